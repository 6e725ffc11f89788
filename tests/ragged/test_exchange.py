"""Sizes of all_to_all_single that are values, as libraries write it; CPU torch has the values.

The same functions against real processes: `tests/oracle/scenarios/expert_parallel_splits.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.oracle.scenarios.expert_parallel_splits import (
    DIM,
    EXPERTS,
    LOCAL,
    RANKS,
    ROWS,
    AllToAll,
    counted,
    expert,
    megatron,
    titan,
    transformers,
)

IDS = {
    "drawn": torch.randint(EXPERTS, (RANKS, ROWS), generator=torch.Generator().manual_seed(0)),
    "all to one": torch.full((RANKS, ROWS), 3),
    "none for some": torch.arange(RANKS * ROWS).view(RANKS, ROWS) % 2 * 5,
    "drawn again": torch.randint(
        EXPERTS, (RANKS, ROWS), generator=torch.Generator().manual_seed(1)
    ),
}


@pytest.fixture
def mesh() -> Any:
    return xd.init_device_mesh("xla", (2, RANKS), mesh_dim_names=("dp", "ep"))["ep"]


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    shapes = (RANKS, ROWS, DIM), (RANKS, LOCAL, DIM, DIM), (RANKS, LOCAL, DIM)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def expected(ids: torch.Tensor, balance: bool) -> list[torch.Tensor]:
    """Every row by its own expert, and the gradients."""
    x, up, shift = (t.clone().requires_grad_() for t in inputs())
    flat = ids.flatten()
    of_row = [
        expert(row.unsqueeze(0), up[e // LOCAL, e % LOCAL], shift[e // LOCAL, e % LOCAL])
        for row, e in zip(x.flatten(0, 1), flat.tolist(), strict=True)
    ]
    y = torch.cat(of_row).view_as(x)
    if balance:
        device = flat // LOCAL
        rows = y.flatten(0, 1)
        each = [rows[device == d] for d in range(RANKS)]
        y = y + torch.stack([h.mean(0) * 0.1 + h.sum(0) / (len(h) + 1) for h in each]).unsqueeze(1)
    (y - x).square().sum().backward()
    return [y.detach(), *(t.grad for t in (x, up, shift))]  # type: ignore[misc]


def near(found: torch.Tensor, wanted: Any, what: str = "") -> None:
    room = 1e-5 * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=room, msg=lambda m: f"{what}: {m}")


def placed(values: torch.Tensor, mesh: Any) -> Any:
    return xd.from_device_values(list(values), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "compiled", "checkpoint"])
@pytest.mark.parametrize("function", [titan, megatron, transformers], ids=lambda f: f.__name__)
def test_as_libraries_write_it(function: Any, way: str, mesh: Any) -> None:
    """Other counts in each call are the same program."""
    group = mesh.get_group()

    def step(x: Any, ids: Any, up: Any, shift: Any) -> Any:
        if way == "checkpoint":
            y = checkpoint(function, x, ids, up, shift, group, use_reentrant=False)
        else:
            y = function(x, ids, up, shift, group)
        (y - x).square().sum().backward()
        return y.detach()

    run: Any = step if way == "eager" else xd.compile(step)
    balance = function is transformers  # whose mean over no rows is NaN
    for name, ids in IDS.items():
        if (way == "eager" and name == "drawn again") or (balance and "drawn" not in name):
            continue
        leaves = [placed(t, mesh).requires_grad_() for t in inputs()]
        x, up, shift = leaves
        found = [run(x, placed(ids, mesh), up, shift), *(leaf.grad for leaf in leaves)]
        for value, wanted in zip(found, expected(ids, balance), strict=True):
            near(torch.stack(value.local_values()[:RANKS]), wanted)
    if way != "eager":
        assert (run.traces, run.compilations) == (1, 1)


class Dispatcher:
    """As torchtitan's `ExpertParallel`: what it needs again it keeps on itself."""

    def there(self, rows: Any, counts: Any, group: Any) -> Any:
        arrived = torch.empty_like(counts)
        torch.distributed.all_to_all_single(arrived, counts, group=group)
        self.sent, self.got = counts.tolist(), arrived.tolist()
        return AllToAll.apply(group, rows, self.got, self.sent)

    def back(self, rows: Any, group: Any) -> Any:
        return AllToAll.apply(group, rows, self.sent, self.got)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sizes_kept_between_two_calls(compiled: bool, mesh: Any) -> None:
    """In attributes, and as results and arguments of steps, with the tensor of so many rows."""
    group, dispatcher = mesh.get_group(), Dispatcher()
    wrap: Any = xd.compile if compiled else lambda function: function

    @wrap
    def there(x: Any, counts: Any) -> Any:
        return dispatcher.there(x, counts, group), dispatcher.sent

    @wrap
    def doubled(rows: Any) -> Any:
        return rows * 2 + 1

    @wrap
    def back(rows: Any) -> Any:
        return dispatcher.back(rows, group)

    x = inputs()[0]
    for ids in IDS.values():
        to = (ids // LOCAL).sort(dim=1).values
        counts = torch.nn.functional.one_hot(to, RANKS).sum(1)
        rows, sent = there(placed(x, mesh), placed(counts, mesh))
        for device, value in enumerate(rows.local_values()[:RANKS]):
            wanted = [x[s][to[s] == device] for s in range(RANKS)]
            torch.testing.assert_close(value, torch.cat(wanted), rtol=0, atol=0)
        assert str(sent[1]) == f"<{', '.join(map(str, [*counts[:, 1].tolist()] * 2))}>"
        again = torch.stack(back(doubled(rows)).local_values()[:RANKS])
        torch.testing.assert_close(again, x * 2 + 1)
    if compiled:
        assert [f.compilations for f in (there, doubled, back)] == [1, 1, 1]
        assert doubled.traces == 1


def exchanged(x: Any, ids: Any, mesh: Any) -> tuple[Any, Any]:
    counts = counted(ids).view(RANKS, LOCAL).sum(1)
    arrived = xd.collectives.all_to_all(counts, mesh)
    rows = torch.distributed._functional_collectives.all_to_all_single(
        x[ids.argsort(stable=True)], arrived.tolist(), counts.tolist(), mesh
    )
    return rows, arrived


def grouped(rows: Any, arrived: Any) -> Any:
    weights = torch.ones(1, DIM, 2, device="xla")
    return torch._grouped_mm(rows, weights, offs=arrived.sum(0, keepdim=True).to(torch.int32))


# What is computed of each device's rows. What is behind them must never show.
OF_ROWS: dict[str, Any] = {
    "sum of what zeros aren't": lambda rows, _: rows.exp().sum(0),
    "of what has no value at zero": lambda rows, _: (rows * rows).log().sum(),
    "mean": lambda rows, _: rows.mean(0),
    "mean of all, kept dims": lambda rows, _: rows.cos().mean((0, 1), keepdim=True),
    "divided by the number": lambda rows, _: rows.sum() / rows.shape[0],
    "product over rows": lambda rows, _: (rows + 1).t() @ rows.exp(),
    "views": lambda rows, _: (rows + 1).reshape(-1, 2, 2).transpose(0, 1).sum((1, 2)),
    "view by the number": lambda rows, _: (rows + 1).view(rows.shape[0], 2, 2).sum(0),
    "expand": lambda rows, _: (rows.new_ones(DIM).expand(rows.shape[0], DIM) + rows).sum(0),
    "factories": lambda rows, _: (rows.new_zeros(rows.shape) + torch.ones_like(rows)).sum(0),
    "arange": lambda rows, _: torch.arange(rows.shape[0], device=rows.device).sum(),
    "softmax": lambda rows, _: (rows.softmax(-1) + 1).sum(0),
    "layer_norm": lambda rows, _: torch.nn.functional.layer_norm(rows + 1, (DIM,)).exp().sum(0),
    "linear": lambda rows, _: torch.nn.functional.linear(
        rows, torch.ones(3, DIM, device=rows.device), torch.ones(3, device=rows.device)
    ).sum(0),
    "running sum": lambda rows, _: rows.detach().cumsum(0).sum(0),
    "last": lambda rows, _: rows[torch.tensor([-1], device=rows.device)],
    "in place": lambda rows, _: (rows.clone().add_(1).mul_(rows)).sum(0),
    "cut by the number": lambda rows, _: (rows + 1)[: rows.shape[0]].sum(0),
    "cast": lambda rows, _: (rows.double() + 1).sum(0),
    "where": lambda rows, _: torch.where(rows > 0, rows, 5.0).sum(0),
    "index_add": lambda rows, _: torch.zeros(2, DIM, device=rows.device).index_add(
        0, (rows[:, 0] > 0).long(), rows + 1
    ),
    "scatter_add": lambda rows, _: torch.zeros(2, DIM, device=rows.device).scatter_add(
        0, (rows > 0).long(), rows + 1
    ),
    "embedding": lambda rows, _: torch.nn.functional.embedding(
        (rows[:, 0] > 0).long() + 1, torch.arange(6.0, device=rows.device).view(3, 2)
    ).sum(0),
}


def arriving(x: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The rows that each device gets, by CPU torch: those for its experts, by who sends them."""
    to = ids // LOCAL
    order = [i.argsort(stable=True) for i in ids]
    return [
        torch.cat([x[s][order[s]][to[s][order[s]] == d] for s in range(RANKS)])
        for d in range(RANKS)
    ]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_is_behind_the_rows_never_shows(compiled: bool, mesh: Any) -> None:
    x, ids = inputs()[0], IDS["drawn"]
    own = arriving(x, ids)

    def step(x: Any, ids: Any) -> Any:
        rows, arrived = exchanged(x, ids, mesh)
        leaf = rows.detach().requires_grad_()
        found, grads = {}, {}
        for name, function in OF_ROWS.items():
            found[name] = function(leaf, arrived)
            if found[name].requires_grad:
                (found[name] * 3).sum().backward()
                grads[name], leaf.grad = leaf.grad, None
        return {n: t.detach() for n, t in found.items()}, grads

    run: Any = xd.compile(step) if compiled else step
    found, grads = run(placed(x, mesh), placed(ids, mesh))
    assert len(grads) > len(OF_ROWS) // 2
    for name, function in OF_ROWS.items():
        for device, rows in enumerate(own):
            leaf = rows.clone().requires_grad_()
            wanted = function(leaf, None)
            value = found[name]
            values = value.local_values() if value._form.varying else [value.cpu()] * RANKS
            near(values[device], wanted.detach(), name)
            if wanted.requires_grad:
                (wanted * 3).sum().backward()
                near(grads[name].local_values()[device], leaf.grad, f"gradient of {name}")


def test_products_by_groups(mesh: Any) -> None:
    x, ids = inputs()[0], IDS["drawn"]
    step = xd.compile(lambda x, ids: grouped(*exchanged(x, ids, mesh)).sum())
    found = step(placed(x, mesh), placed(ids, mesh)).local_values()
    for device in range(RANKS):
        wanted = x[ids // LOCAL == device].sum() * 2
        torch.testing.assert_close(found[device], wanted)
