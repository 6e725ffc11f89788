"""Per-device tensors with one value lie on the default device or on all of a mesh's: eager
operations that are launched together with a mesh's leave their results there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.errors import MeshMismatchError
from xla_dtensor.execution import lazy

W = torch.arange(64.0).view(8, 8) / 64

# With a weight on a mesh: the whole of it on every device, and what each has of it.
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "computed with": lambda w, x: w * x,
    "a view": lambda w, x: w * x[2],
    "first without the mesh": lambda w, x: torch.where(x > 2, x, 0).softmax(0) * w,
    "written to": lambda w, x: w * x.add_(1),
    "written in part": lambda w, x: w * x[1:].mul_(2).sum(),
    "by position": lambda w, x: w[0, x.long() % 8],
    "not computed with": lambda w, x: (w + 1, torch.full_like(x, 2)),
    "given back": lambda w, x: (w + 1, x, x[1:], x.view(2, 4).t()),
    "from a list": lambda w, x: [w @ x, (x + 1).unsqueeze(0)],
}


def weight(mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(W, mesh, [Replicate(), Shard(0)])


def on(mesh: DeviceMesh | None, value: torch.Tensor) -> torch.Tensor:
    """The value on all devices of a mesh, or on the default device."""
    if mesh is None:
        return value.to("xla")
    return distribute_tensor(value, mesh, [Replicate()] * mesh.ndim).to_local().clone()


def values(result: Any) -> list[torch.Tensor]:
    if isinstance(result, tuple | list):
        return [value for each in result for value in values(each)]
    return [(result.full_tensor() if hasattr(result, "full_tensor") else result).cpu()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("at_first", ["default", "mesh"])
def test_an_argument_makes_one_program(mesh_2x4: DeviceMesh, name: str, at_first: str) -> None:
    of, w = STEPS[name], weight(mesh_2x4)
    step = xd.compile(lambda x: of(w, x), audit=1)
    for i in range(4):
        x = torch.arange(8.0) + i
        given = on(mesh_2x4 if (i % 2 == 1) == (at_first == "default") else None, x)
        torch.testing.assert_close(values(step(given)), values(of(W, x)))
        torch.testing.assert_close(given.cpu(), x)
    assert step.traces == step.compilations == 1


@pytest.mark.parametrize("name", STEPS)
def test_state_makes_one_program(mesh_2x4: DeviceMesh, name: str) -> None:
    """Its program leaves it on the mesh; a trace of later finds the same operations."""
    of, w, x = STEPS[name], weight(mesh_2x4), torch.arange(8.0)
    state = on(None, x)
    step = xd.compile(lambda: of(w, state), audit=1)
    for _ in range(3):
        torch.testing.assert_close(values(step()), values(of(W, x)))
        torch.testing.assert_close(state.cpu(), x)
    assert step.traces == step.compilations == 1


def test_what_a_step_keeps_makes_one_program(mesh_2x4: DeviceMesh) -> None:
    w, kept = weight(mesh_2x4), {"x": on(None, torch.ones(8))}

    def step(y: torch.Tensor) -> torch.Tensor:
        kept["x"] = kept["x"] * 2 + y
        return w * kept["x"]

    compiled, expected = xd.compile(step, audit=1), torch.ones(8)
    for i in range(6):
        if i == 3:
            kept["x"] = on(None, expected)
        expected = expected * 2 + i
        y = on(mesh_2x4 if i % 2 else None, torch.full((8,), float(i)))
        torch.testing.assert_close(values(compiled(y)), [W * expected])
    assert compiled.compilations == 1


def test_gradients_that_are_there(mesh_2x4: DeviceMesh) -> None:
    w, p = weight(mesh_2x4), torch.ones(8, device="xla", requires_grad=True)

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        (p * x).sum().backward()
        return w + 1

    for mesh in (None, mesh_2x4, None, mesh_2x4):
        p.grad, x = on(mesh, torch.ones(8)), torch.arange(8.0)
        torch.testing.assert_close(values(step(on(None, x))), [W + 1])
        torch.testing.assert_close(p.grad.cpu(), x + 1)
    assert step.compilations == 1


@pytest.mark.usefixtures("small_batches")
def test_results_lie_where_they_were_launched(mesh_2x4: DeviceMesh) -> None:
    """What makes an argument lie on a mesh that nothing has put there."""
    w, frames = weight(mesh_2x4), set()
    step = xd.compile(lambda x: w * x)
    for i in range(4):
        beside = w + 1 if i % 2 else None
        x = torch.full((8,), float(i), device="xla") * 2 + 1
        lazy.flush()
        frames.add(x._form.frame)
        torch.testing.assert_close(values(step(x)), [W * (2 * i + 1)])
        del beside
    assert len(frames) == 2 and step.traces == step.compilations == 1


def test_without_a_mesh_they_are_two(mesh_2x4: DeviceMesh) -> None:
    """A result lies where the argument does: one of the default device goes with any mesh."""
    other = xd.DeviceMesh("xla", [4, 5, 6, 7])
    step = xd.compile(lambda x: x[1:] * 2)
    for mesh in (None, mesh_2x4, None, mesh_2x4):
        x = on(mesh, torch.arange(8.0))
        result = step(x)
        torch.testing.assert_close(result.cpu(), torch.arange(8.0)[1:] * 2)
        if mesh is None:
            elsewhere = distribute_tensor(torch.ones(7), other, [Shard(0)])
            torch.testing.assert_close(values(elsewhere + result), [torch.arange(8.0)[1:] * 2 + 1])
    assert step.compilations == 2
    (why,) = step.recompilations
    assert "argument [0]: from [8] torch.float32 on the default device to" in why
    assert "Frame(dp=2, tp=4)" in why


def test_state_that_another_step_moves(mesh_2x4: DeviceMesh) -> None:
    """It ended in an error of JAX's: the program was for the default device."""
    w, state, x = weight(mesh_2x4), on(None, torch.full((8,), 3.0)), torch.arange(8.0)
    alone, together = xd.compile(lambda x: x * state), xd.compile(lambda: w * state)
    for i in range(3):
        torch.testing.assert_close(alone(on(None, x + i)).cpu(), (x + i) * 3)
        torch.testing.assert_close(values(together()), [W * 3])
    assert alone.compilations == 2 and together.compilations == 1


def test_other_devices_are_told_apart(mesh_2x4: DeviceMesh) -> None:
    w, other = weight(mesh_2x4), xd.DeviceMesh("xla", [4, 5, 6, 7])
    step = xd.compile(lambda x: w * x)
    x = torch.arange(8.0)
    torch.testing.assert_close(values(step(on(None, x))), [W * x])
    with pytest.raises(MeshMismatchError, match="devices"):
        step(on(other, x))
    torch.testing.assert_close(values(step(on(mesh_2x4, x + 1))), [W * (x + 1)])
    assert step.compilations == 1


def test_a_mesh_that_is_not_used(mesh_2x4: DeviceMesh) -> None:
    """A step could reach one, and computes on another or on none: what lies on none stays there."""
    w, other = weight(mesh_2x4), xd.DeviceMesh("xla", [4, 5, 6, 7])
    state, x = on(None, torch.ones(8)), torch.arange(8.0)

    def step(x: torch.Tensor, where: str) -> Any:
        if where == "there":
            return w * x * state
        if where == "elsewhere":
            return distribute_tensor(x * state, other, [Shard(0)]) * 2
        return x[1:] * state[1:]

    compiled = xd.compile(step, audit=1)
    for _ in range(2):
        torch.testing.assert_close(values(compiled(on(None, x), "nowhere")), [x[1:]])
        torch.testing.assert_close(values(compiled(on(None, x), "elsewhere")), [x * 2])
    assert state._form.frame is None
    for _ in range(2):
        torch.testing.assert_close(values(compiled(on(None, x), "there")), [W * x])


def test_a_step_that_raises_moves_nothing(mesh_2x4: DeviceMesh) -> None:
    w, x, state = weight(mesh_2x4), on(None, torch.ones(8)), on(None, torch.ones(8))

    def step(x: torch.Tensor) -> None:
        state.add_((w.to_local() * x).sum())
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        xd.compile(step)(x)
    assert x._form.frame is None and state._form.frame is None
    assert state.tolist() == [1] * 8
