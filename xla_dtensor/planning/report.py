"""The report of `plan` on a step, as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_dtensor.planning.inputs import NamedInput
from xla_dtensor.planning.memory import Memory
from xla_dtensor.planning.picture import picture
from xla_dtensor.planning.rows import Row
from xla_dtensor.planning.schedule import Stretch, TimelineEvent
from xla_dtensor.planning.text import as_text

# Of the inputs of a step a replicated one is worth a line from this part of them on.
LARGE = 0.01


@dataclass(frozen=True)
class Report:
    """What a step needs per chip, and how fast it can be at the best; `plan` makes it, and ``str``
    is a table.

    Attributes:
        step, topology, mesh, chips: what was planned for what: the mesh as its dims' sizes.
        hops: per mesh dim how many links neighbours are apart, in the mean.
        memory: bytes on one device: ``needed``, ``available``, ``fits``, ``arguments``,
            ``temporaries``, ``outputs``.
        inputs: the arrays that the program is given, by name.
        was_read: whether the compiled program is known: where XLA has refused it, there are no
            collectives and times.
        collectives: what moves between devices, each kind with its mesh dims, module, count, bytes.
        replicated: large parameters and states that no mesh dim shards.
        flops: of the step's matrix products and convolutions, on all chips together.
        flops_by_kind: ``flops`` by what is multiplied: ``"bf16"``, ``"tf32"`` and the like.
        scheduled: how long the step takes by XLA's order of instructions, if each took what it has
            to at the least, with collectives alone beside them; None where nobody knows.
        exposed: per mesh dim how long of that a device waits for collectives, and for copies to and
            from its host's memory under ``host``.
        stretches: those parts of the schedule that communicate (`schedule.Stretch`).
        flops_per_device: what XLA counts in the program of one device; a loop's body counts once.
        seconds: at the least: ``compute``, ``memory``, ``network DIM``, and where there are several
            slices or hosts ``network between slices`` (or ``hosts``), ``the host's memory`` for
            copies to it and from there; {} where the chip is none that is known.
        domains: how many slices of a TPU there are, or hosts (racks) of GPUs.
        slow_bytes: what comes in at a device over the slow network between these, in a step.
        bound: the largest of these: no step is faster.
        tokens: what a step computes; ``tokens_per_second`` and ``mfu`` are those at the bound.
        attributed: the part of the collectives' bytes of which a module or a parameter is known.
        notes: what to keep in mind.
        source: where the chip's figures are from.

    Example::

        import torch, xla_dtensor as xd

        with xd.abstract("cpu:4"):
            mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))
            x = xd.distribute_tensor(torch.randn(16, 64), mesh, [xd.Shard(0)])
            report = xd.plan(lambda x: x.sum(), x)
        assert report.memory.arguments == 16 * 64 * 4 // 4 and "all-reduce" in str(report)
    """

    step: str
    topology: str
    chips: int
    mesh: dict[str, int]
    hops: dict[str, float]
    was_read: bool
    memory: Memory
    inputs: tuple[NamedInput, ...]
    collectives: tuple[Row, ...]
    replicated: tuple[NamedInput, ...]
    flops: int
    flops_per_device: float
    seconds: dict[str, float]
    bound: float | None
    tokens: int | None
    tokens_per_second: float | None
    mfu: float | None
    attributed: float
    notes: tuple[str, ...]
    source: str
    flops_by_kind: dict[str, int] = field(default_factory=dict)
    scheduled: float | None = None
    exposed: dict[str, float] = field(default_factory=dict)
    stretches: tuple[Stretch, ...] = ()
    slow_bytes: float = 0.0
    domains: int = 1

    @classmethod
    def made(
        cls,
        *,
        inputs: Sequence[NamedInput],
        collectives: Sequence[Row],
        seconds: dict[str, float],
        flops_by_kind: dict[str, int],
        peak: float | None,
        chips: int,
        tokens: int | None,
        notes: Sequence[str],
        **rest: Any,
    ) -> Report:
        """A report, with what follows from the rest."""
        bound = max(seconds.values(), default=0.0) or None
        flops = sum(flops_by_kind.values())
        total = sum(row.bytes for row in collectives)
        known = sum(row.bytes for row in collectives if row.module)
        arguments = sum(one.bytes for one in inputs)
        found = [
            one
            for one in inputs
            if not one.along and one.kind != "argument" and one.bytes >= LARGE * arguments
        ]
        return cls(
            inputs=tuple(inputs),
            collectives=tuple(collectives),
            replicated=tuple(found),
            seconds=seconds,
            flops=flops,
            flops_by_kind=flops_by_kind,
            chips=chips,
            bound=bound,
            tokens=tokens,
            tokens_per_second=None if bound is None or tokens is None else tokens / bound,
            mfu=None if bound is None or peak is None else flops / (chips * peak * bound),
            attributed=known / total if total else 1.0,
            notes=tuple(notes),
            **rest,
        )

    @property
    def fits(self) -> bool | None:
        """Whether a chip has the memory; None if nobody knows how much it has."""
        return self.memory.fits

    @property
    def collective_bytes(self) -> int:
        """Of all collectives' results, on one device."""
        return sum(row.bytes for row in self.collectives)

    def as_dict(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers."""
        found = dataclasses.asdict(self)
        found["memory"]["fits"] = self.fits
        return found

    def as_json(self) -> str:
        """As JSON, which `from_json` reads."""
        return json.dumps(self.as_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """A report from what `as_json` has given.

        Args:
            text: JSON.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = json.loads(text)
            memory = dict(found.pop("memory"))
            memory.pop("fits", None)
            memory["largest"] = tuple(memory["largest"])
            lists = {name: found.pop(name) for name in ("inputs", "replicated", "collectives")}
            return cls(
                memory=Memory(**memory),
                inputs=tuple(_of(NamedInput, one) for one in lists["inputs"]),
                replicated=tuple(_of(NamedInput, one) for one in lists["replicated"]),
                collectives=tuple(_of(Row, one) for one in lists["collectives"]),
                notes=tuple(found.pop("notes")),
                stretches=tuple(map(_stretch, found.pop("stretches", ()))),
                **found,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no report of xla_dtensor.plan: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write it to a file, by the ending of its name.

        Args:
            path: ``.json``, ``.png`` or ``.svg`` (which need matplotlib) or ``.txt``.

        Raises:
            ValueError: another ending.
        """
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(self.as_json())
        elif path.suffix == ".txt":
            path.write_text(f"{self}\n")
        elif path.suffix in (".png", ".svg"):
            picture(self, path)
        else:
            raise ValueError(f"{path}: a report is saved as .json, .png, .svg or .txt")

    def __str__(self) -> str:
        return as_text(self)


def _stretch(values: dict[str, Any]) -> Stretch:
    events = tuple(_of(TimelineEvent, one) for one in values["events"])
    return Stretch(**{**values, "events": events})


def _of(cls: Any, values: dict[str, Any]) -> Any:
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return cls(**lists)
