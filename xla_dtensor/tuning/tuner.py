"""`xd.tune`: one mesh after the other while there is time, then the compiler for the best."""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.errors import TopologyError
from xla_dtensor.runtime import topologies
from xla_dtensor.runtime.jax_runtime import topology_here
from xla_dtensor.tuning.configuration import RECOMPUTED, Configuration
from xla_dtensor.tuning.meshes import NAMES, usual
from xla_dtensor.tuning.result import Tuned
from xla_dtensor.tuning.search import Build, Search
from xla_dtensor.tuning.trial import Trial, apart

logger = logging.getLogger("xla_dtensor")

_MICROBATCHES = (1, 2, 4)


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

    search = Search(build, takes, tuple(batch), topology, pinned or {}, reserve)
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
    asked, left = search.judged(found, top, is_over)
    if left:
        notes.append(f"{left} of the best {len(asked) + left} were not compiled, likewise")
    for i, trial in (search.measured(asked) if run else asked).items():
        found[i] = trial
    notes += sorted(search.notes)
    return Tuned(topology, tuple(sorted(found, key=Trial.rank)), tuple(notes))
