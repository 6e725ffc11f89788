"""Sums of half precision: rounded as torch rounds them, and narrow where devices add them up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.lowering.context import Target, at
from xla_dtensor.lowering.registry import find_lowering

HALF = (torch.bfloat16, torch.float16)


def lowering(name: str) -> Any:
    found = find_lowering(name)
    assert found is not None
    return found.function


def array(tensor: torch.Tensor) -> Any:
    return jnp.asarray(tensor.float().numpy()).astype(to_jax_dtype(tensor.dtype))


def as_torch(value: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(value.astype(np.float32)))


PRODUCTS: dict[str, tuple[list[tuple[int, ...]], Any]] = {
    "aten::mm.default": ([(8, 64), (64, 4)], torch.mm),
    "aten::bmm.default": ([(3, 8, 64), (3, 64, 4)], torch.bmm),
    "aten::mv.default": ([(8, 64), (64,)], torch.mv),
    "aten::matmul.default": ([(2, 8, 64), (64, 4)], torch.matmul),
    "aten::linear.default": ([(2, 8, 64), (4, 64), (4,)], torch.nn.functional.linear),
    "aten::addmm.default": ([(4,), (8, 64), (64, 4)], torch.addmm),
    "aten::baddbmm.default": ([(3, 8, 4), (3, 8, 64), (3, 64, 4)], torch.baddbmm),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, dtype: torch.dtype, platform: str) -> None:
    """A product's own result is narrow where the backend adds it up so; the addend is added in
    single precision wherever it is."""
    shapes, torchs = PRODUCTS[name]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    function = lowering(name)
    with at(Target(platform)):
        program = jax.make_jaxpr(lambda *given: function(*given))(*map(array, tensors))
        found = function(*map(array, tensors))
    (dot,) = [line for line in str(program).splitlines() if "preferred_element_type" in line]
    narrow = str(to_jax_dtype(dtype))
    assert f"preferred_element_type={narrow if platform == 'tpu' else 'float32'}" in dot
    expected = torchs(*(t.double() for t in tensors))
    rounding = torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(
        as_torch(found.astype(to_jax_dtype(dtype))).double(), expected, atol=rounding, rtol=0
    )


def test_a_product_that_is_asked_for_in_float32() -> None:
    x = jnp.ones((4, 8), jnp.bfloat16)
    with at(Target("tpu")):
        assert lowering("aten::mm.dtype")(x, x.T, torch.float32).dtype == np.float32
        assert lowering("aten::mm.default")(x.astype(np.float32), x.T.astype(np.float32)).dtype == (
            np.float32
        )


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("name", "dtype"), [("_int_mm", torch.int8), ("mm", torch.uint8)])
def test_products_of_bytes(name: str, dtype: torch.dtype, platform: str) -> None:
    """On GPUs XLA's own are twice what they are (`xla_faults.PRODUCTS_OF_BYTES`)."""
    low = 0 if dtype is torch.uint8 else -128
    x, y = (torch.randint(low, low + 256, shape).to(dtype) for shape in ((24, 32), (32, 16)))
    with at(Target(platform)):
        function = lowering(f"aten::{name}.default")
        program = str(jax.make_jaxpr(lambda *given: function(*given))(x.numpy(), y.numpy()))
        found = function(x.numpy(), y.numpy())
    assert ("i32[24,32]" in program) == (platform == "gpu")
    expected = getattr(torch, name)(x, y)
    np.testing.assert_array_equal(np.asarray(found), expected.numpy())


@pytest.mark.parametrize("alpha", [1, 2])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sums_are_torchs_bit_for_bit(dtype: torch.dtype, alpha: int) -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.logspace(-5, 4, 4096)
    x, y = ((torch.randn(4096, generator=generator) * scale).to(dtype) for _ in range(2))
    y = y[torch.randperm(4096, generator=generator)]
    edges = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 6e-8]).to(dtype)
    x, y = torch.cat([x, edges]), torch.cat([y, edges.flip(0)])
    found = jax.jit(lambda x, y: lowering("aten::add.Tensor")(x, y, alpha))(array(x), array(y))
    expected = torch.add(x, y, alpha=alpha).float()
    rounded = as_torch(found.astype(to_jax_dtype(dtype)))
    torch.testing.assert_close(rounded, expected, atol=0, rtol=0, equal_nan=True)


def test_a_sum_of_two_is_one_operation() -> None:
    """Conversions in between keep XLA from adding before devices do."""
    x = jnp.ones(4, jnp.bfloat16)
    assert "convert" not in str(jax.make_jaxpr(lowering("aten::add.Tensor"))(x, x))
