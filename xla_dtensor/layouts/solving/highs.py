"""An integer program, and its solution by HiGHS (https://highs.dev)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

logger = logging.getLogger("xla_dtensor")

ITERATIONS = 1_000_000
"""Steps of the simplex method that the relaxation may take; Llama 3 70B's takes 20,000."""

WORK = 10_000_000
"""How long HiGHS may search: branches times the program's columns, so that a large program's search
ends after half a minute, too. What it has found by then is taken. It is no time, so that how fast
or how busy a machine is doesn't change what is chosen. Hardly anything comes near: of 500 programs
of Llama 3 and Mixtral on pods none needed more than 15 branches, where it allows 350 (2026-11-28).
"""

SECONDS = 600.0
"""A fence far outside, by the clock. Where it ends a search, that is said (`by_clock`)."""

LARGE = 1e12
UNIT = 2.0**-20
"""Costs are bytes, and those of memory that isn't there a hundred times as many. At 1e13 HiGHS's
simplex method may come back at once with nothing ("ratio test failed due to excessive dual
values": 4 programs of Llama 3 70B in 100). So where one is large, all are in mebibytes."""

EXACTLY = 1e-4
ROUGHLY = 0.02
"""How much more than the least a solution may cost, of what could be done otherwise. A bound of
memory has to be met by whole tensors, and to prove that no others do it cheaper takes HiGHS ten
times as long as to find what is one or two hundredths from that (Llama 3 70B, 2026-11-28)."""


@dataclass
class IntegerProgram:
    """An integer program in the making: costs of variables from 0 to 1, and bounds of sums of them,
    a row for each.

    Attributes:
        by_clock: whether the clock has ended its solution: another time it may be another one.
    """

    costs: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    unavoidable: float = 0.0
    by_clock: bool = False

    def variable(self, cost: float = 0.0, whole: bool = False) -> int:
        if whole:
            self.whole.append(len(self.costs))
        self.costs.append(cost)
        return len(self.costs) - 1

    def charge(self, variables: Sequence[int], cost: float) -> None:
        """Let each of them cost so much more."""
        for variable in variables:
            self.costs[variable] += cost

    def require(self, plus: Sequence[int], minus: Sequence[int], least: float, most: float) -> None:
        self.columns += plus
        self.columns += minus
        self.factors += [1.0] * len(plus) + [-1.0] * len(minus)
        self._row(least, most)

    def one_of(self, variables: Sequence[int]) -> None:
        """Let one of them be the case; what the cheapest costs is spent then in any solution."""
        self.require(variables, [], 1, 1)
        self.unavoidable += min(self.costs[variable] for variable in variables)

    def at_most(self, weights: Mapping[int, float], most: float) -> None:
        """Bound a weighted sum of variables."""
        self.columns += weights
        self.factors += weights.values()
        self._row(-np.inf, most)

    def transport(
        self,
        pairs: Sequence[Sequence[int]],
        rows: Sequence[list[int]],
        columns: Sequence[list[int]],
    ) -> None:
        """One of the pairs is the case: that of the row and the column whose variables say so."""
        for i, row in enumerate(rows):
            self.require([*pairs[i]], row, 0, 0)
        for j, column in enumerate(columns):
            self.require([pair[j] for pair in pairs], column, 0, 0)

    def pairs(
        self, states: int, group: Sequence[int], by_state: Sequence[list[int]]
    ) -> list[list[list[int]]]:
        """For each state of a group and of a node that has it, the variables that say both are so.

        Args:
            states: how many the group has.
            group: its variables, one for each state; none where it has one state.
            by_state: the node's variables, for each state.
        """
        if states == 1:  # where a side has one state the other side's variable is the pair's
            return [[[*variables] for variables in by_state]]
        if len(by_state) == 1:
            return [[[variable]] for variable in group]
        made = [[self.variable() for _ in by_state] for _ in range(states)]
        self.transport(made, [[variable] for variable in group], by_state)
        return [[[variable] for variable in row] for row in made]

    def _row(self, least: float, most: float) -> None:
        self.starts.append(len(self.columns))
        self.least.append(least)
        self.most.append(most)

    def solve(self, roughly: bool) -> Any:
        """The variables' values; None if none were found.

        Args:
            roughly: whether a solution will do that costs a little more than the least.
        """
        if not self.costs:
            return np.zeros(0)  # nothing to choose: XLA chooses all

        import highspy

        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self.costs), len(self.least)
        unit = UNIT if max(self.costs) > LARGE else 1.0
        program.col_cost_ = unit * np.array(self.costs)
        program.col_lower_, program.col_upper_ = np.zeros(len(self.costs)), np.ones(len(self.costs))
        program.row_lower_, program.row_upper_ = np.array(self.least), np.array(self.most)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.array(self.starts, np.int32)
        program.a_matrix_.index_ = np.array(self.columns, np.int32)
        program.a_matrix_.value_ = np.array(self.factors)
        solver = highspy.Highs()
        options = {
            "output_flag": False,
            "threads": 1,
            "mip_rel_gap": ROUGHLY if roughly else EXACTLY,
            "mip_detect_symmetry": False,  # half of the time, for nothing: equal layers are one
        }
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(program)
        solver.changeObjectiveOffset(-unit * self.unavoidable)  # products are 50 times what moves
        whole = np.array(self.whole, np.int32)
        # The relaxation first: it takes half the time, and its solution is nearly always integral.
        continuous, integer = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        for kind in (continuous, integer):
            solver.changeColsIntegrality(len(whole), whole, np.full(len(whole), kind))
            limits = {
                "simplex_iteration_limit": ITERATIONS if kind == continuous else highspy.kHighsIInf,
                "mip_max_nodes": max(1, WORK // len(self.costs)),
                "time_limit": solver.getRunTime() + SECONDS,
            }
            for name, value in limits.items():
                solver.setOptionValue(name, value)
            solver.run()
            solution, status = solver.getSolution(), solver.getModelStatus()
            if status == highspy.HighsModelStatus.kTimeLimit:
                self.by_clock = True
                logger.warning(
                    "xla_dtensor: HiGHS was stopped by the clock, after %.0f s: another run may "
                    "choose other layouts",
                    SECONDS,
                )
            found = np.array(solution.col_value) if solution.value_valid else None
            proven = status == highspy.HighsModelStatus.kOptimal
            if found is not None and proven and np.all(np.abs(found - found.round())[whole] < 1e-6):
                break
            if found is None:
                logger.debug("HiGHS has found nothing: %s", status)
        return found
