"""Which input or operation the memory of each CPU tensor belongs to, while a step is traced."""

from __future__ import annotations

import bisect

import torch

from xla_dtensor.compilation.recorded.host_program import HostInput, Value
from xla_dtensor.compilation.trace.host_reads import is_on_host


class Memories:
    """Memory, and what gives a tensor with it. It is kept: an address may be used again."""

    def __init__(self) -> None:
        # By the memory's address: (storage, source of a tensor in it, that tensor's address).
        self._known: dict[int, tuple[torch.UntypedStorage, HostInput | Value, int]] = {}
        self._starts: list[int] = []

    def shows(self, tensor: torch.Tensor, source: HostInput | Value) -> None:
        """``source`` gives the memory of ``tensor``."""
        if not has_memory(tensor):
            return
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in self._known:
            bisect.insort(self._starts, start)
        elif self._known[start][0].data_ptr() == start:
            return
        self._known[start] = storage, source, tensor.data_ptr()

    def source_of(self, start: int) -> tuple[HostInput | Value, int] | None:
        """What gives the memory at an address, and where a tensor of that begins."""
        i = bisect.bisect_right(self._starts, start) - 1
        if i < 0:
            return None
        storage, source, first = self._known[self._starts[i]]
        begin = storage.data_ptr()
        inside = begin == self._starts[i] and start < begin + storage.nbytes()
        return (source, first) if inside else None


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is memory on the CPU in which the elements of ``tensor`` lie."""
    if tensor.layout is not torch.strided or tensor.is_nested or not is_on_host(tensor):
        return False
    try:
        return tensor.untyped_storage().nbytes() > 0
    except NotImplementedError:  # functorch's wrappers have no storage
        return False
