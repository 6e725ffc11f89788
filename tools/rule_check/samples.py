"""Calls to check rules on: a tensor argument is a `Like`, everything else is passed as it is.

The calls of elementwise and foreach ops are made from their schemas, the others are in `table.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from xla_dtensor.plans.ops import info_of
from xla_dtensor.rules.call import bind
from xla_dtensor.rules.families.pointwise import pointwise_rule
from xla_dtensor.rules.registry import find_rule, rule_name


@dataclass(frozen=True)
class Like:
    """A tensor argument: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def meta(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Sample:
    """One call of an overload, its tensors without layouts."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        """The name of the rule that speaks for the call."""
        return rule_name(self.func) or ""

    @property
    def likes(self) -> list[Like]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Like)]

    @property
    def written(self) -> list[int]:
        """Which of `likes` the call writes to."""
        names = {
            argument.name
            for argument in self.func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        flags = [
            name in names
            for name, value in bind(self.func, self.args, self.kwargs).items()
            for leaf in tree_leaves(value)
            if isinstance(leaf, Like)
        ]
        return [i for i, is_written in enumerate(flags) if is_written]

    def filled(self, values: Iterator[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with each `Like` replaced by the next of `values`."""
        filled: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            Like, lambda _: next(values), (self.args, self.kwargs)
        )
        return filled

    def result_shapes(self) -> list[tuple[int, ...] | None]:
        """The shapes of the results, flat, by torch's meta kernel (None for an undefined one)."""
        if not self.func._schema.returns:
            return []
        args, kwargs = self.filled(like.meta() for like in self.likes)
        shapes = info_of(self.func).shapes or self.func
        return [
            None if leaf is None else tuple(leaf.shape)
            for leaf in tree_leaves(shapes(*args, **kwargs))
            if leaf is None or isinstance(leaf, torch.Tensor)
        ]

    def __str__(self) -> str:
        return f"{self.func}{[list(like.shape) for like in self.likes]}"


# --- calls made from a schema --------------------------------------------------------------------

MATRIX = (16, 8)
"""Every dim divides by 8, the number of devices that a dim may be cut over."""
_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
_OF_INTEGERS = ("bitwise_", "shift__", "or__", "and__", "gcd", "lcm")
_FOREACH = ("aten::_foreach_", "aten::_amp_foreach_")
_VALUES: dict[str, Any] = {
    "Scalar": 2,
    "number": 2,
    "float": 0.5,
    "int": 1,
    "SymInt": 1,
    "bool": False,
    "ScalarType": torch.float32,
}


def from_schema(func: torch._ops.OpOverload) -> Sample | None:
    """A call with tensors of one shape and small numbers, if torch takes it in some dtype."""
    # torch's meta kernels take floats for these too.
    integers = any(word in func.name() for word in _OF_INTEGERS)
    for dtype in (torch.int64,) if integers else _DTYPES:
        values = [_value(argument, dtype) for argument in _required(func)]
        if any(value is NotImplemented for value in values):
            return None
        keywords = [a.name for a in _required(func) if a.kwarg_only]
        positional = len(values) - len(keywords)
        named = dict(zip(keywords, values[positional:], strict=True))
        sample = Sample(func, tuple(values[:positional]), named)
        try:
            sample.result_shapes()
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            continue  # not this dtype, says torch
        return sample
    return None


def _required(func: torch._ops.OpOverload) -> list[Any]:
    return [a for a in func._schema.arguments if not a.has_default_value()]


def _value(argument: Any, dtype: torch.dtype) -> Any:
    kind = str(argument.type)
    matrix = Like(MATRIX, dtype)
    if kind == "Tensor":
        return Like((), dtype) if argument.name == "weight" else matrix
    if kind == "List[Tensor]":
        return [matrix, Like((8, 16), dtype)]
    if kind.startswith("Optional["):
        return None
    if kind.startswith("List["):
        inner = _VALUES.get(kind[5:-1], NotImplemented)
        return inner if inner is NotImplemented else [inner, inner]
    return _VALUES.get(kind, NotImplemented)


@cache
def from_schemas() -> tuple[Sample, ...]:
    """A call of each elementwise and foreach overload that takes tensors of one dtype."""
    samples = []
    # `dir(torch.ops.aten)` has only those that someone asked for.
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for packet_name in sorted(n.removeprefix("aten::") for n in names if n.startswith("aten::")):
        packet = getattr(torch.ops.aten, packet_name)
        funcs = [getattr(packet, overload) for overload in packet.overloads()]
        found = [f for f in funcs if _by_schema(f)]
        # An `out=` form, and an in-place one where there is another, has the same rule.
        functional = [f for f in found if not f._schema.is_mutable]
        inplace = [f for f in found if f._schema.is_mutable and not _has_out(f)]
        if packet_name.endswith("_") and hasattr(torch.ops.aten, packet_name[:-1]):
            inplace = []
        samples += [made for func in functional or inplace if (made := from_schema(func))]
    return tuple(samples)


def _by_schema(func: torch._ops.OpOverload) -> bool:
    elementwise = find_rule(func) is pointwise_rule or func._schema.name.startswith(_FOREACH)
    return elementwise and any("Tensor" in str(a.type) for a in _required(func))


def _has_out(func: torch._ops.OpOverload) -> bool:
    return any(a.is_out for a in func._schema.arguments)
