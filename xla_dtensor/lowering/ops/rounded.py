"""Sums, products and quotients that XLA can't rearrange, so that each is rounded as in torch.

XLA rearranges what it sees through: it divides by multiplying with the reciprocal, by a product
where torch divides twice, adds up two numbers that are added one after the other, so that ``x + c -
c`` is ``x`` however large ``c`` (which rounds), and leaves out the rounding of a product that is
added to something (``x * x - y * y`` isn't 0 of equal numbers then). It sees through no choice, and
choosing costs nothing beside reading ``x`` (`docs/rounding.md`, `docs/design.md`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
}


def rounded(operation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """``operation`` of two arrays of one dtype, which broadcast.

    Args:
        operation: ``"add"``, ``"sub"``, ``"mul"`` or ``"div"``.

    Example::

        third = rounded("div", x, jnp.asarray(3, x.dtype))
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        result: jax.Array = _PLAIN[operation](x, y)
        return result
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    # A scalar stays one: it is a number of the program's, mostly.
    x, y = (v if v.shape in ((), shape) else jnp.broadcast_to(v, shape) for v in (x, y))
    bound: jax.Array = _PRIMITIVES[operation].bind(x, y)
    return bound


def _written_out(operation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    if operation == "div":
        # A divisor that is a quotient or a root is joined with it, and one number is inverted once.
        one = x if x.ndim >= y.ndim else y
        result = x / jnp.where(one != one, 1, y)
        if one is y:
            result = jnp.where(y != y, y, result)
    else:
        result = _PLAIN[operation](x, y)
    # By the result: what an operand's rows have would be looked at once, outside of the loop.
    return jnp.where(result != result, jnp.nan, result)


def _jvp(operation: str, primals: Any, tangents: Any) -> Any:
    given = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(_PLAIN[operation], primals, tuple(given))


def _batch(operation: str, values: Any, dims: Any) -> Any:
    size = next(v.shape[d] for v, d in zip(values, dims, strict=True) if d is not None)
    front = [batching.bdim_at_front(v, d, size) for v, d in zip(values, dims, strict=True)]
    ndim = max(v.ndim for v in front)
    front = [v.reshape(size, *(1,) * (ndim - v.ndim), *v.shape[1:]) for v in front]
    return rounded(operation, *front), 0


def _shape(x: Any, y: Any) -> Any:
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    return x.update(shape=shape, weak_type=x.weak_type and y.weak_type)


def _primitive(operation: str) -> Primitive:
    """Called as JAX's own is: to who reads a program it is the same operation."""
    primitive = Primitive(operation)
    written_out = functools.partial(_written_out, operation)
    primitive.def_impl(jax.jit(written_out))
    primitive.def_abstract_eval(_shape)
    mlir.register_lowering(primitive, mlir.lower_fun(written_out, multiple_results=False))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, operation)
    batching.primitive_batchers[primitive] = functools.partial(_batch, operation)
    return primitive


_PRIMITIVES = {operation: _primitive(operation) for operation in _PLAIN}
