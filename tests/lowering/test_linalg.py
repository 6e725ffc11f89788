"""Factorisations that aren't unique, and what they are used for: checked by their products."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.lowering.harness import run_lowering, to_torch
from xla_dtensor.lowering import find_lowering
from xla_dtensor.lowering.meta import meta_of, shapes_of

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def lowered(overload: torch._ops.OpOverload, *args: object, **kwargs: object) -> list[np.ndarray]:
    name = str(overload).replace("aten.", "aten::", 1)
    found = find_lowering(name)
    assert found is not None
    out = run_lowering(overload, name, found, args, kwargs)
    return jax.tree.leaves(out)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.one_in(10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_ldl_is_lapacks(n: int, hermitian: bool, dtype: torch.dtype) -> None:
    """A small diagonal makes for many blocks of two."""
    a = random(3, n, n, dtype=dtype)
    a = a + (a.mH if hermitian else a.mT)
    a.diagonal(dim1=-2, dim2=-1).mul_(0.2)
    expected = torch.linalg.ldl_factor_ex(a, hermitian=hermitian)
    ld, pivots, info = lowered(aten.linalg_ldl_factor_ex.default, a, hermitian=hermitian)
    np.testing.assert_array_equal(pivots, expected.pivots)
    np.testing.assert_array_equal(info, expected.info)
    tolerance = 3e-3 if torch.finfo(dtype).bits == 32 else 1e-10
    torch.testing.assert_close(to_torch(ld, dtype), expected.LD, rtol=tolerance, atol=tolerance)
    if n > 2:
        assert (expected.pivots < 0).any()


def test_ldl_of_a_singular_matrix_says_where() -> None:
    a = torch.zeros(3, 3)
    expected = torch.linalg.ldl_factor_ex(a)
    for ours, theirs in zip(lowered(aten.linalg_ldl_factor_ex.default, a), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "gelss"])
@pytest.mark.parametrize(
    ("a", "b"), [((5, 3), (5, 2)), ((3, 5), (3, 2)), ((2, 5, 3), (2, 5)), ((0, 3), (0, 2))]
)
def test_least_squares(driver: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = random(*a), random(*b)
    expected = torch.linalg.lstsq(x, y, driver=driver)
    metas = shapes_of("linalg_lstsq")(x.to("meta"), y.to("meta"), driver=driver)
    results = lowered(aten.linalg_lstsq.default, x, y, driver=driver)
    for ours, meta, theirs in zip(results, metas, expected, strict=True):
        assert (meta.shape, meta.dtype, meta.stride()) == (
            theirs.shape,
            theirs.dtype,
            theirs.stride(),
        )
        torch.testing.assert_close(to_torch(ours, theirs.dtype), theirs)


def test_rank_deficient_least_squares() -> None:
    a = random(6, 2) @ random(2, 4)
    b = random(6, 3)
    expected = torch.linalg.lstsq(a, b, rcond=1e-8)
    x, _, rank, _ = lowered(aten.linalg_lstsq.default, a, b, 1e-8)
    torch.testing.assert_close(to_torch(x, b.dtype), expected.solution)
    assert int(rank) == int(expected.rank) == 2


def test_qr_factors_multiply_to_the_matrix() -> None:
    a = random(2, 5, 3)
    packed, tau = (to_torch(x, a.dtype) for x in lowered(aten.geqrf.default, a))
    for ours, meta in zip((packed, tau), shapes_of("geqrf")(a.to("meta")), strict=True):
        assert ours.shape == meta.shape
    r = packed.triu()
    q_times_r = lowered(aten.ormqr.default, packed, tau, r)[0]
    torch.testing.assert_close(to_torch(q_times_r, a.dtype), a)


@pytest.mark.parametrize("scale", [1e-9, 0.3, 1.0, 4.0, 30.0])
def test_matrix_exponential_is_as_precise_as_torchs(scale: float) -> None:
    """float32 against float64: torch's own error is a few ulp of the largest element, squared."""
    a = random(4, 6, 6).float() * scale
    exact = torch.matrix_exp(a.double())
    size = exact.abs().amax((-2, -1), keepdim=True)
    ours = to_torch(lowered(aten.linalg_matrix_exp.default, a)[0], a.dtype)
    error = ((ours - exact).abs() / size).max()
    theirs = ((torch.matrix_exp(a) - exact).abs() / size).max()
    assert error < max(4 * theirs, 1e-6)


def test_a_second_meta_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="geqrf"):
        meta_of("geqrf")(lambda a: a)


EX = {
    "inv": lambda a: torch.linalg.inv_ex(a, check_errors=True),
    "cholesky": lambda a: torch.linalg.cholesky_ex(a, check_errors=True),
    "upper": lambda a: torch.linalg.cholesky_ex(a, upper=True, check_errors=True),
    "lu": lambda a: torch.linalg.lu_factor_ex(a, check_errors=True),
    "solve": lambda a: torch.linalg.solve_ex(a, a, check_errors=True),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placements", [[Replicate()] * 2, [Shard(0), Replicate()]], ids=str)
@pytest.mark.parametrize("is_singular", [False, True])
@pytest.mark.parametrize("name", EX)
def test_errors_that_are_asked_for(
    mesh_2x4: Any, name: str, is_singular: bool, placements: list[Any]
) -> None:
    """They were ignored: `check_errors=True` is an argument of torch's kernels."""
    a = torch.eye(3).expand(4, 3, 3).clone()
    if is_singular:
        a[2, 1, 1] = 0
    x = distribute_tensor(a, mesh_2x4, placements)
    if not is_singular:
        for expected, actual in zip(EX[name](a), EX[name](x), strict=True):
            torch.testing.assert_close(actual.full_tensor().cpu(), expected)
        return
    with pytest.raises(RuntimeError) as expected:
        EX[name](a)
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
        EX[name](x)
