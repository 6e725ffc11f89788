"""Estimates a step's time from its layouts alone, before XLA compiles it."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_dtensor.layouts.choice import Choice, Move
from xla_dtensor.planning.collectives import HloCollective, Part
from xla_dtensor.planning.flops import kind_of
from xla_dtensor.planning.links import Links, links
from xla_dtensor.planning.program_text import Shaped
from xla_dtensor.runtime.chips import Chip
from xla_dtensor.tuning.problem import Problem, Solution

SCORES = {"forward": 12.0, "backward": 28.0}
"""The bytes of a device's memory that are written and read for each pair of a query and a key where
attention is computed in blocks: scores, their exponentials, and backward the gradients of both. A
70B's step on 256 GPUs takes as much longer by XLA's order (657 ms; `docs/design.md`)."""


@dataclass(frozen=True)
class Estimate:
    """What layouts cost.

    Attributes:
        price: what the integer program minimises, in bytes (`layouts/prices.py`).
        memory: bytes of a device.
        moved: bytes of collectives' results on a device.
        compute: seconds at the chip's peak; None where the chip is none that is known.
        network: seconds by mesh dim, those of several under the names of all.
        state: seconds in which parameters and the optimizer's state are read and written once.
        host: seconds in which what is kept in the host's memory goes there and comes back.
        scores: seconds in which attention's scores are written and read (`scores`).
    """

    price: float
    memory: float
    moved: float
    compute: float | None
    network: Mapping[str, float]
    state: float = 0.0
    host: float = 0.0
    scores: float = 0.0

    @property
    def seconds(self) -> float | None:
        """Of a step in which nothing is hidden behind anything: the more a configuration moves, the
        more of it is likely to be exposed."""
        if self.compute is None:
            return None
        others = self.state + self.host + self.scores
        return self.compute + others + sum(self.network.values())

    @property
    def rank(self) -> float:
        """What is smaller for what is better."""
        return self.price if self.seconds is None else self.seconds


def estimate(problem: Problem, solution: Solution, chip: Chip | None) -> Estimate:
    """What a solution costs on devices of this kind."""
    moves = solution.choice.moves()
    network: dict[str, float] = {}
    compute, state, host, of_scores = None, 0.0, 0.0, 0.0
    if chip is not None:
        over = links(chip, problem.devices, (*problem.sizes,))
        for move in moves:
            name = " x ".join(move.axes)
            network[name] = network.get(name, 0.0) + _seconds(move, problem, over)
        compute = chip.seconds(operations(solution.choice))
        bandwidth = chip.memory_bandwidth / chip.devices
        state = solution.choice.kept() / bandwidth
        if problem.devices.flat[0].platform == "gpu":
            of_scores = scores(solution.choice) / bandwidth
        host = 2 * solution.on_host / (chip.host / chip.devices)
    moved = sum(move.nbytes * move.times for move in moves)
    price, memory = solution.choice.price(), solution.memory
    return Estimate(price, memory, moved, compute, network, state, host, of_scores)


def scores(choice: Choice) -> float:
    """The bytes of scores that a GPU writes and reads for causal attention whose queries are cut,
    which cuDNN's kernel doesn't take (`lowering/attention/flash.py:_KERNELS`)."""
    total = 0.0
    for node, factors in zip(choice.graph.nodes, choice.factors, strict=True):
        if all(factor.work == 1 for factor in factors.values()):
            continue  # no causal attention of cut queries (`factors.py:_cut`)
        assert node.equation is not None
        out, second = (variable.aval.shape for variable in node.equation.outvars[:2])
        # Forward the second result is the sums' logs, backward the gradient of the keys.
        is_backward = len(second) == len(out)
        keys = second[-2] if is_backward else node.equation.invars[1].aval.shape[-2]
        pairs = math.prod(out[:-1]) * keys / math.prod(map(choice.size, factors))
        total += pairs * node.times * SCORES["backward" if is_backward else "forward"]
    return total


def operations(choice: Choice) -> dict[str, float]:
    """What one device computes of all that takes long, by what is multiplied (`flops`): as much as
    all of it where no axis cuts an operation."""
    found: defaultdict[str, float] = defaultdict(float)
    for node, factors in zip(choice.graph.nodes, choice.factors, strict=True):
        if node.work and node.equation is not None:
            cut = [unit for unit, factor in factors.items() if factor.operands or factor.results]
            work = node.work * node.times * math.prod(f.work for f in factors.values())
            found[kind_of(node.equation)] += work / math.prod(map(choice.size, cut))
    return dict(found)


def _seconds(move: Move, problem: Problem, over: Links) -> float:
    size = math.prod(problem.sizes[axis] for axis in move.axes)
    # A reduce-scatter's price is that of what it takes (`prices.collective`), and what links are
    # asked for is what a collective gives.
    nbytes = move.nbytes / (size if move.kind == "reduce-scatter" else 1)
    part = Part(Shaped("u8", (math.ceil(nbytes),)), ())
    groups = _groups(problem, move.axes)
    if move.kind == "collective-permute":
        groups = tuple(pair for group in groups for pair in itertools.pairwise(group))
    collective = HloCollective(move.kind, move.times, (part,), move.axes, size, groups)
    return over.seconds(collective) * move.times


def _groups(problem: Problem, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    names = [*problem.sizes]
    numbers: Any = np.arange(math.prod(problem.sizes.values())).reshape(*problem.sizes.values())
    own = [names.index(axis) for axis in axes]
    others = [i for i in range(len(names)) if i not in own]
    size = math.prod(problem.sizes[axis] for axis in axes)
    rows = numbers.transpose(*others, *own).reshape(-1, size)
    return tuple(tuple(map(int, row)) for row in rows)
