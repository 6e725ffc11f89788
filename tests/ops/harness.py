"""Runs an op on sharded tensors and compares all there is to see of it with CPU torch.

A `Case` is an op with its inputs, whose shapes are written with letters: ``f("m k")``. Each letter
has an even size, which every mesh divides, and an uneven one (`SIZES`), so that one case stands for
two sets of inputs. `check_case` runs it with the layouts that `layouts` picks for a mesh.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from xla_dtensor.mesh import normalize_placements

# Letter -> (even size, uneven size). Uneven: no multiple of any mesh dim, or smaller than it.
SIZES = {
    "m": (8, 10),
    "n": (16, 6),
    "k": (8, 3),
    "b": (8, 3),
    "s": (8, 5),
    "h": (8, 6),
    "c": (8, 3),
    "w": (8, 7),
    "l": (8, 1),
}
EVEN, UNEVEN = 0, 1

Layout = tuple[tuple[Placement, ...], ...]  # per input, per mesh dim


@dataclass(frozen=True)
class Input:
    """A tensor argument.

    Attributes:
        dims: its shape, letters of `SIZES` and numbers.
        make: makes its value, given the shape.
        differentiable: whether its gradient is compared.
    """

    dims: str
    make: Callable[[tuple[int, ...]], torch.Tensor]
    differentiable: bool = False

    @property
    def ndim(self) -> int:
        return len(self.dims.split())

    def value(self, parity: int) -> torch.Tensor:
        sizes = [SIZES[d][parity] if d in SIZES else int(d) for d in self.dims.split()]
        return self.make(tuple(sizes))

    @property
    def constant(self) -> Input:
        """The same input without a gradient."""
        return replace(self, differentiable=False)


def f(dims: str, dtype: torch.dtype = torch.float32) -> Input:
    """Normally distributed numbers."""
    return Input(dims, lambda shape: torch.randn(shape, dtype=dtype), differentiable=True)


def positive(dims: str, dtype: torch.dtype = torch.float32) -> Input:
    """Numbers from 0.5 to 1.5."""
    return Input(dims, lambda shape: torch.rand(shape, dtype=dtype) + 0.5, differentiable=True)


def distinct(dims: str) -> Input:
    """Numbers far from each other and from zero, for kinks and ties."""

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        count = int(torch.Size(shape).numel())
        values = (torch.randperm(count) - count // 2 + 0.5) / 4
        return values.reshape(shape)

    return Input(dims, make, differentiable=True)


def ints(dims: str, high: int = 8, low: int = 0, dtype: torch.dtype = torch.int64) -> Input:
    """Integers in ``[low, high)``."""
    return Input(dims, lambda shape: torch.randint(low, high, shape).to(dtype))


def bools(dims: str) -> Input:
    """Truth values, the first of every row true."""

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        mask = torch.rand(shape) < 0.5
        mask[..., 0] = True
        return mask

    return Input(dims, make)


@dataclass(frozen=True)
class Case:
    """An op and its inputs.

    Attributes:
        function: takes the inputs; returns one tensor or several. The inputs are its own.
        light: whether it is tried in few layouts: an op that shares its rule and the shape of its
            program with another case.
        strides: whether the result's strides are torch's on the CPU; where not, the case says why.
        tolerance: rtol and atol, where assert_close's (1e-5 for float32) are too tight.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    light: bool = False
    strides: bool = True
    tolerance: tuple[float, float] | None = None


def case(name: str, function: Callable[..., Any], *inputs: Input, **options: Any) -> Case:
    """A `Case` with its inputs as arguments."""
    return Case(name, function, inputs, **options)


@dataclass
class Expected:
    """What CPU torch gives."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    output_grads: list[torch.Tensor | None]
    grads: list[torch.Tensor | None]


@functools.cache
def expected(case: Case, parity: int) -> Expected:
    torch.manual_seed(parity)
    values = [i.value(parity) for i in case.inputs]
    leaves = [
        v.clone().requires_grad_(i.differentiable) for v, i in zip(values, case.inputs, strict=True)
    ]
    outputs = _tensors(case.function(*leaves))
    output_grads = [torch.randn_like(o) if o.requires_grad else None for o in outputs]
    _backward(outputs, output_grads)
    return Expected(values, [o.detach() for o in outputs], output_grads, [t.grad for t in leaves])


def layouts(
    case: Case, mesh_shape: tuple[int, ...], exhaustive: bool = False
) -> Iterator[tuple[int, Layout]]:
    """The layouts to try on a mesh, each with the parity of the shapes; the same ones on every run.

    On a mesh of one dim each placement of each input with uneven shapes (one for a light case), and
    one layout with even ones. On others one layout in which all mesh dims cut one tensor dim, and
    one of a mix of placements (for a light case either). ``exhaustive``: each placement of each
    input, on a mesh of one dim with even shapes too.
    """
    rng = random.Random(f"{case.name} {mesh_shape}")
    choices = [rng.sample(c, len(c)) for c in map(_alternatives, case.inputs)]
    every = max(map(len, choices))
    ndim = len(mesh_shape)
    few = case.light and not exhaustive
    if mesh_shape == (1,):
        yield UNEVEN, tuple((c[0],) for c in choices)
    elif ndim == 1:
        for turn in range(1 if few else every):
            yield UNEVEN, tuple((c[turn % len(c)],) for c in choices)
        for turn in range(every if exhaustive else 1):
            # Shifted, so that other placements meet.
            yield EVEN, tuple((c[(turn + 1 + i) % len(c)],) for i, c in enumerate(choices))
    else:
        if not few or mesh_shape[0] == 4:
            yield UNEVEN, tuple(_one_dim_cut_by_all(i, mesh_shape, rng) for i in case.inputs)
        mixes = -(-every // ndim) if exhaustive else 0 if mesh_shape[0] == 4 else 1
        parity = rng.randrange(2)
        for turn in range(mixes):
            first = turn * ndim
            yield (
                (turn + parity) % 2,
                tuple(tuple(c[(first + i) % len(c)] for i in range(ndim)) for c in choices),
            )


def _alternatives(input: Input) -> list[Placement]:
    return [Replicate(), *(Shard(d) for d in range(input.ndim)), Partial()]


def _one_dim_cut_by_all(
    input: Input, mesh_shape: tuple[int, ...], rng: random.Random
) -> tuple[Placement, ...]:
    if not input.ndim:
        partial = Partial(rng.choice(["sum", "avg", "max"]))
        return (Replicate(), *(partial for _ in mesh_shape[1:]))
    dim = rng.randrange(input.ndim)
    if rng.random() < 0.5:
        return tuple(Shard(dim) for _ in mesh_shape)
    # The last mesh dim cuts first, the others as they stand.
    first = _StridedShard(dim, split_factor=mesh_shape[-1])
    return (*(first for _ in mesh_shape[:-1]), Shard(dim))


def check_case(case: Case, mesh: DeviceMesh, exhaustive: bool = False) -> None:
    """Compare the case with CPU torch in its `layouts` on ``mesh``."""
    failures = []
    for number, (parity, layout) in enumerate(layouts(case, tuple(mesh.shape), exhaustive)):
        try:
            _check_layout(case, mesh, parity, layout, whole=number == 0)
        except Exception as error:
            shapes = [tuple(v.shape) for v in expected(case, parity).inputs]
            failures.append(f"{shapes} {layout}\n  {type(error).__name__}: {error}")
            last = error
    if failures:
        raise AssertionError(f"{case.name} on {mesh!r}\n" + "\n".join(failures)) from last


def _check_layout(case: Case, mesh: DeviceMesh, parity: int, layout: Layout, whole: bool) -> None:
    want = expected(case, parity)
    leaves = []
    for value, input, placements in zip(want.inputs, case.inputs, layout, strict=True):
        leaf = distribute_tensor(value, mesh, placements)
        assert leaf.placements == placements
        leaves.append(leaf.requires_grad_(input.differentiable))
    outputs = _tensors(case.function(*leaves))
    assert len(outputs) == len(want.outputs)
    for i, (actual, wanted) in enumerate(zip(outputs, want.outputs, strict=True)):
        check_tensor(actual, wanted, mesh, case, f"result {i}", whole)
    grads = [
        None if g is None else distribute_tensor(g, mesh, [_whole_or_cut(p) for p in o.placements])
        for g, o in zip(want.output_grads, outputs, strict=True)
    ]
    _backward(outputs, grads)
    for i, (leaf, grad) in enumerate(zip(leaves, want.grads, strict=True)):
        if grad is None:
            assert leaf.grad is None, f"input {i} has a gradient, but none on the CPU"
            continue
        assert leaf.grad is not None, f"input {i} has no gradient"
        check_tensor(leaf.grad, grad, mesh, replace(case, strides=False), f"gradient {i}", False)
        wanted_placements = tuple(map(_whole_or_cut, leaf.placements))
        assert leaf.grad.placements == wanted_placements, (
            f"gradient {i} is laid out {leaf.grad.placements}, its leaf {leaf.placements}"
        )
    if whole:
        for leaf, value in zip(leaves, want.inputs, strict=True):
            torch.testing.assert_close(leaf.detach().cpu(), value, rtol=0, atol=0)


def check_tensor(
    actual: torch.Tensor,
    wanted: torch.Tensor,
    mesh: DeviceMesh,
    case: Case,
    what: str,
    whole: bool,
) -> None:
    """Compare a tensor with the CPU's: class, meta data, layout, value."""
    assert type(actual) is xd.XLAShardedTensor, f"{what} is a {type(actual).__name__}"
    assert actual.dtype == wanted.dtype, f"{what} is {actual.dtype}, on the CPU {wanted.dtype}"
    assert actual.shape == wanted.shape, f"{what} is {actual.shape}, on the CPU {wanted.shape}"
    if case.strides:
        assert actual.stride() == wanted.stride(), (
            f"{what} has strides {actual.stride()}, on the CPU {wanted.stride()}"
        )
    assert actual.device_mesh == mesh
    placements = normalize_placements(actual.placements, mesh, actual.ndim, what)
    assert actual.placements == placements
    value = actual.detach().cpu()
    close(value, wanted, case.tolerance, what)
    if case.strides:
        # As torch's copies between devices: gaps and expanded dims are not kept.
        assert value.stride() == torch.empty_like(wanted).stride(), (
            f"{what} on the CPU has strides {value.stride()}"
        )
    if whole:
        full = actual.detach().full_tensor()
        assert type(full) is xd.XLATensor
        torch.testing.assert_close(full.cpu(), value, rtol=0, atol=0, equal_nan=True)


def close(
    actual: torch.Tensor,
    wanted: torch.Tensor,
    tolerance: tuple[float, float] | None = None,
    what: str = "",
) -> None:
    """assert_close with 1e-5 for float32 and complex64, whose sums XLA orders differently."""
    if tolerance is None and wanted.dtype in (torch.float32, torch.complex64):
        tolerance = (1e-5, 1e-5)
    rtol, atol = tolerance or (None, None)
    torch.testing.assert_close(
        actual, wanted, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def _whole_or_cut(placement: Placement) -> Placement:
    return Replicate() if isinstance(placement, Partial) else placement


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for item in result for t in _tensors(item)]


def _backward(outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
