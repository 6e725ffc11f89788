"""What a step's first call costs beside its own program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import xla_dtensor as xd
from tests.compilation.test_history import numbers
from xla_dtensor.compilation.recorded import start
from xla_dtensor.compilation.watch import watch
from xla_dtensor.runtime import arrays

COMPILED = "/jax/core/compile/backend_compile_duration"


def programs(function: Callable[[], Any]) -> int:
    """How many programs XLA was asked for, kept ones included."""
    found: list[str] = []
    listen = lambda name, seconds, **_: found.append(name)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        function()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return found.count(COMPILED)


def training(model: nn.Module, make_optimizer: Callable[..., Any]) -> Callable:
    optimizer = make_optimizer(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    ],
    ids=["adamw", "sgd", "rmsprop"],
)
def test_the_step_is_the_only_program(mesh_2x4: DeviceMesh, make_optimizer: Callable) -> None:
    """What optimizers fill is memory of the host where devices compute in it: no program for each
    shape. The values are CPU torch's, and those of parameters that share it stay apart."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 6))

    x = numbers(3, 16, 8)
    plain = training(make(), make_optimizer)
    expected = [plain(x).item() for _ in range(3)]
    model = make()
    weight = distribute_tensor(model[0].weight.detach(), mesh_2x4, [Shard(1), Shard(0)])
    model[0].weight = nn.Parameter(weight)
    distribute_module(model, mesh_2x4)
    step = xd.compile(training(model, make_optimizer))
    batch = distribute_tensor(x, mesh_2x4, [Shard(0), Replicate()])
    jax.block_until_ready(jax.live_arrays())
    losses: list[Any] = []
    assert programs(lambda: losses.append(step(batch))) == 1
    losses += [step(batch) for _ in range(2)]
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0, "float32"),
        (float("nan"), "bfloat16"),
        (float("-inf"), "float64"),
        (-1, "uint8"),
        (True, "bool"),
        (2 - 1j, "complex64"),
        (2.75, "int32"),
    ],
)
def test_filled_arrays(mesh_2x4: DeviceMesh, value: Any, dtype: str) -> None:
    """Those of JAX's own function; others keep their values when one is given to a program."""
    lines = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    spec = jax.sharding.PartitionSpec("b", "a")
    with jax.enable_x64(True):
        for shape, sharding in (
            ((8, 4), jax.sharding.NamedSharding(lines, spec)),
            ((8, 4), jax.sharding.NamedSharding(lines, jax.sharding.PartitionSpec())),
            ((), None),
            ((3, 0), None),
        ):
            expected = jax.numpy.full(shape, value, dtype=dtype, device=sharding)
            found, given = (arrays.full(shape, value, dtype, sharding) for _ in range(2))
            assert found.sharding == expected.sharding and found.dtype == expected.dtype
            assert found.weak_type == expected.weak_type and found.committed == expected.committed
            assert found.tobytes() == expected.tobytes()
            jax.jit(lambda x: x + x, donate_argnums=0)(given)
            again = arrays.full(shape, value, dtype, sharding)
            jax.jit(lambda x: x * 0, donate_argnums=0)(again)
            assert found.tobytes() == expected.tobytes()


def test_a_second_walk_begins_with_the_names_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first finds that the step reads an attribute of its argument, which goes into the key."""
    known = []

    class Noted(watch.Watch):
        def __init__(self, *args: Any, **options: Any) -> None:
            known.append(options["known"])
            super().__init__(*args, **options)

    monkeypatch.setattr(start, "Watch", Noted)
    x = torch.ones(2, device="xla")
    x.scale = 2.0  # type: ignore[attr-defined]
    step = xd.compile(lambda x: x * x.scale)
    assert step(x).tolist() == [2, 2]
    first, *others = known
    assert first is None and others and None not in others
