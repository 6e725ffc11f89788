"""``_foreach_`` operations: equal tensors of a list are traced and lowered once, together.

An optimizer's step does the same to each parameter, a dozen operations with each. Traced one after
the other they take most of the time that a step with many layers takes to trace; XLA, which inlines
the calls, sees no difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from xla_dtensor.lowering.ops.for_each import for_each
from xla_dtensor.plans.ops import OpInfo

Function = Callable[[Any, tuple, dict], tuple[list[Any], list[Any]]]

ENOUGH = 3
"""Of so many tensors alike on it is worth a call."""

_FOREACH = "aten::_foreach_"


def once_for_alike(info: OpInfo, run: Function) -> Function:
    """``run`` of a ``_foreach_`` operation, which is called once for tensors of one shape and dtype
    that meet the same numbers; of others ``run`` itself.

    Args:
        info: the overload.
        run: takes what gives PRNG keys, args and kwargs, of whose lists it computes each element
            alone; returns results and what is written, list after list.
    """
    if not info.name.startswith(_FOREACH):
        return run

    def by_groups(keys: Any, args: tuple, kwargs: dict) -> tuple[list[Any], list[Any]]:
        lists = [x for x in args if isinstance(x, list)]
        count = len(lists[0]) if lists else 0
        if kwargs or count < ENOUGH or any(len(x) != count for x in lists):
            return run(keys, args, kwargs)
        elements = [[x[i] if isinstance(x, list) else x for x in args] for i in range(count)]
        groups: dict[Hashable, list[int]] = {}
        for i, element in enumerate(elements):
            groups.setdefault(tuple(map(_kind, element)), []).append(i)
        if len(groups) > count // ENOUGH:
            return run(keys, args, kwargs)
        found: list[Any] = [None] * count
        for kind, members in groups.items():
            rows = [[x for x in elements[i] if _is_array(x)] for i in members]
            ids = [tuple(map(id, row)) for row in rows]
            once = dict(zip(ids, rows, strict=True))  # the step counts of parameters are one array
            of_one = functools.partial(_of_one, run, args, elements[members[0]])
            results = for_each(of_one, list(once.values()), key=(run, kind))
            known = dict(zip(once, results, strict=True))
            for i, own in zip(members, ids, strict=True):
                found[i] = known[own]
        columns = [x for column in zip(*found, strict=True) for x in column]
        return ([], columns) if info.mutated else (columns, [])

    return by_groups


def _of_one(
    run: Function, args: tuple, element: list[Any], arrays: Sequence[Any], _: Any
) -> list[Any]:
    """``run`` of lists of one element, with other ``arrays`` in place of its own."""
    given = iter(arrays)
    own = [next(given) if _is_array(x) else x for x in element]
    lists = tuple([x] if isinstance(a, list) else x for x, a in zip(own, args, strict=True))
    fresh, new = run(None, lists, {})
    return [*fresh, *new]


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _kind(value: Any) -> Hashable:
    if _is_array(value):
        return value.shape, value.dtype, value.weak_type
    return type(value), repr(value)  # 0.0 and -0.0 are equal, but not the same
