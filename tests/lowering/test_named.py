"""Functions that XLA calls back have names, by which programs are found again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.lowering.partitioned.named import Partition, with_names
from xla_dtensor.lowering.partitioned.per_slice import per_slice

BY_ROW = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))


def names(*functions: Callable[..., Any], shape: tuple[int, ...] = (8, 4)) -> Any:
    def program(x: Array) -> list[Any]:
        return [per_slice(function, 1, x) for function in functions]

    lowered = jax.jit(program).lower(jax.ShapeDtypeStruct(shape, np.float32, sharding=BY_ROW))
    text, found = with_names(lowered.as_text())
    assert found is not None and all(name in text for name in found)
    return found


def times(number: float) -> Callable[[Array], Array]:
    return lambda x: x * number


def test_equal_functions_share_a_name() -> None:
    one, two = names(times(2.0), times(2.0))
    assert one == two
    assert names(times(2.0)) == [one]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: names(times(3.0)), id="another number"),
        pytest.param(lambda: names(jnp.sin), id="another function"),
        pytest.param(lambda: names(times(2.0), shape=(4, 4)), id="another shape"),
        pytest.param(lambda: names(lambda x: (x * 2.0).sum(-1)), id="another rank"),
    ],
)
def test_others_have_another_name(other: Callable[[], Any]) -> None:
    assert other() != names(times(2.0))


def test_names_are_in_texts() -> None:
    """Addresses come again: an eager operation's program in JAX's cache was another function's."""

    def text(function: Callable[..., Any]) -> str:
        x = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=BY_ROW)
        lowered = jax.jit(lambda x: per_slice(function, 1, x)).lower(x)
        return re.sub(r'backend_config = "\d+"', "", lowered.as_text())

    assert text(times(2.0)) == text(times(2.0)) != text(times(3.0))


def test_names_do_not_depend_on_who_asks_first() -> None:
    """With 64-bit types off, as where programs are saved."""
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((8, 4), np.float64)
        one, two = (Partition(lambda: None, times(2.0), [x], "") for _ in range(2))
        name = one.name
    assert two.name == name


def test_somebody_elses_function_has_none() -> None:
    call = custom_partitioning(lambda x: x * 2)
    call.def_partition(
        lambda mesh, given, results: (mesh, None, None, None), sharding_rule="i -> i"
    )
    lowered = jax.jit(call).lower(jax.ShapeDtypeStruct((4,), np.float32, sharding=BY_ROW))
    text = lowered.as_text()
    assert "@CustomSPMDPartitioning" in text and with_names(text) == (text, None)


def step() -> tuple[Any, Any, torch.Tensor]:
    """A step that needs such a function, an argument, and what it is to give."""
    mesh = make_mesh("8")
    torch.manual_seed(0)
    x = torch.randn(16, 32)
    function = lambda x: x.sin().topk(3, -1).values.sum(-1)
    return xd.compile(function), xd.distribute_tensor(x, mesh, [xd.Shard(0)]), function(x)


def test_a_step_that_is_traced_again_is_known() -> None:
    """What its Python has read is another text, which the program has no use for."""
    mesh = make_mesh("8")
    values = torch.randn(16, 32)
    x = xd.distribute_tensor(values, mesh, [xd.Shard(0)])
    read = ["a"]

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.topk(3, -1).values if read[0] else x

    for read[0] in ("a", "b", "c"):
        torch.testing.assert_close(step(x).full_tensor().cpu(), values.topk(3, -1).values)
    assert (step.traces, step.compilations) == (3, 1)
    assert "@CustomSPMDPartitioning" in step.lower(x).as_text()


SCRIPT = """
import sys, pathlib
import torch
import xla_dtensor as xd
from tests.lowering.test_named import step
compiled, x, expected = step()
if sys.argv[2:]:
    xd.load_compiled(sys.argv[2], compiled, trusted=True)
torch.testing.assert_close(compiled(x).full_tensor().cpu(), expected)
print(compiled.compilations, len([*pathlib.Path(sys.argv[1]).glob("jit_step*-cache")]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_saved", [False, True], ids=["cache", "file"])
def test_another_process_finds_the_program(is_saved: bool, tmp_path: Path) -> None:
    compiled, x, _ = step()
    file = tmp_path / "step.xla"
    if is_saved:
        compiled.save_compiled(file, x)
    cache = tmp_path / "cache"
    cache.mkdir()
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", SCRIPT, str(cache), *([str(file)] if is_saved else [])]
        options = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, **options}
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found == ([["0", "0"]] * 2 if is_saved else [["1", "1"]] * 2)
