"""Copies parts of arrays from the devices that have them to those that are to have them.

A device's part of a tensor is a box. What it needs of a source is cut into boxes that one device of
the source has; each is sliced there, sent, and written where it belongs. These are programs of one
device each, which XLA's partitioner has no part in, and nothing is gathered anywhere. XLA says how
much memory each takes beside its operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.forms.form import Form
from xla_dtensor.weights.recipes import Places

Box = tuple[tuple[int, int], ...]


class _Program(NamedTuple):
    """A program of one device.

    Attributes:
        run: the executable.
        bytes: what it takes beside its operands, as XLA says.
    """

    run: Any
    bytes: int


_programs: Cache[Any, _Program] = Cache("copies of weights", 1024)


class _Held(NamedTuple):
    """A part of a source.

    Attributes:
        box: which.
        data: a ``jax.Array`` of one device, or NumPy's.
    """

    box: Box
    data: Any


class WeightSource:
    """An array that is read.

    Args:
        array: in physical form, padded; or NumPy's.
    """

    def __init__(self, array: Any) -> None:
        self.dtype = np.dtype(array.dtype)
        self._parts: dict[Box, list[Any]] = {}
        if isinstance(array, np.ndarray):
            self._parts[tuple((0, n) for n in array.shape)] = [array]
            return
        for shard in array.addressable_shards:
            self._parts.setdefault(_box(shard.index, array.shape), []).append(shard.data)

    def held(self, device: Any, turn: int) -> list[_Held]:
        """All of it: of each part the copy of ``device`` if it has one, else one copy by turns."""
        found = []
        for box, copies in self._parts.items():
            own = [c for c in copies if getattr(c, "device", None) == device]
            found.append(_Held(box, own[0] if own else copies[turn % len(copies)]))
        return found


class Moves:
    """Copies with a bound of memory.

    Args:
        limit: how many bytes a device may take beside what it has and is to have; None: no bound.

    Attributes:
        bytes: the most that a program took.
        count: how many boxes were copied.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit, self.bytes, self.count = limit, 0, 0
        self._sent = 0  # bytes since it was waited for what was sent

    def build(self, places: Places, sources: Sequence[WeightSource], form: Form) -> Any:
        """The array in ``form`` of what ``places`` says.

        Args:
            sources: in the order of ``places.sources``.
        """
        shape, sharding = form.array_shape, form.sharding
        runs, buffers = places.runs(), []
        by_name = dict(zip(places.sources, sources, strict=True))
        indices = sharding.addressable_devices_indices_map(shape)
        for turn, (device, index) in enumerate(indices.items()):
            box = _box(index, shape)
            wanted = _common(box, tuple((0, n) for n in form.shape))
            buffer = None
            if wanted is not None:
                for at, source, of in _needed(places.dim, runs, by_name, wanted):
                    buffer = self._copied(buffer, box, at, source, of, device, turn, form.jax_dtype)
            if buffer is None:
                buffer = _zeros(_sizes(box), form.jax_dtype, device)
            buffers.append(buffer)
        return jax.make_array_from_single_device_arrays(
            shape, sharding, buffers, dtype=form.jax_dtype
        )

    def _copied(
        self,
        buffer: Any,
        box: Box,
        at: Box,
        source: WeightSource,
        of: Box,
        device: Any,
        turn: int,
        to: Any,
    ) -> Any:
        """``buffer``, the part ``box`` of the target, with what is ``of`` the source put ``at``."""
        for held in source.held(device, turn):
            common = _common(of, held.box)
            for piece in [] if common is None else self._pieces(common, to):
                place = tuple(
                    (a + p - o, a + q - o)
                    for (a, _), (o, _), (p, q) in zip(at, of, piece, strict=True)
                )
                sent = self._sent_to(device, held, piece, to)
                if place == box:
                    buffer = sent
                else:
                    buffer = _zeros(_sizes(box), to, device) if buffer is None else buffer
                    buffer = self._run("put", (buffer, sent), device, (), _starts(place, box))
                self._wait(buffer, sent)
        return buffer

    def _sent_to(self, device: Any, held: _Held, piece: Box, to: Any) -> Any:
        self.count += 1
        if isinstance(held.data, np.ndarray):
            index = tuple(slice(*_relative(p, h)) for p, h in zip(piece, held.box, strict=True))
            return jax.device_put(held.data[index].astype(to), device)
        sizes, starts = _sizes(piece), _starts(piece, held.box)
        # A copy in any case: two arrays in one memory are no two weights.
        cut = self._run("take", (held.data,), held.data.device, (sizes, to), starts)
        return jax.device_put(cut, device)

    def _run(self, kind: str, arrays: Any, device: Any, how: Any, starts: np.ndarray) -> Any:
        key = kind, device, how, *((x.shape, x.dtype) for x in arrays)
        program = _programs.get_or_make(key, lambda: _compiled(kind, arrays, device, how))
        if self.limit is not None and program.bytes > self.limit:
            raise ValueError(
                f"transfer: XLA needs {program.bytes} bytes on a device for one piece, more than "
                f"limit={self.limit}"
            )
        self.bytes = max(self.bytes, program.bytes)
        return program.run(*arrays, starts)

    def _pieces(self, box: Box, dtype: Any) -> Iterator[Box]:
        """Boxes of ``box``, none with more bytes than the limit."""
        sizes = _sizes(box)
        nbytes = math.prod(sizes) * dtype.itemsize
        if nbytes == 0:
            return
        if self.limit is None or nbytes <= self.limit:
            yield box
            return
        dim = next((d for d, n in enumerate(sizes) if n > 1), None)
        if dim is None:
            raise ValueError(f"transfer: limit={self.limit} is less than one element")
        rows = max(1, self.limit // (nbytes // sizes[dim]))
        begin, end = box[dim]
        for start in range(begin, end, rows):
            part = (*box[:dim], (start, min(start + rows, end)), *box[dim + 1 :])
            yield from self._pieces(part, dtype)

    def _wait(self, buffer: Any, sent: Any) -> None:
        """Let not more than the limit be on its way."""
        if self.limit is not None:
            self._sent += sent.nbytes
            if self._sent + sent.nbytes > self.limit:
                buffer.block_until_ready()
                self._sent = 0


def _compiled(kind: str, arrays: Any, device: Any, how: Any) -> _Program:
    def take(array: Any, starts: Any) -> Any:
        sizes, dtype = how
        return _sliced(array, starts, sizes).astype(dtype)

    def put(buffer: Any, part: Any, starts: Any) -> Any:
        return jax.lax.dynamic_update_slice(buffer, part, list(starts))

    there = SingleDeviceSharding(device)
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in arrays]
    starts = jax.ShapeDtypeStruct((arrays[0].ndim,), np.int32)
    jitted = jax.jit(put, donate_argnums=0) if kind == "put" else jax.jit(take)
    with jax.enable_x64(True):
        compiled = jitted.lower(*operands, starts).compile()
    said = compiled.memory_analysis()
    nbytes = said.output_size_in_bytes + said.temp_size_in_bytes - said.alias_size_in_bytes
    return _Program(compiled, nbytes)


def _sliced(array: Any, starts: Any, sizes: Any) -> Any:
    return jax.lax.dynamic_slice(array, list(starts), sizes) if sizes else jnp.copy(array)


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    with jax.enable_x64(True):
        return jnp.zeros(shape, dtype, device=device)


def _needed(
    dim: int, runs: Any, sources: dict[str, WeightSource], wanted: Box
) -> Iterator[tuple[Box, WeightSource, Box]]:
    """What the box ``wanted`` consists of: where in the target, of which source, where in that."""
    if not wanted:  # a scalar
        yield (), sources[runs[0].source], ()
        return
    begin, end = wanted[dim]
    for run in runs:
        first, last = max(begin, run.start), min(end, run.start + run.length)
        if first < last:
            shift = run.at - run.start
            at = (*wanted[:dim], (first, last), *wanted[dim + 1 :])
            of = (*wanted[:dim], (first + shift, last + shift), *wanted[dim + 1 :])
            yield at, sources[run.source], of


def _box(index: Any, shape: Sequence[int]) -> Box:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _common(a: Box, b: Box) -> Box | None:
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(p < q for p, q in both) else None


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(q - p for p, q in box)


def _relative(part: tuple[int, int], whole: tuple[int, int]) -> tuple[int, int]:
    return part[0] - whole[0], part[1] - whole[0]


def _starts(part: Box, whole: Box) -> np.ndarray:
    pairs = zip(part, whole, strict=True)
    return np.array([_relative(p, w)[0] for p, w in pairs], np.int32)
