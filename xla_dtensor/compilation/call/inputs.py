"""Inputs of a program that are the arrays of storages: gathered and checked for each call."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

from xla_dtensor.base import epoch
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.sources import ArraySource
from xla_dtensor.forms.storage import Pending, Storage
from xla_dtensor.mesh import Frame

_value = operator.attrgetter("value")
_storage = operator.attrgetter("_storage_")


class Arrays:
    """Inputs that are the arrays of storages.

    Args:
        frame: the devices that the program runs on.
    """

    def __init__(self, sources: list[ArraySource], frame: Frame | None) -> None:
        self.sources, self._frame = sources, frame
        # None for arguments and gradients, which are others in each call; the rest moves the epoch.
        self._storages: list[Any] = [s.storages[0] if s.storages else None for s in sources]
        self._fixed = [(i, s.storages[0]) for i, s in enumerate(sources) if s.is_fixed]
        others = [(i, s) for i, s in enumerate(sources) if not s.is_fixed]
        of_arguments = [(i, s.argument) for i, s in others if s.argument is not None]
        self._of_arguments = [i for i, _ in of_arguments]
        self._arguments = [argument for _, argument in of_arguments]
        self._of_gradients = [(i, s) for i, s in others if s.argument is None]
        self._shared = [s for s in sources if len(s.storages) > 1]
        self._forms = [s.form for s in sources]
        self._epoch = -1
        self._are_fixed_placed = False

    def _of_this_call(self, arguments: Arguments) -> list[tuple[int, Any]]:
        """The storages that are others in each call, with their positions."""
        tensors = map(arguments.tensors.__getitem__, self._arguments)
        found: list[tuple[int, Any]] = list(
            zip(self._of_arguments, map(_storage, tensors), strict=True)
        )
        if self._of_gradients:
            found += [(i, source.storage(arguments)) for i, source in self._of_gradients]
        return found

    def mismatch(self, arguments: Arguments) -> str | None:
        """Whether a storage no longer lies as the program was compiled for."""
        moved = epoch.forms.value
        if self._epoch != moved:
            difference = self._differ(self._fixed)
            if difference is not None:
                return difference
            self._epoch = moved
        if self._of_arguments or self._of_gradients:
            difference = self._differ(self._of_this_call(arguments))
            if difference is not None:
                return difference
        for source in self._shared:
            first = source.storages[0].value
            values = map(_value, source.storages)
            if not all(map(operator.is_, values, itertools.repeat(first))):
                return "step counts that were equal"
        return None

    def _differ(self, storages: Iterable[tuple[int, Storage]]) -> str | None:
        forms, frame = self._forms, self._frame
        for i, storage in storages:
            form, before = storage.form, forms[i]
            if form is before:
                continue
            if form.placed(frame) is not before.placed(frame):  # as `_place` will have it
                return f"captured state: from {before!r} to {form!r}"
            forms[i] = form
            self._are_fixed_placed = False
        return None

    def _place(self, storages: Iterable[tuple[int, Storage]]) -> None:
        """Copy what is on the default device alone to all devices of the program."""
        if self._frame is None:
            return
        for i, storage in storages:
            if storage.form.frame is None:
                storage.place(self._frame)
                self._forms[i] = storage.form
                for other in self.sources[i].storages[1:]:
                    other.array = storage.array
                    other.reform(storage.form)

    def gather(self, arguments: Arguments) -> list[Any]:
        """The arrays of this call."""
        if not self._are_fixed_placed:
            self._place(self._fixed)
            self._are_fixed_placed = True
        storages = self._storages
        if self._of_arguments or self._of_gradients:
            storages, now = list(storages), self._of_this_call(arguments)
            self._place(now)
            for i, storage in now:
                storages[i] = storage
        arrays = list(map(_value, storages))
        if Pending in set(map(type, arrays)):
            arrays = [storage.array for storage in storages]
        return arrays


class LostArrays:
    """Whether a launch has ever failed after it had taken over what it was to overwrite. XLA may
    end the process when it is given such an array again, so from then on each is looked at."""

    seen = False


def check_alive(arrays: list[Any], error: BaseException) -> None:
    """Say it if a launch that failed has used up the arrays that it was to overwrite.

    Raises:
        RuntimeError: it has.
    """
    lost = sum(array.is_deleted() for array in arrays)
    if lost:
        LostArrays.seen = True
        raise RuntimeError(
            f"the compiled step failed on the devices after it had taken over the memory of {lost} "
            "tensors that it overwrites; their values are lost: load the last checkpoint"
        ) from error


def refuse_deleted(arrays: Iterable[Any]) -> None:
    for array in arrays:
        if array.is_deleted():
            raise RuntimeError(
                f"a tensor of shape {list(array.shape)} has lost its value, because a compiled "
                "step failed on the devices while it overwrote it: load the last checkpoint"
            )


def outputs_in_order(donated: Iterable[ArraySource], count: int) -> list[int]:
    """The order of a program's outputs: first what takes the place of a donated input, as the
    inputs are, then all else.

    JAX gives a donated input's memory to the first output of its shape, whatever it is. A
    parameter's memory would go to a gradient that the step leaves behind, the optimizer's state to
    another parameter, and XLA would have to copy each of them before it writes.

    Args:
        donated: where the donated inputs come from, in their order.
        count: of the outputs.
    """
    first = [index for source in donated for index, _ in source.writes]
    return [*dict.fromkeys((*first, *range(count)))]
