"""What torchtitan has written for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(dump_folder: Path, name: str) -> dict[int, float]:
    """A metric of a run, by step, in float32."""
    (folder,) = (dump_folder / "tb").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}
