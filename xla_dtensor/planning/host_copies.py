"""Copies between a device and its host's memory, in a compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xla_dtensor.planning.program_text import HloText, Instruction

HOST = "host"
"""What stands for the way to the host's memory where others are a mesh's dims."""

# What names an array on the host, or makes room for it, and moves nothing.
_NAMES = frozenset(
    {
        *("parameter", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional"),
        *("custom-call", "opt-barrier", "constant"),
    }
)


@dataclass(frozen=True)
class HostCopy:
    """One copy, to the host or from there.

    Attributes:
        name: of the instruction that begins it.
        bytes: that it moves each time.
        times: how often it runs.
        kind, dims: as a collective has them.
    """

    name: str
    bytes: int
    times: int
    kind: str = "copy"
    dims: tuple[str, ...] = (HOST,)


def host_copies(program: HloText) -> dict[str, HostCopy]:
    """A program's copies, by the names of their instructions."""
    found: dict[str, HostCopy] = {}
    every = program.computations.items()
    calls = (call for _, members in every for one in members for call in one.calls())
    fused = {name for how, name in calls if how == "calls"}
    for computation, members in every:
        times = program.runs.get(computation, 0)
        if times and computation not in fused and any(one.is_on_host for one in members):
            around = program.by_name(computation)
            moved = {one.name: _moved(one, around) for one in members}
            found |= {name: HostCopy(name, n, times) for name, n in moved.items() if n}
    return found


def _moved(one: Instruction, around: Mapping[str, Instruction]) -> int:
    """The bytes that an instruction moves: of a slice that is read of an array on the host, or
    written to it, those of the slice."""
    if one.op in _NAMES or one.op.endswith("-done"):
        return 0
    # What begins a copy gives all that it takes as well as what becomes of it.
    arrays = one.results
    if not one.op.endswith("-start"):
        given = (around[name] for name in one.operand_names() if name in around)
        arrays = [*arrays, *(x for g in given if g.op != "tuple" for x in g.results)]
    here = [x.bytes for x in arrays if not x.on_host]
    return max(here, default=0) if any(x.on_host for x in arrays) else 0
