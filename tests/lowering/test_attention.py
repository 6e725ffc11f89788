"""Attention and its gradients against torch's math path on the CPU."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.lowering.harness import check_call, check_overloads, to_numpy
from xla_dtensor.lowering.attention.composition import attention, attention_backward


def bool_mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.4


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": bool_mask(2, 1, 5, 7)},
    "float mask": {"attn_mask": torch.randn(5, 7)},
    "mask per head": {"attn_mask": torch.randn(2, 4, 5, 7)},
    "gqa": {"enable_gqa": True},
    "gqa causal": {"enable_gqa": True, "is_causal": True},
    "gqa mask per head": {"enable_gqa": True, "attn_mask": torch.randn(2, 4, 5, 7)},
    "gqa bool mask": {"enable_gqa": True, "attn_mask": bool_mask(2, 1, 5, 7)},
}


def compare(shapes: Any, dtype: torch.dtype, tolerance: float, **options: Any) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]
    mask = options.pop("attn_mask", None)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(dtype).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *inputs, attn_mask=mask, **options
        )
        grad = torch.randn_like(expected)
        leaves = [x for x in (*inputs, mask) if x is not None and x.requires_grad]
        expected_grads = torch.autograd.grad(expected, leaves, grad)

    arrays = [to_numpy(x) for x in inputs]
    array_mask = None if mask is None else to_numpy(mask)
    with jax.enable_x64(True):
        out = jax.jit(lambda q, k, v, m: attention(q, k, v, m, **options))(*arrays, array_mask)
        assert out.dtype == arrays[0].dtype
        grads = jax.jit(lambda g, q, k, v, m: attention_backward(g, q, k, v, m, **options))(
            to_numpy(grad), *arrays, array_mask
        )
    grads = [g for g in grads if g is not None]
    for actual, wanted in zip([out, *grads], [expected, *expected_grads], strict=True):
        np.testing.assert_allclose(
            np.asarray(actual, np.float64),
            np.asarray(to_numpy(wanted), np.float64),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name: str) -> None:
    heads = 2 if CASES[name].get("enable_gqa") else 4
    shapes = [(2, 4, 5, 8), (2, heads, 7, 8), (2, heads, 7, 6)]
    compare(shapes, torch.float32, 1e-5, **CASES[name])


def test_dtypes_and_ranks() -> None:
    compare([(2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)], torch.float64, 1e-12)
    compare([(2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)], torch.bfloat16, 4e-2, is_causal=True)
    compare([(4, 5, 8), (4, 7, 8), (4, 7, 8)], torch.float32, 1e-5)
    compare([(3, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8)], torch.float32, 1e-5)


def test_rows_masked_throughout_are_zero() -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    shapes = [(1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)]
    compare(shapes, torch.float32, 1e-5, attn_mask=mask)
    compare(shapes, torch.float32, 1e-5, attn_mask=torch.zeros(5, 7).masked_fill(~mask, -torch.inf))


def test_overloads_of_torch() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    aten = torch.ops.aten
    for options in ({}, {"attn_mask": torch.randn(6, 6)}):
        flash = aten._scaled_dot_product_flash_attention_for_cpu.default
        assert check_call(flash, q, k, v, 0.0, False, **options).mismatches == []
        out, log_total = flash(q, k, v, **options)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        args = (torch.randn_like(q), q, k, v, out, log_total, 0.0, False)
        assert check_call(backward, *args, **options).mismatches == []
    report = check_overloads("nn.functional.scaled_dot_product_attention", limit=6)
    assert report.mismatches == []


@pytest.mark.filterwarnings("ignore:Dropout mask should only be used")
def test_a_dropout_mask() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    math = torch.ops.aten._scaled_dot_product_attention_math.default
    args = (q, k, v, None, 0.3, False, torch.rand(2, 4, 6, 6) > 0.3)
    assert check_call(math, *args).mismatches == []
    with torch.inference_mode():  # else autograd takes it apart
        own = [x.to("xla") if isinstance(x, torch.Tensor) else x for x in args]
        for actual, expected in zip(math(*own), math(*args), strict=True):
            torch.testing.assert_close(actual.cpu(), expected)


def test_dropout_is_refused() -> None:
    x = np.zeros((1, 1, 2, 2), np.float32)
    with pytest.raises(NotImplementedError, match="dropout_p > 0"):
        attention(x, x, x, dropout_p=0.1)
