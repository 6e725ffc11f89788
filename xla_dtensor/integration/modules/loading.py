"""``torch.load`` of xla tensors and meshes: ``weights_only=True``, and ``map_location``.

torch moves storages. An xla tensor has none that C++ could fill: those that are to be on "xla" stay
on the CPU while the file is read, and the tensors made of them are moved, those of one storage as
views of one memory.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xla_dtensor.base import map_location as base
from xla_dtensor.base import torch_private
from xla_dtensor.base.torch_private.attributes import cpp_address, untyped_storage_of


def _rebuild_tensor(*arguments: Any) -> Any:
    from xla_dtensor.tensors.saving import rebuild_tensor

    return rebuild_tensor(*arguments)


def _rebuild_mesh(*arguments: Any) -> Any:
    from xla_dtensor.mesh.saving import rebuild_mesh

    return rebuild_mesh(*arguments)


def install() -> None:
    """Allow what files refer to, besides plain data, also by the names that it had first; hook
    where torch reads files. What we refer to takes long to import."""
    torch.serialization.add_safe_globals(
        [
            (_rebuild_tensor, "xla_dtensor.tensors.saving.rebuild_tensor"),
            (_rebuild_mesh, "xla_dtensor.mesh.saving.rebuild_mesh"),
            (_rebuild_tensor, "xla_dtensor._pickling.rebuild_tensor"),
            (_rebuild_mesh, "xla_dtensor._pickling.rebuild_mesh"),
        ]
    )
    for name, hooked in {
        "load_file": _hooked(torch_private.load_file),
        "load_legacy_file": _hooked_legacy(torch_private.load_legacy_file),
        "rebuild_tensor": _moving(torch_private.rebuild_tensor),
    }.items():
        torch_private.replace(name, hooked)


class _OnItsWay:
    """A storage whose values are to be on "xla".

    Attributes:
        tensors: by dtype, the first tensor made of it that is on "xla".
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage  # kept, so that no other one gets its address
        self.tensors: dict[torch.dtype, torch.Tensor] = {}


class _Moved(threading.local):
    """What the file that is being read has for "xla", by the addresses of the storages."""

    storages: dict[int, _OnItsWay] | None = None


_moved = _Moved()


def _hooked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(file: Any, map_location: Any, *args: Any, **kwargs: Any) -> Any:
        if map_location is None:
            return original(file, None, *args, **kwargs)
        place = _Place(map_location)
        with _placing(place):
            return original(file, place.argument, *args, **kwargs)

    return load


def _hooked_legacy(original: Callable[..., Any]) -> Callable[..., Any]:
    """In files of before torch 1.6 values come behind all tensors: what the first of them becomes
    on a device while they are read has none yet. A file of which something is to be on "xla" is
    read once more, over the storages that have been filled: torch asks for the same ones in the
    same order."""

    @functools.wraps(original)
    def load(file: Any, map_location: Any, *args: Any, **kwargs: Any) -> Any:
        place, begin = _Place(map_location), file.tell()
        storages: list[Any] = []
        is_late = False

        def first(storage: Any, location: str) -> Any:
            nonlocal is_late
            is_late |= place.is_xla(location)
            storages.append(place.restored(storage, location))
            return storages[-1]

        def on_cpu(location: str) -> torch.device:  # asked of xla tensors
            nonlocal is_late
            device = place.device_of(location)
            is_late |= device is None or device.type != "cpu"
            return torch.device("cpu")

        with base.loading(on_cpu):
            found = original(file, first, *args, **kwargs)
        if not is_late:
            return found
        file.seek(begin)
        filled = iter(storages)
        with _placing(place):
            again = lambda storage, location: place.moved(next(filled), location)
            return original(file, again, *args, **kwargs)

    return load


@contextlib.contextmanager
def _placing(place: _Place) -> Iterator[None]:
    """While a file is read."""
    before, _moved.storages = _moved.storages, {}
    try:
        with base.loading(place.device_of):
            yield
    finally:
        _moved.storages = before


class _Place:
    """What a ``map_location`` says.

    Attributes:
        argument: what torch is given in its place.
    """

    def __init__(self, map_location: Any) -> None:
        self._given = map_location
        if isinstance(map_location, bytes):
            self._given = map_location.decode()
        # Torch asks some of these what they are; all that name no xla device it gets as they are.
        mapped = self._given.values() if isinstance(self._given, dict) else [self._given]
        names_xla = any(not callable(each) and _is_xla(each) for each in mapped)
        self.argument = self._restore if names_xla else map_location

    def device_of(self, location: str) -> torch.device | None:
        given = self._given
        if given is None:
            return None
        if isinstance(given, dict):
            found = given.get(location, given.get(location.partition(":")[0]))
            return None if found is None else torch.device(found)
        if not callable(given):
            return torch.device(given)
        result = given(torch.UntypedStorage(0), location)
        return None if result is None else result.device

    def is_xla(self, location: str) -> bool:
        return not callable(self._given) and _is_xla(self.device_of(location))

    def restored(self, storage: Any, location: str) -> Any:
        """The storage where it is to be; on the CPU if what is made of it is to be on "xla"."""
        given = self._given
        if callable(given):
            result = given(storage, location)
            if result is not None:
                return result
        elif self.is_xla(location):
            return storage
        elif isinstance(given, dict):
            location = str(given.get(location, location))
        elif given is not None:
            location = str(given)
        return torch.serialization.default_restore_location(storage, location)

    def moved(self, storage: Any, location: str) -> Any:
        """A storage that is where it is to be; whether tensors made of it go on is noted."""
        if self.is_xla(location):
            assert _moved.storages is not None
            _moved.storages[cpp_address(storage)] = _OnItsWay(storage)
        return storage

    def _restore(self, storage: Any, location: str) -> Any:
        return self.moved(self.restored(storage, location), location)


def _is_xla(device: Any) -> bool:
    if device is None:
        return False
    device = torch.device(device)
    if device.type == "xla":
        from xla_dtensor.dispatch import refuse_other_device

        refuse_other_device("torch.load", device)
    return device.type == "xla"


def _moving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rebuild(storage: Any, offset: Any, size: Any, stride: Any) -> Any:
        entry = (_moved.storages or {}).get(cpp_address(untyped_storage_of(storage)))
        if entry is None:
            return original(storage, offset, size, stride)
        moved = entry.tensors.get(storage.dtype)
        numel = untyped_storage_of(storage).nbytes() // storage.dtype.itemsize
        whole = offset == 0 and torch.Size(size).numel() == numel and _is_dense(size, stride)
        with torch.no_grad():
            if moved is None:
                if not whole:
                    size_of_all, stride_of_all = (numel,), (1,)
                else:
                    size_of_all, stride_of_all = size, stride
                moved = original(storage, 0, size_of_all, stride_of_all).to("xla")
                entry.tensors[storage.dtype] = moved
                if whole:
                    return moved
            return moved.as_strided(size, stride, offset)

    return rebuild


def _is_dense(size: Any, stride: Any) -> bool:
    return torch.empty(size, device="meta").stride() == tuple(stride)
