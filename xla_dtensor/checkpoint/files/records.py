"""Reads parts of tensors from a checkpoint's files: only the bytes that are wanted.

``torch.distributed.checkpoint`` writes each shard as ``torch.save`` does, one after another: a zip
archive, uncompressed, in which the values lie in one piece. torch reads a shard whole for each part
of it that is wanted.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from xla_dtensor.errors import CheckpointError

BLOCK = 8 * 2**20
"""The most bytes that are read at once into memory of our own."""

# Single stretches are worth it if they are this long, or less than half of all bytes are wanted.
_STRETCH = 256 * 2**10
_LEAST = 4096


class Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._offset + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's values lie in a file.

    Attributes:
        begin: the position of its first element, in bytes.
        dtype, sizes, strides: as torch's; strides in elements.
    """

    begin: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class _Values:
    """What a pickle says of a storage."""

    dtype: torch.dtype
    key: str
    numel: int


_TYPES = {
    f"{dtype}".removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


class _Unpickler(pickle.Unpickler):
    """Makes a `StoredTensor`'s parts of the pickle of one plain tensor, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _parts_v2 if name.endswith("v2") else _parts_v3
        if module == "collections" and name == "OrderedDict":
            return dict
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _TYPES:
            return _TYPES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> _Values:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it refers to {pid!r}")
        return _Values(dtype, str(key), int(numel))


def _parts_v2(storage: _Values, offset: int, size: Any, stride: Any, *_: Any) -> tuple[Any, ...]:
    return storage, storage.dtype, offset, tuple(size), tuple(stride)


def _parts_v3(storage: _Values, offset: int, size: Any, stride: Any, *rest: Any) -> tuple[Any, ...]:
    _, _, dtype, *_ = rest
    return storage, dtype, offset, tuple(size), tuple(stride)


def stored_tensor(file: BinaryIO, offset: int, length: int) -> StoredTensor:
    """Where the values of the tensor lie that ``torch.save`` has written to a part of ``file``.

    Raises:
        CheckpointError: it is damaged, or no plain tensor; it doesn't say of which file.
    """
    try:
        with zipfile.ZipFile(Window(file, offset, length)) as archive:
            entries = {name.partition("/")[2]: name for name in archive.namelist()}
            info = archive.getinfo(entries["data.pkl"])
            if info.file_size > length:
                raise CheckpointError("its pickle is larger than itself")
            pickled = archive.read(info)
            found = _Unpickler(io.BytesIO(pickled)).load()
            storage, dtype, first, sizes, strides = found
            info = archive.getinfo(entries[f"data/{storage.key}"])
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive or pickle raises anything
        raise CheckpointError(f"no tensor ({type(error).__name__}: {error})") from error
    numbers = (first, *sizes, *strides)
    if not all(type(n) is int and n >= 0 for n in numbers) or len(sizes) != len(strides):
        raise CheckpointError(f"a tensor of sizes {sizes} and strides {strides} from {first}")
    file.seek(offset + info.header_offset)
    header = file.read(30)
    if len(header) != 30 or info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError("its values aren't stored plainly")
    # By the entry's own header: torch pads its extra field so that values are aligned, and the
    # archive's directory, which `zipfile` reads, doesn't say by how much.
    names = sum(struct.unpack("<26xHH", header))
    begin = info.header_offset + 30 + names
    last = first + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    end = 0 if 0 in sizes else (last + 1) * dtype.itemsize
    if end > info.file_size or begin + info.file_size > length:
        raise CheckpointError(
            f"a tensor of sizes {sizes} with {dtype} needs {end} bytes, and has {info.file_size}"
        )
    return StoredTensor(offset + begin + first * dtype.itemsize, dtype, sizes, strides)


@dataclass(frozen=True)
class StoredBox:
    """A box of a stored tensor that is wanted.

    Attributes:
        offsets: where it begins in the stored tensor, per dim.
        target: the CPU tensor that gets it; its shape is the box's.
    """

    offsets: tuple[int, ...]
    target: torch.Tensor


def read_parts(file: BinaryIO, stored: StoredTensor, parts: Sequence[StoredBox]) -> None:
    """Read boxes of a stored tensor, in another dtype where the targets have one.

    Raises:
        CheckpointError: the file ends before; it doesn't say which file.
    """
    parts = [part for part in parts if part.target.numel()]
    if not parts:
        return
    # Its dims in the order in which the values lie.
    order = sorted(range(len(stored.sizes)), key=lambda d: -stored.strides[d])
    sizes = [stored.sizes[d] for d in order]
    steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    if any(
        n > 1 and stored.strides[d] != step for d, n, step in zip(order, sizes, steps, strict=True)
    ):
        _read_with_gaps(file, stored, parts)
        return
    boxes = [
        StoredBox(
            tuple(p.offsets[d] for d in order), p.target.permute(order) if order else p.target
        )
        for p in parts
    ]
    if not order:
        _fill(boxes[0].target, _read(file, stored, 0, 1))
        for other in boxes[1:]:
            other.target.copy_(boxes[0].target)
        return
    reader = _Reader(file, stored, sizes, steps)
    if reader.is_sparse(boxes):
        for box in boxes:
            reader.read_stretches(box)
    else:
        reader.read_rows(boxes)


class _Reader:
    """Reads boxes of a tensor whose values lie row-major."""

    def __init__(
        self, file: BinaryIO, stored: StoredTensor, sizes: list[int], steps: list[int]
    ) -> None:
        self._file, self._stored, self._sizes, self._steps = file, stored, sizes, steps
        self._itemsize = stored.dtype.itemsize

    def is_sparse(self, boxes: list[StoredBox]) -> bool:
        """Whether to read stretch by stretch, and not all rows in which anything is wanted."""
        stretches = [self._stretch(box) * self._itemsize for box in boxes]
        if min(stretches) >= _STRETCH:
            return True
        first, last = self._rows(boxes)
        wanted = sum(box.target.numel() for box in boxes)
        return min(stretches) >= _LEAST and 2 * wanted < (last - first) * self._steps[0]

    def _stretch(self, box: StoredBox) -> int:
        """How many elements of a box lie next to one another."""
        count = 1
        for n, size in zip(reversed(box.target.shape), reversed(self._sizes), strict=True):
            count *= n
            if n != size:
                break
        return count

    def _rows(self, boxes: list[StoredBox]) -> tuple[int, int]:
        first = min(box.offsets[0] for box in boxes)
        return first, max(box.offsets[0] + box.target.shape[0] for box in boxes)

    def read_stretches(self, box: StoredBox) -> None:
        """Each stretch by itself, straight to where it is wanted if that lies likewise."""
        shape = box.target.shape
        dim = len(shape)
        while dim and shape[dim - 1] == self._sizes[dim - 1]:
            dim -= 1
        dim = max(dim - 1, 0)  # the dim that a stretch begins in
        for outer in _positions(shape[:dim]):
            start = sum(
                (o + i) * step
                for o, i, step in zip(box.offsets[:dim], outer, self._steps[:dim], strict=True)
            )
            target = box.target[outer] if outer else box.target
            step = self._steps[dim]
            start += box.offsets[dim] * step
            if target.dtype == self._stored.dtype and target.is_contiguous():
                _read_into(self._file, self._at(start), target)
                continue
            rows = max(1, BLOCK // (step * self._itemsize))
            for row in range(0, shape[dim], rows):
                some = target[row : row + rows]
                data = _read(self._file, self._stored, start + row * step, some.numel())
                _fill(some, data)

    def read_rows(self, boxes: list[StoredBox]) -> None:
        """Whole rows in blocks, and of each block what is wanted: columns of a few bytes are not
        worth a read each."""
        first, last = self._rows(boxes)
        step = self._steps[0]
        if step * self._itemsize > BLOCK and self._sizes[0] > 1:
            self._read_rows_apart(boxes, first, last)
            return
        rows = max(1, BLOCK // max(step * self._itemsize, 1))
        for row in range(first, last, rows):
            stop = min(row + rows, last)
            inside = [_overlap(box, row, stop) for box in boxes]
            if not any(inside):
                continue
            data = _read(self._file, self._stored, row * step, (stop - row) * step)
            block = data.view(stop - row, *self._sizes[1:])
            for found in inside:
                if found is not None:
                    part, at = found
                    _fill(part.target, block[_box((at, *part.offsets[1:]), part.target.shape)])

    def _read_rows_apart(self, boxes: list[StoredBox], first: int, last: int) -> None:
        for row in range(first, last):
            inside = [found for box in boxes if (found := _overlap(box, row, row + 1))]
            if inside:
                inner = StoredTensor(
                    self._at(row * self._steps[0]),
                    self._stored.dtype,
                    tuple(self._sizes[1:]),
                    tuple(self._steps[1:]),
                )
                parts = [StoredBox(part.offsets[1:], part.target[0]) for part, _ in inside]
                read_parts(self._file, inner, parts)

    def _at(self, element: int) -> int:
        return self._stored.begin + element * self._itemsize


def _overlap(box: StoredBox, first: int, stop: int) -> tuple[StoredBox, int] | None:
    """What of a box lies in rows ``first`` to ``stop``, and at which of them it begins."""
    begin = max(box.offsets[0], first)
    end = min(box.offsets[0] + box.target.shape[0], stop)
    if begin >= end:
        return None
    target = box.target[begin - box.offsets[0] : end - box.offsets[0]]
    return StoredBox((begin, *box.offsets[1:]), target), begin - first


def _positions(shape: Sequence[int]) -> Any:
    """All indices of a shape, in order."""
    if not shape:
        return [()]
    return ((i, *rest) for i in range(shape[0]) for rest in _positions(shape[1:]))


def _read_with_gaps(file: BinaryIO, stored: StoredTensor, parts: Sequence[StoredBox]) -> None:
    """Of a tensor whose values lie apart, or several at one place: everything in between, too."""
    last = sum((n - 1) * step for n, step in zip(stored.sizes, stored.strides, strict=True))
    data = _read(file, stored, 0, last + 1).as_strided(stored.sizes, stored.strides)
    for part in parts:
        _fill(part.target, data[_box(part.offsets, part.target.shape)])


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # whatever the strides of dims of one element
    return memoryview(flat.view(torch.uint8).numpy())


def _fill(target: torch.Tensor, value: torch.Tensor) -> None:
    target.copy_(value.reshape(target.shape))


def _read(file: BinaryIO, stored: StoredTensor, first: int, count: int) -> torch.Tensor:
    """``count`` elements from the element ``first`` on, in one dim."""
    result = torch.empty(count, dtype=stored.dtype)
    _read_into(file, stored.begin + first * stored.dtype.itemsize, result)
    return result


def _read_into(file: BinaryIO, position: int, target: torch.Tensor) -> None:
    view = bytes_of(target)
    file.seek(position)
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"the file ends at {position}, {len(view)} bytes too early")
        position, view = position + count, view[count:]
