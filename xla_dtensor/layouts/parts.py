"""The parts of a graph to be laid out (`graph.py`): groups, nodes, loops' bodies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.layouts.factors import Factor

DimAxes = tuple[tuple[str, ...], ...]
"""Per dim the mesh axes that shard it, major first."""


class Group:
    """Values that lie alike.

    Attributes:
        shape: of each.
        nbytes: of the largest.
        known: how they lie, if that isn't to be chosen.
        uneven: dims that may be cut though devices don't divide them: they come from parameters
            that are.
        joint: dims that several axes may cut, though none of the user's layouts does so: what was
            dims of their own has become one.
        orders: of dims that several axes cut, in which order, where that isn't the mesh's: theirs
            from whom it comes.
        is_free: whether XLA is to choose.
        by_rule: the axes and dims that they cut by the layout rules of the operations that make
            them.
        of_rule: how the first of these has it.
        kept: the bytes, whole, that each step reads and writes of the program's state.
        kept_values: how many values of it there are among them.
        within: the group that this one has become part of.
    """

    of_rule: DimAxes | None = None

    def __init__(self, shape: tuple[int, ...], nbytes: int, known: DimAxes | None) -> None:
        self.shape, self.nbytes, self.known = shape, nbytes, known
        self.uneven: set[int] = set()
        self.joint: set[int] = set()
        self.orders: dict[int, tuple[str, ...]] = {}
        self.by_rule: set[tuple[str, int]] = set()
        self.is_free = False
        self.kept, self.kept_values = 0.0, 0
        self.within: Group | None = None

    @property
    def whole(self) -> Group:
        """The group that this one has become part of, or itself."""
        found = self
        while found.within is not None:
            found = found.within
        if found is not self:
            self.within = found  # path compression
        return found


@dataclass(frozen=True)
class Node:
    """An equation that may be cut in several ways, or what a result of the program has to be.

    Attributes:
        equation: None for a result of the program.
        operands: its operands; None of numbers and of what has no dims.
        results: its results, likewise.
        factors: how one axis may cut it; none: not at all.
        work: its floating-point operations.
        required: how its operand has to lie, of a result of the program.
        times: how often it runs in the program.
        fills: the part of its first result that it writes, however little it is given: all of a
            table's gradient, a layer's part of what a loop stacks; 0 of other operations.
        added: the nodes whose results nobody wants but their sum, itself among them (`mark_added`).
    """

    equation: Any
    operands: Sequence[Any]
    results: Sequence[Any]
    factors: list[Factor]
    work: float = 0.0
    required: DimAxes | None = None
    times: int = 1
    fills: float = 0.0
    added: list[Node] = field(default_factory=list, compare=False, repr=False)

    @property
    def part(self) -> float:
        """What it pays of a sum along an axis, of which `added` pay equal parts."""
        return 1.0 / max(len(self.added), 1)


@dataclass(frozen=True)
class Body:
    """What a loop runs, in variables of its own.

    Attributes:
        loop: the equation.
        inputs, constants: its variables that are given, in the order of the loop's jaxpr.
        equations: of these.
        results: what it gives.
    """

    loop: Any
    inputs: Sequence[Any]
    constants: Sequence[Any]
    equations: Sequence[Any]
    results: Sequence[Any]


def nbytes_of(aval: Any) -> int:
    """The bytes of a whole array; those of a PRNG key aren't known."""
    return math.prod(aval.shape) * int(getattr(aval.dtype, "itemsize", 1))


def of_spec(spec: Any, ndim: int, sizes: Mapping[str, int]) -> DimAxes | None:
    """How something of ``ndim`` dims lies by a spec, on axes of more than one device; None where it
    doesn't say so."""
    found: list[tuple[str, ...]] = []
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            return None
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        if not sizes.keys() >= {*names}:
            return None
        found.append(tuple(name for name in names if sizes[name] > 1))
    return (*found, *[()] * (ndim - len(found)))


def dim_axes(sharding: Any, ndim: int, sizes: Mapping[str, int]) -> DimAxes | None:
    """How something of ``ndim`` dims lies by a sharding, on axes of more than one device; None
    where it doesn't say so, or on another mesh than that whose axes have these ``sizes``."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape != sizes:
        return None
    return of_spec(sharding.spec, ndim, sizes)
