"""A call of a step compiled with ``watch="replay"`` that fails: what is told, and what is left."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.compilation.test_replayed import numbers, replayed


def test_an_error_leaves_what_was_done(mesh_2x4: DeviceMesh) -> None:
    """As in eager torch: what came before the error has happened, and the step goes on."""
    x = distribute_tensor(torch.zeros(8, 4), mesh_2x4, [Shard(0), Replicate()])

    @replayed
    def step(fails: bool) -> torch.Tensor:
        x.add_(1)
        if fails:
            raise ValueError("in the middle")
        return x + 1

    step(False)
    with pytest.raises(ValueError, match="in the middle"):
        step(True)
    assert torch.equal(x.full_tensor().cpu(), torch.full((8, 4), 2.0))
    assert torch.equal(step(False).full_tensor().cpu(), torch.full((8, 4), 4.0))


def test_what_torch_refuses_is_refused_at_its_line(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.zeros(8, 4), mesh_2x4, [Shard(0), Replicate()])
    with pytest.raises(RuntimeError, match="reduction dim"):
        replayed(lambda: x.add_(1) @ x)()
    assert torch.equal(x.full_tensor().cpu(), torch.ones(8, 4))


def test_an_index_out_of_range(mesh_2x4: DeviceMesh) -> None:
    table = distribute_tensor(numbers(0, 8, 4), mesh_2x4, [Shard(0), Replicate()])
    step = replayed(lambda i: nn.functional.embedding(i, table))
    step(torch.tensor([0, 7], device="xla"))
    with pytest.raises(IndexError):
        step(torch.tensor([0, 8], device="xla")).full_tensor().cpu()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Who starts the tests in the background has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_in_the_middle(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.zeros(8, 4), mesh_2x4, [Shard(0), Replicate()])

    @replayed
    def step(interrupt: bool) -> None:
        x.add_(1)
        if interrupt:
            signal.raise_signal(signal.SIGINT)
        x.add_(10)

    step(False)
    with pytest.raises(KeyboardInterrupt):
        step(True)
    seen = x.full_tensor().cpu()
    assert torch.equal(seen, torch.full((8, 4), 12.0))
    step(False)
    assert torch.equal(x.full_tensor().cpu(), seen + 11)


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 1 byte"


def out_of_memory(*args: Any, **kwargs: Any) -> Any:
    raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)


def test_what_cannot_be_compiled_is_told_in_each_call(
    mesh_2x4: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA is asked once for each sequence of operations; tensors stay as they were."""
    w = distribute_tensor(numbers(0, 8, 4), mesh_2x4, [Shard(0), Replicate()])
    asked: list[int] = []

    def compile(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        out_of_memory()

    @replayed
    def step(n: int) -> torch.Tensor:
        w.add_(1)
        return w.sin() if n else w.cos()

    messages = []
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile)
        for n in (0, 0, 1, 0, 1):
            with pytest.raises(jax.errors.JaxRuntimeError, match=OUT_OF_MEMORY) as error:
                step(n)
            (note,) = error.value.__notes__
            messages.append(note)
            assert torch.equal(w.full_tensor().cpu(), numbers(0, 8, 4))
        times = len(asked)
    assert len(set(messages)) == 1
    assert "whose 2 operations XLA refuses as one program" in messages[0]
    assert "clear_cache()" in messages[0]
    with pytest.raises(jax.errors.JaxRuntimeError, match=OUT_OF_MEMORY):
        step(0)
    assert (len(asked), step.compilations, step.compiled_programs()) == (times, 0, [])
    step.clear_cache()
    expected = (numbers(0, 8, 4) + 1).cos()
    torch.testing.assert_close(step(0).full_tensor().cpu(), expected)


def test_a_compiler_option_that_there_is_not() -> None:
    step = xd.compile(
        lambda x: x * 2, watch="replay", compiler_options={"xla_no_such_option": True}
    )
    for _ in range(2):
        with pytest.raises(Exception, match="xla_no_such_option") as error:
            step(torch.ones(4, device="xla"))
    assert "in a call of" in error.value.__notes__[0]


def test_a_launch_that_fails_is_no_other_program(
    mesh_2x4: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a watched step: tensors are as before, and the next call may have more luck."""
    w = distribute_tensor(numbers(0, 8, 4), mesh_2x4, [Shard(0), Replicate()])
    step = replayed(lambda: w.mul_(2))
    step()
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Compiled, "__call__", out_of_memory)
        with pytest.raises(jax.errors.JaxRuntimeError, match=OUT_OF_MEMORY):
            step()
    assert torch.equal(w.full_tensor().cpu(), numbers(0, 8, 4) * 2)
    step()
    assert torch.equal(w.full_tensor().cpu(), numbers(0, 8, 4) * 4)
    assert step.compilations == 1


LOST = r"(?s)has no value.*call of a step compiled.*not these numbers.*make it again.*zero_grad"


def step_on(tensor: torch.Tensor) -> Callable[..., Any]:
    return replayed(lambda x: tensor + 1)


def refuses(array: Any) -> Any:
    raise ValueError("not these numbers")


def test_an_operation_that_fails_is_named_and_what_it_would_make_is_lost(
    mesh_2x4: DeviceMesh,
) -> None:
    """In each call; what doesn't depend on it has happened. Who uses a lost tensor is told what
    has become of it."""
    failing = xd.jax_function(
        lambda x: jax.pure_callback(refuses, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    )
    w = nn.Parameter(torch.ones(4, 4, device="xla"))
    kept: list[torch.Tensor] = []

    @replayed
    def step(fails: bool) -> None:
        loss = (w * 3).square().sum()
        kept.append(w * 5)
        if fails:
            kept.append(failing(w.detach()))  # the line
            loss = loss * kept[-1].sum()
        loss.backward()

    for _ in range(2):
        with pytest.raises(Exception, match="not these numbers") as error:
            step(True)
        assert any("failing(w.detach()))  # the line" in note for note in error.value.__notes__)
        good, bad = kept[-2:]
        assert torch.equal(good.cpu(), torch.full((4, 4), 5.0))
        for use in (torch.Tensor.cpu, torch.Tensor.sum, torch.clone, repr, step_on(bad)):
            with pytest.raises(RuntimeError, match=LOST):
                use(bad)
        with pytest.raises(RuntimeError, match=LOST):
            step(False)  # adds to the gradient
        w.grad = None
    step(False)
    assert torch.equal(w.grad.cpu(), torch.full((4, 4), 18.0))
