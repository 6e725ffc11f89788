"""Overlap of a compiled program's collectives with its computation, and the time that is exposed.

XLA has written the order down. A collective that is started and ended by two instructions runs
beside what stands between them; any other one is waited for at once. So do copies to the host's
memory and from there. Instructions run one after another, collectives too, and copies, and each
takes what the chip's figures allow at the least. What is waited for then is *exposed*. It is an
estimate: kernels take longer than their peaks allow, which hides more; collectives take longer than
their links allow, which hides less.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xla_dtensor.lowering.attention.splash import operations_of_kernel
from xla_dtensor.planning.collectives import HloCollective
from xla_dtensor.planning.host_copies import HostCopy
from xla_dtensor.planning.links import Links
from xla_dtensor.planning.program_text import HloText, Instruction, Shaped
from xla_dtensor.runtime.chips import Chip

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\S+?)_(?P<kernel>\S+?)->")
_COST = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_SCORES = re.compile(r'"intermediate_tensor_shape": \{[^}]*?"dimensions": \[([^\]]*)\]')

# What moves or names values without computing, and takes no time by itself.
_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
        *("partition-id", "replica-id", "add-dependency", "opt-barrier", "copy-start", "copy-done"),
        *("send", "recv", "send-done", "recv-done"),  # of which collectives have their own time
    }
)


_Moved = HloCollective | HostCopy


@dataclass(frozen=True)
class TimelineEvent:
    """Something that a device does in one run of a computation.

    Attributes:
        what: the kind of a collective, ``"copy"`` or ``"compute"``.
        dims: of a collective the mesh dims that it goes along; of a copy ``"host"``.
        start, seconds: when it begins, from the computation's begin, and how long it takes.
        exposed: how long of it the device waits, with nothing else to do.
    """

    what: str
    dims: tuple[str, ...]
    start: float
    seconds: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Stretch:
    """One run of a computation that communicates: the step's, or a loop's body.

    Attributes:
        name: of the computation.
        times: how often it runs.
        seconds: how long one run takes.
        events: in it.
    """

    name: str
    times: int
    seconds: float
    events: tuple[TimelineEvent, ...]


@dataclass
class Schedule:
    """A program in time.

    Attributes:
        seconds: of the whole program.
        exposed: of each collective and copy, by its instruction's name, in all its runs.
        stretches: those computations that communicate.
    """

    seconds: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)


def schedule(
    program: HloText,
    found: Sequence[HloCollective],
    over: Links,
    chip: Chip,
    copies: Mapping[str, HostCopy],
) -> Schedule:
    """The schedule of a program.

    Args:
        program: what was read of its text.
        found: its collectives.
        over: the links that they go over.
        chip: what runs it.
        copies: those between the device and its host (`host_copies`).
    """
    walk = _Walk(program, {one.name: one for one in found} | {**copies}, over, chip)
    walk.made.seconds = walk.run(walk.program.entry)
    return walk.made


class _Walk:
    def __init__(
        self, program: HloText, found: Mapping[str, _Moved], over: Links, chip: Chip
    ) -> None:
        self.program, self._found, self._over, self._chip = program, found, over, chip
        self.made = Schedule()
        self._known: dict[str, float] = {}
        self._inside = {
            name: one
            for name, members in program.computations.items()
            for member in members
            if (one := found.get(member.name)) is not None
        }

    def run(self, computation: str) -> float:
        """How long a computation takes."""
        if computation not in self._known:
            self._known[computation] = self._timed(computation)
        return self._known[computation]

    def _timed(self, computation: str) -> float:
        now = computing_since = 0.0
        free: dict[str, float] = defaultdict(float)  # when each way is free again
        started: dict[str, tuple[_Moved, float, float]] = {}
        events: list[TimelineEvent] = []
        times = self.program.runs.get(computation, 1)

        def wait(name: str) -> None:
            nonlocal now, computing_since
            one, begin, end = started.pop(name)
            waited = max(0.0, end - now)
            if now > computing_since:
                seconds = now - computing_since
                events.append(TimelineEvent("compute", (), computing_since, seconds))
            events.append(TimelineEvent(one.kind, one.dims, begin, end - begin, waited))
            exposed = self.made.exposed
            exposed[one.name] = exposed.get(one.name, 0.0) + waited * times
            now = max(now, end)
            computing_since = now

        for instruction in self.program.computations.get(computation, ()):
            one, key, is_done = self._collective(instruction)
            if one is not None:
                way, seconds = self._way(one)
                begin = max(now, free[way])
                end = free[way] = begin + seconds
                started[key] = one, begin, end
                if is_done:
                    wait(key)
            elif is_done and key in started:
                wait(key)
            elif instruction.op not in _FREE:
                now += self._seconds(instruction)
        for name in list(started):
            wait(name)
        if now > computing_since:
            events.append(TimelineEvent("compute", (), computing_since, now - computing_since))
        if len(events) > 1:
            self.made.stretches.append(Stretch(computation, times, now, tuple(events)))
        return now

    def _way(self, one: _Moved) -> tuple[str, float]:
        """Which way something goes, on which only one is at a time; and how long it takes."""
        if isinstance(one, HostCopy):
            return "host", one.bytes / (self._chip.host / self._chip.devices)
        return "network" if one.between_slices else "links", self._over.seconds(one)

    def _collective(self, instruction: Instruction) -> tuple[_Moved | None, str, bool]:
        """The collective or copy that an instruction starts; by which name it is known; and whether
        it is ended here."""
        one = self._found.get(instruction.name)
        if one is not None:
            return one, instruction.name, not instruction.op.endswith(("-start", "recv"))
        if instruction.op.endswith("-done"):
            return None, next(iter(instruction.operand_names()), ""), True
        # The TPU's compiler has them in fusions, and tells by a number which belong together.
        called = [name for how, name in instruction.calls() if how == "calls"]
        chain = next(filter(None, map(self._chain, called)), None)
        if instruction.op == "fusion" and instruction.name.startswith("async-collective-done"):
            return None, chain or "", True
        one = next((self._inside[name] for name in called if name in self._inside), None)
        if instruction.op != "fusion" or one is None:
            return None, "", False
        return one, chain or one.name, chain is None

    def _chain(self, computation: str) -> str | None:
        members = self.program.computations.get(computation, ())
        return next(filter(None, (member.chain for member in members)), None)

    # --- what isn't a collective ----------------------------------------------------------------

    def _seconds(self, instruction: Instruction) -> float:
        if instruction.op == "while":
            body = next((name for how, name in instruction.calls() if how == "body"), "")
            each = self.program.runs.get(body, 0)
            outer = self.program.runs.get(instruction.computation, 1) or 1
            return self.run(body) * each / outer
        if instruction.op in ("call", "conditional", "async-start"):
            inner = [self.run(name) for _, name in instruction.calls() if self._has(name)]
            return max(inner, default=0.0)
        operations, moved = self._work(instruction)
        chip = self._chip
        return max(chip.seconds(operations), moved / (chip.memory_bandwidth / chip.devices))

    def _has(self, computation: str) -> bool:
        return computation in self.program.computations

    def _work(self, instruction: Instruction) -> tuple[dict[str, float], float]:
        """The operations of an instruction, and the bytes that it reads and writes."""
        around = self.program.by_name(instruction.computation)
        # A library's call gives the memory that it works in as bytes, behind its results.
        is_call = instruction.op == "custom-call"
        written = float(
            sum(
                r.bytes
                for r in instruction.results
                if not (r.on_host or (is_call and r.dtype in ("s8", "u8")))
            )
        )
        given = [_whole(around.get(name)) for name in instruction.operand_names()]
        if instruction.op != "fusion":
            return _operations(instruction, around), written + sum(given)
        operations: dict[str, float] = {}
        called = next((name for how, name in instruction.calls() if how == "calls"), "")
        inside, users = self.program.by_name(called), self.program.users(called)
        for member in inside.values():
            for kind, count in _operations(member, inside).items():
                operations[kind] = operations.get(kind, 0.0) + count
        read = 0.0
        for member in inside.values():
            if member.op == "parameter" and member.operands.isdigit():
                place = int(member.operands)
                whole = given[place] if place < len(given) else 0.0
                read += _read(member.name, users, whole)
        for member in inside.values():
            if member.op == "dynamic-update-slice":  # in place: what is written is the update
                written -= _whole(member) - _whole(inside.get(member.operand_names()[1]))
        return operations, max(written, 0.0) + read


def _whole(instruction: Instruction | None) -> float:
    if instruction is None:
        return 0.0
    return float(sum(r.bytes for r in instruction.results if not r.on_host))


def _read(name: str, users: Mapping[str, list[Instruction]], whole: float) -> float:
    """The bytes that a fusion reads of a parameter: of one that it takes slices of, these."""
    read = 0.0
    for user in users.get(name, []):
        if user.op in ("bitcast", "reshape"):
            read += _read(user.name, users, whole)
        elif user.op in ("dynamic-slice", "slice", "gather"):
            read += _whole(user) if user.operand_names()[0] == name else whole
        elif user.op == "dynamic-update-slice" and user.operand_names()[0] == name:
            continue
        else:
            return whole
    return min(read, whole)


def _operations(instruction: Instruction, around: Mapping[str, Instruction]) -> dict[str, float]:
    """The floating-point operations of a product, by what is multiplied (`flops.py`)."""
    operands = [around.get(name) for name in instruction.operand_names()]
    if not operands or operands[0] is None or not operands[0].results:
        return {}
    results, left = instruction.results, operands[0].results[0]
    if instruction.op == "custom-call" and '"tpu_custom_call"' in instruction.attributes:
        return _of_kernel(instruction, [one.results[0] for one in operands if one and one.results])
    if not results:
        return {}
    elements = math.prod(results[0].dims)
    if instruction.op == "dot":
        match = _CONTRACTED.search(instruction.attributes)
        dims = [int(d) for d in match[1].split(",") if d] if match else []
        terms = math.prod(left.dims[d] for d in dims)
        return {_kind(left, instruction): _each(left) * elements * terms}
    is_library = instruction.op == "custom-call" and "__cudnn$conv" in instruction.attributes
    if instruction.op == "convolution" or is_library:
        labels, kernel = (
            _LABELS.search(instruction.attributes),
            operands[1] if operands[1:] else None,
        )
        if labels is None or kernel is None or not kernel.results:
            return {}
        sizes = kernel.results[0].dims
        outputs = sizes[labels["kernel"].index("o")]
        window = math.prod(sizes) // max(outputs, 1)
        return {_kind(left, instruction): 2.0 * elements * window}
    if instruction.op == "custom-call" and "__cudnn$fmha" in instruction.attributes:
        return _of_attention(instruction, left)
    if instruction.op == "custom-call" and "__cublas$" in instruction.attributes:
        found = re.search(r'"lhs_contracting_dimensions":\["(\d+)"', instruction.attributes)
        size = left.dims[int(found[1])] if found else left.dims[-1]
        return {_kind(left, instruction): _each(left) * elements * size}
    return {}


def _each(left: Shaped) -> float:
    """The operations of a multiplication and an addition: of complex numbers four of each."""
    return 8.0 if left.dtype.startswith("c") else 2.0


def _of_attention(instruction: Instruction, query: Shaped) -> dict[str, float]:
    """cuDNN's attention: two products forward, five backward (`lowering/attention/cudnn.py`), of
    the scores that a causal mask leaves."""
    scores = _SCORES.search(instruction.attributes)
    if scores is None:
        return {}
    *rows, length, keys = (int(n) for n in re.findall(r"\d+", scores[1]))
    pairs = math.prod(rows) * float(length * keys)
    if '"CAUSAL"' in instruction.attributes:
        pairs *= (length + 1) / (2 * length)
    products = 5 if "fmhaSoftmaxBackward" in instruction.attributes else 2
    return {"bf16": products * 2.0 * pairs * query.dims[-1]}


def _of_kernel(instruction: Instruction, operands: Sequence[Shaped]) -> dict[str, float]:
    """A kernel of Pallas' for TPUs: what it says itself (products of groups), or attention's."""
    # In front of what is multiplied stand the kernel's integers.
    factors = [one for one in operands if len(one.dims) > 1 and one.dtype[0] in "bf"]
    if not factors:
        return {}
    said = _COST.search(instruction.attributes)
    query, key = factors[0], factors[min(1, len(factors) - 1)]
    count = (
        float(said[1]) if said else operations_of_kernel(instruction.op_name, query.dims, key.dims)
    )
    return {_kind(query, instruction): count}


def _kind(left: Shaped, instruction: Instruction) -> str:
    if left.dtype == "f32":
        return "fp32" if "operand_precision={highest" in instruction.attributes else "tf32"
    if left.dtype.startswith("f8"):
        return "fp8"
    return {
        "f64": "fp64",
        "c64": "fp32",
        "c128": "fp64",
        "bf16": "bf16",
        "f16": "bf16",
        "s8": "int8",
        "u8": "int8",
    }.get(left.dtype, left.dtype)
