"""XLA's faults in plain JAX: when one of these passes, its row of the table can go."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from tests.conftest import make_mesh
from xla_dtensor.base.strictness import Strictness
from xla_dtensor.base.xla_faults import FAULTS, PINNED, Fault, pinned
from xla_dtensor.runtime import memory, xla_flags

P = PartitionSpec


@pytest.fixture(autouse=True)
def _told() -> Iterator[None]:
    """What couldn't be computed lives on in the exception: no later test is to be told of it."""
    yield
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        memory.synchronize()


WHOLE = P()
SHAPES = {"2x4": (2, 4), "4x2": (4, 2), "2x2x2": (2, 2, 2), "8": (8,)}
still_there = pytest.mark.xfail(
    strict=True,
    raises=(AssertionError, jax.errors.JaxRuntimeError),
    reason="XLA; when this passes its row can go",
)


def check(
    mesh_name: str,
    function: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    inside: Sequence[PartitionSpec],
    out: PartitionSpec,
    given: PartitionSpec = WHOLE,
) -> None:
    """A function of arrays, sharded unevenly or not, gives what it gives on one device.

    Args:
        inside: how its arrays are sharded.
        out: how its result is, and `given` how a program gives it.
    """
    make_mesh(mesh_name)  # starts the devices
    shape = SHAPES[mesh_name]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(shape), tuple("abc"[: len(shape)]))
    asked = lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def sharded(*arrays: Any) -> Any:
        result = asked(function(*map(asked, arrays, inside)), out)
        return asked(result, given)

    found = jax.jit(sharded, out_shardings=NamedSharding(mesh, given))(*arrays)
    np.testing.assert_allclose(found, jax.jit(function)(*arrays), rtol=1e-5)


def counted(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape), dtype=np.float32) % 7 + 1).reshape(shape)


@still_there
@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("size", [1, 4])
def test_padding_between_elements(size: int, step: int) -> None:
    padded = lambda x: lax.pad(x, jnp.float32(0), [(1, 0, step - 1)])
    check("2x4", padded, [counted(size)], [P()], P("a"))


@still_there
def test_strided_slices_of_one_element() -> None:
    check("8", lambda x: lax.slice(x, [3], [4], [3]), [counted(4)], [P("a")], P("a"))


def _weight_gradient(groups: int, kernel: Sequence[int]) -> Callable[..., Any]:
    def gradient(x: Any, grad: Any) -> Any:
        weight = jnp.zeros((grad.shape[1], x.shape[1] // groups, *kernel))
        half = [(n // 2, n // 2) for n in kernel]
        convolve = lambda w: lax.conv_general_dilated(
            x, w, (1, 1), half, feature_group_count=groups
        )
        return jax.vjp(convolve, weight)[1](grad)[0]

    return gradient


@still_there
def test_convolutions() -> None:
    x, grad = counted(8, 2, 4, 4), counted(8, 2, 5, 5)
    spec = [P(None, "a", "b", None), P("a")]
    check("2x4", _weight_gradient(1, (2, 2)), [x, grad], spec, P(None, None, None, "a"))


@still_there
def test_gradients_of_grouped_weights() -> None:
    x, grad = counted(2, 2, 4, 4), counted(2, 2, 4, 4)
    check("2x2x2", _weight_gradient(2, (3, 3)), [x, grad], [P("b", "c")] * 2, P("a"))


@still_there
@pytest.mark.parametrize("size", [6, 2])
def test_scatters_of_uneven_shards(size: int) -> None:
    # Of 6 on 4 and 8 devices the indices' padding is 0, of 2 the values' is no padding.
    x, index = counted(size), np.arange(size, dtype=np.int32)
    if size == 6:
        write, out = lambda x, i, v: x.at[i].min(v - 9, mode="drop"), P(("a", "b"))
        check("4x2", write, [x, index[::-1].copy(), counted(size)], [P("b"), P("a"), P()], out)
    else:
        add = lambda x, i, v: x.at[i].add(jnp.where(lax.iota(np.int32, 2) < 2, v, 0), mode="drop")
        check("4x2", add, [x, index, counted(size)], [P(), P("a"), P("b")], P())


@still_there
def test_scatters_to_one_position() -> None:
    def write(index: Any) -> Any:
        wrapped = lambda i: jnp.where(i < 0, i + 5, i).astype(np.int32).reshape(())
        places = wrapped(index[:1]), wrapped(index[:1])
        return jnp.zeros((6, 5)).at[places].add(1, mode="drop", wrap_negative_indices=False)

    check("2x4", write, [np.array([4, 0, 0, 0])], [P("b")], P("a"), P("a"))


@still_there
def test_scatters_shorter_than_an_axis() -> None:
    def write(x: Any, index: Any, value: Any) -> Any:
        rows, columns = (lax.broadcasted_iota(np.int32, (4, 2), d) for d in (0, 1))
        return x.at[rows, columns, index].add(value, mode="drop", wrap_negative_indices=False)

    arrays = counted(4, 2, 2), np.zeros((4, 2), np.int32), counted(4, 2)
    check("4x2", write, arrays, [P("a"), P(None, "a"), P(None, "b")], P("a"))


@still_there
def test_scatters_to_one_position_of_what_moves() -> None:
    write = lambda x, i: x.at[i].add(20, mode="drop", wrap_negative_indices=False)
    check("2x4", write, [counted(3, 1), np.array(0, np.int32)], [P("a"), P()], P("a"))


@still_there
def test_windows_beside_each_other() -> None:
    both = lambda x: jnp.stack([lax.cumsum(x), lax.cummax(x)])
    check("2x4", both, [counted(8) - 20], [P("b")], P(None, "b"))


@still_there
def test_crops() -> None:
    crop = lambda x: lax.pad(x, jnp.float32(0), [(-1, 0, 0)])
    check("2x4", crop, [counted(4)], [P()], P("a"))


@still_there
def test_slices_of_padding() -> None:
    padding = lambda x: lax.slice(lax.pad(x, jnp.float32(0.5), [(3, 0, 0)]), [0], [3])
    check("8", padding, [counted(3)], [P("a")], P("a"))


@still_there
def test_gathers_that_begin_with_dims_passed_on() -> None:
    at = jnp.array([1, 0, 3, 2])
    read = lambda x: x[:, at, at]
    check("2x4", read, [counted(2, 4, 4)], [P(None, "a")], P("a", "b"))


@still_there
def test_cuts_that_look_whole() -> None:
    """A result of four elements has three."""

    def both(x: jax.Array) -> jax.Array:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
        whole = NamedSharding(mesh, P())
        doubled = lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("a")))
        cut = lax.with_sharding_constraint(doubled[:3], whole)
        return lax.with_sharding_constraint(doubled, whole), cut.sum()

    make_mesh("2x4")
    found = np.asarray(jax.jit(both)(counted(4))[0])
    np.testing.assert_array_equal(found, counted(4) * 2)


@still_there
def test_grouped_products() -> None:
    convolve = lambda x, w: lax.conv_general_dilated(x, w, (1,), [(0, 0)], feature_group_count=2)
    arrays = counted(1, 4, 1), counted(4, 2, 1)
    check("2x4", convolve, arrays, [P(None, "a"), P("a")], P(None, "a"))


@still_there
def test_transforms() -> None:
    transform = lambda x: jnp.fft.fft(x, axis=0).real
    check("8", transform, [counted(8, 2, 16)], [P(None, None, "a")], P("a"))


@still_there
def test_layouts_of_transforms() -> None:
    transform = lambda x: jnp.fft.fft(x, axis=1).real
    check("2x4", transform, [counted(16, 16)], [P(("a", "b"))], P("b", "a"))


@still_there
def test_nans_in_extremes() -> None:
    x = counted(4, 4)
    x[0, 0] = np.nan
    check("2x4", lambda x: jnp.max(x, 0), [x], [P("a")], P())


LARGE_LOOP = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax

def loop(row, j, k, m, h, r, s, v):
    part = lambda x, at: lax.dynamic_slice(x, (0, at), (2, 4))
    both = r + s
    x = part(h, j) * (v[0] * v[1]) * v[2] + v[3] + part(h, k) * v[4] * v[5]
    y = part(both, m) * v[6] * v[7] + x * v[8] + both[:, :4] * v[9] * v[10] + v[11]
    whole = lax.dynamic_update_slice(jnp.zeros((2, 2, 4)), (y * v[12])[None], (row, 0, 0))
    return jnp.pad(whole, ((0, 0), (0, 0), (4, 0)))

given = list(map(np.int32, (1, 4, 8, 12)))
random = np.random.RandomState(0).randn
given += [random(2, 16).astype("f") for _ in range(3)]
given += [[random(2, 4).astype("f") for _ in range(13)]]
with jax.disable_jit():
    expected = loop(*given)
np.testing.assert_allclose(jax.jit(loop)(*given), expected, rtol=1e-5, atol=1e-5)
"""


def _large_loop(**flags: str) -> subprocess.CompletedProcess[str]:
    """In a process as users have it: the tests' own compiles with less effort."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", LARGE_LOOP]
    return subprocess.run(command, env=env | flags, capture_output=True, text=True, check=False)


@still_there
def test_addresses_in_large_loops() -> None:
    assert not _large_loop().returncode


def test_addresses_in_large_loops_as_the_package_has_them() -> None:
    done = _large_loop(XLA_FLAGS=xla_flags.LLVM_ON_CPUS)
    assert not done.returncode, done.stderr


@still_there
def test_the_order_of_axes() -> None:
    check("2x4", lambda x: jnp.tile(x, (2, 1)), [counted(4, 5)], [P()], P(("a", "b")), P("b"))


@still_there
def test_products_with_masks() -> None:
    nothing = jax.jit(lambda mask, x: mask.astype(np.float32) * x)
    found = nothing(np.array([True, False]), np.array([np.inf, np.nan], np.float32))
    np.testing.assert_equal(found, np.array([np.inf, np.nan], np.float32))


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_rows_name_what_there_is(fault: Fault) -> None:
    path, what = fault.remedy.split(":")
    found: Any = importlib.import_module(
        "xla_dtensor." + path.removesuffix(".py").replace("/", ".")
    )
    for name in what.split("."):
        found = getattr(found, name)
    assert (fault.pinned is None) == (fault not in PINNED)
    if fault.pinned is None:  # the remedy says what it is for
        (name,) = (name for name, row in FAULTS.items() if row is fault)
        assert name in (ROOT / "xla_dtensor" / path).read_text()
    for word in fault.proof.split():
        if word.startswith("tests/"):
            file, _, test = word.partition("::")
            assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).exists()


@pytest.mark.parametrize(
    ("kinds", "axes", "dims", "summed", "strictness"),
    [
        ((), 2, 4, True, None),
        ((), 3, 3, False, None),
        ((), 3, 4, False, (Strictness.EXACT, Strictness.FREE)),
        (("PRODUCT",), 1, 2, True, None),
        (("PRODUCT",), 2, 2, False, (Strictness.FREE, Strictness.FREE)),
        (("PRODUCT",), 3, 2, False, (Strictness.EXACT, Strictness.FREE)),
        (("PRODUCT", "BATCHED"), 2, 3, False, (Strictness.HELD, Strictness.HELD)),
        (("PRODUCT", "BATCHED"), 4, 3, False, (Strictness.EXACT, Strictness.HELD)),
        (("GATHER",), 1, 2, True, (Strictness.EXACT, Strictness.EXACT)),
        (("GATHER",), 1, 2, False, None),
        (("CONVOLUTION",), 1, 4, False, (Strictness.EXACT, Strictness.EXACT)),
        (("TRANSFORM",), 3, 4, False, (Strictness.EXACT, Strictness.EXACT)),
    ],
)
def test_which_pins(
    kinds: tuple[str, ...],
    axes: int,
    dims: int,
    summed: bool,
    strictness: tuple[Strictness, Strictness] | None,
) -> None:
    how = pinned(set(kinds), axes, dims, summed)
    assert (how and (how.results.strictness, how.results.loose)) == strictness
