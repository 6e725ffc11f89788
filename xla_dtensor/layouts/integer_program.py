"""How one mesh axis cuts a graph, as an integer program: which dim of each group it shards, and by
which factor it cuts each node, so that what is moved costs least.

A group's *state* is the dim that the axis shards, or none; so is that of an operand as a node wants
it and of a result as the node gives it. Between the two stands the price of the move. Each pair of
states of one operand has a variable that says whether it is the case; its sums over either side are
the choices of group and node (the transport form, whose relaxation is nearly whole: HiGHS rarely
has to branch). A move that several nodes want of one value is paid once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xla_dtensor.layouts.factors import SUM, Factor
from xla_dtensor.layouts.graph import Graph
from xla_dtensor.layouts.memory import PER_BYTE_TOO_MANY, Point
from xla_dtensor.layouts.parts import Group, Node

State = int | None
"""The dim that an axis shards, or `SUM`; None of what is whole along it."""

_NOTHING = Factor()
SECONDS = 20.0
"""How long HiGHS may take; what it has found by then is taken."""

STARTUP_BYTES = 500.0
"""What a collective costs, however little it moves, in bytes."""
WORK_PER_BYTE = 100.0
"""How many floating-point operations cost as much as a byte that is moved. Accelerators do ten
times as many, but what is computed on all devices is kept on all of them, too."""
_PREFERENCE = 10.0
"""Bytes that a shard costs, so that of equally good layouts that with fewer ones is taken."""


@dataclass
class _Program:
    """An integer program in the making: costs of variables, and sums of them that are given."""

    costs: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, whole: bool = False) -> int:
        self.costs.append(cost)
        self.whole.append(int(whole))
        return len(self.costs) - 1

    def require(self, plus: Sequence[int], minus: Sequence[int], least: float, most: float) -> None:
        row = len(self.least)
        for columns, factor in ((plus, 1.0), (minus, -1.0)):
            self.rows += [row] * len(columns)
            self.columns += columns
            self.factors += [factor] * len(columns)
        self.least.append(least)
        self.most.append(most)

    def at_most(self, weights: Mapping[int, float], most: float) -> None:
        """Bound a weighted sum of variables."""
        row = len(self.least)
        self.rows += [row] * len(weights)
        self.columns += weights
        self.factors += weights.values()
        self.least.append(-np.inf)
        self.most.append(most)

    def solve(self) -> Any:
        """The variables' values; None if none were found."""
        if not self.costs:
            return np.zeros(0)  # all is XLA's

        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        shape = len(self.least), len(self.costs)
        matrix = csr_matrix((self.factors, (self.rows, self.columns)), shape=shape)
        whole = np.array(self.whole)
        # Without the demand that choices be whole they nearly always are, in half the time.
        for integrality in (np.zeros_like(whole), whole):
            found = milp(
                np.array(self.costs),
                constraints=LinearConstraint(matrix, self.least, self.most),
                integrality=integrality,
                bounds=Bounds(0, 1),
                options={"time_limit": SECONDS, "mip_rel_gap": 1e-4},
            ).x
            if found is None or np.all(np.abs(found - found.round())[whole == 1] < 1e-6):
                break
        return found


class AxisChoice:
    """How an axis cuts a graph, with all other axes as they are.

    Args:
        graph: what is to be laid out.
        size: the number of devices along the axis.
        own: the state of a group whose layout is known.
        free_dims: the dims of a group that the axis may shard, were it not known how it lies.
        fits: whether the axis may cut so, with the others as they are, given groups of operands and
            of results.
        local_bytes: what a device has of a group, whole along this axis.
        always: whether what takes long has to be cut, where it can be.
        points: at which memory is short, and how much there is of it.

    Attributes:
        found: whether there is a solution.
    """

    def __init__(
        self,
        graph: Graph,
        size: int,
        own: Callable[[Any], State],
        free_dims: Callable[[Group], list[int]],
        fits: Callable[[Factor, Sequence[Any], Sequence[Any]], bool],
        local_bytes: Callable[[Group], float],
        always: bool,
        points: Sequence[Point] = (),
    ) -> None:
        self._graph, self._size, self._always = graph, size, always
        self._own, self._free_dims, self._local_bytes = own, free_dims, local_bytes
        self._fits = fits
        self._program = _Program()
        self._states: dict[Group, dict[State, int]] = {}
        self._moves: dict[tuple[int, State, State], int] = {}
        self._options = [self._node(node, count) for node, count in graph.folds.nodes]
        for allowed, groups in points:
            self._bound(allowed, groups)
        self._values = self._program.solve()
        self.found = self._values is not None

    def state(self, group: Group) -> State:
        """The dim of a group that the axis shards."""
        states = self._states.get(group)
        if states is None:
            return None
        return max(states, key=lambda state: self._values[states[state]])

    def factor(self, number: int) -> Factor:
        """By what the axis cuts a node."""
        options, variables = self._options[self._graph.folds.kind_of_node[number]]
        best = max(range(len(options)), key=lambda i: self._values[variables[i]])
        return options[best]

    @property
    def options(self) -> list[list[Factor]]:
        """In how many ways the axis could cut a node, by the nodes' kinds."""
        return [options for options, _ in self._options]

    # --- making it ----------------------------------------------------------------------------

    def _of_group(self, group: Group) -> dict[State, int]:
        if group not in self._states:
            if group.known is not None:
                possible: list[State] = [self._own(group.known)]
            else:
                possible = [None, *self._free_dims(group)]
            states = {
                state: self._program.variable(_PREFERENCE * (state is not None), whole=True)
                for state in possible
            }
            self._program.require([*states.values()], [], 1, 1)
            self._states[group] = states
        return self._states[group]

    def _node(self, node: Node, count: int) -> tuple[list[Factor], list[int]]:
        """The ways to cut each of ``count`` equal nodes, and their variables."""
        operands = [self._graph.group(v) for v in node.operands]
        results = [self._graph.group(v) for v in node.results]
        options = [_NOTHING]
        if self._graph.is_left(node):
            return options, [self._program.variable()]
        if node.required is not None:
            wanted = self._own(node.required)
            options = [Factor({} if wanted is None else {0: wanted})]
        options += [f for f in node.factors if self._is_possible(f, operands, results)]
        if self._always and node.work and len(options) > 1:
            del options[0]
        costs = [0.0] * len(options)
        if node.work and results[0] is not None:
            share = node.work * self._local_bytes(results[0]) / results[0].nbytes / WORK_PER_BYTE
            costs = [share / (1 if option is _NOTHING else self._size) for option in options]
        for i, option in enumerate(options):
            if option.exchanges and results[0] is not None:
                costs[i] += STARTUP_BYTES + self._local_bytes(results[0]) / self._size
        variables = [self._program.variable(count * cost, whole=True) for cost in costs]
        self._program.require(variables, [], 1, 1)
        for i, group in enumerate(operands):
            if group is not None:
                wanted_states = [option.operands.get(i) for option in options]
                self._operand(node.operands[i], group, wanted_states, variables)
        for i, group in enumerate(results):
            if group is not None:
                given = [option.results.get(i) for option in options]
                self._result(group, given, variables, count)
        return options, variables

    def _is_possible(self, factor: Factor, operands: Sequence[Any], results: Sequence[Any]) -> bool:
        places = [
            *((operands[i], d) for i, d in factor.operands.items()),
            *((results[i], d) for i, d in factor.results.items() if d != SUM),
        ]
        return self._fits(factor, operands, results) and all(
            group is None
            or d in self._free_dims(group)
            or (group.known is not None and self._own(group.known) == d)
            for group, d in places
        )

    def _operand(
        self, value: Any, group: Group, wanted: Sequence[State], variables: Sequence[int]
    ) -> None:
        kind = self._graph.folds.kind_of_value[value]

        def charge(have: State, want: State, chosen: Sequence[int]) -> None:
            cost = self._move(group, have, want) * self._graph.folds.values[kind]
            if cost:
                key = (kind, have, want)
                if key not in self._moves:
                    self._moves[key] = self._program.variable(cost)
                self._program.require([self._moves[key]], chosen, 0, np.inf)

        self._transport(group, wanted, variables, charge)

    def _result(
        self, group: Group, given: Sequence[State], variables: Sequence[int], count: int
    ) -> None:
        def charge(have: State, give: State, chosen: Sequence[int]) -> None:
            cost = count * self._move(group, give, have)
            for variable in chosen if cost else ():
                self._program.costs[variable] += cost

        self._transport(group, given, variables, charge)

    def _bound(self, allowed: float, groups: Mapping[Group, float]) -> None:
        """Let groups have no more than so many bytes, or pay for what is too much."""
        total = sum(groups.values())
        too_many = self._program.variable(PER_BYTE_TOO_MANY * total)
        weights = {too_many: -1.0}
        for group, nbytes in groups.items():
            share = nbytes / total * self._local_bytes(group) / group.nbytes
            for state, variable in self._of_group(group).items():
                weights[variable] = share / (1 if state is None else self._size)
        self._program.at_most(weights, max(allowed, 0.0) / total)

    def _transport(
        self,
        group: Group,
        of_node: Sequence[State],
        variables: Sequence[int],
        charge: Callable[[State, State, Sequence[int]], None],
    ) -> None:
        """One of the pairs of a group's state and a node's is the case, and has its price."""
        states = self._of_group(group)
        by_state: dict[State, list[int]] = {}
        for state, variable in zip(of_node, variables, strict=True):
            by_state.setdefault(state, []).append(variable)
        if len(states) == 1 or len(by_state) == 1:
            # The state on the other side says which pair it is.
            for own, variable in states.items():
                for other, chosen in by_state.items():
                    charge(own, other, chosen if len(states) == 1 else [variable])
            return
        pairs = {(own, other): self._program.variable() for own in states for other in by_state}
        for (own, other), variable in pairs.items():
            charge(own, other, [variable])
        for own, variable in states.items():
            self._program.require([pairs[own, other] for other in by_state], [variable], 0, 0)
        for other, chosen in by_state.items():
            self._program.require([pairs[own, other] for own in states], chosen, 0, 0)

    def _move(self, group: Group, before: State, after: State) -> float:
        """The price of a move, in bytes."""
        found = collective(before, after, self._local_bytes(group), self._size)
        return 0.0 if found is None else STARTUP_BYTES + found[1]


def collective(before: State, after: State, nbytes: float, size: int) -> tuple[str, float] | None:
    """The collective that takes a value from one state to another along an axis of ``size``, and
    the bytes of its result on a device, of the ``nbytes`` that one has of the whole; None if there
    is nothing to communicate. XLA's CPU compiler makes a sum of a reduce-scatter, and cuts that."""
    if before == after or before is None:
        return None
    if before == SUM:
        return ("all-reduce" if after is None else "reduce-scatter"), nbytes
    return ("all-gather", nbytes) if after is None else ("all-to-all", nbytes / size)


def local_bytes(group: Group, axes: Sequence[Sequence[str]], sizes: dict[str, int]) -> float:
    """What a device has of a group whose dims are sharded by ``axes``."""
    return group.nbytes / math.prod(sizes[axis] for names in axes for axis in names)
