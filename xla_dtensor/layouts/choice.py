"""The layouts chosen for a jaxpr: mesh axes of its values and nodes, and the bytes that move."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_dtensor.layouts.factors import SUM, Factor
from xla_dtensor.layouts.graph import Graph
from xla_dtensor.layouts.memory import PER_BYTE_TOO_MANY
from xla_dtensor.layouts.parts import DimAxes, Group, nbytes_of
from xla_dtensor.layouts.prices import (
    BY_BYTES,
    WORK_PER_BYTE,
    Prices,
    State,
    collective,
    exchanged,
    is_all_reduce,
    is_moved,
    local_bytes,
)
from xla_dtensor.layouts.solving.integer_program import AxisChoice

Unit = tuple[str, ...]
"""Mesh axes that shard the same dims wherever one of them does: one axis to the step."""


@dataclass(frozen=True)
class Move:
    """A collective that layouts take.

    Attributes:
        kind: of collective.
        nbytes: of its result on a device.
        axes: the mesh axes that it runs along.
        shape: of the value.
        node: the number of the node that wants or gives it.
        times: how often, in loops.
    """

    kind: str
    nbytes: float
    axes: Unit
    shape: tuple[int, ...]
    node: int
    times: int = 1


def state_of(axes: DimAxes, unit: Unit) -> State:
    """The dim that the axes of a unit shard."""
    return next((d for d, names in enumerate(axes) if unit[0] in names), None)


def units_of(sizes: Mapping[str, int], given: Sequence[DimAxes]) -> list[Unit]:
    """The axes, neighbours joined that are always together, in this order, where one of them is."""
    units: list[Unit] = []
    for axis in sizes:
        before = units[-1][-1] if units else None
        if before is not None and all(_agree(names, before, axis) for d in given for names in d):
            units[-1] = (*units[-1], axis)
        else:
            units.append((axis,))
    return units


def _agree(names: Sequence[str], first: str, second: str) -> bool:
    if first not in names and second not in names:
        return True
    return (first, second) in itertools.pairwise(names)


Ways = Mapping[Unit, Factor]
"""By what each unit cuts a node."""


class Choice:
    """How axes cut a graph.

    Args:
        graph: of a jaxpr.
        sizes: the number of devices along each mesh axis, in the mesh's order.
        units: these axes, those joined that always go together.
        used: axes that cut an input or a result.
        slow: axes that leave a slice or a host, and how many of their devices are in one.
        prices: what collectives cost.

    Attributes:
        found: whether there are layouts, found with the work that this may take.
        by_clock: whether the clock has ended a search on the way (`highs.py`): another run may find
            other ones.
        too_many: bytes of a device more than there are, by an estimate (`memory.py`).
        states: the dim that each unit shards of a group.
        factors: of each node, by what each unit cuts it.
        options: by what each unit could cut nodes, by their kinds.
    """

    def __init__(
        self,
        graph: Graph,
        sizes: Mapping[str, int],
        units: Sequence[Unit],
        used: set[str],
        slow: Mapping[str, int] = {},
        prices: Prices = BY_BYTES,
    ) -> None:
        self.graph, self.sizes, self.units, self.used = graph, sizes, units, used
        self.slow, self.prices = slow, prices
        self.found, self.by_clock, self.too_many = True, False, 0.0
        self.states: dict[Group, dict[Unit, State]] = {}
        self.factors: list[dict[Unit, Factor]] = [{} for _ in graph.nodes]
        self.options: dict[Unit, list[list[Factor]]] = {}
        self._known: dict[Group, DimAxes] = {}  # each group's layout by `states`, cached

    def copy(self) -> Choice:
        """The same, to be changed."""
        other = Choice(*(self.graph, self.sizes, self.units, self.used), *(self.slow, self.prices))
        other.found, other.by_clock, other.too_many = self.found, self.by_clock, self.too_many
        other.states = {group: {**of_units} for group, of_units in self.states.items()}
        other.factors = [{**of_units} for of_units in self.factors]
        other.options = {**self.options}
        return other

    def cut(self, unit: Unit, found: AxisChoice) -> None:
        """Cut as was chosen for a unit."""
        self._known.clear()
        for group in self.graph.groups():
            self.states.setdefault(group, {})[unit] = found.state(group)
        for number, factors in enumerate(self.factors):
            factors[unit] = found.factor(number)
        self.options[unit] = found.options

    def of(self, variable: Any) -> DimAxes | None:
        """How a value lies; None where XLA is to choose."""
        group = self.graph.group(variable)
        return None if group is None or group.is_free else self.axes(group)

    def operand(self, node: int, number: int, ways: Ways | None = None) -> DimAxes | None:
        """How a node wants an operand, if it is cut as it is or in these ways; None where XLA is to
        choose."""
        group = self.graph.group(self.graph.nodes[node].operands[number])
        if group is None or self.graph.is_left(self.graph.nodes[node]):
            return None
        ways = self.factors[node] if ways is None else ways
        return self._dim_axes(group, {unit: f.operands.get(number) for unit, f in ways.items()})

    def result(
        self, node: int, number: int, ways: Ways | None = None
    ) -> tuple[DimAxes, tuple[str, ...]] | None:
        """How a node gives a result then, and the axes along which devices have parts of a sum."""
        group = self.graph.group(self.graph.nodes[node].results[number])
        if group is None or self.graph.is_left(self.graph.nodes[node]):
            return None
        ways = self.factors[node] if ways is None else ways
        states = {unit: f.results.get(number) for unit, f in ways.items()}
        sums = tuple(axis for unit, state in states.items() if state == SUM for axis in unit)
        return self._dim_axes(group, states), sums

    def call(self, node: int, ways: Ways | None = None) -> Any:
        """How an operation is called on shards then, a `ShardMapCall`; None if it isn't, because
        its rule refuses these axes together, shards are uneven, or XLA is to choose how its tensors
        lie."""
        params = self.graph.nodes[node].equation.params
        call = params["call"]
        if self.graph.is_left(self.graph.nodes[node]):
            return None
        places = call.tensors_among(params["numbers"], params["keyed"])
        tensors = [self.operand(node, i, ways) or () for i in places]
        count = len(self.graph.nodes[node].results)
        results = [self.result(node, i, ways) or ((), ()) for i in range(count)]
        laid_out = call.laid_out(tensors, [axes for axes, _ in results], [s for _, s in results])
        return None if laid_out is call else laid_out

    def given(self, nodes: Sequence[int], result: Any) -> DimAxes | None:
        """How a result lies as it is made by the one of an equation's nodes that makes it."""
        value = self.graph.value(result)
        for number in nodes:
            results = self.graph.nodes[number].results
            for i, each in enumerate(results):
                if each is value:
                    found = self.result(number, i)
                    return None if found is None else found[0]
        return None

    def is_of_operands(self, node: int) -> bool:
        """Whether each axis that cuts a result of a node cuts one of its operands."""
        return all(
            factor.operands and not factor.behind_operand and not factor.behind_result
            for factor in self.factors[node].values()
            if any(dim != SUM for dim in factor.results.values())
        )

    def moves(self) -> list[Move]:
        """What is communicated by these layouts, as far as is known here; of moves that several
        nodes want of one value the first."""
        found: dict[Any, Move] = {}
        for number in range(len(self.graph.nodes)):
            for unit, factor in self.factors[number].items():
                for key, move in self._moves_of(number, unit, factor):
                    found.setdefault(key, move)
        return sorted(found.values(), key=lambda move: -move.nbytes * move.times)

    def turned(self) -> dict[int, set[Unit]]:
        """The nodes at which values go to other dims along several units, and which these are."""
        found: dict[int, set[Unit]] = {}
        for move in self.moves():
            if move.kind == "all-to-all":
                found.setdefault(move.node, set()).add(move.axes)
        return {node: units for node, units in found.items() if len(units) > 1}

    def price(self) -> float:
        """What it costs by this estimate, in bytes; infinite if none were found."""
        if not self.found:
            return math.inf
        price = sum(
            self.prices.of((move.kind, move.nbytes), self.toll(move.axes)) * move.times
            for move in self.moves()
        )
        for node, factors in zip(self.graph.nodes, self.factors, strict=True):
            cut = [
                unit
                for unit, factor in factors.items()
                if (factor.operands or factor.results) and unit[0] in self.used
            ]
            devices = math.prod(map(self.size, cut))
            work = node.work * math.prod(factor.work for factor in factors.values())
            price += work * node.times / devices / WORK_PER_BYTE
        for group in self._state():
            axes = sum(state is not None for state in self.states.get(group, {}).values())
            price += axes * group.kept_values * self.prices.startup
        return price + self.kept() * self.prices.kept + PER_BYTE_TOO_MANY * self.too_many

    def kept(self) -> float:
        """The bytes of state that a device reads and writes in its memory."""
        return sum(group.kept * self.share(group) for group in self._state())

    def _state(self) -> Iterator[Group]:
        return (group for group in self.graph.groups() if group.kept)

    def second_best(self, number: int) -> float | None:
        """The bytes that a node would move, each time, in the next best of the ways that it could
        be cut along one axis, with all others as they are; None if there is no other."""
        node, ways = self.graph.nodes[number], []
        for unit, chosen in self.factors[number].items():
            others = [
                move.nbytes
                for other, factor in self.factors[number].items()
                if other != unit
                for _, move in self._moves_of(number, other, factor)
            ]
            for factor in self.options[unit][self.graph.folds.kind_of_node[number]]:
                if factor != chosen:
                    own = [move.nbytes for _, move in self._moves_of(number, unit, factor)]
                    size = self.size(unit) if factor.operands or factor.results else 1
                    work = node.work * factor.work / size
                    price = sum(own) + self.prices.startup * len(own) + work / WORK_PER_BYTE
                    ways.append((price, sum(own) + sum(others)))
        return min(ways)[1] if ways else None

    def _moves_of(self, number: int, unit: Unit, factor: Factor) -> Iterator[tuple[Any, Move]]:
        """What a node moves along some axes, if these cut it so, by what identifies it."""
        node = self.graph.nodes[number]
        if self.graph.is_left(node):
            return
        for i, value in enumerate(node.operands):
            axes = self.of(value)
            pair = None if axes is None else (state_of(axes, unit), factor.operands.get(i))
            if pair is not None and is_moved(*pair):
                nbytes = self.moved_bytes(number, unit, False, i)
                made = collective(*pair, nbytes, self.size(unit))
                assert made is not None
                move = Move(*made, unit, tuple(value.aval.shape), number, node.times)
                yield (value, unit, pair, nbytes), move
        for i, value in enumerate(node.results):
            axes = self.of(value)
            pair = None if axes is None else (factor.results.get(i), state_of(axes, unit))
            if pair is not None and is_moved(*pair):
                along = self._summed_with(number, unit, i) if is_all_reduce(*pair) else [unit]
                if along[0] == unit:
                    nbytes = self.moved_bytes(number, unit, True, i)
                    made = collective(*pair, nbytes, self.size(unit))
                    assert made is not None
                    names = tuple(axis for each in along for axis in each)
                    move = Move(*made, names, tuple(value.aval.shape), number, node.times)
                    first = node.added[0] if pair[0] == SUM and node.added else None
                    yield ((number, i, unit) if first is None else (id(first), pair, unit)), move
        group = self.graph.group(node.results[0]) if factor.exchanges else None
        if group is not None:
            nbytes = local_bytes(group, self.others(group, unit), self.sizes)
            nbytes = exchanged(factor, group, nbytes, self.size(unit))
            move = Move("collective-permute", nbytes, unit, group.shape, number, node.times)
            yield (number, "exchange", unit), move

    def _summed_with(self, number: int, unit: Unit, i: int) -> list[Unit]:
        """The axes along which a result is summed at once, these among them: those that cut the
        same dims. Of others XLA makes a sum each."""
        axes = self.of(self.graph.nodes[number].results[i])
        assert axes is not None
        of = self.factors[number]
        return [
            other
            for other in self.units
            if other == unit
            or (
                other in of
                and of[other].operands == of[unit].operands
                and is_all_reduce(of[other].results.get(i), state_of(axes, other))
            )
        ]

    def moved_bytes(
        self, number: int, unit: Unit, is_result: bool, i: int, but: Unit | None = None
    ) -> float:
        """What a device has of an operand or result of a node when it moves along some axes, whole
        along these and ``but``. A group may be of several dtypes: a weight and what it was cast to.
        """
        node = self.graph.nodes[number]
        value = (node.results if is_result else node.operands)[i]
        group = self.graph.group(value)
        assert group is not None
        home, devices = self.axes(group), 1
        for other in self.units:
            if other in (unit, but):
                continue
            factor = self.factors[number].get(other)
            has_moved = self.is_first(other, unit, is_result)
            is_at_home = has_moved if is_result else not has_moved  # a result moves to its group's
            if factor is None or is_at_home:
                state = state_of(home, other)
            else:
                state = (factor.results if is_result else factor.operands).get(i)
            devices *= 1 if state is None or state == SUM else self.size(other)
        return nbytes_of(value.aval) / devices

    def toll(self, axes: Unit) -> float:
        """What a byte costs along axes."""
        return self.prices.toll((self.sizes[axis], self.inside((axis,))) for axis in axes)

    def is_first(self, one: Unit, other: Unit, is_result: bool) -> bool:
        """Whether what moves along both moves along ``one`` first. Over the slow network goes what
        is smallest: a result's parts of a sum once they are summed and cut inside of slices, an
        operand before it is gathered there. XLA does it so. Else it's the order of the axes."""
        place = lambda unit: ((unit[0] in self.slow) == is_result, self.units.index(unit))
        return place(one) < place(other)

    def size(self, unit: Unit) -> int:
        """How many devices there are along a unit."""
        return math.prod(self.sizes[axis] for axis in unit)

    def inside(self, unit: Unit) -> int:
        """How many of the devices along a unit are in one slice or host."""
        return math.prod(self.slow.get(axis, self.sizes[axis]) for axis in unit)

    def axes(self, group: Group) -> DimAxes:
        """How a group lies."""
        found = group.known or self._known.get(group)
        if found is None:
            found = self._known[group] = self._dim_axes(group, self.states.get(group, {}))
        return found

    def share(self, group: Group) -> float:
        """What a device has of a group."""
        return local_bytes(group, self.axes(group), self.sizes) / group.nbytes

    def others(self, group: Group, unit: Unit) -> DimAxes:
        """How other axes than these cut a group."""
        axes = self.axes(group)
        return tuple(tuple(name for name in names if name not in unit) for names in axes)

    def _dim_axes(self, group: Group, states: Mapping[Unit, State]) -> DimAxes:
        found = []
        for d in range(len(group.shape)):
            axes = [axis for unit in self.units if states.get(unit) == d for axis in unit]
            found.append(tuple(sorted(axes, key=self.order(group, d).index)))
        return tuple(found)

    def order(self, group: Group, dim: int) -> list[str]:
        """The axes, in the order in which they cut a dim."""
        own = group.orders.get(dim, ())
        return [*own, *(axis for axis in self.sizes if axis not in own)]
