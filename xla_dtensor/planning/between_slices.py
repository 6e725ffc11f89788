"""Reads the collectives between a TPU's slices, which are transfers of the hosts to the compiler.

A program for several slices is one for each of them, of which the text numbers the devices by
themselves. What crosses slices is a ``send`` and a ``recv`` that libtpu's runtime for several
slices (MegaScale) carries out over the data-centre network: their attributes say what it is, and
between which devices, by slice (from 1 on) and by JAX's number in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from xla_dtensor.planning.program_text import HloText, Instruction

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_TYPE = re.compile(r'_xla_megascale_transfer_type="([A-Z_]+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_TARGET = re.compile(r"_xla_megascale_target=(?:\"(?P<grid>[^\"]*)\"|\{(?P<lists>.*?\})\})")
_PAIR = re.compile(r"\{(\d+)->(\d+)\}")
_EACH = 100_000  # a device's id is its number in the slice, and the slice's number times this


def kind_of(instruction: Instruction) -> str | None:
    """The collective that a ``recv`` ends between slices; None for any other instruction. One that
    libtpu has a new word for is that word."""
    if instruction.op != "recv":
        return None
    found = _TYPE.search(instruction.attributes)
    return found and _KINDS.get(found[1], found[1].lower().replace("_", "-"))


def sender(received: Instruction, program: HloText) -> Instruction | None:
    """The ``send`` of a ``recv``, which has what goes in."""
    name = _RENDEZVOUS.search(received.attributes)
    for one in program.computations[received.computation]:
        if one.op == "send" and name is not None:
            found = _RENDEZVOUS.search(one.attributes)
            if found is not None and found[1] == name[1]:
                return one
    return None


def groups_of(received: Instruction, devices: Sequence[Any]) -> list[list[int]]:
    """The groups of devices, by their positions; of a permutation its pairs; [] where the text says
    it in a form that isn't known.

    Args:
        devices: JAX's, in the order of the program's mesh.
    """
    target = _TARGET.search(received.attributes)
    position = {int(device.id): i for i, device in enumerate(devices)}
    if target is None:
        return []
    if target["grid"] is not None:
        sides = re.fullmatch(r"\{([\d:,]*)\}x\{([\d:,]*)\}", target["grid"])
        if sides is None:
            return []
        slices, own = map(_numbers, sides.groups())
        ids = [[slice_ * _EACH + number for slice_ in slices] for number in own]
    elif "->" in target["lists"]:
        ids = [[int(a), int(b)] for a, b in _PAIR.findall(target["lists"])]
    else:
        ids = [list(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", target["lists"])]
    if any(one not in position for group in ids for one in group):
        return []
    return [[position[one] for one in group] for group in ids]


def _numbers(text: str) -> list[int]:
    """Of ``"1,4:6"`` 1, 4, 5 and 6."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found


def of_every_slice(
    groups: Sequence[Sequence[int]], partitions: int, devices: Sequence[Any]
) -> list[list[int]]:
    """The groups of a slice's devices, which a program for several slices has by their place among
    them, in each of the slices.

    Args:
        partitions: how many devices the program is for: those of one slice, or all.
        devices: JAX's, in the order of the program's mesh.
    """
    if not partitions or partitions == len(devices):
        return [list(group) for group in groups]
    slices: dict[int, list[int]] = {}
    for i, device in enumerate(devices):
        slices.setdefault(int(device.slice_index), []).append(i)
    return [[own[i] for i in group] for own in slices.values() for group in groups]
