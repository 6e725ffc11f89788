"""Runs a program on a mesh in four ways, and judges what comes of it by CPU torch."""

from __future__ import annotations

import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.fuzz import judge, layouts_text
from tests.fuzz.functions import DRAWS
from tests.fuzz.program import Program, Run, collected, on_cpu
from xla_dtensor.execution import lazy

WAYS = ("lazy", "strict", "compiled", "outside")
SEED = 17
mesh_of = functools.cache(make_mesh)

# What may be refused, by name: a message of ours that says what to do.
REFUSALS = (
    xd.UnsupportedOpError,
    xd.DataDependentError,
    xd.PlacementError,
    xd.PerDeviceValueError,
)


@dataclass(frozen=True)
class Failure:
    """What was wrong.

    Attributes:
        way: in which of `WAYS`.
        kind: ``wrong``, ``error`` (raised what it shouldn't), ``refused``, or ``died``.
        what: the result that is wrong, or the type of the exception.
        text: expected and got, or the message.
    """

    way: str
    kind: str
    what: str
    text: str

    def same(self, other: Failure) -> bool:
        """Whether another failure is of this kind: that of another program, smaller than this."""
        alike = (self.way, self.kind) == (other.way, other.kind)
        return alike and (self.kind == "wrong" or self._error() == other._error())

    def _error(self) -> str:
        return re.sub(r"[\d.,()\[\]{}%-]+", "", self.text.splitlines()[0])[:60]


def distributed(program: Program) -> list[Any]:
    """The program's leaves on its mesh."""
    mesh = mesh_of(program.mesh)
    return [
        distribute_tensor(
            leaf.tensor().detach(), mesh, layouts_text.parsed(leaf.placements)
        ).requires_grad_(leaf.requires_grad)
        for leaf in program.leaves
    ]


def run(program: Program, way: str) -> Run:
    """The program on its mesh.

    Raises:
        Exception: xla_dtensor refuses it, or fails.
    """
    xd.config.eager = "lazy" if way == "lazy" else "strict"
    function = program.function(mesh_of(program.mesh))
    leaves = distributed(program)
    torch.manual_seed(SEED)
    try:
        if way == "compiled":
            loss, outputs = xd.compile(_with_backward(function))(*leaves)
        else:
            loss, outputs = (xd.compile(function) if way == "outside" else function)(*leaves)
            if loss is not None:
                loss.backward()
        got = collected(program, loss, outputs, leaves)
        got.results = [(what, read(value)) for what, value in got.results]
        return got
    finally:
        try:
            lazy.flush()
        finally:
            xd.config.eager = "lazy"


def _with_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    def step(*leaves: Any) -> Any:
        loss, outputs = function(*leaves)
        if loss is None:
            return None, outputs
        loss.backward()
        return loss.detach(), [t.detach() for t in outputs]

    return step


def read(value: Any) -> Any:
    """On the CPU."""
    if value is None:
        return None
    return value.detach().cpu().resolve_conj().resolve_neg()


def failures(program: Program, ways: Sequence[str] = WAYS) -> list[Failure]:
    """What is wrong with a program: at most one thing for each way.

    Raises:
        Exception: CPU torch refuses the program.
    """
    found: list[Failure] = []
    DRAWS.start(None)
    if program.draws:
        try:
            DRAWS.start(random_numbers(program))
        except Exception as error:
            return [_raised("random", error)]
    wanted, exact = on_cpu(program), on_cpu(program, wide=True)
    for run_ in (wanted, exact):
        run_.results = [(what, read(value)) for what, value in run_.results]
    for way in ways:
        try:
            got = run(program, way)
        except Exception as error:
            found.append(_raised(way, error))
            continue
        wrong = judge.first_wrong(program, got, wanted, exact)
        if wrong is not None:
            found.append(Failure(way, "wrong", *wrong))
    return found


def _raised(way: str, error: Exception) -> Failure:
    kind = "refused" if isinstance(error, REFUSALS) else "error"
    text = f"{type(error).__name__}: {error}"
    if kind == "error":
        text += "\n" + "".join(traceback.format_tb(error.__traceback__)[-6:])
    return Failure(way, kind, type(error).__name__, text)


def random_numbers(program: Program) -> list[torch.Tensor]:
    """Those that the devices draw for the program where nothing is sharded: the same ones that they
    draw in any layout."""
    whole = [layouts_text.whole(leaf) for leaf in program.leaves]
    DRAWS.record = []
    try:
        run(dataclasses.replace(program, leaves=tuple(whole)), "strict")
        return DRAWS.record
    finally:
        DRAWS.record = None


__all__ = ["WAYS", "Failure", "failures", "run"]
