"""Integers that a compiled step copies to the CPU: Python does with them what it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd

USES: dict[str, Callable[[Any, Any], Any]] = {
    "multiplied": lambda n, x: n.cpu() * 2,
    "by to()": lambda n, x: n.to("cpu") - 1,
    "with a tensor of the CPU": lambda n, x: n.cpu() + torch.tensor([1, 2, 3]),
    "compared": lambda n, x: (n.cpu() == torch.tensor([5, 3, 1])).all(),
    "sorted": lambda n, x: torch.sort(n.cpu())[0],
    "a stop": lambda n, x: x[:, : n.cpu()[0]].sum(),
    "the largest as a stop": lambda n, x: x[:, : int(n.cpu().max())].sum(),
    "one as a number": lambda n, x: int(n.cpu()[0]) * x.sum(),
    "their sum as a number": lambda n, x: n.cpu().sum().item() * x.sum(),
    "one by one": lambda n, x: sum(int(k) for k in n.cpu()) * x.sum(),
    "where": lambda n, x: torch.where(n.cpu() > 2, n.cpu(), torch.zeros(3, dtype=torch.long)),
    "an array": lambda n, x: torch.from_numpy(n.cpu().numpy() * 2),
    "and back": lambda n, x: (n.cpu() * 2).to(x.device) + x.sum().long(),
    "as lengths": lambda n, x: torch.stack(
        [x[i, :k].sum() for i, k in enumerate(n.cpu().tolist())]
    ),
    "written to": lambda n, x: n.cpu().add_(1),
    "a mask": lambda n, x: torch.arange(10)[None, :] < n.cpu()[:, None],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("watch", ["trace", "auto", "replay"])
@pytest.mark.parametrize("use", USES)
def test_as_on_the_cpu(use: str, watch: Any) -> None:
    n, x = torch.tensor([5, 3, 2]), torch.arange(30.0).view(3, 10)
    step = xd.compile(USES[use], watch=watch)
    for _ in range(2):
        n = n + 1
        try:
            found = step(n.to("xla"), x.to("xla"))
        except xd.DataDependentError:
            assert watch == "trace"
            return
        torch.testing.assert_close(torch.as_tensor(found).cpu(), torch.as_tensor(USES[use](n, x)))


@pytest.mark.parametrize("watch", ["auto", "replay"])
def test_packed_sequences(watch: Any) -> None:
    """Their lengths are on the CPU, as torch wants them."""
    torch.manual_seed(0)
    layer, x, n = nn.GRU(4, 3, batch_first=True), torch.randn(3, 5, 4), torch.tensor([2, 5, 3])

    def outputs(layer: Any, x: Any, n: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, n.cpu(), batch_first=True, enforce_sorted=False
        )
        out, last = layer(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0].sum(1) + last.mean()

    expected = outputs(layer, x, n)
    layer.to("xla")
    step = xd.compile(outputs, watch=watch)
    for _ in range(2):
        found = step(layer, x.to("xla"), n.to("xla"))
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("watch", ["trace", "auto", "replay"])
def test_they_are_a_copy(watch: Any) -> None:
    def step(n: Any, kept: Any) -> Any:
        kept.add_(n)
        first, second = kept.cpu(), n.cpu()
        first[0] = 99
        second.add_(1)
        third = kept.cpu()
        kept.zero_()
        return first, second, third, third.to(kept.device) + 0

    on_cpu, on_xla = torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long).to("xla")
    n = torch.tensor([3, 1, 2])
    # On the CPU `cpu()` is no copy.
    copied = lambda t: t.clone()
    compiled = xd.compile(step, watch=watch)
    for _ in range(2):
        on_cpu.add_(n)
        first, second, third = copied(on_cpu), copied(n) + 1, copied(on_cpu)
        first[0] = 99
        on_cpu.zero_()
        mine = n.to("xla")
        found = compiled(mine, on_xla)
        for got, right in zip(found, (first, second, third, third), strict=True):
            assert torch.as_tensor(got).tolist() == right.tolist()
        assert on_xla.tolist() == on_cpu.tolist() and mine.tolist() == n.tolist()
