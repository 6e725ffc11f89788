"""Dim transforms for view ops: how each output dim comes from the input dims.

The transform of an output dim is one of

- ``InputDim(i)``              input dim ``i``, unchanged;
- ``Flatten((a, b, ...))``     several, row-major;
- ``Split(a, sizes, k)``       factor ``k`` of a dim (or of a `Flatten`) of size ``prod(sizes)``;
- ``Singleton()``              a new dim of size one;
- ``Broadcast(size)``          a dim of size one (or none) expanded to ``size``;
- ``Repeat(a, times)``         a dim tiled ``times`` times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = Sequence[int]


@dataclass(frozen=True)
class InputDim:
    dim: int


@dataclass(frozen=True)
class Flatten:
    dims: tuple[InputDim, ...]


@dataclass(frozen=True)
class Split:
    source: InputDim | Flatten
    sizes: tuple[int, ...]
    index: int


@dataclass(frozen=True)
class Singleton:
    pass


@dataclass(frozen=True)
class Broadcast:
    size: int


@dataclass(frozen=True)
class Repeat:
    source: InputDim
    times: int


Transform = InputDim | Flatten | Split | Singleton | Broadcast | Repeat
Transforms = tuple[Transform, ...]


def flatten(dims: Sequence[int]) -> InputDim | Flatten | Singleton:
    if not dims:
        return Singleton()
    if len(dims) == 1:
        return InputDim(dims[0])
    return Flatten(tuple(InputDim(d) for d in dims))


def split(source: InputDim | Flatten, sizes: Shape) -> list[Transform]:
    """The factors of `source`; those of size one are made, not split off."""
    real = tuple(n for n in sizes if n != 1)
    if len(real) <= 1:
        return [source if n != 1 else Singleton() for n in sizes]
    index = iter(range(len(real)))
    return [Split(source, real, next(index)) if n != 1 else Singleton() for n in sizes]


def reshape(in_shape: Shape, out_shape: Shape) -> Transforms:
    """Row-major reshape: the shortest runs of input and output dims with equal products.

    Dims of size one belong to no run: a sharded one is dropped, a new one is a `Singleton`.
    """
    result: list[Transform] = [Singleton()] * len(out_shape)
    if math.prod(in_shape) == 0:
        return _reshape_empty(in_shape, out_shape)
    ins = [d for d, n in enumerate(in_shape) if n != 1]
    outs = [d for d, n in enumerate(out_shape) if n != 1]
    i = o = 0
    while i < len(ins) and o < len(outs):
        first_in, first_out = i, o
        in_size, out_size = in_shape[ins[i]], out_shape[outs[o]]
        while in_size != out_size:
            if in_size < out_size:
                i += 1
                in_size *= in_shape[ins[i]]
            else:
                o += 1
                out_size *= out_shape[outs[o]]
        i, o = i + 1, o + 1
        source = flatten(ins[first_in:i])
        assert not isinstance(source, Singleton)
        run = outs[first_out:o]
        for d, transform in zip(run, split(source, [out_shape[d] for d in run]), strict=True):
            result[d] = transform
    return _keep_ones(result, in_shape, out_shape)


def _keep_ones(result: list[Transform], in_shape: Shape, out_shape: Shape) -> Transforms:
    """A dim of size one at the same place among the other dims is the same dim."""

    def ones(shape: Shape) -> dict[tuple[int, int], int]:
        places: dict[tuple[int, int], int] = {}
        before = run = 0
        for d, n in enumerate(shape):
            if n == 1:
                places[before, run] = d
                run += 1
            else:
                before, run = before * n if before else n, 0
        return places

    sources = ones(in_shape)
    for place, d in ones(out_shape).items():
        if place in sources:
            result[d] = InputDim(sources[place])
    return tuple(result)


def _reshape_empty(in_shape: Shape, out_shape: Shape) -> Transforms:
    """Without elements only equal leading dims correspond."""
    same = 0
    for a, b in zip(in_shape, out_shape, strict=False):
        if a != b:
            break
        same += 1
    rest: list[Transform] = [Broadcast(n) if n != 1 else Singleton() for n in out_shape[same:]]
    return (*(InputDim(d) for d in range(same)), *rest)


def permute(dims: Sequence[int]) -> Transforms:
    ndim = len(dims)
    return tuple(InputDim(d % ndim) for d in dims)


def transpose(ndim: int, dim0: int, dim1: int) -> Transforms:
    order = list(range(ndim))
    if ndim:
        dim0, dim1 = dim0 % ndim, dim1 % ndim
        order[dim0], order[dim1] = dim1, dim0
    return permute(order)


def movedim(ndim: int, source: Sequence[int], destination: Sequence[int]) -> Transforms:
    order = [d for d in range(ndim) if d not in {s % ndim for s in source}]
    for dst, src in sorted((d % ndim, s % ndim) for s, d in zip(source, destination, strict=True)):
        order.insert(dst, src)
    return permute(order)


def squeeze(in_shape: Shape, dims: Sequence[int] | None = None) -> Transforms:
    ndim = len(in_shape)
    candidates = range(ndim) if dims is None else {d % max(ndim, 1) for d in dims}
    dropped = {d for d in candidates if ndim and in_shape[d] == 1}
    return tuple(InputDim(d) for d in range(ndim) if d not in dropped)


def unsqueeze(ndim: int, dim: int) -> Transforms:
    dim = dim % (ndim + 1)
    dims: list[Transform] = [InputDim(d) for d in range(ndim)]
    return (*dims[:dim], Singleton(), *dims[dim:])


def expand(in_shape: Shape, out_shape: Shape) -> Transforms:
    new = len(out_shape) - len(in_shape)
    result: list[Transform] = []
    for d, size in enumerate(out_shape):
        if d < new:
            result.append(Singleton() if size == 1 else Broadcast(size))
        elif in_shape[d - new] == size or size == -1:
            result.append(InputDim(d - new))
        else:
            result.append(Broadcast(size))
    return tuple(result)


def repeat(ndim: int, times: Sequence[int]) -> Transforms:
    new = len(times) - ndim
    result: list[Transform] = []
    for d, n in enumerate(times):
        if d < new:
            result.append(Singleton() if n == 1 else Broadcast(n))
        else:
            result.append(InputDim(d - new) if n == 1 else Repeat(InputDim(d - new), n))
    return tuple(result)
