"""Storages from outside that a step uses: their state before the trace, restored after it."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from xla_dtensor.base.source_line import user_line
from xla_dtensor.errors import DataDependentError, MeshMismatchError
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import Frame


class ExternalStorage:
    """A storage from outside of the trace that the step uses.

    Attributes:
        storage: the storage; of state that the step's optimizer made in this trace only while
            somebody else holds it.
        array, form, version: as they were when the step first used it.
        first_use: when the step first used it. Unlike the order of capture, this doesn't depend on
            whether an optimizer made it in this trace.
        fill_value: of state that the step's optimizer made in this trace, its initial value; None
            for storages that existed before.
        written: whether the step overwrites it.
    """

    __slots__ = (
        *("_before", "_reference", "_strong", "array", "fill_value", "first_use", "form"),
        "version",
        "written",
    )

    def __init__(self, storage: Storage, fill_value: Any = None) -> None:
        # State that an optimizer has just made may be a temporary, which a weak reference shows.
        self._strong = storage if fill_value is None else None
        self._reference = weakref.ref(storage)
        self.array = storage.array
        self.form = storage.form
        self.version = storage.version
        self._before = self.array, self.form, self.version  # what `restore` puts back
        self.written = False
        self.first_use: int | None = None
        self.fill_value = fill_value

    @property
    def storage(self) -> Storage | None:
        """The storage; None if it was a temporary of the optimizer."""
        return self._reference()

    def writing(self) -> None:
        """The step is about to write to it."""
        storage = self.storage
        if not self.written and storage is not None:
            # Another thread may have written eagerly since; compiled steps wait (`first_calls`).
            self._before = storage.array, storage.form, storage.version
        self.written = True

    def is_written_by_others(self) -> bool:
        """Whether another thread has written to it since the step first used it, and the step
        itself hasn't: a tracer is the trace's own, a layer's weight in a loop's body for one."""
        storage = self.storage
        if self.written or storage is None or storage.is_given_back:
            return False
        return storage.version != self.version and not isinstance(storage.array, jax.core.Tracer)

    def restore(self) -> None:
        """Undo what the trace did to the storage. It has its version again, too: a backward pass
        that waits must not take a trace for a write, and those of the trace never come back."""
        storage = self.storage
        if storage is None:
            return
        # Where the step only reads, another value is another thread's, which stays.
        if self.written or self.fill_value is not None or storage.is_given_back:
            array, form, version = self._before
            storage.put_back(array, form)
            storage.version = version


def refuse_other_devices(first: Frame, frame: Frame, storage: Storage) -> None:
    raise MeshMismatchError(
        f"the compiled step uses tensors of {first.root!r} (devices {list(first.device_ids)}) and "
        f"of {frame.root!r} (devices {list(frame.device_ids)}); one XLA program runs on one set of "
        f"devices: redistribute the tensor of shape {list(storage.form.shape)} to the first mesh "
        f"before the step{user_line()}"
    )


def refuse_made_meanwhile(storage: Storage) -> None:
    raise DataDependentError(
        f"the step uses a tensor of shape {list(storage.form.shape)} that has been computed while "
        "it was traced, but not by it: by another thread, most likely. In later calls it would be "
        "that tensor still: compute it in the step itself, or before it, and pass it as an "
        f"argument{user_line()}"
    )
