"""`for_each`: one computation on many groups of arrays, as one equation of the jaxpr.

An optimizer's step does the same to each parameter. As a call each, what is traced and lowered
once is still bound, evaluated and lowered as often as there are parameters. Here the calls of
parameters alike are one equation, which is lowered to a function and its calls; XLA inlines those.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from xla_dtensor.base.tables.cache import Cache

Arrays = Sequence[jax.Array]
Function = Callable[[Arrays, Arrays], Sequence[jax.Array]]

_aval = operator.attrgetter("aval")
_known: Cache[Hashable, tuple[ClosedJaxpr, list[int | None]]] = Cache(
    "computations of groups of arrays", 256
)


def for_each(
    function: Function, rows: Sequence[Arrays], shared: Arrays = (), key: Hashable = None
) -> list[list[Any]]:
    """``function(row, shared)`` for each row. Of rows alike (in number, shapes and dtypes) it is
    traced, and lowered, once.

    Args:
        function: gives a list of arrays.
        rows: lists of arrays.
        shared: further arrays, the same for all.
        key: what decides what ``function`` computes, if it is to be traced once in the process; it
            closes over no arrays then.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(tuple(map(_aval, row)), []).append(i)
    found: list[list[Any]] = [[] for _ in rows]
    for members in groups.values():
        results = _of_group(function, [rows[i] for i in members], shared, key)
        for i, result in zip(members, results, strict=True):
            found[i] = result
    return found


def once_for_each(function: Callable[[jax.Array], Any], arrays: Arrays) -> list[Any]:
    """``function`` of each array; of those that are one and the same, as parameters' step counts
    are, once: what is made of them is one again."""
    known: dict[int, Any] = {}
    for array in arrays:
        if id(array) not in known:
            known[id(array)] = function(array)
    return [known[id(array)] for array in arrays]


def _of_group(
    function: Function, rows: list[Arrays], shared: Arrays, key: Hashable
) -> list[list[Any]]:
    make = functools.partial(_traced, function, rows[0], shared)
    if key is None:
        closed, kept = make()
    else:
        avals = tuple(map(_aval, (*rows[0], *shared)))
        wide = jax.config.jax_enable_x64
        closed, kept = _known.get_or_make((key, len(rows[0]), avals, wide), make)
    # A jaxpr that has closed over tracers belongs to this trace, and can't be an equation's
    # parameter.
    if closed.effects or any(isinstance(value, jax.core.Tracer) for value in closed.consts):
        return [list(function(row, shared)) for row in rows]
    arrays = [array for row in rows for array in row]
    flat = iter(
        _primitive.bind(*arrays, *shared, jaxpr=closed, count=len(rows), shared=len(shared))
    )
    return [[next(flat) if i is None else (*row, *shared)[i] for i in kept] for row in rows]


def _traced(
    function: Function, row: Arrays, shared: Arrays
) -> tuple[ClosedJaxpr, list[int | None]]:
    """What ``function`` computes, and which argument each of its results is as it came: those are
    none of what it computes."""
    width = len(row)
    closed = jax.make_jaxpr(lambda *given: list(function(given[:width], given[width:])))(
        *row, *shared
    )
    jaxpr = closed.jaxpr
    position = {variable: i for i, variable in enumerate(jaxpr.invars)}
    kept = [None if isinstance(v, Literal) else position.get(v) for v in jaxpr.outvars]
    computed = [v for v, i in zip(jaxpr.outvars, kept, strict=True) if i is None]
    # The names are those of all results, and `kept` ones are none any more.
    debug = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    return ClosedJaxpr(jaxpr.replace(outvars=computed, debug_info=debug), closed.consts), kept


_primitive = Primitive("for_each")
_primitive.multiple_results = True


def _rows(values: Sequence[Any], count: int, shared: int) -> list[Sequence[Any]]:
    """The arguments of each call."""
    width = (len(values) - shared) // count
    others = values[len(values) - shared :]
    return [(*values[i * width : (i + 1) * width], *others) for i in range(count)]


@_primitive.def_impl
def _run(*values: Any, jaxpr: ClosedJaxpr, count: int, shared: int) -> list[Any]:
    call = jax.jit(jaxpr_as_fun(jaxpr))
    return [result for row in _rows(values, count, shared) for result in call(*row)]


@_primitive.def_abstract_eval
def _shapes(*values: Any, jaxpr: ClosedJaxpr, count: int, shared: int) -> list[Any]:
    return [*jaxpr.out_avals] * count


def _lower(context: Any, *values: Any, jaxpr: ClosedJaxpr, count: int, shared: int) -> Any:
    rows = _rows(values, count, shared)
    one = context.replace(
        avals_in=_rows(context.avals_in, count, shared)[0], avals_out=jaxpr.out_avals
    )

    def lowered(row: Sequence[Any]) -> Sequence[Any]:
        found: Sequence[Any] = mlir.core_call_lowering(
            one, *row, name=_primitive.name, call_jaxpr=jaxpr
        )
        return found

    first = lowered(rows[0])
    call: Any = first[0].owner if first else None
    results = [*first]
    if getattr(call, "name", None) != "func.call" or list(call.operands) != list(rows[0]):
        return results + [value for row in rows[1:] for value in lowered(row)]
    # The same call of others: what JAX does about a call takes longer than the call.
    types = [value.type for value in first]
    callee = {"callee": call.attributes["callee"]}
    for row in rows[1:]:
        again = mlir.ir.Operation.create("func.call", types, row, callee, loc=call.location)
        results += again.results
    return results


def _batch(
    values: Any, dims: Any, *, jaxpr: ClosedJaxpr, count: int, shared: int
) -> tuple[list[Any], list[Any]]:
    call = jax.jit(jaxpr_as_fun(jaxpr))
    results: list[Any] = []
    of_results: list[Any] = []
    each = zip(_rows(values, count, shared), _rows(dims, count, shared), strict=True)
    for row, row_dims in each:
        mapped = any(dim is not None for dim in row_dims)
        function = jax.vmap(call, in_axes=tuple(row_dims)) if mapped else call
        made = function(*row)
        results += made
        of_results += [0 if mapped else None] * len(made)
    return results, of_results


mlir.register_lowering(_primitive, _lower, cacheable=False)
batching.primitive_batchers[_primitive] = _batch
