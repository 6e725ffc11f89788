"""torch's storages of xla tensors: which tensors share memory, and how many bytes.

Libraries that save models find shared weights by it (safetensors, huggingface_hub). There is no
address: a ``jax.Array`` is replaced by each write, and may lie on many devices. So a number stands
for the memory, and whatever would read at that address, or write there, raises.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from xla_dtensor.base import executor
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.views import CrossingStep

if TYPE_CHECKING:
    from xla_dtensor.forms.storage import Storage

_lock = threading.Lock()
# Far from all addresses that programs have. It grows by the size of what has got a number.
_next_address = 1 << 62


class DeviceMemory(torch.UntypedStorage):
    """The memory of a tensor and its views; of what devices hold of it, one device's part.

    ``data_ptr()`` is the same number as long as the tensor exists, and no other tensor's.
    """

    _address: int
    _full: int
    _of: Callable[[], Storage | None]

    # Without memory: torch then knows a size.
    @staticmethod
    def __new__(cls: Any, nbytes: int, address: int, storage: Storage) -> Any:
        memory = torch.UntypedStorage.__new__(cls, nbytes, device="meta")
        memory._address = address
        memory._full = nbytes
        memory._of = weakref.ref(storage)  # which holds this
        return memory

    def __init__(self, nbytes: int, address: int, storage: Storage) -> None:
        """Everything happens in ``__new__``."""

    @property
    def device(self) -> torch.device:
        return torch.device("xla:0")

    def data_ptr(self) -> int:
        executor.current().not_in_step(
            "data_ptr() in a compiled step: another tensor of the next call would have another "
            "one; compare tensors with `is`, or ask before the step"
        )
        return self._address

    def nbytes(self) -> int:
        storage = self._of()
        return 0 if storage is not None and storage.is_given_back else self._full

    size = nbytes

    def resize_(self, size: int) -> torch.UntypedStorage:
        """To 0 gives the memory back, although there are tensors that see it: memory is saved so
        where values are computed again. To what it was makes it zeros, where torch leaves it to
        chance.

        Raises:
            UnsupportedOpError: any other size, or in a compiled step.
        """
        executor.current().not_in_step(
            "storage.resize_() in a compiled step, whose memory is XLA's: it gives back what isn't "
            "used any more by itself, and torch.utils.checkpoint computes values again"
        )
        storage = self._of()
        if storage is None:
            raise RuntimeError("resize_ of a storage whose tensors are gone")
        if size not in (0, self._full):
            raise UnsupportedOpError(
                f"resize_ of an xla tensor's storage of {self._full} bytes to {size}: only to 0, "
                f"which gives its memory back, or to what it was; tensor.resize_ has other sizes"
            )
        if size == self._full == 0:
            pass
        elif size == 0 and not storage.is_given_back:
            storage.give_back()
        elif size and storage.is_given_back:
            storage.refill()
        return self

    def __repr__(self) -> str:
        return f"DeviceMemory({self.nbytes()} bytes)"

    def __str__(self) -> str:
        return repr(self)


# What neither reads nor writes memory. Every other method of torch's class is refused, those that a
# later torch adds, too.
_KEPT = {
    *("element_size", "untyped", "get_device", "is_shared", "is_pinned"),
    *("resizable", "type", "_weak_ref", "_free_weak_ref", "_fix_weakref", "_expired"),
    *("_shared_incref", "_shared_decref", "_new_with_weak_ptr", "_get_filename"),
}
_REFUSED = {
    *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__"),
    *("__copy__", "__deepcopy__", "__reduce__"),
}


def _refuse(name: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedOpError(
            f"{name} of an xla tensor's storage: the memory of xla tensors is a jax.Array, which "
            "torch's storages don't show; use the tensor (.cpu(), .copy_(), torch.save)"
        )

    return refused


for _name in dir(torch.UntypedStorage):
    if _name in _REFUSED or (
        not _name.startswith("__")
        and _name not in _KEPT
        and _name not in vars(DeviceMemory)
        and callable(getattr(torch.UntypedStorage, _name))
    ):
        setattr(DeviceMemory, _name, _refuse(_name))


def _memory_of(tensor: Any) -> DeviceMemory:
    """The same one for a tensor and its views."""
    global _next_address
    storage, steps = tensor._storage_, tensor._steps
    # What devices hold of a part of a sharded tensor is, as in torch, a part of what they have.
    own = steps and isinstance(steps[0], CrossingStep)
    form = steps[0].target if own else storage.form
    nbytes = math.prod(form.shape) * form.dtype.itemsize
    with _lock:
        known: dict[int, DeviceMemory] = getattr(storage, "memories", None) or {}
        memory = known.get(nbytes)
        if memory is None:
            if known:
                address = next(iter(known.values()))._address
            elif form.meta or not nbytes:
                address = 0
            else:
                address = _next_address
                _next_address += -(-nbytes // 64) * 64 + 64
            memory = known[nbytes] = DeviceMemory(nbytes, address, storage)
            storage.memories = known
    return memory


class HasMemory:
    """The methods of tensors that tell of their memory."""

    def untyped_storage(self) -> torch.UntypedStorage:
        """What stands for the tensor's memory: the same object for a tensor and its views. Its
        ``data_ptr()`` and ``nbytes()`` tell who shares memory, and how much; of a sharded tensor
        the whole one's, of what devices hold of it (``to_local()``) one device's.

        Returns:
            a storage without data: whatever reads or writes it raises `UnsupportedOpError`.

        Example::

            import torch, xla_dtensor as xd

            x = torch.ones(4, 4, device="xla")
            assert x[1].untyped_storage() is x.untyped_storage()
            assert x.untyped_storage().nbytes() == 64
        """
        return _memory_of(self)

    def data_ptr(self) -> int:
        """A number that tells where a tensor begins in the memory that it shares with others. It
        is no address.

        Returns:
            that of the storage, and the bytes before the tensor's first element; 0 if it has none.

        Raises:
            UnsupportedOpError: in a compiled step.

        Example::

            import torch, xla_dtensor as xd

            x = torch.ones(4, 4, device="xla")
            assert x[1].data_ptr() == x.data_ptr() + 16
            assert x.data_ptr() != torch.ones(4, 4, device="xla").data_ptr()
        """
        start = _memory_of(self).data_ptr()
        form = self._form  # type: ignore[attr-defined]
        return start + form.offset * form.dtype.itemsize if start else 0
