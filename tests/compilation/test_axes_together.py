"""Meshes of three and more axes: what XLA must be told there, and that it costs nothing where a
program takes no axes apart."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import xla_dtensor as xd
from benchmarks.hlo import collective_traffic
from tests.compilation.random_products import OPERATIONS, check, groupings
from tests.conftest import make_mesh
from xla_dtensor.compilation.program.program import Program
from xla_dtensor.mesh import frame_of
from xla_dtensor.plans import pin


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("together", groupings(3), ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_random_products(name: str, together: tuple[int, ...], seed: int) -> None:
    check(make_mesh("2x2x2"), name, seed, together)


@pytest.mark.parametrize(
    ("seed", "together"),
    [
        (1082, (0, 0, 1)),  # XLA's own cut of attention's products gave wrong gradients
        (1132, (0, 1, 1)),  # and divided by zero
    ],
)
def test_attention_is_cut_by_its_rule(seed: int, together: tuple[int, ...]) -> None:
    check(make_mesh("2x2x2"), "attention", seed, together)


def run(mesh: str, cases: int, first: int, *options: str) -> None:
    """`random_products` as a program, which has as many devices as it needs, and may end."""
    command = [sys.executable, "-m", "tests.compilation.random_products", "--mesh", mesh]
    process = subprocess.run(
        [*command, "--cases", str(cases), "--first", str(first), *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "cases"),
    [("4x2", 400), ("2x2x2", 480), ("2x2x2x2", 400), ("2x3x2", 240), ("4x2x2", 96)],
)
def test_many_random_products(mesh: str, cases: int) -> None:
    run(mesh, cases, 100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "only", "seed", "groups"),
    [
        ("2x2x2x2", "attention", 1006, 5),  # its query moves
        ("2x3x2", "attention", 1018, 3),  # its gradient lands
        ("2x2x2x2", "sum", 10016, 5),  # XLA brings one summand to the other
    ],
)
def test_axes_that_change_dims_at_once(mesh: str, only: str, seed: int, groups: int) -> None:
    """XLA's partitioner divided by zero, and the process ended."""
    run(mesh, groups, seed, "--only", only)


@functools.cache
def trained(shape: tuple[int, ...], together: tuple[int, ...]) -> tuple[list[float], Any]:
    """Losses and traffic of a small model, batch and weights over the first mesh dims of a plane of
    two, weights over the last ones, too."""
    names = tuple(f"d{i}" for i in range(len(shape)))
    mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=names)

    def over(first: Any, last: Any) -> list[Any]:
        return [(first, last)[group] for group in together]

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 16)
    )

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            dims = [Shard(1), Shard(0)] if param.ndim == 2 else [Replicate(), Replicate()]
            tensor = distribute_tensor(param.data, mesh, over(*dims))
            module.register_parameter(key, nn.Parameter(tensor))

    distribute_module(model, mesh, shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = distribute_tensor(torch.randn(8, 16), mesh, over(Shard(0), Replicate()))
    losses = [step(x).item() for _ in range(3)]
    return losses, collective_traffic(step.compiled_programs()[-1].as_text())


@pytest.mark.parametrize(
    ("three", "together", "two"),
    [
        ((2, 2, 2), (0, 0, 1), (4, 2)),
        ((2, 2, 2), (0, 1, 1), (2, 4)),
        ((2, 2, 1, 2), (0, 0, 1, 1), (4, 2)),
    ],
    ids=str,
)
def test_three_axes_cost_what_two_do(three: Any, together: Any, two: Any) -> None:
    losses, traffic = trained(three, together)
    expected, plane = trained(two, (0, 1))
    assert traffic.bytes == plane.bytes and traffic.total_bytes > 0
    # XLA makes one collective of two scalars' sums only where it writes their groups alike.
    more = traffic.counts["all-reduce"] - plane.counts["all-reduce"]
    assert abs(more) <= 1
    assert traffic.counts == {**plane.counts, "all-reduce": plane.counts["all-reduce"] + more}
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)


# Shardings on axes (pp, dp, tp), and whether they take three axes apart.
PROGRAMS = {
    "nothing": ([P()], False),
    "one axis": ([P("dp")], True),  # pp and tp aren't its neighbours in a dim: three classes
    "two neighbours": ([P(("pp", "dp"), "tp")], False),
    "the other two": ([P("pp", ("dp", "tp")), P(None, "pp")], False),
    "all": ([P(("pp", "dp", "tp"))], False),
    "neighbours the other way round": ([P(("dp", "pp"), "tp")], True),
    "together, then apart": ([P(("pp", "dp"), "tp"), P("pp")], True),
    "not neighbours": ([P(("pp", "tp"), "dp")], True),
    "each for itself": ([P("pp", "dp", "tp")], True),
    "each in turn": ([P("pp"), P("dp"), P("tp")], True),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("where", ["input", "inside", "in a jit", "shard_map"])
def test_whether_pins_are_needed(name: str, where: str) -> None:
    specs, expected = PROGRAMS[name]
    mesh = frame_of(make_mesh("2x2x2")).jax_mesh
    shardings = [NamedSharding(mesh, spec) for spec in specs]

    def function(x: Any) -> Any:
        if where in ("inside", "in a jit"):
            for sharding in shardings:
                x = jax.lax.with_sharding_constraint(x, sharding)
        elif where == "shard_map":
            for spec in specs:
                # What isn't in a spec is manual, too: all axes are, together.
                x = jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)(x)
        return x

    function = jax.jit(function) if where == "in a jit" else function
    jaxpr = jax.make_jaxpr(function)(jnp.ones((8, 8, 8))).jaxpr
    outer = shardings if where == "input" else []
    assert pin.may_be_loose(jaxpr, mesh, outer) != expected


def test_meshes_of_two_axes_need_none(mesh_2x4: Any) -> None:
    mesh = frame_of(mesh_2x4).jax_mesh
    jaxpr = jax.make_jaxpr(lambda x: x)(1.0).jaxpr
    assert not pin.may_be_loose(jaxpr, mesh, [NamedSharding(mesh, P("tp", "dp"))])


def test_what_xla_gets_wrong_without_pins() -> None:
    """On two axes, too: results of products are held there."""
    check(make_mesh("2x2x2"), "bmm", 114, (0, 0, 1))


@pytest.mark.parametrize("seed", [90])
def test_what_xla_does_not_compile_on_two_axes(seed: int) -> None:
    """ "Slice dim size 16 greater than dynamic slice dimension: 8": it gets all pins then."""
    check(make_mesh("4x2"), "embedding", seed, (0, 1))


def test_what_xla_does_not_compile_without_pins() -> None:
    """ "Cannot infer shape for dot operation": it gets them then."""
    check(make_mesh("2x2x2"), "attention", 1002, (0, 0, 1))


def test_a_backward_pass_that_xla_does_not_compile_without_pins() -> None:
    """One that is a program of its own, compiled when it is needed."""
    mesh = make_mesh("2x2x2")
    torch.manual_seed(0)
    weight = torch.randn(8, 8)
    leaf = weight.clone().requires_grad_()
    (leaf @ leaf).tanh().sum().backward()
    sharded = distribute_tensor(weight, mesh, [Shard(0), Shard(0), Replicate()]).requires_grad_()
    forward = xd.compile(lambda x: (x @ x).tanh())
    out = forward(sharded)
    programs = [o for o in gc.get_objects() if type(o) is Program]
    lowerings = [program.executable.lowering for program in programs]
    (lowering,) = [lowering for lowering in lowerings if lowering.context is pin.loose]
    entered = []

    @contextmanager
    def failing() -> Iterator[None]:
        entered.append(True)
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: injected")
        yield

    lowering.context = failing
    out.sum().backward()
    assert entered == [True]
    torch.testing.assert_close(sharded.grad.full_tensor().cpu(), leaf.grad)

    def exhausted() -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: ...")

    lowering.context = pin.loose
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        lowering.attempt(exhausted, lambda: pytest.fail("tried again"))
    assert lowering.context is pin.loose
