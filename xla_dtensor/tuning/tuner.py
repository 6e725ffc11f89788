"""The search of `xd.tune`: meshes, and for each the layouts that its integer program finds.

XLA's compiler has the last word on the best.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import inspect
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compilation import compile
from xla_dtensor.errors import TopologyError
from xla_dtensor.layouts.prices import BY_BYTES, BY_TIME
from xla_dtensor.mesh.domains import domains
from xla_dtensor.planning import abstract
from xla_dtensor.planning.planner import lowered_plan
from xla_dtensor.runtime import topologies
from xla_dtensor.runtime.jax_runtime import topology_here
from xla_dtensor.tuning.configuration import (
    RECOMPUTED,
    Configuration,
    Dims,
    computed_again,
)
from xla_dtensor.tuning.estimate import estimate
from xla_dtensor.tuning.meshes import NAMES, meshes, usual
from xla_dtensor.tuning.problem import Problem
from xla_dtensor.tuning.result import Tuned
from xla_dtensor.tuning.timing import timed
from xla_dtensor.tuning.trial import Trial, apart

logger = logging.getLogger("xla_dtensor")

Build = Callable[..., Callable[..., Any]]

# What two solutions cost that are ties but for the order in which numbers are added up.
_TIE = 1e-6
_ENOUGH = 0.5  # of the memory: a step that takes no more by the estimate fits
_MICROBATCHES = (1, 2, 4)
_NOTHING_AGAIN = {
    "layers": "the model has no list of equal layers to compute again",
    "attention": "no part of equal layers is called attention, to compute that alone again",
}


def tune(
    build: Build,
    batch: Sequence[Any],
    *,
    topology: str,
    minutes: float = 10.0,
    top: int = 10,
    mesh: Mapping[str, int] | None = None,
    dims: Sequence[str] | None = None,
    pinned: Mapping[str, Mapping[str, int | None]] | None = None,
    recompute: Sequence[str] = RECOMPUTED,
    microbatches: Sequence[int] | None = None,
    reserve: float = 0.1,
    run: bool | None = None,
) -> Tuned:
    """Look for the mesh, the layouts of parameters and batch, and what to compute again, with which
    a training step is fastest on devices that needn't be here.

    For each mesh the step is traced once, and an integer program says how its parameters should lie
    (`docs/tune.md`). The best are compiled by XLA, for those devices, and ranked by what it says of
    memory and time.

    Args:
        build: makes the step: is given a function that lays a model out, calls it with the model
            before it makes an optimizer, and returns the function to be compiled. It is called
            again and again. One that has an argument ``microbatches`` is told in how many parts the
            step is to compute its batch, summing their gradients; one that has ``offload``, whether
            what it keeps for backward is to be in the host's memory (`xd.scan_layers` has it).
        batch: the arguments of a step, whole: tensors, of which only shape and dtype count, and
            whatever else it takes.
        topology: `xd.abstract`'s: ``"v5p:4x4x4"``, ``"h100:8x8"``, ``"cpu:8"``; ``"here"``: the
            devices that JAX has.
        minutes: for all of it. When they are over the best so far is returned, and says so.
        top: how many XLA is to compile.
        mesh: sizes of mesh dims that are given, by name.
        dims: the mesh dims that may be used: ``dp`` and ``fsdp`` shard the batch, ``cp`` its second
            dim, ``tp`` none of it. What they do with all else is found. By default all but ``cp``,
            and that, too, where the batch has fewer rows than there are devices.
        pinned: parameters that have to lie as given: by a pattern of names (``"embed.*"``) for each
            mesh dim which dim of the parameter it shards; others of its mesh dims nothing.
        recompute: what may be computed again in backward: ``"nothing"``, ``"attention"`` (the parts
            of equal layers that are called so), ``"layers"``. The next is looked at where the one
            before takes more than half of the memory.
        microbatches: of such a ``build``, how many there may be, by default 1, 2 and 4. More than
            the first are looked at where that takes more than half of the memory.
        reserve: the part of a device's memory that is to stay free.
        run: whether the best are also run, a few steps each, and ranked by how long these take; the
            devices have to be here (``"cpu:8"``, ``"gpu:8"``). By default where ``topology`` is
            ``"here"``.

    Returns:
        a `Tuned`, whose ``best`` is a `Configuration`.

    Raises:
        TopologyError: no such topology, or mesh dims that aren't known.
        ValueError: an argument that can't be.

    Example::

        import torch, xla_dtensor as xd

        def build(parallelize):
            model = parallelize(torch.nn.Linear(64, 8))
            return lambda x: model(x).square().mean().backward()

        found = xd.tune(build, (torch.ones(512, 64),), topology="cpu:4", top=1)
        assert found.best.mesh == {"dp": 4} and "all-reduce" in str(found.trials[0].report)
        step = xd.compile(build(found.best.apply))  # on the devices that are here
    """
    if isinstance(batch, torch.Tensor | Mapping):
        raise ValueError(
            f"batch is a {type(batch).__name__}: give the step's arguments, (batch,) if it is one"
        )
    if not recompute or isinstance(recompute, str) or {*recompute} - {*RECOMPUTED}:
        raise ValueError(f"recompute={recompute!r}: it has {', '.join(RECOMPUTED)}")
    takes = {"microbatches", "offload"} & {*inspect.signature(build).parameters}
    takes_parts = "microbatches" in takes
    if microbatches is None:
        microbatches = _MICROBATCHES if takes_parts else (1,)
    if not microbatches or min(microbatches) < 1 or (max(microbatches) > 1 and not takes_parts):
        raise ValueError(
            f"microbatches={microbatches!r}: numbers from 1, of a build(parallelize, microbatches) "
            "whose step computes its batch in so many parts"
        )
    for pattern, wanted_dims in (pinned or {}).items():
        are_dims = isinstance(wanted_dims, Mapping) and {*wanted_dims} <= {*NAMES}
        if not are_dims or any((d or 0) < 0 for d in wanted_dims.values()):
            raise ValueError(
                f"pinned[{pattern!r}] = {wanted_dims}: by the names of mesh dims "
                f"({', '.join(NAMES)}) the parameter's dim, counted from 0"
            )
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve={reserve}: the part of the memory that stays free, 0.1 of it")
    run = topology == "here" if run is None else run
    topology = topology_here() if topology == "here" else topology
    if run and not topologies.topology(topology).is_here:
        raise ValueError(f"run=True, and the devices of {topology} aren't here")
    deadline = time.monotonic() + 60 * minutes

    def is_over() -> bool:
        return time.monotonic() > deadline

    search = _Search(build, takes, tuple(batch), topology, pinned or {}, reserve)
    found: list[Trial] = []
    notes: list[str] = []
    # What is left when the time is over has the most dims. Half of it is for estimates.
    dims = usual(search.count, batch) if dims is None else dims
    wanted = sorted(search.meshes(dims, mesh or {}), key=lambda each: len(each[0]))
    if not wanted:
        raise TopologyError(
            f"xd.tune: no mesh of {search.count} devices has the dims {', '.join(dims)} with "
            f"{dict(mesh or {})}, and divides the batch"
        )
    kinds = [name for name in RECOMPUTED if name in recompute]
    offload = (False, True) if "offload" in takes else (False,)
    alternatives = [*itertools.product(sorted({*microbatches}), kinds, offload)]
    for done, (sizes, roles) in enumerate(wanted):
        if found and time.monotonic() > deadline - 30 * minutes:
            notes.append(
                f"{len(wanted) - done} of {len(wanted)} meshes were not looked at: the time was "
                f"over (minutes={minutes:g})"
            )
            break
        own: list[Trial] = []
        for parts, again, away in alternatives:
            plain = Configuration(sizes, roles, again, microbatches=parts, offload=away)
            if (not own or search.is_short(own[-1])) and search.divides(plain):
                own += search.estimated(plain)
        found += own
        best = min(own, key=Trial.rank, default=None)
        what = "nothing" if best is None else best.configuration.describe()
        logger.info("xd.tune: mesh %d of %d: %s", done + 1, len(wanted), what)
    if not found:
        raise ValueError(f"xd.tune: {'; '.join(sorted(search.notes))}, which recompute= asks for")
    found = sorted(apart(found), key=Trial.rank)
    asked: dict[int, Trial] = {}
    for first in range(0, len(found), top) if top else ():
        # The next ones only where XLA refuses these: what it hasn't seen would be the best then.
        if first and (is_over() or any(t.fits for t in asked.values()) or not found[first].fits):
            break
        chosen = found[first : first + top]
        best_of = first + len(chosen)
        logger.info("xd.tune: XLA is asked for the best %d of %d", best_of, len(found))
        asked |= {first + i: t for i, t in search.compiled(chosen, is_over).items()}
        if len(asked) < best_of:
            left = best_of - len(asked)
            notes.append(f"{left} of the best {best_of} were not compiled, likewise")
            break
    for i, trial in (search.measured(asked) if run else asked).items():
        found[i] = trial
    notes += sorted(search.notes)
    return Tuned(topology, tuple(sorted(found, key=Trial.rank)), tuple(notes))


class _Search:
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
