"""The choice of how one mesh axis cuts a graph, as an integer program.

It says which dim of each group the axis shards, and by which factor it cuts each node, so that what
is moved costs least.

A group's *state* is the dim that the axis shards, or none; so is that of an operand as a node wants
it and of a result as the node gives it. Between the two stands the price of the move.

What a node costs is a function of its groups' states, the least of its ways to be cut. Where that
is one or two groups, and nobody else wants the values that it takes, the groups may be eliminated
(`eliminate.py`): a chain of transposes and reshapes is as good as nothing. A move that several
nodes want of one value is paid once, so their choices hang together: these are in the integer
program. Each pair of states of one operand has a variable that says whether it is the case; its
sums over either side are the choices of group and node (the transport form, whose relaxation is
nearly whole: HiGHS rarely has to branch).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from xla_dtensor.layouts.factors import SUM, Factor
from xla_dtensor.layouts.graph import Graph
from xla_dtensor.layouts.memory import PER_BYTE_TOO_MANY, Point
from xla_dtensor.layouts.parts import DimAxes, Group, Node
from xla_dtensor.layouts.prices import (
    FILLED_PER_BYTE,
    WORK_PER_BYTE,
    Other,
    Prices,
    State,
    collective,
    exchanged,
    is_all_reduce,
)
from xla_dtensor.layouts.solving.eliminate import Sum
from xla_dtensor.layouts.solving.highs import IntegerProgram

_NOTHING = Factor()
_SUM_TOO = SUM - 1
"""`SUM`, where other axes cut the same dims as this one, and leave parts of a sum, too: XLA adds
all these parts up at once."""
_PREFERENCE = 10.0
"""Bytes that a shard costs, so that of equally good layouts that with fewer ones is taken."""


@dataclass(frozen=True)
class _End:
    """An operand or result of a node.

    Attributes:
        group: that it is of.
        states: how it is wanted or given, in each way to cut the node.
        nbytes: what a device has of it when it moves, whole along this axis.
        times: how often it moves, if it does.
        value: the number of an operand's kind; None of a result.
        others: how a result moves along other axes.
        part: of a sum of its parts, `Node.part`.
    """

    group: Group
    states: Sequence[State]
    nbytes: float
    times: int
    value: int | None = None
    others: Sequence[Other] = ()
    part: float = 1.0


@dataclass(frozen=True, eq=False)
class _Ways:
    """The ways to cut equal nodes, and what they cost by themselves."""

    options: list[Factor]
    costs: list[float]
    ends: list[_End]


class AxisCosts(Protocol):
    """An axis, with all others as they are.

    Attributes:
        size: the number of devices along it.
        always: whether what takes long has to be cut, where it can be.
        counts_work: whether it is worth something that devices share what takes long.
        prices: what collectives cost.
        inside: how many of these are in one slice or host.
    """

    size: int
    always: bool
    counts_work: bool
    prices: Prices
    inside: int

    def own(self, axes: DimAxes, /) -> State:
        """The state of a group whose layout is known."""

    def free_dims(self, group: Group, /) -> list[int]:
        """The dims of a group that the axis may shard, were it not known how it lies."""

    def fits(
        self, kind: int, factor: Factor, operands: Sequence[Any], results: Sequence[Any], /
    ) -> bool:
        """Whether it may cut a node so, given the number of the node's kind, and groups of operands
        and of results."""

    def local_bytes(self, group: Group, /) -> float:
        """What a device has of a group, whole along this axis."""

    def moved_bytes(self, kind: int, is_result: bool, i: int, /) -> float:
        """The same of a node's operand or result when it moves along this axis, given the number
        of the node's kind, and its own."""

    def others(self, kind: int, i: int, /) -> list[Other]:
        """How such a result moves along other axes."""


class AxisChoice:
    """How an axis cuts a graph, with all other axes as they are.

    Args:
        graph: what is to be laid out.
        axis: that cuts it.
        points: at which memory is short, and how much there is of it.

    Attributes:
        found, by_clock: whether there is a solution, and whether the clock has ended the search.
    """

    def __init__(self, graph: Graph, axis: AxisCosts, points: Sequence[Point] = ()) -> None:
        self._graph, self._axis = graph, axis
        self._states: dict[Group, list[State]] = {}
        self._sum: Sum[Group] = Sum()
        of_kinds = enumerate(graph.folds.nodes)
        self._ways = [self._ways_of(kind, node, count) for kind, (node, count) in of_kinds]
        for group in itertools.chain.from_iterable(groups for _, groups in points):
            self._add(group)
        wanted = Counter(end.value for ways in self._ways for end in ways.ends)
        alone: list[_Ways] = []
        together: list[_Ways] = []
        for ways in self._ways:
            shares = any(wanted[end.value] > 1 for end in ways.ends if end.value is not None)
            (together if shares or len(self._open(ways)) > 2 else alone).append(ways)
        best: list[tuple[_Ways, list[Group], Any]] = []
        for ways in alone:
            groups, costs = self._open(ways), self._costs(ways)
            self._sum.add(groups, costs.min(-1))
            best.append((ways, groups, costs.argmin(-1)))
        kept = {group for ways in together for group in self._open(ways)}
        self._sum.eliminate(kept.union(*(groups for _, groups in points)))
        self._chosen: dict[Group, int] = {}
        self._factors: dict[_Ways, Factor] = {}
        self.found = self._solve(together, points)
        if self.found:
            self._sum.complete(self._chosen)
            for ways, groups, number in best:
                states = tuple(self._chosen[group] for group in groups)
                self._factors[ways] = ways.options[int(number[states])]

    def state(self, group: Group) -> State:
        """The dim of a group that the axis shards."""
        states = self._states.get(group)
        return None if states is None else states[self._chosen.get(group, 0)]

    def factor(self, number: int) -> Factor:
        """By what the axis cuts a node."""
        return self._factors[self._ways[self._graph.folds.kind_of_node[number]]]

    @property
    def options(self) -> list[list[Factor]]:
        """The ways in which the axis could cut a node, by the nodes' kinds."""
        return [ways.options for ways in self._ways]

    # --- what it costs ------------------------------------------------------------------------

    def _add(self, group: Group) -> None:
        if group in self._states:
            return
        dims = self._axis.free_dims(group)
        states: list[State] = [None, *dims]
        if group.known is not None:
            states = [self._axis.own(group.known)]
        self._states[group] = states
        if len(states) > 1:
            kept = group.kept * self._axis.local_bytes(group) / group.nbytes
            kept *= self._axis.prices.kept
            # Each value that is cut is gathered or summed apart, in a layer of its own.
            pieces = _PREFERENCE + group.kept_values * self._axis.prices.startup
            # Parts of a first dim are gathered one behind another, with no copy.
            behind = _PREFERENCE if group.kept else 0.0
            cut = pieces + kept / self._axis.size
            costs = [kept, *(cut + behind * d for d in dims)]
            self._sum.variable(group, costs)

    def _ways_of(self, kind: int, node: Node, count: int) -> _Ways:
        """The ways to cut each of ``count`` equal nodes, which are of one kind."""
        operands = [self._graph.group(v) for v in node.operands]
        results = [self._graph.group(v) for v in node.results]
        options = [_NOTHING]
        if self._graph.is_left(node):
            return _Ways(options, [0.0], [])
        if node.required is not None:
            wanted = self._axis.own(node.required)
            options = [Factor({} if wanted is None else {0: wanted})]
        options += [f for f in node.factors if self._is_possible(kind, f, operands, results)]
        if self._axis.always and node.work and len(options) > 1:
            del options[0]
        # A small cost for an otherwise unused axis: it would make collectives larger for nothing.
        taken = 0.0 if self._axis.counts_work else _PREFERENCE
        costs = [0.0 if option is _NOTHING else taken for option in options]
        if node.work and results[0] is not None and self._axis.counts_work:
            share = (
                node.work * self._axis.local_bytes(results[0]) / results[0].nbytes / WORK_PER_BYTE
            )
            costs = [share * o.work / (1 if o is _NOTHING else self._axis.size) for o in options]
        if node.fills and results[0] is not None:
            filled = node.fills * self._axis.local_bytes(results[0]) / FILLED_PER_BYTE
            are_cut = [option.results.get(0) not in (None, SUM) for option in options]
            costs = [
                c + filled / (self._axis.size if cut else 1)
                for c, cut in zip(costs, are_cut, strict=True)
            ]
        for i, option in enumerate(options):
            if option.exchanges and results[0] is not None:
                nbytes = self._axis.local_bytes(results[0])
                moved = exchanged(option, results[0], nbytes, self._axis.size)
                each = self._axis.prices.toll([(self._axis.size, self._axis.inside)])
                costs[i] += self._axis.prices.of(("collective-permute", moved), each)
        folds, ends = self._graph.folds, list[_End]()
        seen: set[Any] = set()
        for i, group in enumerate(operands):
            if group is not None:
                value = folds.kind_of_value[node.operands[i]]
                takes = tuple([option.operands.get(i) for option in options])
                if (value, takes) in seen:
                    continue  # of equal parameters that a loop stacks one stands for all
                seen.add((value, takes))
                nbytes = self._axis.moved_bytes(kind, False, i)
                ends.append(_End(group, takes, nbytes, folds.values[value], value))
        for i, group in enumerate(results):
            if group is not None:
                nbytes, others = self._axis.moved_bytes(kind, True, i), self._axis.others(kind, i)
                summed = [other.factor.operands for other in others if other.before == SUM]
                given = [(option.results.get(i), option.operands) for option in options]
                states = [_SUM_TOO if s == SUM and of in summed else s for s, of in given]
                ends.append(_End(group, states, nbytes, count, None, others, node.part))
        for end in ends:
            self._add(end.group)
        return _Ways(options, [count * cost for cost in costs], ends)

    def _is_possible(
        self, kind: int, factor: Factor, operands: Sequence[Any], results: Sequence[Any]
    ) -> bool:
        places = [
            *((operands[i], d) for i, d in factor.operands.items()),
            *((results[i], d) for i, d in factor.results.items() if d != SUM),
        ]
        return self._axis.fits(kind, factor, operands, results) and all(
            group is None
            or d in self._axis.free_dims(group)
            or (group.known is not None and self._axis.own(group.known) == d)
            for group, d in places
        )

    def _open(self, ways: _Ways) -> list[Group]:
        """The groups of a node whose states are to be chosen."""
        return [*{end.group: None for end in ways.ends if len(self._states[end.group]) > 1}]

    def _costs(self, ways: _Ways) -> Any:
        """What each way to cut a node costs, for all states of its groups: an axis for each of
        `_open`, and one for the ways."""
        groups = self._open(ways)
        total: Any = np.array(ways.costs)
        for end in ways.ends:
            own = self._states[end.group]
            prices = np.array([[self._price(end, have, it) for it in end.states] for have in own])
            axes = [len(own) if group is end.group else 1 for group in groups]
            total = total + prices.reshape(*axes, -1)
        return np.broadcast_to(total, (*(len(self._states[g]) for g in groups), len(ways.options)))

    def _price(self, end: _End, own: State, other: State) -> float:
        """What it costs that a group lies otherwise than an end of a node has it; and what a
        result's moves along other axes cost then, which move less of what this one cuts."""
        before, after = (other, own) if end.value is None else (own, other)
        too = before == _SUM_TOO
        before = SUM if too else before
        along, total = [(self._axis.size, self._axis.inside)], 0.0
        summed = is_all_reduce(before, after)
        for beside in end.others:
            own_toll = beside.size, beside.inside
            if too and summed and is_all_reduce(beside.before, beside.after):
                along.append(own_toll)  # one all-reduce along all axes
                continue
            state = before if beside.is_first else after
            nbytes = beside.nbytes / (1 if state is None or state == SUM else self._axis.size)
            move = beside.before, beside.after, nbytes, beside.size
            total += self._paid(end, *move, along=[own_toll])
        total += self._paid(end, before, after, end.nbytes, self._axis.size, along=along)
        return total * end.times

    def _paid(self, end: _End, before: State, *moved: Any, along: Any) -> float:
        part = end.part if before == SUM else 1.0
        return part * self._axis.prices.of(
            collective(before, *moved), self._axis.prices.toll(along)
        )

    # --- what is left of it -------------------------------------------------------------------

    def _solve(self, together: Sequence[_Ways], points: Sequence[Point]) -> bool:
        """Choose for what wasn't eliminated."""
        program, variables = IntegerProgram(), dict[Group, list[int]]()
        for group in self._states:
            if group in self._sum.own:
                costs = self._sum.own[group]
                variables[group] = [program.variable(cost, whole=True) for cost in costs]
                program.one_of(variables[group])
        for one, two, costs in self._sum.pairs():
            pairs = [[program.variable(cost) for cost in row] for row in costs]
            program.transport(pairs, [[v] for v in variables[one]], [[v] for v in variables[two]])
        moves: dict[Any, int] = {}
        options = {ways: self._put(program, ways, variables, moves) for ways in together}
        for allowed, groups in points:
            self._bound(program, variables, allowed, groups)
        values = program.solve(roughly=bool(points))
        self.by_clock = program.by_clock
        if values is None:
            return False
        for group, own in variables.items():
            self._chosen[group] = int(np.argmax(values[own]))
        for ways, own in options.items():
            self._factors[ways] = ways.options[int(np.argmax(values[own]))]
        return True

    def _put(
        self,
        program: IntegerProgram,
        ways: _Ways,
        variables: Mapping[Group, list[int]],
        moves: dict[Any, int],
    ) -> list[int]:
        """Variables for the ways to cut a node; ``moves`` are those for moves of values."""
        chosen = [program.variable(cost, whole=True) for cost in ways.costs]
        program.one_of(chosen)
        for end in ways.ends:
            by_state: dict[State, list[int]] = {}
            for state, variable in zip(end.states, chosen, strict=True):
                by_state.setdefault(state, []).append(variable)
            own = self._states[end.group]
            pairs = program.pairs(len(own), variables.get(end.group, []), [*by_state.values()])
            for j, other in enumerate(by_state):
                by_cost: dict[float, list[int]] = {}
                for have, row in zip(own, pairs, strict=True):
                    by_cost.setdefault(self._price(end, have, other), []).extend(row[j])
                by_cost.pop(0.0, None)
                for cost, cases in by_cost.items():
                    if end.value is None:
                        program.charge(cases, cost)
                        continue
                    # One move serves all that want the value so, wherever it comes from.
                    key = end.value, other, cost
                    if key not in moves:
                        moves[key] = program.variable(cost)
                    program.require([moves[key]], cases, 0, np.inf)
        return chosen

    def _bound(
        self,
        program: IntegerProgram,
        variables: Mapping[Group, list[int]],
        allowed: float,
        groups: Mapping[Group, float],
    ) -> None:
        """Let groups have no more than so many bytes, or pay for what is too much."""
        total = sum(groups.values())
        too_many = program.variable(PER_BYTE_TOO_MANY * total)
        weights, fixed = {too_many: -1.0}, 0.0
        for group, nbytes in groups.items():
            share = nbytes / total * self._axis.local_bytes(group) / group.nbytes
            shares = [share / (1 if s is None else self._axis.size) for s in self._states[group]]
            if group in variables:
                weights.update(zip(variables[group], shares, strict=True))
            else:
                fixed += shares[0]
        program.at_most(weights, max(allowed / total - fixed, 0.0))
