"""The meshes and layouts that `xd.tune` looks at, and what XLA's compiler says of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import nn

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compilation import compile
from xla_dtensor.layouts.prices import BY_BYTES, BY_TIME
from xla_dtensor.mesh.domains import domains
from xla_dtensor.planning import abstract
from xla_dtensor.planning.planner import lowered_plan
from xla_dtensor.runtime import topologies
from xla_dtensor.tuning.configuration import Configuration, Dims, computed_again
from xla_dtensor.tuning.estimate import estimate
from xla_dtensor.tuning.meshes import meshes
from xla_dtensor.tuning.problem import Problem
from xla_dtensor.tuning.timing import timed
from xla_dtensor.tuning.trial import Trial

logger = logging.getLogger("xla_dtensor")

Build = Callable[..., Callable[..., Any]]

# What two solutions cost that are ties but for the order in which numbers are added up.
_TIE = 1e-6
_ENOUGH = 0.5  # of the memory: a step that takes no more by the estimate fits
_NOTHING_AGAIN = {
    "layers": "the model has no list of equal layers to compute again",
    "attention": "no part of equal layers is called attention, to compute that alone again",
}


class Search:
    """What `tune` asks.

    Args:
        build: makes the step.
        takes: which of ``microbatches`` and ``offload`` it has arguments for.
        batch: the step's arguments.
        topology: the devices.
        pinned: how parameters have to lie, by patterns of their names.
        reserve: the part of a device's memory that is to stay free.

    Attributes:
        notes: what is to be said under the table.
    """

    def __init__(
        self,
        build: Build,
        takes: Set[str],
        batch: tuple[Any, ...],
        topology: str,
        pinned: Mapping[str, Mapping[str, int | None]],
        reserve: float,
    ) -> None:
        self._build, self._takes, self._batch, self._pinned = build, takes, batch, pinned
        self._topology = topologies.topology(topology)
        self._chip = self._topology.chip
        memory = None if self._chip is None else self._chip.memory / self._chip.devices
        self._memory = None if memory is None else memory * (1 - reserve)
        self.notes: set[str] = set()

    @property
    def count(self) -> int:
        """How many devices there are."""
        return len(self._topology.devices)

    def meshes(
        self, names: Sequence[str], fixed: Mapping[str, int]
    ) -> Iterator[tuple[dict[str, int], Dims]]:
        devices = self._topology.devices
        with abstract(self._topology.name):
            numbers = domains(devices)
        return meshes(len(devices), numbers.count(numbers[0]), self._batch, names, fixed)

    def is_short(self, trial: Trial) -> bool:
        """Whether it may turn out to need too much memory: estimates of that are rough."""
        return self._memory is not None and trial.memory > _ENOUGH * self._memory

    def divides(self, own: Configuration) -> bool:
        """Whether its devices divide each of its microbatches, as they do the batch."""
        rows = [x.shape[0] for x in pytree.tree_leaves(self._batch) if getattr(x, "ndim", 0)]
        sizes = zip(own.mesh.values(), own.batch, strict=True)
        devices = math.prod(size for size, dim in sizes if dim == 0)
        return own.microbatches == 1 or max(rows, default=0) % (devices * own.microbatches) == 0

    def estimated(self, plain: Configuration) -> list[Trial]:
        """The mesh's best layouts; where these may need too much memory also those with half of it.
        None where nothing is computed again, because the model has no equal layers."""
        mesh: dict[str, int] = dict(plain.mesh)
        models: list[nn.Module] = []
        replaced: list[nn.Parameter] = []

        def parallelize(model: nn.Module) -> nn.Module:
            models.append(model)
            replaced.extend(model.parameters())
            return whole.apply(model)

        whole = dataclasses.replace(plain, batch=(None,) * len(mesh))
        with abstract(self._topology.name):
            step = self._built(parallelize, plain)
            if not models:
                raise ValueError(
                    "build(parallelize) hasn't called parallelize(model): the parameters of that "
                    "model are what is laid out"
                )
            if len(models) > 1:
                raise ValueError(
                    "build(parallelize) has called parallelize more than once: hand it one model, "
                    "of which the others are parts (nn.ModuleList)"
                )
            model = models[0]
            pins = self._pins(model)
            if plain.recompute != "nothing" and not computed_again(model, plain.recompute):
                self.notes.add(_NOTHING_AGAIN[plain.recompute])
                return []
            compiled = compile(step, layouts="torch")
            problem = Problem(compiled, whole.place(*self._batch), model, replaced)
            found: list[Trial] = []
            pinned = {
                problem.first[name]: tuple(dims.get(axis) for axis in mesh)
                for name, dims in pins.items()
            }
            have = self._memory
            memories = [have] if have is None else [have, _ENOUGH * have]
            prices = BY_BYTES if have is None else BY_TIME  # nobody knows simulated devices' links
            for solution in problem.solutions(plain.batch, memories, prices, pinned):
                if solution.choice.by_clock:
                    self.notes.add("the clock has ended HiGHS: another run may find others")
                cost = estimate(problem, solution, self._chip)
                parameters = {
                    name: solution.parameters.get(first, (None,) * len(mesh))
                    for name, first in problem.first.items()
                }
                own = dataclasses.replace(plain, parameters=parameters)
                trial = Trial(own, cost, available=self._memory)
                if found and trial.configuration == found[-1].configuration:
                    # Else the steps differ in what `xd.compile` decides: it's one program.
                    found[-1] = min(found[-1], trial, key=Trial.rank)
                elif found and math.isclose(cost.rank, found[-1].estimate.rank, rel_tol=_TIE):
                    found[-1] = trial  # as quick, with less memory
                else:
                    found.append(trial)
                if not self.is_short(found[-1]):
                    break
        return found

    def _built(self, parallelize: Any, own: Configuration) -> Callable[..., Any]:
        return self._build(parallelize, **{name: getattr(own, name) for name in self._takes})

    def judged(
        self, found: Sequence[Trial], top: int, is_over: Callable[[], bool]
    ) -> tuple[dict[int, Trial], int]:
        """The best ``top`` with XLA's report, by their positions, and how many of them there was no
        time for. Where XLA refuses all of them the next ones are asked for: of those that it hasn't
        seen one would be the best then."""
        asked: dict[int, Trial] = {}
        for first in range(0, len(found), top) if top else ():
            if first and (is_over() or not found[first].fits):
                break
            chosen = found[first : first + top]
            best_of = first + len(chosen)
            logger.info("xd.tune: XLA is asked for the best %d of %d", best_of, len(found))
            asked |= {first + i: t for i, t in self.compiled(chosen, is_over).items()}
            if len(asked) < best_of:
                return asked, best_of - len(asked)
            if any(trial.fits for trial in asked.values()):
                break
        return asked, 0

    def compiled(self, trials: Sequence[Trial], is_over: Callable[[], bool]) -> dict[int, Trial]:
        """The same with XLA's report, by their positions: one is traced while others are compiled,
        as many at once as there are cores. An interrupt ends what hasn't begun.

        Args:
            trials: what is to be compiled.
            is_over: whether the time is; all but the first are left out then.
        """
        found: dict[int, Trial] = {}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count(), "xla_dtensor tune") as pool:
            asked: dict[int, concurrent.futures.Future[Trial | None]] = {}
            try:
                for i, trial in enumerate(trials):
                    if i and is_over():
                        break
                    ask = self._lowered(trial)
                    asked[i] = pool.submit(_unless, is_over if i else None, ask)
                for i, future in asked.items():
                    compiled = future.result()
                    if compiled is not None:
                        found[i] = compiled
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return found

    def _lowered(self, trial: Trial) -> Callable[[], Trial]:
        """Asks XLA of it."""
        own = trial.configuration
        with abstract(self._topology.name), _errors(trial) as refused:
            report = lowered_plan(self._built(own.apply, own), own.place(*self._batch), {})

        def ask() -> Trial:
            if refused:
                return refused[0]
            with _errors(trial) as error:
                return dataclasses.replace(trial, report=report())
            return error[0]

        return ask

    def measured(self, trials: Mapping[int, Trial]) -> dict[int, Trial]:
        """The same with how long a step of each takes that fits."""

        def make(own: Configuration) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return compile(self._built(own.apply, own)), own.place(*self._batch)

        return timed(trials, make)

    def _pins(self, model: nn.Module) -> dict[str, Mapping[str, int | None]]:
        """By a parameter's name how it has to lie: as the first pattern says that it has.

        Raises:
            ValueError: a pattern that no parameter has, or a dim that one lacks.
        """
        found: dict[str, Mapping[str, int | None]] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for pattern, dims in self._pinned.items():
            names = fnmatch.filter(parameters, pattern)
            if not names:
                raise ValueError(f"pinned: no parameter is called {pattern}")
            for name in names:
                ndim = parameters[name].ndim
                if any(d is not None and d >= ndim for d in dims.values()):
                    raise ValueError(f"pinned[{pattern!r}] = {dict(dims)}: {name} has {ndim} dims")
                found.setdefault(name, dims)
        return found


@contextlib.contextmanager
def _errors(trial: Trial) -> Iterator[list[Trial]]:
    """Catches what refuses a step; the list has the trial with it then."""
    found: list[Trial] = []
    try:
        yield found
    except Exception as error:
        found.append(dataclasses.replace(trial, error=f"{type(error).__name__}: {error}"))


def _unless(is_over: Callable[[], bool] | None, ask: Callable[[], Trial]) -> Trial | None:
    return None if is_over is not None and is_over() else ask()
