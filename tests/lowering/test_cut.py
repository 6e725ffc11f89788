"""Cuts from the front of dims whose shards look like those of the whole."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.compilation.program.input_layouts import Pinning, compile_somehow
from xla_dtensor.execution import lazy

CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda y: y[:3],
    "narrow": lambda y: y.narrow(0, 0, 3),
    "split": lambda y: y.split([3, 1])[0],
    "pad": lambda y: torch.nn.functional.pad(y, (0, -1)),
    "gather": lambda y: y.gather(0, torch.arange(3, device=y.device)),
}


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CUTS)
def test_both_brought_to_one_layout(
    mesh_2x4: DeviceMesh, name: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy, "OFTEN", 0)  # a few operations are joined at once, too
    numbers = torch.arange(1.0, 5.0)
    whole = [Replicate()] * 2

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.cumprod(0)  # whole by its rule, and computed in shards
        return y, CUTS[name](y).redistribute(placements=whole).sin()

    x = distribute_tensor(numbers, mesh_2x4, [Shard(0), Replicate()])
    found = (step if eager else xd.compile(step))(x)
    expected = numbers.cumprod(0), CUTS[name](numbers.cumprod(0)).sin()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_results_that_are_too_small() -> None:
    """A program to which XLA gives a result of fewer elements is compiled in another way."""
    make_mesh("2x4")  # starts the devices
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    replicated, sharded = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in ("", "a")
    )

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x * 2
        return y, jax.lax.with_sharding_constraint(y[:3], replicated).sum()

    def lower() -> jax.stages.Lowered:
        jitted = jax.jit(lambda x: both(x), in_shardings=sharded, out_shardings=replicated)
        return jitted.lower(jnp.arange(4.0))

    compiled = compile_somehow(lower, lower, None, Pinning())
    y, total = compiled(jax.device_put(jnp.arange(4.0), sharded))
    assert (y.tolist(), float(total)) == ([0.0, 2.0, 4.0, 6.0], 6.0)
