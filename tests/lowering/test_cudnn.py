"""cuDNN's attention: what it is given and asked for, on machines without a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax._src.cudnn import fused_attention_stablehlo as binding

import xla_dtensor as xd
from tests.lowering.harness import to_numpy
from tests.lowering.test_blocked_attention import assert_close, inputs_of, torch_says
from xla_dtensor.lowering.attention import cudnn
from xla_dtensor.lowering.attention import flash as flash_attention
from xla_dtensor.lowering.context import ShardNumber, Target, at

HOPPER = (9, 0)
needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU here")


def like_the_kernel(
    *tensors: jax.Array, scale: Any, mask_type: Any, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """JAX's own attention with the arguments of its binding of cuDNN, which refuses odd lengths."""
    assert all(x.shape[2] % 2 == 0 for x in tensors)
    own: dict[str, Any] = {"implementation": "xla", "return_residual": True}
    if mask_type is binding.MaskType.PADDING:
        own["query_seq_lengths"] = options.pop("q_seqlen")
        own["key_value_seq_lengths"] = options.pop("kv_seqlen")
    assert options == {"qkv_layout": "BNTH", "return_residual": True}
    turned = (x.transpose(0, 2, 1, 3) for x in tensors)
    causal = mask_type is binding.MaskType.CAUSAL
    out, log_sums = jax.nn.dot_product_attention(*turned, scale=scale, is_causal=causal, **own)
    return out.transpose(0, 2, 1, 3), log_sums.transpose(0, 2, 1).astype(jnp.float32)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("is_causal", "lengths", "kv", "traced"),
    [
        (True, (16, 16), 4, False),
        (True, (16, 16), 2, True),
        (True, (15, 15), 2, False),
        (False, (12, 20), 1, False),
        (False, (15, 20), 4, False),
        (False, (12, 19), 2, True),
    ],
)
def test_what_it_is_given(
    is_causal: bool, lengths: tuple[int, int], kv: int, traced: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(binding, "dot_product_attention", like_the_kernel)
    monkeypatch.setattr(cudnn, "generation", lambda: HOPPER)
    torch.manual_seed(0)
    inputs = inputs_of(torch.bfloat16, (2, 3), 4, kv, (*lengths, 8, 8))
    wanted, (grad, *wanted_grads) = torch_says(
        [x.double() for x in inputs], None, is_causal=is_causal, scale=0.3, enable_gqa=True
    )
    arrays = [to_numpy(x) for x in inputs]
    scale = jnp.float32(0.3) if traced else 0.3
    with at(Target("gpu")):
        out, log_sums = flash_attention.flash_attention(*arrays, None, is_causal, scale)
        *found, _ = flash_attention.flash_attention_backward(
            jnp.asarray(to_numpy(grad.bfloat16())),
            *arrays, None, out, log_sums, None, 0.0, is_causal, scale, False,
        )  # fmt: skip
    assert out.dtype == jnp.bfloat16 and log_sums.shape == out.shape[:-1]
    assert_close([out, *found], [wanted, *wanted_grads], 3e-2)


def test_the_program_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls the kernel forward and backward, and has no scores."""
    monkeypatch.setattr(binding, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(cudnn, "generation", lambda: HOPPER)
    query = jax.ShapeDtypeStruct((2, 8, 1024, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, 2, 1024, 128), jnp.bfloat16)

    def forward_and_backward(query: Any, key: Any, value: Any) -> Any:
        with at(Target("gpu")):
            out, sums = flash_attention.flash_attention(query, key, value, None, True, 0.1)
            rest = None, out, sums, None, 0.0, True, 0.1, False
            return flash_attention.flash_attention_backward(out, query, key, value, *rest)

    with jax.enable_x64(True):
        traced = jax.jit(forward_and_backward).trace(query, key, key)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text and "__cudnn$fmhaSoftmax(" in text
    assert "1024x1024" not in text


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("of single precision", {"dtype": jnp.float32}),
        ("a width that isn't a multiple of 8", {"width": 60}),
        ("wider than the kernel", {"width": 512}),
        ("a mask", {"mask": True}),
        ("causal and not square", {"keys": 512}),
        ("values of another width", {"value": 32}),
        ("an older GPU", {"generation": (7, 5)}),
        ("no cuDNN", {"generation": (0, 0)}),
    ],
)
def test_what_goes_in_blocks(why: str, changes: dict[str, Any], monkeypatch: Any) -> None:
    def takes(**given: Any) -> bool:
        monkeypatch.setattr(cudnn, "generation", lambda: given.get("generation", HOPPER))
        dtype, width = given.get("dtype", jnp.bfloat16), given.get("width", 64)
        keys = given.get("keys", 256)
        like = lambda *shape: jax.ShapeDtypeStruct((2, 4, *shape), dtype)
        query, key = like(256, width), like(keys, width)
        value = like(keys, given.get("value", width))
        return cudnn.takes(query, key, value, given.get("mask"), True)

    assert takes()
    assert not takes(**changes)


def test_a_part_of_the_queries_of_a_causal_mask_goes_in_blocks(monkeypatch: Any) -> None:
    monkeypatch.setattr(cudnn, "generation", lambda: HOPPER)
    monkeypatch.setattr(Target, "part", lambda self, tensor, dim: ShardNumber(jnp.int32(1), 2))
    x = jax.ShapeDtypeStruct((2, 4, 256, 64), jnp.bfloat16)
    with at(Target("gpu")):
        assert flash_attention._kernel(x, x, x, None, is_causal=True, index=0) is None
        assert flash_attention._kernel(x, x, x, None, is_causal=False, index=0) is not None


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU here")
def test_machines_without_a_gpu() -> None:
    assert cudnn.generation() == (0, 0)


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("is_causal", "lengths", "kv", "width"),
    [
        (True, (512, 512), 4, 64),
        (True, (1024, 1024), 2, 128),
        (True, (1000, 1000), 1, 64),
        (False, (512, 1536), 4, 128),
        (False, (768, 768), 2, 40),
        (True, (577, 577), 4, 64),  # odd, which JAX's binding refuses in backward
        (False, (577, 577), 2, 64),
        (False, (600, 601), 4, 64),
        (False, (197, 197), 4, 64),  # shorter than what goes in blocks
        (True, (512, 1024), 4, 64),  # a rectangle with a causal mask: not cuDNN's
    ],
)
def test_on_a_gpu(
    is_causal: bool,
    lengths: tuple[int, int],
    kv: int,
    width: int,
    dtype: torch.dtype,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel itself, against double precision."""
    torch.manual_seed(0)
    inputs = inputs_of(dtype, (2,), 4, kv, (*lengths, width, width))
    wanted, (grad, *wanted_grads) = torch_says(
        [x.double() for x in inputs], None, is_causal=is_causal, enable_gqa=True
    )
    kernel, calls = flash_attention._KERNELS["gpu"], []
    counted = lambda *given: calls.append(1) or kernel.forward(*given)
    monkeypatch.setitem(flash_attention._KERNELS, "gpu", kernel._replace(forward=counted))

    def step(grad: Any, *inputs: Any) -> Any:
        out = F.scaled_dot_product_attention(*inputs, is_causal=is_causal, enable_gqa=True)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    on_device = [x.detach().to("xla").requires_grad_() for x in inputs]
    call = xd.compile(step) if compiled else step
    found = [to_numpy(x.detach().cpu()) for x in call(grad.to(dtype).to("xla"), *on_device)]
    assert_close(found, [wanted, *wanted_grads], 3e-2)
    assert bool(calls) == (not is_causal or lengths[0] == lengths[1])
