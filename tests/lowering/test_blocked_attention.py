"""Attention in blocks, and TPUs' kernel, against torch's math path on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.lowering.harness import to_numpy
from xla_dtensor.lowering.attention import blocked as blocked_attention
from xla_dtensor.lowering.attention import flash as flash_attention
from xla_dtensor.lowering.attention.blocked import Blocks
from xla_dtensor.lowering.attention.splash import (
    name_of_call,
    share_of_blocks,
    splash,
    splash_backward,
)
from xla_dtensor.lowering.context import Target, at


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "QUERIES", 5)
    monkeypatch.setattr(blocked_attention, "KEYS", 7)


def some_rows_see_nothing() -> torch.Tensor:
    mask = torch.rand(12, 20) > 0.4
    mask[3] = False
    return mask


CASES: dict[str, dict[str, Any]] = {
    "plain": {"value": 6},
    "causal": {"is_causal": True, "L": 24, "S": 24},
    "causal, more keys": {"is_causal": True},
    "causal, fewer keys": {"is_causal": True, "L": 20, "S": 12},
    "grouped": {"is_causal": True, "kv": 2, "scale": 0.3},
    "3-D": {"lead": ()},
    "5-D": {"lead": (2, 3), "attn_mask": torch.randn(3, 1, 12, 20)},
    "bool mask": {"attn_mask": some_rows_see_nothing()},
    "mask of a batch": {"attn_mask": torch.randn(2, 1, 12, 20), "kv": 1},
    "mask of heads": {"attn_mask": torch.randn(4, 12, 20), "kv": 2},
    "mask of keys": {"attn_mask": torch.randn(2, 1, 1, 20)},
    "mask of queries": {"attn_mask": torch.randn(12, 1)},
}


def torch_says(
    inputs: list[torch.Tensor], mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output, its gradient, and those of inputs and a mask of numbers."""
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, **options)
    grad = torch.randn_like(out)
    leaves = [x for x in (*inputs, mask) if x is not None and x.requires_grad]
    return out, [grad, *torch.autograd.grad(out, leaves, grad)]


def assert_close(actual: Any, wanted: Any, tolerance: float) -> None:
    for one, other in zip(actual, wanted, strict=True):
        other = np.asarray(to_numpy(other), np.float64)
        np.testing.assert_allclose(
            np.asarray(one, np.float64), other, rtol=tolerance, atol=tolerance
        )


def inputs_of(
    dtype: torch.dtype, lead: tuple[int, ...], heads: int, kv: int, sizes: tuple[int, int, int, int]
) -> list[torch.Tensor]:
    length, keys, width, value = sizes
    shapes = [(heads, length, width), (kv, keys, width), (kv, keys, value)]
    return [torch.randn(*lead, *s, dtype=dtype, requires_grad=True) for s in shapes]


def compare(dtype: torch.dtype, tolerance: float, **given: Any) -> None:
    torch.manual_seed(0)
    options = dict(given)
    lead, kv = options.pop("lead", (2,)), options.pop("kv", 4)
    sizes = options.pop("L", 12), options.pop("S", 20), 8, options.pop("value", 8)
    mask = options.pop("attn_mask", None)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(dtype).requires_grad_()
    inputs = inputs_of(dtype, lead, 4, kv, sizes)
    out, (grad, *grads) = torch_says(inputs, mask, enable_gqa=kv != 4, **options)
    array_mask = None if mask is None else to_numpy(mask)
    is_causal, scale = options.get("is_causal", False), options.get("scale", 8**-0.5)

    def both(grad: Any, mask: Any, *tensors: Any) -> Any:
        blocks = Blocks(*tensors, mask, is_causal, scale)
        attended, log_sums = blocks.forward()
        of_mask = mask is not None and mask.dtype.kind != "b"
        return attended, *blocks.backward(grad, attended, log_sums, of_mask)

    with jax.enable_x64(True):
        found = jax.jit(both)(to_numpy(grad), array_mask, *map(to_numpy, inputs))
    assert found[0].dtype == found[1].dtype == to_numpy(inputs[0]).dtype
    assert_close([x for x in found if x is not None], [out, *grads], tolerance)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name: str) -> None:
    compare(torch.float64, 1e-12, **CASES[name])


def test_dtypes() -> None:
    compare(torch.float32, 1e-5, is_causal=True, kv=2)
    compare(torch.bfloat16, 4e-2, is_causal=True, kv=2)


@pytest.mark.filterwarnings("ignore:Dropout mask should only be used")
def test_dropout_drops_the_same_in_both_passes() -> None:
    torch.manual_seed(0)
    q, k, v = inputs_of(torch.float64, (2,), 4, 2, (12, 20, 8, 20))
    p = 0.3
    with jax.enable_x64(True):
        op = lambda value: flash_attention.flash_attention_dropout(
            jax.random.key(3), to_numpy(q), to_numpy(k), value, None, p, True, 0.5
        )
        out, log_sums, seed = op(to_numpy(v))
        # Of one-hot values the output is the probabilities.
        eye = jnp.broadcast_to(jnp.eye(20), v.shape)
        dropped = torch.tensor(np.asarray(op(eye)[0]) == 0)
        seen = torch.ones(12, 20, dtype=torch.bool).tril().expand_as(dropped)
        assert abs(dropped[seen].double().mean() - p) < 0.05
        assert not torch.equal(dropped[0], dropped[1])
        grad = torch.randn(2, 4, 12, 20, dtype=torch.float64)
        grads = flash_attention.flash_attention_backward(
            to_numpy(grad),
            *map(to_numpy, (q, k, v)),
            None,
            out,
            log_sums,
            seed,
            p,
            True,
            0.5,
            False,
        )[:3]
    wanted, _ = torch._scaled_dot_product_attention_math(
        *(q, k, v, None, p, True, ~dropped), scale=0.5, enable_gqa=True
    )
    assert_close([out, *grads], [wanted, *torch.autograd.grad(wanted, [q, k, v], grad)], 1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_kernel_of_tpus(is_causal: bool) -> None:
    """Interpreted; `tests/integration/test_flash_attention.py` compiles it."""
    torch.manual_seed(0)
    inputs = inputs_of(torch.float32, (2,), 2, 1, (128, 256, 64, 32))
    options = {"is_causal": is_causal, "enable_gqa": True, "scale": 0.2}
    wanted, (grad, *grads) = torch_says(inputs, None, **options)
    arrays = [jnp.asarray(to_numpy(x)) for x in inputs]
    with jax.enable_x64(True):
        out, log_sums = splash(*arrays, is_causal, 0.2)
        found = splash_backward(to_numpy(grad), *arrays, out, log_sums, is_causal, 0.2)
    assert_close([out, *found], [wanted, *grads], 2e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("length", "keys"), [(512, 512), (512, 256), (256, 512)])
def test_the_kernel_of_tpus_on_parts_of_the_queries(
    is_causal: bool, length: int, keys: int
) -> None:
    torch.manual_seed(0)
    inputs = inputs_of(torch.float32, (1,), 4, 2, (length, keys, 64, 64))
    options = {"is_causal": is_causal, "enable_gqa": True, "scale": 0.2}
    wanted, (grad, *grads) = torch_says(inputs, None, **options)
    cut, whole = PartitionSpec(None, None, "cp", None), PartitionSpec()
    axes = {cut: ((), (), ("cp",), ()), whole: ((),) * 4}
    mesh = jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(cut, cut, whole, whole),
        out_specs=(cut, cut, whole, whole),
        check_vma=False,
    )
    def each(grad: Any, *tensors: Any) -> Any:
        with at(Target("cpu", [axes[cut], axes[whole], axes[whole]])):
            out, log_sums = splash(*tensors, is_causal, 0.2)
        with at(Target("cpu", [axes[s] for s in (cut, cut, whole, whole)])):
            found = splash_backward(grad, *tensors, out, log_sums, is_causal, 0.2)
        return out, found[0], *(jax.lax.psum(x, "cp") for x in found[1:])

    arrays = [jnp.asarray(to_numpy(x)) for x in (grad, *inputs)]
    assert_close(each(*arrays), [wanted, *grads], 2e-5)


def test_what_the_kernel_of_tpus_leaves_out() -> None:
    """The last part of the queries sees the most."""
    share = lambda *given: share_of_blocks(name_of_call(*given))
    assert share(2048, 2048, True) == 10 / 16
    assert share(512, 2048, True, 4) == 1
    assert share(1024, 2048, True, 2) == 7 / 8
    assert share(1024, 2048, False, 2) == 1
