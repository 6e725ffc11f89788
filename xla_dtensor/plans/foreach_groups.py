"""``_foreach_`` operations: equal tensors of a list are traced and lowered once, together.

An optimizer's step does the same to each parameter, a dozen operations with each. Traced one after
the other they take most of the time that a step with many layers takes to trace; XLA, which inlines
the calls, sees no difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.lowering.ops.for_each import for_each

Function = Callable[[Any, tuple, dict], tuple[list[Any], list[Any]]]

ENOUGH = 3
"""Of so many tensors alike on it is worth a call."""

_FOREACH = "aten::_foreach_"

_calls: Cache[Hashable, Any] = Cache("foreach operations of tensors alike", 512)


def once_for_alike(name: str, run: Function) -> Function:
    """``run`` of a ``_foreach_`` operation, which is called once for tensors of one shape and dtype
    that meet the same numbers; of others ``run`` itself.

    Args:
        name: the overload's, qualified.
        run: takes what gives PRNG keys, args and kwargs, of whose lists it computes each element
            alone; returns results and what is written, list after list.
    """
    if not name.startswith(_FOREACH):
        return run

    def by_groups(keys: Any, args: tuple, kwargs: dict) -> tuple[list[Any], list[Any]]:
        lists = [x for x in args if isinstance(x, list)]
        count = len(lists[0]) if lists else 0
        if kwargs or count < ENOUGH or any(len(x) != count for x in lists):
            return run(keys, args, kwargs)
        groups: dict[Hashable, list[int]] = {}
        for i in range(count):
            groups.setdefault(tuple(_kind(_at(x, i)) for x in args), []).append(i)
        if len(groups) > count // ENOUGH:
            return run(keys, args, kwargs)
        found: list[Any] = [None] * count
        for key, members in groups.items():
            make = functools.partial(_call_of, run, args, members[0])
            call = _calls.get_or_make((run, key), make)
            rows = [[x for x in (_at(x, i) for x in args) if _is_array(x)] for i in members]
            ids = [tuple(map(id, row)) for row in rows]
            once = dict(zip(ids, rows, strict=True))  # step counts may be one array: computed once
            results = dict(zip(once, _of_each(call, list(once.values())), strict=True))
            for i, own in zip(members, ids, strict=True):
                found[i] = results[own]
        columns = lambda part: [x for column in zip(*part, strict=True) for x in column]
        return columns([fresh for fresh, _ in found]), columns([new for _, new in found])

    return by_groups


def _call_of(run: Function, args: tuple, index: int) -> Any:
    """A function of the arrays among the arguments of element ``index``."""
    are_lists = [isinstance(x, list) for x in args]
    holes = [_is_array(_at(x, index)) for x in args]
    # Not the arrays, which would live as long as the function.
    numbers = [None if hole else _at(x, index) for x, hole in zip(args, holes, strict=True)]

    def call(arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        remaining = iter(arrays)
        own = [next(remaining) if hole else x for x, hole in zip(numbers, holes, strict=True)]
        filled = tuple([x] if is_list else x for x, is_list in zip(own, are_lists, strict=True))
        return run(None, filled, {})

    return jax.jit(call)


def _of_each(call: Any, rows: list[list[Any]]) -> list[Any]:
    """The results of ``call`` for each row of arrays, as one equation of the trace."""
    if len(rows) == 1:
        return [call(rows[0])]
    trees: list[Any] = []

    def flat(row: Any, _: Any) -> list[Any]:
        values, tree = jax.tree.flatten(call(list(row)))
        trees.append(tree)
        return values

    return [trees[0].unflatten(values) for values in for_each(flat, rows)]


def _at(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) else value


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _kind(value: Any) -> Hashable:
    if _is_array(value):
        return value.shape, value.dtype, value.weak_type
    return type(value), repr(value)  # 0.0 and -0.0 are equal, but not the same
