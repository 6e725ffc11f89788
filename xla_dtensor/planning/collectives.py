"""Reads from a compiled program's text which collectives it runs, how often, of how many bytes.

And over which mesh dims, and for which module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_dtensor.planning import between_slices
from xla_dtensor.planning.parts import Part, parts
from xla_dtensor.planning.program_text import HloText, Instruction, Shaped

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_LISTS = re.compile(r"replica_groups=\{(?P<groups>(?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(
    r"replica_groups=\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](T\((?P<t>[\d,]+)\))?"
)
_AXES = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]*)\](?P<order>,? ?device_ids=\(\S+\))?"
    r" *\{(?P<along>[^}]*)\}"
)
# The order of the mesh's devices: numbers transposed, or a list.
_ORDER = re.compile(r"\(\[(?P<dims>[\d,]+)\]T\((?P<t>[\d,]+)\)\)|\((?P<list>[\d,]+)\)")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>(?:\{\d+,\d+\},?)*)\}")


@dataclass(frozen=True)
class HloCollective:
    """A collective instruction.

    Attributes:
        kind: one of `KINDS`.
        times: how often it runs in one run of the program.
        parts: the arrays of its result.
        dims: the mesh dims that its groups lie along, in the mesh's order; () where unknown.
        size: devices in a group.
        groups: their positions; of a permutation the pairs, from and to. () for all devices where
            the program doesn't say which.
        name: of the instruction.
        between_slices: whether it goes over the data-centre network between a TPU's slices.
    """

    kind: str
    times: int
    parts: tuple[Part, ...]
    dims: tuple[str, ...]
    size: int
    groups: tuple[tuple[int, ...], ...]
    name: str = ""
    between_slices: bool = False

    @property
    def bytes(self) -> int:
        """Of its result on one device, each time."""
        return sum(part.shape.bytes for part in self.parts)


def collectives(
    text: str | HloText,
    shape: Sequence[int] = (),
    names: Sequence[str] = (),
    devices: Sequence[Any] = (),
) -> list[HloCollective]:
    """The collectives that a program runs.

    Args:
        text: ``jax.stages.Compiled.as_text()``, or what was read of it.
        shape: of the mesh that it was compiled for, which says along which dims groups lie.
        names: of its dims.
        devices: JAX's, in the mesh's order; of one slice they needn't be given.
    """
    program = text if isinstance(text, HloText) else HloText(text)
    found: list[HloCollective] = []
    chains: set[tuple[str, str]] = set()
    scattering = _scattering(program)
    for instruction, times in program.instructions():
        between = between_slices.kind_of(instruction)
        kind = between or _kind(instruction)
        if kind is None:
            continue
        # The TPU's compiler writes a collective that runs beside others' work down twice: once in
        # what starts it, once in what ends it. Only the chain's number tells that they are one; the
        # channel's may be that of others, too.
        if instruction.chain is not None:
            key = kind, instruction.chain
            if key in chains:
                continue
            chains.add(key)
        results = _results(instruction, kind)
        fused = scattering.get(instruction.computation)
        if kind == "all-reduce" and fused is not None:
            kind, results = "reduce-scatter", fused.results
        if between:
            results = results[:1]
            groups = between_slices.groups_of(instruction, devices)
        else:
            groups = _groups(instruction, kind, _sizes_of_one(program, shape, devices))
            if devices:
                groups = between_slices.of_every_slice(groups, program.partitions, devices)
        dims = _dims(groups, shape, names)
        size = len(groups[0]) if groups else 0
        if kind == "collective-permute" and dims:
            size = int(np.prod([shape[list(names).index(d)] for d in dims]))
        sender = between_slices.sender(instruction, program) if between else None
        own = tuple(parts(fused or instruction, results, program, sender))
        one = kind, times, own, dims, size, tuple(map(tuple, groups)), instruction.name
        found.append(HloCollective(*one, between_slices=bool(between)))
    return found


def _sizes_of_one(
    program: HloText, shape: Sequence[int], devices: Sequence[Any]
) -> tuple[int, ...]:
    """The sizes of the mesh that a program numbers the devices of: of several slices, one's."""
    is_part = devices and 0 < program.partitions < len(devices)
    return (program.partitions,) if is_part else tuple(shape)


def _kind(instruction: Instruction) -> str | None:
    op = instruction.op.removesuffix("-start")
    return op if op in KINDS else None


def _scattering(program: HloText) -> dict[str, Instruction]:
    """Computations that are a reduce-scatter to the TPU's compiler, an all-reduce of which each
    device keeps its part: the fusions that run them."""
    return {
        called: instruction
        for instruction, _ in program.instructions()
        if instruction.op == "fusion"
        for how, called in instruction.calls()
        if how == "calls" and called.startswith("all-reduce-scatter")
    }


def _results(instruction: Instruction, kind: str) -> list[Shaped]:
    """The arrays that a collective gives. What starts one returns (operands, results, context...),
    of which the context is one or two scalars; an all-reduce's start returned the results alone
    until jaxlib 0.10, and ((operands), results) later."""
    found = instruction.results
    is_alone = kind == "all-reduce" and not instruction.type.startswith("((")
    if not instruction.op.endswith("-start") or is_alone:
        return found
    if kind == "collective-permute":
        return found[1:2]
    return found[len(found) // 2 :]


def _groups(instruction: Instruction, kind: str, shape: Sequence[int]) -> list[list[int]]:
    """The groups of devices, by their positions; of a permutation its pairs."""
    text = instruction.attributes
    if kind == "collective-permute":
        match = _PAIRS.search(text)
        return [] if match is None else _lists(match["pairs"])
    iota = _IOTA.search(text)
    if iota is not None:
        shape_, dims = _numbers(iota["shape"]), _numbers(iota["dims"])
        array = np.arange(int(np.prod(dims))).reshape(dims)
        if iota["t"]:
            array = array.transpose(_numbers(iota["t"]))
        found: list[list[int]] = array.reshape(shape_).tolist()
        return found
    axes = _AXES.search(text)
    if axes is not None:
        groups = _along(axes["mesh"], axes["along"])
        return groups if axes["order"] is None else _ordered(groups, axes["order"])
    lists = _LISTS.search(text)
    if lists is not None and lists["groups"]:
        return _lists(lists["groups"])
    return [list(range(int(np.prod(shape))))] if shape else []


def _along(mesh: str, along: str) -> list[list[int]]:
    """The groups of ``mesh['a'=2,'b'=8] {'a','b':(2)4}``: all of ``a``, and of ``b`` the four parts
    that lie in each of its two halves."""
    wanted = {
        name: (int(before or 1), int(size) if size else None)
        for name, _, before, size in re.findall(r"'([^']*)'(:\((\d+)\)(\d+))?", along)
    }
    dims: list[int] = []
    chosen: list[int] = []
    for name, text in re.findall(r"'([^']*)'=(\d+)", mesh):
        size = int(text)
        if name in wanted:
            before, own = wanted[name]
            own = size if own is None else own
            chosen.append(len(dims) + 1)
            dims += [before, own, size // before // own]
        else:
            dims.append(size)
    array = np.moveaxis(np.arange(int(np.prod(dims))).reshape(dims), chosen, range(-len(chosen), 0))
    found: list[list[int]] = array.reshape(-1, int(np.prod([dims[i] for i in chosen]))).tolist()
    return found


def _ordered(groups: list[list[int]], text: str) -> list[list[int]]:
    """Groups of a mesh whose devices are ``device_ids=([2,4]T(1,0))`` or ``device_ids=(0,2,1,3)``,
    from positions in it; [] in a form that isn't known."""
    order = _ORDER.search(text)
    if order is None:
        return []
    if order["list"]:
        ids = np.array(_numbers(order["list"]))
    else:
        dims = _numbers(order["dims"])
        ids = np.arange(int(np.prod(dims))).reshape(dims).transpose(_numbers(order["t"])).ravel()
    return [ids[group].tolist() for group in groups]


def _lists(text: str) -> list[list[int]]:
    return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text) if group]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _dims(groups: list[list[int]], shape: Sequence[int], names: Sequence[str]) -> tuple[str, ...]:
    """The mesh dims along which the members of a group differ."""
    if not groups or not shape:
        return ()
    differs = np.zeros(len(shape), bool)
    for group in groups:
        coordinates = np.array(np.unravel_index(np.array(group), tuple(shape)))
        differs |= (coordinates != coordinates[:, :1]).any(1)
    return tuple(name for name, along in zip(names, differs, strict=True) if along)


@dataclass(frozen=True)
class Traffic:
    """Per device and per run of the program."""

    counts: dict[str, int]
    bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Of all kinds together."""
        return sum(self.bytes.values())


def collective_traffic(text: str) -> Traffic:
    """Counts and result bytes of the collectives in an optimized program's ``as_text()``, those in
    loops as often as they run."""
    counts: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for one in collectives(text):
        counts[one.kind] += one.times
        moved[one.kind] += one.bytes * one.times
    return Traffic(dict(counts), dict(moved))
