"""Workarounds for one backend's compiler are in that backend's programs alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xla_dtensor
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.lowering import families, workarounds  # noqa: F401  (registers lowerings)
from xla_dtensor.lowering.registry import find_lowering
from xla_dtensor.lowering.workarounds import Feature, Workaround

Shape = tuple[tuple[int, ...], Any]
KEY: Shape = ((2,), np.uint32)


def array(*shape: int, dtype: Any = np.float32) -> Shape:
    return shape, dtype


def text(function: Callable[..., Any], platform: str, *shapes: Shape) -> str:
    """The program for eight devices of a kind that needn't be here."""
    whole = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("x",)), PartitionSpec())
    args = [jax.ShapeDtypeStruct(*about, sharding=whole) for about in shapes]
    with jax.enable_x64(True):
        traced = jax.jit(function).trace(*args)
        return str(traced.lower(lowering_platforms=(platform,)).as_text())


def lowering(name: str) -> Callable[..., Any]:
    found = find_lowering(name)
    assert found is not None
    return found.function


def with_key(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda key, *args: function(jax.random.wrap_key_data(key), *args)


POOL = [2, 2], [2, 2], [0, 0], [1, 1], False
# What a workaround puts into a program, and an operation that has it.
GUARDED = {
    "fft": (
        "LayoutConstraint",
        lambda x: lowering("aten::_fft_r2c.default")(x, [0], 0, True),
        array(8, 8),
    ),
    "randn": ("f64", with_key(lambda key: lowering("aten::randn.default")(key, [8])), KEY),
    "topk": ("SPMDPartitioning", lambda x: lowering("aten::topk.default")(x, 2), array(8, 8)),
    "multinomial": (
        "SPMDPartitioning",
        with_key(lambda key, x: lowering("aten::multinomial.default")(key, x, 3)),
        KEY,
        array(8, 8),
    ),
    "max_pool2d backward": (
        "SPMDPartitioning",
        lambda grad, x, at: lowering("aten::max_pool2d_with_indices_backward.default")(
            grad, x, *POOL, at
        ),
        array(2, 3, 4, 4),
        array(2, 3, 8, 8),
        array(2, 3, 4, 4, dtype=np.int64),
    ),
    "matrix_exp": (
        "SPMDPartitioning",
        lowering("aten::linalg_matrix_exp.default"),
        array(4, 3, 3),
    ),
    "ldl": ("SPMDPartitioning", lowering("aten::linalg_ldl_factor_ex.default"), array(4, 3, 3)),
    "zeta": ("SPMDPartitioning", lowering("aten::special_zeta.default"), array(8), array(8)),
}


@pytest.mark.parametrize("name", GUARDED)
def test_what_is_there_for_cpus_is_in_no_tpu_program(name: str) -> None:
    mark, function, *args = GUARDED[name]
    assert mark in text(function, "cpu", *args)
    assert mark not in text(function, "tpu", *args)


@pytest.mark.parametrize("compute_uv", [False, True])
def test_factorisations_for_tpus_have_no_doubles(compute_uv: bool) -> None:
    svd = lowering("aten::_linalg_svd.default")
    assert "f64" not in text(lambda x: svd(x, False, compute_uv), "tpu", array(6, 5))
    batch = lambda x: jax.vmap(lambda x: svd(x, False, compute_uv))(x)
    assert "f64" not in text(batch, "tpu", array(3, 6, 5))


@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 4), (3, 2, 4, 4), (0, 4)])
def test_a_factorisation_in_32_bits_is_the_same(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a TPU, here: without 64-bit types the CPU's numbers are what they are with them."""
    a = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    svd = lowering("aten::_linalg_svd.default")
    with jax.enable_x64(True):
        before = jax.jit(svd)(a)
        here = Workaround("here, too", ("cpu",))
        monkeypatch.setattr(
            "xla_dtensor.lowering.linalg.decompositions.FACTORISATIONS_IN_32_BITS", here
        )
        after = jax.jit(lambda a: svd(a))(a)
        eager = svd(a)
    for x, y, z in zip(before, after, eager, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape == z.shape
        np.testing.assert_array_equal(x, y)


def test_what_tpus_lack_is_refused_by_name() -> None:
    eig = lowering("aten::linalg_eig.default")
    assert "geev" in text(eig, "cpu", array(3, 3))
    for function in (eig, jax.vmap(eig)):
        shape = (3, 3) if function is eig else (2, 3, 3)
        with pytest.raises(UnsupportedOpError, match=r"linalg_eig of a matrix.*eigh"):
            text(function, "tpu", array(*shape))
    with pytest.raises(UnsupportedOpError, match="hash_tensor of a tensor of shape"):
        text(lowering("aten::hash_tensor.default"), "tpu", array(8))


def test_workarounds_are_in_one_place() -> None:
    """Nothing else asks what backend a program is for, but what looks for a kernel of its own and
    what refuses random numbers on a platform that computes them wrong."""
    root = Path(xla_dtensor.__file__).parent
    asks = re.compile(r"platform_dependent|lowering_platforms|default_backend\(")
    found = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if asks.search(path.read_text())
    }
    assert found == {
        "base/random/threefry.py",
        "lowering/context.py",
        "lowering/workarounds.py",
        "plans/shard_map_call.py",
    }
    every = [one for one in vars(workarounds).values() if isinstance(one, Workaround | Feature)]
    assert len(every) == 12
    for one in every:
        assert one.why and set(one.platforms) <= {"cpu", "tpu", "cuda", "rocm"}
