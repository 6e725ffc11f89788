"""Stand-ins for xla tensors that ``torch.distributed.checkpoint`` saves from and loads into.

Its planners ask a DTensor for the one shard of the calling rank. One process here has all of them
(or several). So they get a tensor that is no DTensor and offers torch's protocol for tensors with
several local shards (``torch.distributed._checkpointable``): any planner, storage and version that
keeps to it works as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from xla_dtensor.base.torch_private import disabled_torch_function, make_wrapper_subclass
from xla_dtensor.checkpoint.shards import (
    Chunk,
    LoadedTensor,
    Own,
    check_whole,
    host_value,
    own_chunks,
)
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.tensors.of_form import Ours, is_ours

Path = tuple[str | int, ...]


class StandIn(torch.Tensor):
    """A tensor in a checkpoint's eyes: size, dtype and the chunks of this process.

    It has no values of its own, and no operation takes it.

    Attributes:
        own: the chunks.
    """

    own: Own

    @staticmethod
    def __new__(cls: Any, own: Own, dtype: torch.dtype, *_: Any) -> Any:
        result = make_wrapper_subclass(cls, own.size, dtype=dtype, device="cpu")
        result.own = own
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedOpError(
            f"{func}: what stands for an xla tensor in a checkpoint has shards and no operations; "
            "a planner or storage that computes does so with what resolve_data(item) and "
            "resolve_tensor(item) give"
        )

    __torch_function__ = disabled_torch_function

    def __init__(self, *_: Any) -> None:
        """Everything happens in ``__new__``."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {list(self.own.chunks)})"

    def __create_chunk_list__(self) -> list[Any]:
        return [_metadata_of(chunk) for chunk in self.own.chunks if chunk.numel or not self.numel()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        properties = TensorProperties(dtype=self.dtype, requires_grad=self.requires_grad)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_metadata_of(chunk), properties=properties, size=self.size()
                ),
            )
            for chunk in self.own.chunks
        ]

    def _chunk_at(self, index: Any) -> Chunk:
        offsets = tuple(index.offset) if index.offset is not None else (0,) * self.ndim
        for chunk in self.own.chunks:
            if chunk.offsets == offsets:
                return chunk
        raise ValueError(f"{index.fqn}: this process has no shard at {list(offsets)}")


class Departing(StandIn):
    """A tensor that is saved; its shards are copied to the host one by one, when asked for.

    Args:
        own, dtype: see `StandIn`.
        read: the value of a chunk on the host.
    """

    def __init__(self, own: Own, dtype: torch.dtype, read: Callable[[Chunk], torch.Tensor]) -> None:
        self._read = read

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._read(self._chunk_at(index))

    def whole(self) -> torch.Tensor:
        """All of the value on the host."""
        result = torch.empty(self.own.size, dtype=self.dtype)
        for chunk in self.own.chunks:
            result[chunk.box] = self._read(chunk)
        return result

    def staged(self) -> Departing:
        """The same with copies of the values: they stay, whatever is written to the tensor."""
        values = {chunk: self._read(chunk) for chunk in self.own.chunks}
        own = Own(self.own.size, {chunk: [] for chunk in values}, [], ())
        return Departing(own, self.dtype, values.__getitem__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = [(chunk.offsets, self._read(chunk)) for chunk in self.own.chunks]
        return _rebuilt, (tuple(self.own.size), self.dtype, values)


class Arriving(StandIn):
    """A tensor that is loaded: its shards are memory of the host until they are `loaded`."""

    def __init__(self, own: Own, dtype: torch.dtype, loaded: LoadedTensor) -> None:
        self.loaded = loaded

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.loaded.buffer(self._chunk_at(index))


class Staged:
    """A `Departing` tensor that has been copied, on its way through torch's stagers, which copy
    what they know as a tensor and leave this as it is."""

    def __init__(self, tensor: Departing) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: Any) -> Staged:
        return self

    def __copy__(self) -> Staged:
        return self


def departing(tensor: Ours, path: Path) -> Departing:
    """What is saved of a tensor.

    Raises:
        UnsupportedOpError: a reduction of it is pending.
    """
    check_whole(tensor, f"saving {_name(path)!r} to a checkpoint")
    if tensor._form.meta:
        raise UnsupportedOpError(
            f"saving {_name(path)!r} to a checkpoint: it is on the meta device, and has no values"
        )
    tensor = tensor.detach()
    own = own_chunks(tensor._form)
    return Departing(own, tensor.dtype, lambda chunk: host_value(tensor, own, chunk))


def saved(tensor: Ours | Staged, path: Path) -> Departing:
    """What is saved of a tensor, or of what `staged` has made of it."""
    return tensor.tensor if isinstance(tensor, Staged) else departing(tensor, path)


def saved_whole(tensor: Ours | Staged, path: Path) -> Departing:
    """The same with one shard, all of the tensor: for storages that keep one for each name."""
    parts = saved(tensor, path)
    box = Chunk((0,) * parts.ndim, tuple(parts.size()))
    own = Own(box.sizes, {box: []}, [], ())
    return Departing(own, parts.dtype, lambda _: parts.whole())


def staged(tensor: Ours | Staged, path: Path) -> Staged:
    """A copy of a tensor's shards on the host, to be saved later."""
    return tensor if isinstance(tensor, Staged) else Staged(departing(tensor, path).staged())


def arriving(tensor: Ours | Staged, path: Path) -> Arriving:
    """What is loaded into a tensor.

    Raises:
        UnsupportedOpError: a reduction of it is pending, or it refuses writes.
    """
    if isinstance(tensor, Staged):
        raise UnsupportedOpError(f"loading {_name(path)!r}: it was staged for saving")
    check_whole(tensor, f"loading {_name(path)!r} from a checkpoint")
    tensor._storage_.check_write()
    loaded = LoadedTensor(tensor)
    return Arriving(loaded.own, tensor.dtype, loaded)


# As torch's planners do, all of these go into mappings and lists, and not into tuples: a tuple is
# pickled as it is, with the tensors in it as `torch.save` has them.


def has_ours(state: Any) -> bool:
    """Whether there is an xla tensor in nested mappings and lists."""
    if isinstance(state, Mapping):
        return any(map(has_ours, state.values()))
    if isinstance(state, list):
        return any(map(has_ours, state))
    return is_ours(state) or isinstance(state, Staged)


def replaced(state: Any, function: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """A copy of nested mappings and lists with something else for each xla tensor; what has none in
    it is itself.

    Args:
        state: what torch.distributed.checkpoint calls a state dict.
        function: is given a tensor and where it is.
    """
    if is_ours(state) or isinstance(state, Staged):
        return function(state, path)
    if not has_ours(state):
        return state
    if isinstance(state, Mapping):
        return {key: replaced(value, function, (*path, key)) for key, value in state.items()}
    return [replaced(value, function, (*path, i)) for i, value in enumerate(state)]


def refuse_tuples(state: Any, path: Path = ()) -> None:
    """Raise if there are xla tensors in tuples: torch's stagers would copy them as plain ones.

    Raises:
        UnsupportedOpError: there are.
    """
    if isinstance(state, tuple) and has_ours(list(state)):
        raise UnsupportedOpError(
            f"async_save: {_name(path)!r} is a tuple with xla tensors in it, which would be pickled"
            " whole; make it a list or dict"
        )
    if isinstance(state, Mapping | list | tuple):
        items = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, value in items:
            refuse_tuples(value, (*path, key))


def taken_back(state: Any, loaded: Any) -> None:
    """Put what was loaded into ``state``, of which ``loaded`` is the copy that `replaced` made."""
    items = loaded.items() if isinstance(loaded, Mapping) else enumerate(loaded)
    for key, new in items:
        old = state.get(key) if isinstance(state, Mapping) else state[key]
        if isinstance(new, Arriving):
            new = new.loaded.tensor
        elif has_ours(old):
            taken_back(old, new)
            continue
        if new is old:
            continue
        if not isinstance(state, MutableMapping | list):
            raise TypeError(
                f"loading a checkpoint into a {type(state).__name__}: its entry {key!r} can't be "
                "set; give it as a dict"
            )
        state[key] = new


def arriving_in(state: Any) -> list[Arriving]:
    """The stand-ins in what `replaced` has made."""
    if isinstance(state, Arriving):
        return [state]
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, list):
        return [found for value in state for found in arriving_in(value)]
    return []


def _metadata_of(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def _rebuilt(
    size: tuple[int, ...], dtype: torch.dtype, values: list[tuple[tuple[int, ...], torch.Tensor]]
) -> Departing:
    held = {Chunk(tuple(offsets), tuple(value.shape)): value for offsets, value in values}
    return Departing(Own(size, {chunk: [] for chunk in held}, [], ()), dtype, held.__getitem__)


def _name(path: Path) -> str:
    return ".".join(map(str, path))
