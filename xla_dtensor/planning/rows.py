"""Groups a program's collectives into rows: one kind, one module, the same mesh dims."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_dtensor.base.source_line import module_in
from xla_dtensor.planning.collectives import HloCollective
from xla_dtensor.planning.inputs import NamedInput
from xla_dtensor.planning.links import Links, slow_bytes

BETWEEN = "between slices"
_INPUT = re.compile(r"\b(?:donated|kept)\[\d+\]")


@dataclass(frozen=True)
class Row:
    """Collectives of one kind.

    Attributes:
        kind: ``"all-gather"`` and the like.
        dims: the mesh dims that they lie along.
        module: the module or the parameter that they are for; "" where nobody knows.
        part: ``"forward"``, ``"backward"``, ``"optimizer"`` or "".
        count: how many run in a step; of those that are brought together, the largest part's row
            has it.
        bytes: of their results on one device, in a step.
        seconds: that they take at the least.
        exposed: how long of these a device waits for them (`schedule.py`).
        of_parameters: whether what they give is shaped like a parameter, or its gradient.
        activations: whether they move something else along a dim that the batch is sharded along.
        slow_bytes: what comes in at a device over the slow network between slices or hosts.
        between_slices: whether they go over nothing but that network.
    """

    kind: str
    dims: tuple[str, ...]
    module: str
    part: str
    count: int
    bytes: int
    seconds: float
    of_parameters: bool
    activations: bool
    exposed: float = 0.0
    slow_bytes: float = 0.0
    between_slices: bool = False


def rows(
    found: Sequence[HloCollective],
    inputs: Sequence[NamedInput],
    over: Links | None,
    exposed: Mapping[str, float],
    domains: Sequence[int] = (),
) -> list[Row]:
    """The rows, those with the most bytes first.

    Args:
        found: the collectives of a program.
        inputs: the arrays that it is given.
        over: the links that they go over; None where nobody knows how fast these are.
        exposed: how long a device waits for each, by its name.
        domains: the slice or host of each device of the mesh, if there are several.
    """
    by_label = {one.label: one.name for one in inputs}
    named = {one.name for one in inputs if one.kind in ("parameter", "gradient")}
    shapes = [one.shape for one in inputs if one.kind in ("parameter", "gradient")]
    batch = {dim for one in inputs if one.kind == "argument" for dim in one.batch}
    groups: dict[Any, list[tuple[int, int, float, float, float]]] = defaultdict(list)
    for one in found:
        taken = 0.0 if over is None else over.seconds(one)
        slow = slow_bytes(one, domains) if domains else 0.0
        largest = max(one.parts, key=lambda part: part.shape.bytes)
        for part in one.parts:
            share = part.shape.bytes / one.bytes if one.bytes else 0.0
            module, part_of = _module(part.op_names, by_label)
            like = module in named or _is_part_of_any(part.shape.dims, shapes)
            key = one.kind, one.dims, module, part_of, like, one.between_slices
            counted = one.times if part is largest else 0
            waited = exposed.get(one.name, 0.0) * share
            nbytes = one.times * part.shape.bytes
            times = one.times * share
            groups[key].append((counted, nbytes, times * taken, waited, times * slow))
    made = [
        Row(
            kind,
            dims,
            module,
            part_of,
            int(totals[0]),
            int(totals[1]),
            totals[2],
            like,
            bool(batch & set(dims)) and not like,
            *(totals[3], totals[4], between),
        )
        for (kind, dims, module, part_of, like, between), members in groups.items()
        for totals in [[sum(column) for column in zip(*members, strict=True)]]
    ]
    return sorted(made, key=lambda row: (-row.bytes, row.kind, row.module))


def _module(op_names: Sequence[str], by_label: dict[str, str]) -> tuple[str, str]:
    """What an operation is for, and in which part of the step."""
    for op_name in op_names:
        found = module_in(op_name)
        if found[0]:
            return found
        label = _INPUT.search(op_name)
        if label is not None and label[0] in by_label:
            return by_label[label[0]], ""
    return "", ""


def _is_part_of_any(dims: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether an array may be a shard of a parameter: scalars are, of its norm."""
    own = [n for n in dims if n != 1]
    if not own:
        return True
    for shape in shapes:
        whole = [n for n in shape if n != 1]
        for order in (whole, whole[::-1]):
            if len(own) == len(order) and all(n % m == 0 for n, m in zip(order, own, strict=True)):
                return True
    return False


def seconds_per_dim(table: Sequence[Row]) -> dict[str, float]:
    """The time that the links of each mesh dim are busy at the least. A collective along several
    dims uses the links of all of them; one between slices none."""
    return _per_dim(table, lambda row: row.seconds)


def exposed_per_dim(table: Sequence[Row]) -> dict[str, float]:
    """How long of that a device waits. Of a collective along several dims, all of it for each; of
    those between slices for the network."""
    return _per_dim(table, lambda row: row.exposed)


def _per_dim(table: Sequence[Row], of: Callable[[Row], float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for row in table:
        for dim in (BETWEEN,) if row.between_slices else row.dims:
            found[dim] += of(row)
    return dict(found)
