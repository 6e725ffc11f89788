"""``torch.load`` of xla tensors and meshes: ``weights_only=True``, and ``map_location``.

torch moves storages. An xla tensor has none that C++ could fill: those that are to be on "xla" stay
on the CPU while the file is read, and the tensors made of them are moved, those of one storage as
views of one memory.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base import map_location as base
from xla_dtensor.base import torch_private
from xla_dtensor.base.torch_private.attributes import cpp_address, untyped_storage_of
from xla_dtensor.errors import UnsupportedOpError


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
        "load_file": _hooked(torch_private.load_file, is_legacy=False),
        "load_legacy_file": _hooked(torch_private.load_legacy_file, is_legacy=True),
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


def _hooked(original: Callable[..., Any], is_legacy: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(file: Any, map_location: Any, *args: Any, **kwargs: Any) -> Any:
        if map_location is None:
            return original(file, None, *args, **kwargs)
        place = _Place(map_location)
        before, _moved.storages = _moved.storages, {}
        try:
            with base.loading(place.device_of):
                # There the values come behind all tensors: what `_moving` would copy to the devices
                # has not been read yet.
                if is_legacy and place.is_xla("cpu"):
                    raise UnsupportedOpError(
                        f"torch.load(map_location={map_location!r}) of a file in the format of "
                        "before torch 1.6: load it with map_location='cpu', and move what is in it"
                    )
                return original(file, place.argument, *args, **kwargs)
        finally:
            _moved.storages = before

    return load


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
        if isinstance(given, dict):
            found = given.get(location, given.get(location.partition(":")[0]))
            return None if found is None else torch.device(found)
        if not callable(given):
            return torch.device(given)
        result = given(torch.UntypedStorage(0), location)
        return None if result is None else result.device

    def is_xla(self, location: str) -> bool:
        return not callable(self._given) and _is_xla(self.device_of(location))

    def _restore(self, storage: Any, location: str) -> Any:
        if self.is_xla(location):
            assert _moved.storages is not None
            _moved.storages[cpp_address(storage)] = _OnItsWay(storage)
            return storage
        given = self._given.get(location, location) if isinstance(self._given, dict) else location
        return torch.serialization.default_restore_location(storage, str(given))


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
