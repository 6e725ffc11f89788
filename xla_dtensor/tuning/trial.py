"""`Trial`: one configuration, and its memory and time: estimated, compiled or measured."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_dtensor.planning import Report
from xla_dtensor.tuning.configuration import Configuration
from xla_dtensor.tuning.estimate import Estimate

_NEARLY = 0.01


@dataclass(frozen=True)
class Trial:
    """A configuration that was looked at.

    Attributes:
        configuration: what it is.
        estimate: by its layouts alone.
        report: `xd.plan`'s, of what XLA has compiled; None if it wasn't compiled.
        measured: seconds of a step, where the devices are here; None if it wasn't run.
        available: bytes of a device, without those that are to stay free; None if nobody knows.
        error: why it couldn't be compiled or run, or "".
    """

    configuration: Configuration
    estimate: Estimate
    report: Report | None = None
    measured: float | None = None
    available: float | None = None
    error: str = ""

    @property
    def memory(self) -> float:
        """Bytes of a device: XLA's, where it has compiled the step."""
        needed = None if self.report is None else self.report.memory.needed
        return self.estimate.memory if needed is None else float(needed)

    @property
    def fits(self) -> bool:
        """Whether a device has the memory, as far as anybody knows; what XLA refuses doesn't."""
        return not self.error and (self.limit is None or self.memory <= self.limit)

    @property
    def limit(self) -> float | None:
        """What a step may need: what was asked to stay free does, and XLA has a limit of its own
        (of a GPU's memory JAX gives programs a part). None if nobody knows."""
        own = None if self.report is None else self.report.memory.available
        return min((each for each in (self.available, own) if each is not None), default=None)

    @property
    def seconds(self) -> float | None:
        """Of a step: measured; else in XLA's order of instructions; else by the estimate; None
        where the chip is none that is known, and only bytes are compared."""
        if self.measured is not None:
            return self.measured
        if self.report is not None and self.report.scheduled is not None:
            # Products of a kernel that nobody knows are in the step's, and not in XLA's order.
            return max(self.report.scheduled, self.report.seconds.get("compute", 0.0))
        return self.estimate.seconds

    @property
    def known_by(self) -> str:
        """Who says how long it takes: ``"measured"``, ``"compiler"`` or ``"estimate"``."""
        if self.measured is not None:
            return "measured"
        return "estimate" if self.report is None else "compiler"

    def rank(self) -> tuple[Any, ...]:
        """What is smaller for what is better: first what is measured or compiled and fits, then
        what is estimated to fit, then what doesn't, and last what is refused."""
        looked_at = self.measured is not None or self.report is not None
        if self.error:
            return (3,)
        if not self.fits:
            return (2, self.memory)
        if self.report is not None and self.measured is None and self.report.scheduled is None:
            # XLA's bytes, where nobody knows how long anything takes, and the products' price.
            work = self.estimate.price - self.estimate.moved
            return (0, work + self.report.collective_bytes, self.estimate.price)
        return (0 if looked_at else 1, self.seconds or self.estimate.rank, self.estimate.price)

    def as_dict(self) -> dict[str, Any]:
        """Of what JSON has."""
        found: dict[str, Any] = {
            "configuration": self.configuration.as_dict(),
            "estimate": dataclasses.asdict(self.estimate),
            "measured": self.measured,
            "available": self.available,
            "error": self.error,
            "fits": self.fits,
            "report": None if self.report is None else self.report.as_dict(),
        }
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """What `as_dict` has given."""
        report = values["report"]
        return cls(
            Configuration(**values["configuration"]),
            Estimate(**values["estimate"]),
            None if report is None else Report.from_json(json.dumps(report)),
            values["measured"],
            values["available"],
            values["error"],
        )


def apart(trials: Sequence[Trial]) -> list[Trial]:
    """Without those that are others in other words: a dim that shards neither parameters nor batch
    is idle, or shards the batch where it is used, as "dp" does; and of two that cost nearly the
    same the first is kept, which has more of "dp"."""
    known = [dict(trial.configuration.mesh) for trial in trials]
    found: list[Trial] = []
    for trial in trials:
        idle = trial.configuration.idle()
        if idle:
            mesh = dict(trial.configuration.mesh)
            mesh["dp"] = mesh.get("dp", 1) * math.prod(mesh.pop(name) for name in idle)
            if mesh in known:
                continue
        if not any(_is_like(trial, other) for other in found):
            found.append(trial)
    return found


def _is_like(one: Trial, other: Trial) -> bool:
    def costs(trial: Trial) -> tuple[float, ...]:
        return trial.estimate.rank, trial.estimate.memory, trial.estimate.moved

    def kind(trial: Trial) -> tuple[Any, ...]:
        return trial.configuration.recompute, trial.configuration.told()

    return kind(one) == kind(other) and all(
        math.isclose(a, b, rel_tol=_NEARLY) for a, b in zip(costs(one), costs(other), strict=True)
    )
