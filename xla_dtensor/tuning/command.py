"""``python -m xla_dtensor.tune``: the mesh for a script that lays its model out by itself."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xla_dtensor.errors import TopologyError
from xla_dtensor.layouts.prices import WORK_PER_BYTE
from xla_dtensor.planning.command import NamesOfMesh, attempted, mesh_sizes, of_script, planned
from xla_dtensor.runtime import topologies
from xla_dtensor.runtime.jax_runtime import topology_here
from xla_dtensor.tuning.configuration import Configuration
from xla_dtensor.tuning.estimate import Estimate
from xla_dtensor.tuning.meshes import factorisations
from xla_dtensor.tuning.result import Tuned
from xla_dtensor.tuning.trial import Trial

_NAME = re.compile(r"\{([a-z]\w*)\}")


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status: 1 where nothing fits into the memory, 2 where something is
    wrong."""
    own, script = of_script(arguments)
    given = _parser().parse_args(own)
    for path in given.save:
        if not path.endswith((".json", ".txt", ".png", ".svg")):
            print(f"--save {path}: write .json, .txt, .png or .svg", file=sys.stderr)
            return 2
    if not Path(given.script).is_file():
        print(f"{given.script}: there is no such script", file=sys.stderr)
        return 2
    found = attempted(
        lambda: tuned(
            *(given.script, script, given.topology, mesh_sizes(given.mesh)),
            *(given.minutes, given.step),
        )
    )
    if found is None:
        return 2
    print(found)
    status = 0
    for path in given.save:
        try:
            found.save(path)
        except (ValueError, OSError, ImportError) as error:
            print(f"--save {path}: {error}", file=sys.stderr)
            status = 2
    if all(trial.error for trial in found.trials):
        print(f"nothing could be looked at: {found.lacks()}", file=sys.stderr)
        return 2
    if not found.fits:
        print(f"nothing fits: {found.lacks()}")
        return 1
    best = found.best.mesh
    if names_in(script):
        print(f"best: {shlex.join(filled(script, best))}")
    else:
        print(f"best: --mesh {','.join(f'{name}={size}' for name, size in best.items())}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xla_dtensor.tune",
        description="the sizes of a script's mesh with which its compiled step is fastest on "
        "devices that needn't be here; the script's own arguments come behind --, with {dp} and "
        "the like in place of sizes where it takes them as arguments",
    )
    parser.add_argument("script", help="a training script, run until it calls its step, each time")
    parser.add_argument(
        "--topology",
        required=True,
        help="v5e:16x16, v5p:4x4x4, h100:8x8 (hosts x GPUs), cpu:64, here",
    )
    parser.add_argument("--mesh", help="tp=8: sizes that are given")
    parser.add_argument("--step", help="the name of the step; by default the first one called")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it (10)")
    parser.add_argument(
        "--save", action="append", default=[], metavar="FILE", help="as .json, .txt, .png or .svg"
    )
    return parser


def tuned(
    script: str,
    arguments: Sequence[str],
    topology: str,
    fixed: dict[str, int],
    minutes: float = 10.0,
    step: str | None = None,
) -> Tuned:
    """All meshes of a topology's devices with the dims that a script's mesh has, as XLA judges the
    script's step on each.

    Args:
        script: a path.
        arguments: what it is given. Where these name sizes, as in ``--tensor-parallel={tp}``, they
            are given those, and whatever meshes the script makes of them stay as they are.
        topology: of the devices; ``"here"`` for those that JAX has.
        fixed: sizes of mesh dims that are given.
        minutes: for all of it: no mesh is begun that would take longer, if it takes as long as
            the longest so far.
        step: the name of the step, if it isn't the first that is called.

    Raises:
        TopologyError: the script makes no mesh with names, calls no step, or has no such dims.
    """
    deadline = time.monotonic() + 60 * minutes
    topology = topology_here() if topology == "here" else topology
    names = names_in(arguments)
    try:
        if not names:
            planned(script, arguments, topology, NamesOfMesh(), step)
            raise TopologyError(
                "the script makes no mesh by init_device_mesh, so its sizes are its own: let it "
                "take them as arguments, named behind -- as in --dp={dp}"
            )
    except NamesOfMesh.Found as found:
        names = found.names
    wanting = set(fixed) - set(names)
    if wanting:
        raise TopologyError(f"--mesh: the script's mesh has the dims {', '.join(names)}")
    kind = topologies.topology(topology)
    wanted = [*factorisations(len(kind.devices), names, fixed)]
    if not wanted:
        raise TopologyError(
            f"--mesh: no mesh of {len(kind.devices)} devices has the dims {', '.join(names)} with "
            f"{fixed}"
        )
    trials: list[Trial] = []
    notes = []
    longest = 0.0
    for number, sizes in enumerate(wanted):
        begun = time.monotonic()
        if number and begun + longest > deadline:
            notes.append(
                f"{len(wanted) - number} of {len(wanted)} meshes were not looked at: the time was "
                f"over (--minutes {minutes:g})"
            )
            break
        own = Configuration(sizes, (None,) * len(sizes))
        trials.append(_trial(script, arguments, topology, own, step))
        longest = max(longest, time.monotonic() - begun)
    ranked, said = _ranked(trials)
    return Tuned(topology, tuple(ranked), (*notes, *said))


def _ranked(trials: Sequence[Trial]) -> tuple[list[Trial], list[str]]:
    """The best first, and what to say of their order: a script whose batch is that of each device
    computes more where more devices share it out, so such steps are compared by the token."""
    counts = {i: t.report.tokens for i, t in enumerate(trials) if t.report is not None}
    if len({*counts.values()}) < 2 or not all(counts.values()):
        return sorted(trials, key=Trial.rank), []

    def rank(i: int) -> tuple[Any, ...]:
        first, *costs = trials[i].rank()
        is_compared = i in counts and trials[i].fits
        return (first, *(cost / counts[i] if is_compared else cost for cost in costs))

    order = sorted(range(len(trials)), key=rank)
    each = [f"{trials[i].configuration.describe()}: {counts[i]}" for i in order if i in counts]
    note = f"steps compute different numbers of tokens ({'; '.join(each)}): by the time of a token"
    return [trials[i] for i in order], [note]


def names_in(arguments: Sequence[str]) -> tuple[str, ...]:
    """The sizes that arguments name, each once: ``dp`` and ``tp`` in ``--mesh={dp}x{tp}``."""
    return tuple(dict.fromkeys(_NAME.findall(" ".join(arguments))))


def filled(arguments: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """The arguments with sizes in place of their names."""
    return [_NAME.sub(lambda found: str(sizes[found[1]]), each) for each in arguments]


def _trial(
    script: str, arguments: Sequence[str], topology: str, own: Configuration, step: str | None
) -> Trial:
    try:
        if names_in(arguments):
            report = planned(script, filled(arguments, own.mesh), topology, {}, step)
        else:
            report = planned(script, arguments, topology, dict(own.mesh), step)
    except Exception as error:
        nothing = Estimate(0.0, 0.0, 0.0, None, {})
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == script]
        where = f"line {lines[-1]}: " if lines else ""
        return Trial(own, nothing, error=f"{where}{type(error).__name__}: {error}")
    needed: Any = report.memory.needed
    moved = float(report.collective_bytes)
    price = moved + report.flops_per_device / WORK_PER_BYTE
    estimate = Estimate(price, float(needed or 0), moved, report.seconds.get("compute"), {})
    return Trial(own, estimate, report, available=report.memory.available)
