"""Parses a compiled XLA program's text: computations, instructions, and how often each runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<dims>[\d,<=]*)\](\{(?P<layout>[^}]*)\})?")
_ON_HOST = "S(5)"  # the number that XLA gives the host's memory
_CALLS = re.compile(
    r"\b(?P<how>calls|to_apply|body|condition|branch_computations|called_computations|"
    r"true_computation|false_computation)=(?P<what>\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CHAIN = re.compile(r'\bchain_id="(-?\d+)"')
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_OP_NAME = re.compile(r'metadata=\{[^}]*?\bop_name="(?P<name>(?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Shaped:
    """An array's dtype and dims, as XLA writes them, and whether it is in the host's memory."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False

    @property
    def bytes(self) -> int:
        """What it takes, without padding."""
        bits = 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])
        elements = 1
        for size in self.dims:
            elements *= size
        return -(-elements * bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name, op: without the percent sign; ``"all-gather"``.
        type: of its result, as XLA writes it.
        operands, attributes: what stands in its parentheses, and behind them.
        computation: in which it is.
    """

    name: str
    op: str
    type: str
    operands: str
    attributes: str
    computation: str

    @property
    def results(self) -> list[Shaped]:
        """The arrays of its result."""
        return arrays(self.type)

    @property
    def is_on_host(self) -> bool:
        """Whether an array of its result is in the host's memory."""
        return _ON_HOST in self.type

    @property
    def op_name(self) -> str:
        """Where in the program it comes from, as JAX has named it; "" where nothing is known."""
        match = _OP_NAME.search(self.attributes)
        return match["name"] if match else ""

    def operand_names(self) -> list[str]:
        """The instructions whose results it is given."""
        return re.findall(r"%([\w.\-]+)", self.operands)

    @property
    def chain(self) -> str | None:
        """The number that what starts a collective of a TPU's program and what ends it share."""
        match = _CHAIN.search(self.attributes)
        return match[1] if match else None

    def calls(self) -> Iterator[tuple[str, str]]:
        """The computations that it runs, each as (how, its name)."""
        for match in _CALLS.finditer(self.attributes):
            for name in re.findall(r"%?([\w.\-]+)", match["what"]):
                yield match["how"], name

    @property
    def trips(self) -> int | None:
        """How often a loop's body runs; None where XLA doesn't know."""
        match = _TRIPS.search(self.attributes)
        return int(match[1]) if match else None


def arrays(type_text: str) -> list[Shaped]:
    """The arrays in a type's text."""
    return [
        Shaped(
            m["dtype"],
            tuple(int(n) for n in re.findall(r"\d+", m["dims"])),
            _ON_HOST in (m["layout"] or ""),
        )
        for m in _ARRAY.finditer(type_text)
    ]


class HloText:
    """The text of a compiled program.

    Args:
        text: ``jax.stages.Compiled.as_text()``.

    Attributes:
        computations: their instructions, by name.
        entry: the name of the one that is run.
        runs: how often each computation runs, by name; not there for those that are never called.
        unknown_loops: the names of loops of which nobody knows how often they run (their bodies
            count once).
        partitions: how many devices it is for: of several slices, those of one; 0 if it isn't said.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] | None = None
        name = ""
        head = _PARTITIONS.search(text.partition("\n")[0])
        self.partitions = int(head[1]) if head else 0
        for line in _lines(text):
            if current is None:
                if line.endswith("{") and not line.startswith(("HloModule", " ")):
                    is_entry = line.startswith("ENTRY ")
                    name = re.match(r"%?([\w.\-]+)", line.removeprefix("ENTRY "))[1]  # type: ignore[index]
                    current = self.computations[name] = []
                    if is_entry:
                        self.entry = name
            elif line.startswith("}"):
                current = None
            else:
                instruction = _instruction(line, name)
                if instruction is not None:
                    current.append(instruction)
        self._by_name: dict[str, dict[str, Instruction]] = {}
        self._users: dict[str, dict[str, list[Instruction]]] = {}
        self.runs: dict[str, int] = defaultdict(int)
        self.unknown_loops: list[str] = []
        if self.entry:
            self._count(self.entry, 1)

    def _count(self, name: str, times: int) -> None:
        self.runs[name] += times
        for instruction in self.computations.get(name, ()):
            if instruction.op.endswith(("-done", "-update")):
                continue  # of what its start has begun
            for how, called in instruction.calls():
                if called not in self.computations or how == "condition":
                    continue
                trips = 1
                if how == "body":
                    known = instruction.trips or self._bound(instruction)
                    if known is None:
                        self.unknown_loops.append(instruction.name)
                    trips = known or 1
                self._count(called, times * trips)

    def _bound(self, loop: Instruction) -> int | None:
        """The number that a loop's counter, which begins at 0, is compared with. TPU programs say
        no other way how often a loop runs; JAX's scans and the partitioner's own loops count so.
        (Where 64-bit types are on, the counter is two 32-bit numbers, and so is the bound.)"""
        bounds: list[int] = []
        for how, name in loop.calls():
            members = self.computations.get(name, ()) if how == "condition" else ()
            constants = {
                m.name: int(m.operands)
                for m in members
                if m.op == "constant" and re.fullmatch(r"\d+", m.operands)
            }
            for member in members:
                if member.op == "compare" and "direction=LT" in member.attributes:
                    bound = member.operands.rpartition("%")[2].strip()
                    bounds.append(constants.get(bound, 0))
        return max(bounds, default=0) or None

    def by_name(self, computation: str) -> dict[str, Instruction]:
        """The instructions of a computation, by their names."""
        if computation not in self._by_name:
            members = self.computations.get(computation, ())
            self._by_name[computation] = {one.name: one for one in members}
        return self._by_name[computation]

    def users(self, computation: str) -> dict[str, list[Instruction]]:
        """By the name of an instruction of a computation, those that take its result."""
        if computation not in self._users:
            found = self._users[computation] = defaultdict(list)
            for one in self.computations.get(computation, ()):
                for name in one.operand_names():
                    found[name].append(one)
        return self._users[computation]

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """All that run, each with how often."""
        for name, members in self.computations.items():
            times = self.runs.get(name, 0)
            if times:
                for instruction in members:
                    yield instruction, times


def _lines(text: str) -> Iterator[str]:
    """A program's lines. What a kernel says of itself XLA writes as it is, with line breaks; here
    it is one line with the rest of its instruction."""
    whole = ""
    for line in text.splitlines():
        if not line.startswith(('"', "}}")):
            yield whole
            whole = ""
        whole += line
    yield whole


def _instruction(line: str, computation: str) -> Instruction | None:
    name, equals, rest = line.strip().partition(" = ")
    if not equals:
        return None
    name = name.removeprefix("ROOT ").removeprefix("%")
    if rest.startswith("("):
        end = _closing(rest, 0) + 1
    else:
        end = rest.find(" ")
    type_text, rest = rest[:end], rest[end:].lstrip()
    op, parenthesis, _ = rest.partition("(")
    if not parenthesis:
        return None
    close = _closing(rest, len(op))
    return Instruction(
        name, op, type_text, rest[len(op) + 1 : close], rest[close + 1 :], computation
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis at ``start`` is closed; the end of the text if it isn't."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "(":
            depth += 1
        elif text[position] == ")":
            depth -= 1
            if not depth:
                return position
    return len(text) - 1
