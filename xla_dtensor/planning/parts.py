"""What the arrays of a collective are for: by what computes them, and by what takes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xla_dtensor.planning.program_text import HloText, Instruction, Shaped


@dataclass(frozen=True)
class Part:
    """One of the arrays that a collective gives: XLA brings small ones together.

    Attributes:
        shape: of the result on one device.
        op_names: where it may come from, as JAX has named it, the most likely first.
    """

    shape: Shaped
    op_names: tuple[str, ...]


def parts(
    instruction: Instruction,
    results: Sequence[Shaped],
    program: HloText,
    sender: Instruction | None = None,
) -> Iterator[Part]:
    """The arrays of a result. Of several brought together, each is named by what takes it out, and
    by what computes it; of one alone, by itself first.

    Args:
        instruction: the collective.
        results: its arrays.
        program: in which it is.
        sender: another instruction that is given what goes in.
    """
    members = program.by_name(instruction.computation)
    # What is received between slices, and sent, is in order with other such: by a token.
    operands = sender.operand_names()[:1] if sender else instruction.operand_names()
    if sender is not None:
        # It is sent in another shape than it was computed in.
        own = members.get(_unshaped(operands[0], members))
        if own is not None and [one.bytes for one in own.results] == [one.bytes for one in results]:
            results = own.results
    if len(results) == len(operands) == 1:
        joined = list(_joined(operands[0], members, program))
        if sum(part.shape.bytes for part in joined) == results[0].bytes:
            yield from joined
            return
    taken: dict[int, str] = {}
    if len(results) > 1:
        for one in members.values():
            if one.op == "get-tuple-element" and one.operands.strip("%") == instruction.name:
                taken[_index(one)] = one.op_name
    for i, shape in enumerate(results):
        names = [taken.get(i, "") if len(results) > 1 else instruction.op_name]
        if len(operands) == len(results):
            names += _made_by(operands[i], members, program)
        index = i if len(results) > 1 else None
        names += [instruction.op_name, *_used_by(instruction, index, program)]
        yield Part(shape, tuple(filter(None, names)))


def _joined(name: str, members: dict[str, Instruction], program: HloText) -> Iterator[Part]:
    """The arrays that XLA:GPU brings together for a collective as one: flat and behind each other.
    The concatenation is a fusion of its own."""
    one = members.get(name)
    if one is None:
        return
    inside = members
    given: list[str] = []
    if one.op == "fusion":
        given = one.operand_names()
        inside = program.by_name(next((c for how, c in one.calls() if how == "calls"), ""))
    joins = [one] if not given else [x for x in inside.values() if x.op == "concatenate"]
    if len(joins) != 1 or joins[0].op != "concatenate":
        return
    for operand in joins[0].operand_names():
        source, around = _unshaped(operand, inside), inside
        if source in inside and inside[source].op == "parameter" and given:
            source, around = _unshaped(given[int(inside[source].operands)], members), members
        if source not in around:
            return
        shape = around[source].results[0]
        yield Part(shape, tuple(filter(None, _made_by(source, around, program))))


def _unshaped(name: str, members: dict[str, Instruction]) -> str:
    """What has the elements of an array in the shape in which they were computed."""
    while name in members and members[name].op in ("bitcast", "reshape", "copy"):
        name = members[name].operand_names()[0]
    return name


_STEPS = 12


def _made_by(name: str, members: dict[str, Instruction], program: HloText) -> Iterator[str]:
    """The names of what a value is computed by, through what only moves it: the compiler's own
    copies have none."""
    for _ in range(_STEPS):
        one = members.get(name)
        if one is None:
            return
        yield one.op_name
        if one.op == "fusion":
            for _, called in one.calls():
                yield from (inner.op_name for inner in program.computations.get(called, ())[::-1])
            return
        operands = one.operand_names()
        if not operands:
            return
        # What is written into a piece of memory comes second.
        name = operands[1] if one.op == "dynamic-update-slice" else operands[0]


def _used_by(instruction: Instruction, index: int | None, program: HloText) -> Iterator[str]:
    """The names of what a result is for, behind what only moves it: a parameter that a loop has
    gathered is known by the product that it goes into.

    Args:
        index: which of several results.
    """
    users = program.users(instruction.computation)
    found = [(instruction.name, index)]
    for _ in range(_STEPS):
        following: list[tuple[str, int | None]] = []
        for name, element in found:
            for user in users.get(name, ()):
                if user.op == "get-tuple-element" and element not in (None, _index(user)):
                    continue
                if user.op in _MOVES or user.op.endswith("-done"):
                    following.append((user.name, _element(user, name, element)))
                else:
                    yield user.op_name
        found = following


_MOVES = ("tuple", "opt-barrier", "get-tuple-element", "bitcast", "reshape", "copy", "transpose")


def _element(user: Instruction, name: str, element: int | None) -> int | None:
    """Which of several results of ``user``, which only moves values, has an element of ``name``."""
    if user.op == "tuple":
        return user.operand_names().index(name)
    return element if user.op.endswith("-done") or user.op == "opt-barrier" else None


def _index(instruction: Instruction) -> int:
    """Which element of a tuple a ``get-tuple-element`` takes."""
    found = re.search(r"\bindex=(\d+)", instruction.attributes)
    assert found is not None
    return int(found[1])
