"""Primitives that decide at lowering time, when the platform is known: 32-bit types, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from xla_dtensor.errors import UnsupportedOpError

Function = Callable[..., Any]


def in_32_bits(function: Function, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """``function(*operands)``, with JAX's 64-bit types off while it is traced and lowered.

    Args:
        function: gives a tuple of arrays.
        operands: of 32-bit types.
    """
    return tuple(_narrow.bind(*operands, function=function))


def refused(text: str, like: Function, *operands: jax.Array) -> Any:
    """Nothing: a program that has it isn't lowered.

    Args:
        text: what the error says.
        like: gives arrays of the shapes and dtypes that are expected of it.
        operands: its arguments.

    Raises:
        UnsupportedOpError: when the program is lowered.
    """
    results, tree = jax.tree.flatten(jax.eval_shape(like, *operands))
    return tree.unflatten(_refused.bind(*operands, text=text, results=tuple(results)))


# A primitive, as a `with` block around the call would be over when JAX lowers what is in it. It is
# for `base/xla_faults.py:FACTORISATIONS_IN_32_BITS`.
_narrow = Primitive("in_32_bits")
_narrow.multiple_results = True
_narrow.def_impl(lambda *values, function: list(function(*values)))


@_narrow.def_abstract_eval
def _shapes(*values: Any, function: Function) -> list[Any]:
    with jax.enable_x64(False):
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(function, *like)]


def _lower_narrow(context: Any, *values: Any, function: Function) -> Any:
    with jax.enable_x64(False):
        return mlir.lower_fun(function, multiple_results=True)(context, *values)


def _batch_narrow(values: Any, dims: Any, *, function: Function) -> Any:
    results = _narrow.bind(*values, function=jax.vmap(function, in_axes=tuple(dims)))
    return results, [0] * len(results)


mlir.register_lowering(_narrow, _lower_narrow)
batching.primitive_batchers[_narrow] = _batch_narrow

_refused = Primitive("refused")
_refused.multiple_results = True


@_refused.def_impl
def _refuse(*values: Any, text: str, results: Any) -> NoReturn:
    raise UnsupportedOpError(text)


@_refused.def_abstract_eval
def _expected(*values: Any, text: str, results: Any) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in results]


def _batch_refused(values: Any, dims: Any, *, text: str, results: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
    wider = tuple(jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in results)
    return _refused.bind(*values, text=text, results=wider), [0] * len(wider)


mlir.register_lowering(_refused, lambda context, *values, **params: _refuse(*values, **params))
batching.primitive_batchers[_refused] = _batch_refused
