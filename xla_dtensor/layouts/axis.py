"""`AxisToChoose`: a mesh axis that is to be chosen, with the others as they are."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from xla_dtensor.layouts.choice import Choice, Unit, state_of
from xla_dtensor.layouts.factors import Factor
from xla_dtensor.layouts.parts import DimAxes, Group
from xla_dtensor.layouts.prices import Other, State, local_bytes

Barred = Mapping[tuple[int, Unit], Factor]
"""Of kinds of nodes, and units, by what these may not cut those."""


class AxisToChoose:
    """A mesh axis, or a unit of several, with the others as they are: what `AxisChoice` asks.

    Args:
        choice: how the others cut.
        unit: the axis.
        together: pairs of axes that may cut one dim.
        barred: by what units may not cut nodes.
        always: as there.
        leaves_state: whether it may not cut what a step keeps.
    """

    def __init__(
        self,
        choice: Choice,
        unit: Unit,
        together: set[tuple[str, str]],
        barred: Barred,
        *,
        always: bool,
        leaves_state: bool,
    ) -> None:
        self._choice, self._unit, self._together = choice, unit, together
        self._barred = barred
        self.always, self.prices = always, choice.prices
        self._leaves_state = leaves_state
        self.size, self.counts_work = choice.size(unit), unit[0] in choice.used
        self.inside = choice.inside(unit)
        # One node of each kind: equal nodes are cut alike (`folding.py`).
        self._some = {kind: n for n, kind in enumerate(choice.graph.folds.kind_of_node)}
        self.free_dims = functools.cache(self._free_dims)
        self.local_bytes = functools.cache(self._local_bytes)

    def own(self, axes: DimAxes) -> State:
        return state_of(axes, self._unit)

    def _free_dims(self, group: Group) -> list[int]:
        return [d for d in range(len(group.shape)) if self._may_cut(group, d)]

    def _local_bytes(self, group: Group) -> float:
        return local_bytes(group, self._choice.others(group, self._unit), self._choice.sizes)

    def moved_bytes(self, kind: int, is_result: bool, i: int) -> float:
        return self._choice.moved_bytes(self._some[kind], self._unit, is_result, i)

    def others(self, kind: int, i: int) -> list[Other]:
        choice, number = self._choice, self._some[kind]
        group = choice.graph.group(choice.graph.nodes[number].results[i])
        assert group is not None
        found = []
        for other in choice.units:
            factor = choice.factors[number].get(other)
            if other == self._unit or factor is None:
                continue
            before, after = factor.results.get(i), state_of(choice.axes(group), other)
            if before != after and before is not None:
                nbytes = choice.moved_bytes(number, other, True, i, but=self._unit)
                is_first = choice.is_first(other, self._unit, True)
                along = choice.size(other), choice.inside(other)
                found.append(Other(factor, before, after, nbytes, *along, is_first))
        return found

    def _may_cut(self, group: Group, dim: int) -> bool:
        """A dim is cut by several axes only where an input or a result is, or a rule has it so:
        what they would move besides is seldom worth it, and their order would have to be right
        everywhere."""
        axis = self._unit[0]
        if self._leaves_state and group.kept:
            return False
        others = self._choice.others(group, self._unit)[dim]
        length, devices = group.shape[dim], self.size * self._choice.size(others)
        if (axis, dim) in group.by_rule:  # alone, or the rule itself has them together
            return not others or length >= devices
        if dim not in group.joint and any((axis, o) not in self._together for o in others):
            return False
        return length >= devices if dim in group.uneven else length % devices == 0 and length > 1

    def fits(
        self, kind: int, factor: Factor, operands: Sequence[Any], results: Sequence[Any]
    ) -> bool:
        if self._barred.get((kind, self._unit)) == factor:
            return False
        number = self._some[kind]
        is_behind = self._is_behind(factor, operands, results)
        return is_behind and self._is_taken(number, factor) and not self._is_filled(number, factor)

    def _is_filled(self, number: int, factor: Factor) -> bool:
        """Whether a table's gradient, which is summed over slices or hosts, would be cut to rows
        that are filled up on the way (`Prices.lanes`), and nothing else of its shape is."""
        choice = self._choice
        equation = choice.graph.nodes[number].equation
        if not choice.slow or equation is None or equation.primitive.name != "scatter-add":
            return False
        group = choice.graph.group(choice.graph.nodes[number].results[0])
        last = len(equation.outvars[0].aval.shape) - 1
        if group is None or last < 0 or factor.results.get(0) != last:
            return False
        length = group.shape[last]
        devices = self.size * choice.size(choice.others(group, self._unit)[last])
        if length < self.prices.lanes or length >= self.prices.lanes * devices:
            return False
        return not any(
            other.known is not None and self.own(other.known) == last
            for other in choice.graph.groups()
            if other.shape == group.shape
        )

    def _is_taken(self, number: int, factor: Factor) -> bool:
        """Whether an operation that is called on shards takes its tensors so, if this axis cuts it
        so and the others as they do by now: its rule may refuse axes together, and shards have to
        be even. Else its operands would be gathered."""
        equation = self._choice.graph.nodes[number].equation
        if equation is None or equation.primitive.name != "cut":
            return True
        ways = {**self._choice.factors[number], self._unit: factor}
        return self._choice.call(number, ways) is not None

    def _is_behind(self, factor: Factor, operands: Sequence[Any], results: Sequence[Any]) -> bool:
        """Whether what has to be cut to length 1 is, and by axes that come before these."""
        choice, unit = self._choice, self._unit
        behind = factor.behind_operand or factor.behind_result
        if not behind:
            return True
        joined = bool(factor.behind_operand)
        many, one = (operands[0], results[0]) if joined else (results[0], operands[0])
        if many is None or one is None:
            return False
        others = choice.others(many, unit)
        if any(choice.size(others[d]) != many.shape[d] for d in behind):
            return False
        before = [axis for d in behind for axis in others[d]]
        cut = (factor.results if joined else factor.operands)[0]
        return [*before, *unit] == [
            axis
            for axis in (one.known[cut] if one.known else choice.order(one, cut))
            if axis in before or axis in unit
        ] and {*before} == {*choice.others(one, unit)[cut]}
