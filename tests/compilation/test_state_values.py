"""What the host isn't given of a tensor's value in a compiled step, and items where they can't be
inputs. `changes/state_values.py` has what it is given."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.plans.computation import Computation

State = SimpleNamespace


def _written_with_an_argument(state: State, x: torch.Tensor) -> torch.Tensor:
    state.buffer.mul_(x.sum())
    return x if state.buffer[0] > 0 else -x


REFUSED: dict[str, Callable[[State, torch.Tensor], torch.Tensor]] = {
    "argument": lambda state, x: x if x[0, 0] > 0 else -x,
    "of_an_argument": lambda state, x: x * float((x + state.buffer).sum()),
    "parameter": lambda state, x: x if state.weight.sum().item() > 0 else -x,
    "gradient": lambda state, x: x * float(state.weight.grad.sum()),
    "written": _written_with_an_argument,
    "random": lambda state, x: x if torch.rand((), device=x.device) + state.buffer[0] > 1 else -x,
    "nonzero": lambda state, x: x[(x.sum(0) > state.buffer).nonzero().flatten()],
}


@pytest.mark.parametrize("step", REFUSED.values(), ids=REFUSED)
def test_what_changes_in_each_call_is_refused(step: Callable, mesh_2x4: DeviceMesh) -> None:
    weight = distribute_tensor(torch.ones(4), mesh_2x4, [Shard(0), Replicate()])
    state = SimpleNamespace(
        weight=weight.requires_grad_(),
        buffer=distribute_tensor(torch.ones(4), mesh_2x4, [Replicate(), Shard(0)]),
    )
    state.weight.sum().backward()
    before = state.buffer.full_tensor()
    with pytest.raises(xd.DataDependentError, match=r"while the step is compiled\n  at .*\.py:\d+"):
        xd.compile(lambda x: step(state, x))(torch.ones(4, 4, device="xla"))
    torch.testing.assert_close(state.buffer.full_tensor(), before)


def test_what_is_replaced_says_that_a_write_is_no_such_thing() -> None:
    state = State(count=torch.tensor(0, device="xla"))

    def step(x: torch.Tensor) -> torch.Tensor:
        state.count = state.count + 1
        return x * 2 if state.count > 2 else x

    compiled = xd.compile(step)
    for _ in range(2):
        with pytest.raises(xd.DataDependentError, match=r"The step replaces .*count.*\+= 1"):
            compiled(torch.ones(2, device="xla"))
    assert state.count.item() == 0


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_an_item_that_is_kept_is_part_of_the_program(device: str) -> None:
    """A cache's key can't be a number that is an input."""
    scale, x = torch.tensor(2.0, device=device), torch.ones(3, device="xla")

    @functools.cache
    def doubled(value: float) -> float:
        return value * 2

    step = xd.compile(lambda x: x * doubled(scale.item()))
    for value, programs in ((2.0, 1), (2.0, 1), (3.0, 2), (2.0, 2)):
        scale.fill_(value)
        torch.testing.assert_close(step(x).cpu(), torch.full((3,), 2 * value))
        assert step.compilations == programs
    assert "scale.item()" in step.recompilations[-1]


def test_others_may_write_between_the_calls(mesh_2x4: DeviceMesh) -> None:
    """Another step, and eager code."""
    flag = distribute_tensor(torch.zeros(8), mesh_2x4, [Shard(0), Replicate()])
    x = torch.ones(3, device="xla")
    looks = xd.compile(lambda x: x * 2 if flag.sum() > 4 else x)
    raises = xd.compile(lambda x: flag.add_(x.sum()))
    found = [looks(x)[0].item()]
    raises(x)
    found.append(looks(x)[0].item())
    flag.zero_()
    found.append(looks(x)[0].item())
    with torch.no_grad():
        flag.set_(distribute_tensor(torch.ones(8), mesh_2x4, [Replicate(), Shard(0)]))
    found.append(looks(x)[0].item())
    assert found == [1, 2, 1, 2]


def test_what_is_only_printed_is_not_looked_at(capsys: pytest.CaptureFixture) -> None:
    """A program for each text, and a call that waits for the one before, would be dear."""
    count = torch.tensor(0, device="xla")

    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        print(f"step {count}")
        return x + count

    compiled, x = xd.compile(step), torch.ones(3, device="xla")
    assert [compiled(x)[0].item() for _ in range(3)] == [2, 3, 4]
    assert compiled.traces == 1
    assert capsys.readouterr().out == "step 1\nstep 2\nstep 3\n"


class Switched(torch.nn.Module):
    """A layer whose buffer says what it computes."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("on", torch.tensor(on))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2 if self.on else self.linear(x).tanh()


@pytest.mark.parametrize("alike", [False, True])
def test_a_body_for_all_layers_is_refused(alike: bool) -> None:
    """It would be the first layer's: the others have buffers of their own."""
    layers = torch.nn.ModuleList([Switched(alike or i % 2 == 0) for i in range(4)]).to("xla")
    looped = xd.scan_layers(layers)
    with pytest.raises(xd.DataDependentError, match=r"while the step is compiled"):
        xd.compile(lambda x: looped(x))(torch.ones(2, 4, device="xla"))


def test_layers_computed_again() -> None:
    """With other buffers in the second call, in forward and in what backward computes again."""
    expected = torch.nn.ModuleList([Switched(i % 2 == 0) for i in range(3)])
    layers = copy.deepcopy(expected).to("xla")

    def step(layers: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        layers.zero_grad()
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.pow(2).sum().backward()
        return x.detach()

    compiled = xd.compile(step)
    for on in (True, False, True):
        for both in (expected, layers):
            both[1].on.fill_(on)
        x = torch.ones(2, 4)
        wanted = step(expected, x)
        torch.testing.assert_close(compiled(layers, x.to("xla")).cpu(), wanted)
        for ours, theirs in zip(layers.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
    assert compiled.compilations == 2


def test_an_interrupt_while_the_host_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call computes it again, and doesn't take what was there for it."""
    count, x = torch.tensor(0, device="xla"), torch.ones(3, device="xla")
    step = xd.compile(lambda x: x * 2 if count * 2 > 1 else x)
    assert step(x)[0].item() == 1
    count.fill_(1)
    original, calls = Computation.of_values, [0]

    def of_values(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(Computation, "of_values", of_values)
    with pytest.raises(KeyboardInterrupt):
        step(x)
    assert step(x)[0].item() == 2
