"""``python -m xla_dtensor.plan``: what the first compiled step of a script will need on a pod.

    python -m xla_dtensor.plan train.py --topology v5e:16x16 --mesh dp=32,tp=8 -- --layers 4
    python -m xla_dtensor.plan --compare a.json b.json

The script runs as it is, in ``xd.abstract``, until it calls a step of ``xd.compile``: that is
planned, and the script ends there.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed
from torch.distributed import device_mesh

from xla_dtensor.compilation.step import lower_only
from xla_dtensor.errors import TopologyError, XlaDTensorError
from xla_dtensor.planning.abstract import abstract
from xla_dtensor.planning.planner import plan
from xla_dtensor.planning.report import Report
from xla_dtensor.planning.text import compared


class NamesOfMesh(dict[str, int]):
    """In place of a mesh's sizes: the script ends where it makes a mesh, with its dims' names."""

    class Found(BaseException):
        """The script's mesh has these dims."""

        def __init__(self, names: Sequence[str]) -> None:
            self.names = tuple(names)


_Found = TypeVar("_Found")
_SIZES: ContextVar[dict[str, int] | None] = ContextVar("sizes of a script's mesh", default=None)


class _Planned(BaseException):
    """The script has called the step, and need not go on."""

    def __init__(self, report: Report) -> None:
        self.report = report


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status: 1 where the step doesn't fit into the memory."""
    parser = _parser()
    own, script = of_script(arguments)
    given = parser.parse_args(own)
    if given.compare:
        one, other = (Report.from_json(Path(path).read_text()) for path in given.compare)
        print(compared(one, other))
        return 0
    if given.script is None or given.topology is None:
        parser.error("name a script and a --topology, or two reports to --compare")
    report = attempted(
        lambda: planned(
            *(given.script, script, given.topology, mesh_sizes(given.mesh)),
            *(given.step, given.tokens),
        )
    )
    if report is None:
        return 2
    print(report)
    for path in given.save:
        report.save(path)
    return 1 if report.fits is False else 0


def attempted(work: Callable[[], _Found]) -> _Found | None:
    """What it gives; None where it, or the script that it runs, fails, and that is said. The exit
    status is 2 then: Python's own for an error, 1, is for what doesn't fit."""
    try:
        return work()
    except XlaDTensorError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xla_dtensor.plan",
        description="what a script's compiled step needs on chips that aren't here; the script's "
        "own arguments come behind --",
    )
    parser.add_argument("script", nargs="?", help="a training script, run until it calls its step")
    parser.add_argument("--topology", help="v5e:16x16, v5p:4x4x4, h100:8x8 (hosts x GPUs), cpu:64")
    parser.add_argument("--mesh", help="dp=32,tp=8: other sizes for the dims of the script's mesh")
    parser.add_argument("--step", help="the name of the step; by default the first one called")
    parser.add_argument("--tokens", type=int, help="what a step computes, if it isn't found")
    parser.add_argument(
        "--save",
        action="append",
        default=[],
        metavar="FILE",
        help="also as .json, .png, .svg or .txt",
    )
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two saved .json")
    return parser


def of_script(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own arguments, and those of its script, which come behind ``--``."""
    own = list(arguments)
    at = own.index("--") if "--" in own else len(own)
    return own[:at], own[at + 1 :]


def mesh_sizes(text: str | None) -> dict[str, int]:
    """The sizes in ``"dp=32,tp=8"``, by name.

    Raises:
        TopologyError: it is something else.
    """
    found = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, size = part.partition("=")
        if not equals or not size.isdigit() or int(size) < 1:
            raise TopologyError(f"--mesh {text}: write each dim as NAME=SIZE, as in dp=32,tp=8")
        found[name] = int(size)
    return found


def planned(
    script: str,
    arguments: Sequence[str],
    topology: str,
    mesh: dict[str, int],
    step: str | None = None,
    tokens: int | None = None,
) -> Report:
    """The report of the first compiled step that a script calls.

    Args:
        script: a path.
        arguments: of the script.
        topology: what it is planned for.
        mesh: sizes for mesh dims that the script names.
        step: the name of the step, if it isn't the first.
        tokens: as `plan` takes it.

    Raises:
        TopologyError: no step was called, or the mesh doesn't fit.
        Exception: the script's own.
    """
    called: list[str] = []

    def call(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        name = getattr(compiled, "__qualname__", "step")
        called.append(name)
        if step is not None and name.rpartition(".")[2] != step:
            raise TopologyError(
                f"the script calls the step {name} before {step}, and what that gives isn't "
                "there: plan one that needs no other's results"
            )
        raise _Planned(plan(compiled, *args, tokens=tokens, **kwargs))

    before = sys.argv
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with abstract(topology), _mesh_sizes(mesh), lower_only.calls_go_to(call):
            runpy.run_path(script, run_name="__main__")
    except _Planned as found:
        return found.report
    except SystemExit as ended:
        raise TopologyError(
            f"{script} has ended by itself ({ended.code!r}) and has called no compiled step: what "
            "is planned is a call of what xd.compile makes"
        ) from ended
    finally:
        sys.argv = before
        sys.path.pop(0)
    raise TopologyError(
        f"{script} has come to its end and has called no compiled step: what is planned is a call "
        "of what xd.compile makes"
    )


@contextmanager
def _mesh_sizes(sizes: dict[str, int]) -> Iterator[None]:
    """Let `init_device_mesh` make meshes of other sizes than it is told, in a script that has them
    by their dims' names."""
    original = device_mesh.init_device_mesh
    token = _SIZES.set(sizes)

    def init_device_mesh(
        device_type: str, mesh_shape: Any, *args: Any, mesh_dim_names: Any = None, **kwargs: Any
    ) -> Any:
        names = tuple(mesh_dim_names or ())
        # Not those above: a module that the script imports has the function of the first run.
        sizes = _SIZES.get()
        if isinstance(sizes, NamesOfMesh) and device_type == "xla":
            if not names:
                raise TopologyError(
                    "the script's mesh has no names: give it mesh_dim_names=, by which its dims "
                    "are given other sizes"
                )
            raise NamesOfMesh.Found(names)
        if sizes and device_type == "xla":
            if set(names) != set(sizes):
                raise TopologyError(
                    f"--mesh gives sizes to {', '.join(sizes)}, and the script's mesh has the dims "
                    f"{', '.join(names) or '(without names)'}: give each of them one"
                )
            mesh_shape = tuple(sizes[name] for name in names)
        return original(device_type, mesh_shape, *args, mesh_dim_names=mesh_dim_names, **kwargs)

    places: list[Any] = [device_mesh, torch.distributed, sys.modules["xla_dtensor"]]
    known = [(p, p.init_device_mesh) for p in places if hasattr(p, "init_device_mesh")]
    for place, _ in known:
        place.init_device_mesh = init_device_mesh
    try:
        yield
    finally:
        for place, function in known:
            place.init_device_mesh = function
        _SIZES.reset(token)
