"""The layouts of a step's values, one mesh axis after the other (`integer_program.py`)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xla_dtensor.layouts.factors import SUM, Factor
from xla_dtensor.layouts.graph import Graph
from xla_dtensor.layouts.integer_program import AxisChoice, Other
from xla_dtensor.layouts.memory import PER_BYTE_TOO_MANY, Alive, Point
from xla_dtensor.layouts.moves import Move, Unit, state_of, units_of
from xla_dtensor.layouts.parts import DimAxes, Group, dim_axes, nbytes_of
from xla_dtensor.layouts.prices import (
    SCATTERED_ON_GPUS,
    STARTUP_BYTES,
    WORK_PER_BYTE,
    State,
    collective,
    exchanged,
    is_all_reduce,
    local_bytes,
)
from xla_dtensor.mesh import Frame

ROUNDS = 2
"""How often each axis is chosen anew, with the others as they are by then."""

POINTS = 3
"""At how many points of a program memory is seen to: without one place the next may be too full."""


class Choice:
    """The layouts chosen for a jaxpr.

    Args:
        jaxpr: without inputs: those are constants.
        known: how constants lie.
        required: how results have to lie; None where that is open.
        sizes: the number of devices along each mesh axis, in the mesh's order.
        arguments: which constants are the step's arguments. What takes long is cut along the axes
            that cut these, always: who cuts a batch doesn't want each device to compute all of it,
            to move less.
        elsewhere: constants and results that lie on another mesh of the same devices.
        memory: bytes of a device that the program may take, if layouts can see to that; None if
            nobody knows how many it has.
        scattered: what a reduce-scatter costs, of the bytes of a sum.

    Attributes:
        graph: of the jaxpr.
        found: whether there are any, in the time that finding them may take.
    """

    found = True
    _too_many = 0.0
    """Bytes of a device more than there are, by an estimate (`memory.py`)."""

    def __init__(
        self,
        jaxpr: Any,
        known: Mapping[Any, DimAxes | None],
        required: Sequence[DimAxes | None],
        sizes: Mapping[str, int],
        arguments: Sequence[Any] = (),
        elsewhere: Sequence[Any] = (),
        memory: float | None = None,
        scattered: float = 1.0,
    ) -> None:
        self._scattered = scattered
        self.graph = Graph(jaxpr, known, required, sizes, elsewhere)
        self._batches = {
            axis
            for layout in self.graph.layouts_of([v for v in arguments if known.get(v) is not None])
            for names in layout
            for axis in names
        }
        self._sizes = {axis: size for axis, size in sizes.items() if size > 1}
        given = [axes for axes in (*known.values(), *required) if axes is not None]
        given += [group.known for group in self.graph.groups() if group.known is not None]
        self._units = tuple(units_of(self._sizes, given))
        # Pairs of axes that one of the layouts has on one dim.
        self._together = {
            pair for axes in given for names in axes for pair in itertools.permutations(names, 2)
        }
        self._states: dict[Group, dict[Unit, State]] = {}
        self._chosen: dict[Group, DimAxes] = {}  # what the states say, as far as was asked
        self._factors: list[dict[Unit, Factor]] = [{} for _ in self.graph.nodes]
        self._options: dict[Unit, list[list[Factor]]] = {}
        # By kind the number of a node: those of a kind are cut alike.
        self._some = {kind: number for number, kind in enumerate(self.graph.folds.kind_of_node)}
        self._used = {axis for axes in given for names in axes for axis in names}
        self._points: list[Point] = []
        self._settle(self._start())
        if memory is not None:
            self._fit(memory, Alive(jaxpr, self.graph))

    def _fit(self, memory: float, alive: Alive) -> None:
        """Choose anew, for points at which there is too much, until there is none."""
        while True:
            needed, groups = alive.most(self._share)
            self._too_many = max(needed - memory, 0.0)
            if not self.found or not self._too_many or len(self._points) == POINTS:
                return
            if not groups or any(groups == before for _, before in self._points):
                return
            here = sum(nbytes * self._share(group) for group, nbytes in groups.items())
            self._points.append((memory - (needed - here), groups))
            self._settle()

    def _start(self) -> Unit:
        """Choose how each axis cuts, once, and give that which was chosen last.

        What comes first is chosen as if all others cut inputs and results alone, and may take a dim
        that a later one needed more: where experts are over "ep", and "dp" comes first, it may take
        them for itself. So it is done in both orders, and the cheaper one is taken.
        """
        best: tuple[float, Unit, Any] | None = None
        for units in dict.fromkeys((self._units, self._units[::-1])):
            self._take((True, {}, {}, [{} for _ in self.graph.nodes]))
            for unit in units:
                self.found = self.found and self._choose(unit)
            price = self.price()
            if best is None or price < best[0]:
                best = price, units[-1] if units else (), self._taken()
        assert best is not None
        _, last, ways = best
        self._take(ways)
        return last

    def _settle(self, fresh: Unit | None = None) -> None:
        """Choose anew how axes cut, but for one that was chosen just now, as long as that is
        cheaper: an axis is chosen by what it costs with the others as they are, and that is nearly,
        but not quite, the price of all of them."""
        stale = {*self._units} - {fresh}  # chosen before others were as they are now
        price = self.price()
        for unit in [*self._units] * ROUNDS:
            if unit in stale and self.found:
                stale.discard(unit)
                before = self._taken()
                self.found = self._choose(unit)
                new = self.price()
                # What memory is short of isn't in the price of what is chosen for that.
                if new < price or (self._points and before[1] != self._states):
                    price, stale = new, {*self._units} - {unit}
                else:
                    self._take(before)

    def _taken(self) -> Any:
        """How all axes cut, to come back to it (`_take`)."""
        states = {group: {**of_units} for group, of_units in self._states.items()}
        return self.found, states, {**self._options}, [{**factors} for factors in self._factors]

    def _take(self, ways: Any) -> None:
        self.found, self._states, self._options, self._factors = ways
        self._chosen.clear()

    @classmethod
    def of_program(
        cls,
        jaxpr: Any,
        inputs: Sequence[Any],
        results: Sequence[Any],
        arguments: Sequence[bool],
        frame: Frame,
        memory: float | None = None,
    ) -> Choice:
        """The layouts of a program on a frame's devices.

        Args:
            jaxpr: of constants.
            inputs: the shardings of these.
            results: those of its results; None where that is open.
            arguments: which inputs are arguments of the step.
            frame: the devices.
            memory: bytes of one of them that the program may take.
        """

        elsewhere: list[Any] = []

        def axes(variable: Any, sharding: Any) -> DimAxes | None:
            if getattr(sharding, "mesh", None) == frame.jax_mesh:
                return dim_axes(sharding, len(variable.aval.shape), frame.sizes)
            if sharding is not None and not sharding.is_fully_replicated:
                elsewhere.append(variable)
            return None

        known = {v: axes(v, sharding) for v, sharding in zip(jaxpr.constvars, inputs, strict=True)}
        required = [axes(v, sharding) for v, sharding in zip(jaxpr.outvars, results, strict=True)]
        given = [
            v for v, is_argument in zip(jaxpr.constvars, arguments, strict=True) if is_argument
        ]
        on_gpus = frame.jax_mesh.devices.flat[0].platform == "gpu"
        scattered = SCATTERED_ON_GPUS if on_gpus else 1.0
        return cls(jaxpr, known, required, frame.sizes, given, elsewhere, memory, scattered)

    def of(self, variable: Any) -> DimAxes | None:
        """How a value lies; None where XLA is to choose."""
        group = self.graph.group(variable)
        return None if group is None or group.is_free else self._axes(group)

    def operand(self, node: int, number: int) -> DimAxes | None:
        """How a node wants an operand; None where XLA is to choose."""
        group = self.graph.group(self.graph.nodes[node].operands[number])
        if group is None or self.graph.is_left(self.graph.nodes[node]):
            return None
        states = {unit: f.operands.get(number) for unit, f in self._factors[node].items()}
        return self._dim_axes(group, states)

    def result(self, node: int, number: int) -> tuple[DimAxes, tuple[str, ...]] | None:
        """How a node gives a result, and the axes along which devices have parts of a sum."""
        group = self.graph.group(self.graph.nodes[node].results[number])
        if group is None or self.graph.is_left(self.graph.nodes[node]):
            return None
        states = {unit: f.results.get(number) for unit, f in self._factors[node].items()}
        sums = tuple(axis for unit, state in states.items() if state == SUM for axis in unit)
        return self._dim_axes(group, states), sums

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
            for factor in self._factors[node].values()
            if any(dim != SUM for dim in factor.results.values())
        )

    def moves(self) -> list[Move]:
        """What is communicated by these layouts, as far as is known here; of moves that several
        nodes want of one value the first."""
        found: dict[Any, Move] = {}
        for number in range(len(self.graph.nodes)):
            for unit, factor in self._factors[number].items():
                for key, move in self._moves_of(number, unit, factor):
                    found.setdefault(key, move)
        return sorted(found.values(), key=lambda move: -move.nbytes * move.times)

    def price(self) -> float:
        """What it costs by this estimate, in bytes; infinite if none were found."""
        if not self.found:
            return math.inf
        price = sum((move.nbytes + STARTUP_BYTES) * move.times for move in self.moves())
        for node, factors in zip(self.graph.nodes, self._factors, strict=True):
            cut = [
                unit
                for unit, factor in factors.items()
                if (factor.operands or factor.results) and unit[0] in self._used
            ]
            devices = math.prod(map(self._size, cut))
            work = node.work * math.prod(factor.work for factor in factors.values())
            price += work * node.times / devices / WORK_PER_BYTE
        return price + PER_BYTE_TOO_MANY * self._too_many

    def second_best(self, number: int) -> float | None:
        """The bytes that a node would move, each time, in the next best of the ways that it could
        be cut along one axis, with all others as they are; None if there is no other."""
        node, ways = self.graph.nodes[number], []
        for unit, chosen in self._factors[number].items():
            others = [
                move.nbytes
                for other, factor in self._factors[number].items()
                if other != unit
                for _, move in self._moves_of(number, other, factor)
            ]
            for factor in self._options[unit][self.graph.folds.kind_of_node[number]]:
                if factor != chosen:
                    own = [move.nbytes for _, move in self._moves_of(number, unit, factor)]
                    size = self._size(unit) if factor.operands or factor.results else 1
                    work = node.work * factor.work / size
                    price = sum(own) + STARTUP_BYTES * len(own) + work / WORK_PER_BYTE
                    ways.append((price, sum(own) + sum(others)))
        return min(ways)[1] if ways else None

    def _moves_of(self, number: int, unit: Unit, factor: Factor) -> Iterator[tuple[Any, Move]]:
        """What a node moves along some axes, if these cut it so, by what identifies it."""
        node = self.graph.nodes[number]
        if self.graph.is_left(node):
            return
        for i, value in enumerate(node.operands):
            axes = self.of(value)
            if axes is not None:
                pair = state_of(axes, unit), factor.operands.get(i)
                nbytes = self._moved_bytes(number, unit, False, i)
                made = collective(*pair, nbytes, self._size(unit))
                if made is not None:
                    move = Move(*made, unit, tuple(value.aval.shape), number, node.times)
                    yield (value, unit, pair, nbytes), move
        for i, value in enumerate(node.results):
            axes = self.of(value)
            if axes is not None:
                before, after = factor.results.get(i), state_of(axes, unit)
                nbytes = self._moved_bytes(number, unit, True, i)
                made = collective(before, after, nbytes, self._size(unit))
                along = (
                    self._summed_with(number, unit, i) if is_all_reduce(before, after) else [unit]
                )
                if made is not None and along[0] == unit:
                    names = tuple(axis for each in along for axis in each)
                    move = Move(*made, names, tuple(value.aval.shape), number, node.times)
                    yield (number, i, unit), move
        group = self.graph.group(node.results[0]) if factor.exchanges else None
        if group is not None:
            nbytes = local_bytes(group, self._others(group, unit), self._sizes)
            nbytes = exchanged(factor, group, nbytes, self._size(unit))
            move = Move("collective-permute", nbytes, unit, group.shape, number, node.times)
            yield (number, "exchange", unit), move

    def _summed_with(self, number: int, unit: Unit, i: int) -> list[Unit]:
        """The axes along which a result is summed at once, these among them: those that cut the
        same dims. Of others XLA makes a sum each."""
        axes = self.of(self.graph.nodes[number].results[i])
        assert axes is not None
        of = self._factors[number]
        return [
            other
            for other in self._units
            if other == unit
            or (
                other in of
                and of[other].operands == of[unit].operands
                and is_all_reduce(of[other].results.get(i), state_of(axes, other))
            )
        ]

    def _moved_bytes(
        self, number: int, unit: Unit, is_result: bool, i: int, but: Unit | None = None
    ) -> float:
        """What a device has of an operand or result of a node when it moves along some axes, whole
        along these and ``but``: what moves along several does so in the order of the axes. A group
        may be of several dtypes: a weight and what it was cast to.
        """
        node = self.graph.nodes[number]
        value = (node.results if is_result else node.operands)[i]
        group = self.graph.group(value)
        assert group is not None
        home, own, devices = self._axes(group), self._units.index(unit), 1
        for place, other in enumerate(self._units):
            if other in (unit, but):
                continue
            factor = self._factors[number].get(other)
            has_moved = place < own
            is_at_home = has_moved if is_result else not has_moved  # a result moves to its group's
            if factor is None or is_at_home:
                state = state_of(home, other)
            else:
                state = (factor.results if is_result else factor.operands).get(i)
            devices *= 1 if state is None or state == SUM else self._size(other)
        return nbytes_of(value.aval) / devices

    def _moves_beside(self, number: int, unit: Unit, i: int) -> list[Other]:
        """How a result of a node moves along other axes than these."""
        group = self.graph.group(self.graph.nodes[number].results[i])
        assert group is not None
        found, own = [], self._units.index(unit)
        for place, other in enumerate(self._units):
            factor = self._factors[number].get(other)
            if other == unit or factor is None:
                continue
            before, after = factor.results.get(i), state_of(self._axes(group), other)
            if before != after and before is not None:
                nbytes = self._moved_bytes(number, other, True, i, but=unit)
                found.append(Other(factor, before, after, nbytes, self._size(other), place < own))
        return found

    def _size(self, unit: Unit) -> int:
        return math.prod(self._sizes[axis] for axis in unit)

    def _choose(self, unit: Unit) -> bool:
        """Choose how some axes cut; whether there is a way."""
        size = self._size(unit)
        possible: dict[Group, list[int]] = {}

        def free_dims(group: Group) -> list[int]:
            if group not in possible:
                dims = range(len(group.shape))
                possible[group] = [d for d in dims if self._may_cut(group, d, unit, size)]
            return possible[group]

        def own_bytes(group: Group) -> float:
            return local_bytes(group, self._others(group, unit), self._sizes)

        always = unit[0] in self._batches
        own = functools.partial(state_of, unit=unit)
        fits = functools.partial(self._fits, unit=unit)
        found = AxisChoice(
            self.graph,
            size,
            own,
            free_dims,
            fits,
            own_bytes,
            lambda kind, is_result, i: self._moved_bytes(self._some[kind], unit, is_result, i),
            lambda kind, i: self._moves_beside(self._some[kind], unit, i),
            always,
            unit[0] in self._used,
            self._scattered,
            self._points,
        )
        if not found.found:
            return False
        self._chosen.clear()
        for group in self.graph.groups():
            self._states.setdefault(group, {})[unit] = found.state(group)
        for number, factors in enumerate(self._factors):
            factors[unit] = found.factor(number)
        self._options[unit] = found.options
        return True

    def _may_cut(self, group: Group, dim: int, unit: Unit, size: int) -> bool:
        """A dim is cut by several axes only where an input or a result is, or a rule has it so:
        what they would move besides is seldom worth it, and their order would have to be right
        everywhere."""
        if (unit[0], dim) in group.by_rule:
            return True
        others = self._others(group, unit)[dim]
        if dim not in group.joint and any((unit[0], o) not in self._together for o in others):
            return False
        devices = size * math.prod(self._sizes[other] for other in others)
        length = group.shape[dim]
        return length >= devices if dim in group.uneven else length % devices == 0 and length > 1

    def _fits(
        self, factor: Factor, operands: Sequence[Any], results: Sequence[Any], unit: Unit
    ) -> bool:
        """Whether what has to be cut to length 1 is, and by axes that come before these."""
        behind = factor.behind_operand or factor.behind_result
        if not behind:
            return True
        joined = bool(factor.behind_operand)
        many, one = (operands[0], results[0]) if joined else (results[0], operands[0])
        if many is None or one is None:
            return False
        others = self._others(many, unit)
        if any(math.prod(self._sizes[a] for a in others[d]) != many.shape[d] for d in behind):
            return False
        before = [axis for d in behind for axis in others[d]]
        cut = (factor.results if joined else factor.operands)[0]
        return [*before, *unit] == [
            axis
            for axis in (one.known[cut] if one.known else self._order(one, cut))
            if axis in before or axis in unit
        ] and {*before} == {*self._others(one, unit)[cut]}

    def _axes(self, group: Group) -> DimAxes:
        found = group.known or self._chosen.get(group)
        if found is None:
            found = self._chosen[group] = self._dim_axes(group, self._states.get(group, {}))
        return found

    def _share(self, group: Group) -> float:
        return local_bytes(group, self._axes(group), self._sizes) / group.nbytes

    def _others(self, group: Group, unit: Unit) -> DimAxes:
        axes = self._axes(group)
        return tuple(tuple(name for name in names if name not in unit) for names in axes)

    def _dim_axes(self, group: Group, states: Mapping[Unit, State]) -> DimAxes:
        found = []
        for d in range(len(group.shape)):
            axes = [axis for unit in self._units if states.get(unit) == d for axis in unit]
            found.append(tuple(sorted(axes, key=self._order(group, d).index)))
        return tuple(found)

    def _order(self, group: Group, dim: int) -> list[str]:
        """The axes, in the order in which they cut a dim."""
        own = group.orders.get(dim, ())
        return [*own, *(axis for axis in self._sizes if axis not in own)]
