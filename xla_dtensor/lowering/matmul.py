"""Matrix products, and the triangles of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.base.dtypes import to_jax_dtype, to_torch_dtype
from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.promotion import is_exactly, math_dtype, promote_for_math
from xla_dtensor.lowering.registry import lowers

_PRECISION = {
    "highest": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "medium": jax.lax.Precision.DEFAULT,
}


def _precision() -> jax.lax.Precision:
    """What the user asked of float32 products, in XLA's terms. An executable must not outlive a
    change of this setting: it belongs in the key under which it is cached."""
    return _PRECISION[torch.get_float32_matmul_precision()]


def dot(
    x: jax.Array,
    y: jax.Array,
    contract: tuple[Any, Any],
    batch: tuple[Any, Any] = ((), ()),
    out_dtype: Any = None,
) -> jax.Array:
    """``lax.dot_general`` as torch multiplies: half-precision operands accumulate, and are
    returned, in float32.

    Raises:
        RuntimeError: the operands' dtypes differ, as in torch (whose meta kernels don't check).
    """
    if x.dtype != y.dtype:
        raise RuntimeError(
            "expected both operands of a matrix product to have the same dtype, but got: "
            f"{x.dtype} != {y.dtype}"
        )
    accumulator = math_dtype(x.dtype) if out_dtype is None else to_jax_dtype(out_dtype)
    full_width = np.dtype(x.dtype) in (np.float32, np.float64) or np.dtype(x.dtype).kind == "c"
    return jax.lax.dot_general(
        x,
        y,
        (contract, batch),
        precision=_precision() if full_width else None,
        preferred_element_type=accumulator,
    )


_BATCHED = (((2,), (1,)), ((0,), (0,)))


def _scaled_sum(x: jax.Array, product: jax.Array, beta: Any, alpha: Any) -> jax.Array:
    """``beta * x + alpha * product``; ``x`` is not read at all where beta is 0."""
    if np.dtype(product.dtype).kind in "iu":
        beta, alpha = _truncated(beta), _truncated(alpha)
    if not is_exactly(alpha, 1):
        product = product * alpha
    if is_exactly(beta, 0):
        return product
    (x,) = promote_for_math(x)
    return product + (x if is_exactly(beta, 1) else x * beta)


def _truncated(scale: Any) -> Any:
    """As torch has it for integers."""
    return jnp.trunc(scale).astype(np.int64) if isinstance(scale, jax.core.Tracer) else int(scale)


def _scales_specially(name: str, scale: Any) -> bool:
    return scale == 0 or scale == 1


@lowers("mm", "mm.dtype")
def mm(x, y, out_dtype=None):
    return dot(x, y, ((1,), (0,)), out_dtype=out_dtype)


@lowers("_int_mm")
def int_mm(x, y):
    return dot(x, y, ((1,), (0,)), out_dtype=torch.int32)


@lowers("bmm", "bmm.dtype")
def bmm(x, y, out_dtype=None):
    return dot(x, y, *_BATCHED, out_dtype=out_dtype)


@lowers("mv")
def mv(x, y):
    return dot(x, y, ((1,), (0,)))


@lowers("dot")
def dot_(x, y):
    return dot(x, y, ((0,), (0,)))


@lowers("vdot")
def vdot(x, y):
    return dot(jnp.conj(x), y, ((0,), (0,)))


@lowers("addmm", static_scalars=_scales_specially)
def addmm(x, a, b, *, beta=1, alpha=1):
    return _scaled_sum(x, mm(a, b), beta, alpha)


@lowers("addmm.dtype", static_scalars=_scales_specially)
def addmm_dtype(x, a, b, out_dtype, *, beta=1, alpha=1):
    return _scaled_sum(x, mm(a, b, out_dtype), beta, alpha)


@lowers("_addmm_activation", static_scalars=_scales_specially)
def addmm_activation(x, a, b, *, beta=1, alpha=1, use_gelu=False):
    result = addmm(x, a, b, beta=beta, alpha=alpha)
    return jax.nn.gelu(result, approximate=False) if use_gelu else jax.nn.relu(result)


@lowers("baddbmm", static_scalars=_scales_specially)
def baddbmm(x, a, b, *, beta=1, alpha=1):
    return _scaled_sum(x, bmm(a, b), beta, alpha)


@lowers("baddbmm.dtype", static_scalars=_scales_specially)
def baddbmm_dtype(x, a, b, out_dtype, *, beta=1, alpha=1):
    return _scaled_sum(x, bmm(a, b, out_dtype), beta, alpha)


@lowers("addbmm", static_scalars=_scales_specially)
def addbmm(x, a, b, *, beta=1, alpha=1):
    return _scaled_sum(x, dot(a, b, ((0, 2), (0, 1))), beta, alpha)


@lowers("addmv", static_scalars=_scales_specially)
def addmv(x, matrix, vector, *, beta=1, alpha=1):
    return _scaled_sum(x, mv(matrix, vector), beta, alpha)


@lowers("addr", static_scalars=_scales_specially)
def addr(x, a, b, *, beta=1, alpha=1):
    x, a, b = promote_for_math(x, a, b)
    return _scaled_sum(x, a[:, None] * b[None, :], beta, alpha)


@lowers("matmul")
def matmul(x, y):
    precision = _precision() if math_dtype(x.dtype) == x.dtype else None
    return jnp.matmul(x, y, precision=precision, preferred_element_type=math_dtype(x.dtype))


@lowers("matmul_backward")
def matmul_backward(grad, x, y, mask):
    _, pullback = jax.vjp(matmul, x, y)
    # JAX's cotangents are the conjugates of torch's gradients.
    grad = jnp.conj(grad).astype(jax.eval_shape(matmul, x, y).dtype)
    return tuple(jnp.conj(g) if m else None for g, m in zip(pullback(grad), mask, strict=True))


@lowers("linear")
def linear(x, weight, bias=None):
    result = dot(x, weight, ((x.ndim - 1,), (weight.ndim - 1,)))
    return result if bias is None else result + bias


@lowers("xla_dtensor::linear_weight_grad")
def linear_weight_grad(grad_out, input):
    """``[..., o]`` and ``[..., i]`` to ``[o, i]``, contracting all leading dims at once.

    In the parameter's dtype: each device accumulates in single precision, and what devices add up
    is narrow, as under torch. In float32 it would be twice the bytes.
    """
    outer = tuple(range(input.ndim - 1))
    return dot(grad_out, input, (outer, outer), out_dtype=to_torch_dtype(input.dtype))


@lowers("xla_dtensor::linear_input_grad")
def linear_input_grad(grad_out, weight):
    """``[..., o]`` and ``[o, i]`` to ``[..., i]``."""
    return dot(grad_out, weight, ((grad_out.ndim - 1,), (0,)))


@lowers("linear_backward")
def linear_backward(x, grad, weight, output_mask):
    outer = tuple(range(x.ndim - 1))
    return (
        dot(grad, weight, ((grad.ndim - 1,), (0,))) if output_mask[0] else None,
        dot(grad, x, (outer, outer)) if output_mask[1] else None,
        jnp.sum(*promote_for_math(grad), outer) if output_mask[2] else None,
    )


@meta_of("_grouped_mm")
def grouped_mm_meta(x, y, offs=None, bias=None, out_dtype=None):
    """torch's own takes bfloat16 in CUDA's alignment only; its CPU kernel takes these dtypes, and
    XLA any strides."""
    check = torch._check
    check(
        x.dtype in _GROUPED and y.dtype == x.dtype,
        lambda: (
            f"Expected mat_a and mat_b to be both Float32, BFloat16 or Float16 matrices, got "
            f"{x.dtype} and {y.dtype}"
        ),
    )
    check(
        x.ndim in (2, 3) and y.ndim in (2, 3),
        lambda: f"mat_a and mat_b have to be 2 or 3 dimensional, got {x.ndim} and {y.ndim} dims",
    )
    # Both ragged in the contracted dim: torch compares the sizes nowhere, and reads past the end.
    check(
        x.shape[-1] == y.shape[-2],
        lambda: (
            "contraction dimension of mat_a and mat_b must match, got "
            f"{x.shape[-1]} and {y.shape[-2]}"
        ),
    )
    ragged = x.ndim == 2 or y.ndim == 2
    check((offs is not None) == ragged, lambda: "Have to provide offsets if there is a 2d matrix")
    if offs is not None:
        check(offs.ndim == 1, lambda: "offs has to be 1D")
        check(offs.dtype == torch.int32, lambda: "Offsets have to be int32")
    check(bias is None, lambda: "Bias not supported yet")
    check(
        out_dtype is None or out_dtype == x.dtype,
        lambda: f"Grouped gemm output dtype must match mat_a dtype, got {out_dtype}",
    )
    groups = [*x.shape[:-2], *y.shape[:-2], *(() if offs is None else offs.shape)]
    check(len(set(groups)) == 1, lambda: f"matrix batch sizes have to match, got {groups}")
    batch = groups[:1] if x.ndim == y.ndim else []
    return x.new_empty((*batch, x.shape[-2], y.shape[-1]))


_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


@lowers("_grouped_mm")
def grouped_mm(x, y, offs=None, bias=None, out_dtype=None):
    """One product per group; ``offs`` holds the ends of the groups along the ragged dim: the
    rows of a 2-d ``x``, the columns of a 2-d ``y``, or, both 2-d, the contracted dim."""
    if offs is None:
        return dot(x, y, *_BATCHED)
    ragged = x.shape[1] if x.ndim == y.ndim else (x.shape[0] if x.ndim == 2 else y.shape[1])
    position = jnp.arange(ragged, dtype=offs.dtype)
    starts = jnp.concatenate([jnp.zeros(1, offs.dtype), offs[:-1]])
    if x.ndim == 2 and y.ndim == 3:
        return _products_of_rows(x, y, starts, offs)
    member = (position >= starts[:, None]) & (position < offs[:, None])  # group, ragged
    if x.ndim == 3:
        products = dot(x, y, ((2,), (0,)))  # group, row, column
        return jnp.sum(jnp.where(member[:, None, :], products, 0), axis=0)
    return dot(jnp.where(member[:, None, :], x, 0), y, ((2,), (0,)))


@jax.custom_batching.custom_vmap
def _products_of_rows(x: jax.Array, y: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
    """Each group's rows of ``x`` by its matrix of ``y``."""
    sizes = (ends - starts).astype(np.int32)
    return jax.lax.ragged_dot(
        x, y, sizes, precision=_precision(), preferred_element_type=math_dtype(x.dtype)
    )


@_products_of_rows.def_vmap
def _batched_products_of_rows(
    axis_size: int, in_batched: Sequence[bool], *args: jax.Array
) -> tuple[jax.Array, bool]:
    """`jax.lax.ragged_dot` has no batch of ``x`` alone: every group's product, masked, instead."""

    def rows(x: jax.Array, y: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
        position = jnp.arange(x.shape[0], dtype=ends.dtype)
        member = (position >= starts[:, None]) & (position < ends[:, None])
        products = dot(jnp.where(member[:, :, None], x, 0), y, ((2,), (1,)), ((0,), (0,)))
        return jnp.sum(products, axis=0)

    axes = [0 if batched else None for batched in in_batched]
    return jax.vmap(rows, in_axes=axes, axis_size=axis_size)(*args), True


@lowers("_scaled_mm")
def scaled_mm(
    x,
    y,
    scale_a,
    scale_b,
    bias=None,
    scale_result=None,
    out_dtype=None,
    use_fast_accum=False,
):
    """A product of float8 matrices, each with a scale for all or for each of its rows (``x``) or
    columns (``y``). ``scale_result`` counts for float8 results only."""
    scale = lambda s: s.reshape(()) if s.size == 1 else s
    # float8 products are exact in float32.
    out = dot(x.astype(np.float32), y.astype(np.float32), ((1,), (0,)))
    out = out * scale(scale_a) * scale(scale_b)
    if bias is not None:
        out = out + bias.astype(np.float32)
    narrow = x.dtype.itemsize == 1 if out_dtype is None else out_dtype.itemsize == 1
    return out / scale(scale_result) if scale_result is not None and narrow else out


@lowers("triu")
def triu(x, diagonal=0):
    return jnp.triu(x, diagonal)


@lowers("tril")
def tril(x, diagonal=0):
    return jnp.tril(x, diagonal)


are(
    Kind.PRODUCT,
    *("_grouped_mm", "_scaled_mm", "addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "linear"),
    *("linear_backward", "matmul", "mm", "mv", "vdot", "xla_dtensor::linear_weight_grad"),
    "xla_dtensor::linear_input_grad",
)
are(Kind.BATCHED, "addbmm", "baddbmm", "bmm", "matmul")
