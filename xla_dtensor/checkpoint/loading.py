"""`Loading`: one ``dcp.load`` of xla tensors, with stand-ins for them and a reader of ours."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import FileSystemReader as TorchReader

from xla_dtensor.checkpoint import stand_ins
from xla_dtensor.checkpoint.files.reading import FileSystemReader, LoadPlannerOfPlainData, Reading


class Loading:
    """While the block runs, the arguments of torch's call have stand-ins for xla tensors, a reader
    that reads tensor after tensor, and, where none were given, ones that unpickle nothing.

    Args:
        state: what is loaded into.
        arguments: of the call, by name; are changed.
    """

    def __init__(self, state: Any, arguments: dict[str, Any]) -> None:
        self._state = state
        self._copy = stand_ins.replaced(state, stand_ins.arriving)
        self._loaded = [each.loaded for each in stand_ins.arriving_in(self._copy)]
        reader = arguments["storage_reader"]
        if type(reader) is TorchReader:  # what torch makes of a checkpoint_id
            reader = FileSystemReader(reader.path)
        self._reading = Reading(reader, self._arrived)
        arguments["storage_reader"] = self._reading
        arguments["state_dict"] = self._copy
        if arguments.get("planner") is None:
            arguments["planner"] = LoadPlannerOfPlainData()

    def error(self) -> Exception | None:
        """What was wrong with the metadata; torch goes on to look for others."""
        return self._reading.error

    def _arrived(self) -> None:
        for loaded in self._loaded:
            if loaded.has_come:
                loaded.finish()

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._arrived()
            stand_ins.taken_back(self._state, self._copy)
