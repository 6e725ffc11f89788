"""Matrix products, and the triangles of a matrix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.base.dtypes import to_jax_dtype, to_torch_dtype
from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.promotion import is_exactly, math_dtype, promote_for_math
from xla_dtensor.lowering.registry import lowers
from xla_dtensor.lowering.workarounds import PRODUCTS_OF_BYTES, SUMS_IN_FLOAT32

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
    if x.dtype in (np.int8, np.uint8) and PRODUCTS_OF_BYTES.holds():
        wide = jax.lax.dot_general(x.astype(np.int32), y.astype(np.int32), (contract, batch))
        return wide.astype(accumulator)
    full_width = np.dtype(x.dtype) in (np.float32, np.float64) or np.dtype(x.dtype).kind == "c"
    return jax.lax.dot_general(
        x,
        y,
        (contract, batch),
        precision=_precision() if full_width else None,
        preferred_element_type=accumulator,
    )


def narrow_dot(
    x: jax.Array,
    y: jax.Array,
    contract: tuple[Any, Any],
    batch: tuple[Any, Any] = ((), ()),
    out_dtype: Any = None,
) -> jax.Array:
    """`dot` as an operation of its own: in the dtype that torch returns, if half precision.

    Each device accumulates in single precision. What devices add up, where they share the
    contracted dim, is narrow, as torch's collectives are: in float32 it would be twice the bytes,
    of memory too.
    """
    if out_dtype is None:
        out_dtype = to_torch_dtype(_product_dtype(x.dtype))
    return dot(x, y, contract, batch, out_dtype)


def _product_dtype(dtype: Any) -> Any:
    """The dtype that a product of tensors of this dtype is computed and summed up in."""
    return math_dtype(dtype) if SUMS_IN_FLOAT32.holds() else dtype


_BATCHED = (((2,), (1,)), ((0,), (0,)))


def _scaled_sum(x: jax.Array, product: jax.Array, beta: Any, alpha: Any) -> jax.Array:
    """``beta * x + alpha * product``; ``x`` is not read at all where beta is 0."""
    (product,) = promote_for_math(product)
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
    return narrow_dot(x, y, ((1,), (0,)), out_dtype=out_dtype)


@lowers("_int_mm")
def int_mm(x, y):
    return dot(x, y, ((1,), (0,)), out_dtype=torch.int32)


@lowers("bmm", "bmm.dtype")
def bmm(x, y, out_dtype=None):
    return narrow_dot(x, y, *_BATCHED, out_dtype=out_dtype)


@lowers("mv")
def mv(x, y):
    return narrow_dot(x, y, ((1,), (0,)))


@lowers("dot")
def dot_(x, y):
    return narrow_dot(x, y, ((0,), (0,)))


@lowers("vdot")
def vdot(x, y):
    return narrow_dot(jnp.conj(x), y, ((0,), (0,)))


@lowers("addmm", "addmm.dtype", static_scalars=_scales_specially)
def addmm(x, a, b, out_dtype=None, *, beta=1, alpha=1):
    return _scaled_sum(x, mm(a, b, out_dtype), beta, alpha)


@lowers("_addmm_activation", static_scalars=_scales_specially)
def addmm_activation(x, a, b, *, beta=1, alpha=1, use_gelu=False):
    result = addmm(x, a, b, beta=beta, alpha=alpha)
    return jax.nn.gelu(result, approximate=False) if use_gelu else jax.nn.relu(result)


@lowers("baddbmm", "baddbmm.dtype", static_scalars=_scales_specially)
def baddbmm(x, a, b, out_dtype=None, *, beta=1, alpha=1):
    return _scaled_sum(x, bmm(a, b, out_dtype), beta, alpha)


@lowers("addbmm", static_scalars=_scales_specially)
def addbmm(x, a, b, *, beta=1, alpha=1):
    return _scaled_sum(x, narrow_dot(a, b, ((0, 2), (0, 1))), beta, alpha)


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
    return jnp.matmul(x, y, precision=precision, preferred_element_type=_product_dtype(x.dtype))


@lowers("matmul_backward")
def matmul_backward(grad, x, y, mask):
    _, pullback = jax.vjp(matmul, x, y)
    # JAX's cotangents are the conjugates of torch's gradients.
    grad = jnp.conj(grad).astype(jax.eval_shape(matmul, x, y).dtype)
    return tuple(jnp.conj(g) if m else None for g, m in zip(pullback(grad), mask, strict=True))


@lowers("linear")
def linear(x, weight, bias=None):
    result = narrow_dot(x, weight, ((x.ndim - 1,), (weight.ndim - 1,)))
    return result if bias is None else sum(promote_for_math(result, bias))


@lowers("xla_dtensor::linear_weight_grad")
def linear_weight_grad(grad_out, input):
    """``[..., o]`` and ``[..., i]`` to ``[o, i]``, contracting all leading dims at once.

    In the parameter's dtype: each device accumulates in single precision, and what devices add up
    is narrow, as under torch. In float32 it would be twice the bytes.
    """
    outer = tuple(range(input.ndim - 1))
    dtype = to_torch_dtype(input.dtype)
    return dot(grad_out, jnp.conj(input), (outer, outer), out_dtype=dtype)


@lowers("xla_dtensor::linear_input_grad")
def linear_input_grad(grad_out, weight):
    """``[..., o]`` and ``[o, i]`` to ``[..., i]``."""
    return narrow_dot(grad_out, jnp.conj(weight), ((grad_out.ndim - 1,), (0,)))


@lowers("linear_backward")
def linear_backward(x, grad, weight, output_mask):
    outer = tuple(range(x.ndim - 1))
    return (
        linear_input_grad(grad, weight) if output_mask[0] else None,
        narrow_dot(grad, jnp.conj(x), (outer, outer)) if output_mask[1] else None,
        jnp.sum(*promote_for_math(grad), outer) if output_mask[2] else None,
    )


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
    *("_scaled_mm", "addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "linear"),
    *("linear_backward", "matmul", "mm", "mv", "vdot", "xla_dtensor::linear_weight_grad"),
    "xla_dtensor::linear_input_grad",
)
are(Kind.BATCHED, "addbmm", "baddbmm", "bmm", "matmul")
are(Kind.ADDED, "addbmm", "baddbmm")
