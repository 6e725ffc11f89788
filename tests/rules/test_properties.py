"""A rule's layouts, applied: every device computes on its pieces, and the pieces of the results,
put together, are the results of the whole. On the CPU, in float64, for seeded random cases.
"""

from __future__ import annotations

import math
import random
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from tests.rules.devices import assemble, devices, parts, piece
from xla_dtensor.rules import (
    DimSharding,
    Merged,
    Notation,
    Placements,
    TensorInfo,
    infer,
    infer_forward,
    parse,
)
from xla_dtensor.rules.merging import shard_dim, split_factor
from xla_dtensor.rules.notation import ONE, expand_ellipsis

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten

MESHES = [(2,), (3,), (4,), (8,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 4), (2, 2, 2)]
SIZES = [1, 2, 3, 4, 5, 6, 8, 12]
NOTATIONS, VIEWS = range(300), range(300, 600)


def random_layout(
    rng: random.Random, ndim: int, mesh: Sequence[int], pending: Sequence[str] = ()
) -> Placements:
    """Several mesh dims may shard one dim, in any order."""
    dims: list[list[int]] = [[] for _ in range(ndim)]
    partial = []
    for mesh_dim in range(len(mesh)):
        choice = rng.random()
        if ndim and choice < 0.75:
            order = dims[rng.randrange(ndim)]
            order.insert(rng.randint(0, len(order)), mesh_dim)
        elif pending and choice < 0.9:
            partial.append((mesh_dim, rng.choice(pending)))
    return DimSharding(tuple(map(tuple, dims)), tuple(partial)).placements(mesh)


# --- notations -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    text: str
    notation: Notation
    inputs: list[TensorInfo]
    out_shapes: list[tuple[int, ...]]
    mesh: tuple[int, ...]

    def merged(self) -> Merged:
        return infer_forward(self.notation, self.inputs, self.mesh)


def random_notation(rng: random.Random) -> Case:
    """One to three inputs of shared and own letters, some broadcast, unsharded, or ellipses."""
    mesh = rng.choice(MESHES)
    letters = list(string.ascii_lowercase[: rng.randint(1, 4)])
    sizes = {x: rng.choice(SIZES) for x in letters}
    hidden = [rng.choice(SIZES) for _ in range(rng.randint(0, 2))] if rng.random() < 0.3 else None
    fixed = {x for x in letters if rng.random() < 0.15}

    def write(term: list[str]) -> str:
        return " ".join(x + "!" * (x in fixed) for x in term)

    terms, shapes = [], []
    for _ in range(rng.randint(1, 3)):
        term = rng.sample(letters, rng.randint(0, len(letters)))
        shape = [1 if rng.random() < 0.15 else sizes[x] for x in term]
        if rng.random() < 0.1:
            at = rng.randint(0, len(term))
            term.insert(at, ONE)
            shape.insert(at, 1)
        if hidden is not None and rng.random() < 0.8:
            own = hidden[rng.randint(0, len(hidden)) :]
            term = ["...", *term]
            shape = [*(1 if rng.random() < 0.15 else n for n in own), *shape]
        terms.append(term)
        shapes.append(tuple(shape))
    known = sorted({x for term in terms for x in term} - {"...", ONE})
    outputs = []
    for _ in range(rng.choice([1, 1, 2])):
        out = rng.sample(known, rng.randint(0, len(known)))
        if rng.random() < 0.1:
            out.insert(rng.randint(0, len(out)), ONE)
        if any("..." in term for term in terms) and rng.random() < 0.8:
            out = ["...", *out]
        outputs.append(out)
    text = " -> ".join(", ".join(map(write, side)) for side in (terms, outputs))

    reduction = rng.choice(["sum", "sum", "sum", "max", "min"])
    multilinear = reduction == "sum" and rng.random() < 0.5
    named = expand_ellipsis(text, [len(s) for s in shapes])
    notation = parse(named, reduction, multilinear)
    found: dict[str, int] = {}
    for term, shape in zip(notation.inputs, shapes, strict=True):
        for x, n in zip(term, shape, strict=True):
            found[x] = max(found.get(x, 1), n)
    pending = ("sum", "avg") if multilinear or rng.random() < 0.2 else ()
    inputs = [
        TensorInfo(s, random_layout(rng, len(s), mesh, pending), torch.float64) for s in shapes
    ]
    out_shapes = [tuple(found.get(x, 1) for x in term) for term in notation.outputs]
    return Case(text, notation, inputs, out_shapes, mesh)


def compute(notation: Notation, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The product of the inputs, reduced over what an output has not: an einsum that broadcasts."""
    letters = sorted({x for term in notation.inputs for x in term} - {ONE})
    product = torch.ones((1,) * len(letters), dtype=torch.float64)
    for term, tensor in zip(notation.inputs, tensors, strict=True):
        product = product * spread(tensor, term, letters)
    return [reduced(notation, product, letters, term) for term in notation.outputs]


def spread(x: Tensor, term: Sequence[str], letters: Sequence[str]) -> Tensor:
    """`x` with a dim for each of `letters`, in their order."""
    x = x.squeeze([d for d, name in enumerate(term) if name == ONE])
    own = [name for name in term if name != ONE]
    x = torch.permute(x, [own.index(name) for name in letters if name in own])
    for d, name in enumerate(letters):
        if name not in own:
            x = x.unsqueeze(d)
    return x


def reduced(notation: Notation, x: Tensor, letters: Sequence[str], term: Sequence[str]) -> Tensor:
    """`x` reduced over the letters that `term` has not, and in the order of `term`."""
    away = [d for d, name in enumerate(letters) if name not in term]
    for d in away:
        if notation.reduction == "sum":
            x = x.sum(d, keepdim=True)
        else:  # of nothing it is the reduction's identity
            largest = notation.reduction == "max"
            identity = torch.full_like(x.sum(d, keepdim=True), -math.inf if largest else math.inf)
            x = torch.cat([x, identity], d)
            x = x.amax(d, keepdim=True) if largest else x.amin(d, keepdim=True)
    kept = [name for name in letters if name in term]
    x = torch.permute(x.squeeze(away), [kept.index(name) for name in term if name != ONE])
    for d, name in enumerate(term):
        if name == ONE:
            x = x.unsqueeze(d)
    return x


@pytest.mark.parametrize("seed", NOTATIONS)
def test_a_notation_computes_the_same_on_pieces(seed: int) -> None:
    rng = random.Random(seed)
    case = random_notation(rng)
    merged = case.merged()
    generator = torch.Generator().manual_seed(seed)
    wholes = [torch.randn(t.shape, dtype=torch.float64, generator=generator) for t in case.inputs]
    held = [parts(x, used, case.mesh, rng) for x, used in zip(wholes, merged.inputs, strict=True)]
    results = {at: compute(case.notation, [each[at] for each in held]) for at in devices(case.mesh)}
    expected = compute(case.notation, wholes)
    for i, (shape, layout) in enumerate(zip(case.out_shapes, merged.outputs, strict=True)):
        got = assemble({at: r[i] for at, r in results.items()}, layout, case.mesh, shape)
        torch.testing.assert_close(got, expected[i], msg=lambda m: f"{case}\n{merged}\n{m}")


# --- views ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    func: torch._ops.OpOverload
    args: tuple
    info: TensorInfo
    mesh: tuple[int, ...]
    local: Callable[[Tensor, Sequence[int]], Tensor]
    """The same on a piece, given the shape of the result's piece."""

    def merged(self) -> Merged:
        result = self.func(torch.empty(self.info.shape, device="meta"), *self.args)
        found = infer(self.func, (self.info, *self.args), {}, [tuple(result.shape)], self.mesh)
        assert found is not None
        return found


def factors(rng: random.Random, total: int) -> list[int]:
    found = []
    while total > 1:
        found.append(rng.choice([d for d in range(2, total + 1) if total % d == 0]))
        total //= found[-1]
    for _ in range(rng.randrange(3)):
        found.insert(rng.randint(0, len(found)), 1)
    return found


def random_view(rng: random.Random) -> View:
    mesh = rng.choice(MESHES)
    kind = rng.choice(
        [*["reshape", "flatten", "unflatten"] * 3, "permute", "transpose", "squeeze", "unsqueeze",
         "expand", "repeat"]
    )  # fmt: skip
    shape = factors(rng, rng.choice([24, 36, 64, 96, 256])) if kind == "reshape" else [
        rng.choice(SIZES) for _ in range(rng.randint(2, 4))
    ]  # fmt: skip
    ndim = len(shape)
    pending = ("sum", "avg", "max", "min")
    info = TensorInfo(tuple(shape), random_layout(rng, ndim, mesh, pending), torch.float64)

    def view(func: torch._ops.OpOverload, *args: object, local: Callable | None = None) -> View:
        return View(func, args, info, mesh, local or (lambda x, _: func(x, *args)))

    def reshaped(x: Tensor, own: Sequence[int]) -> Tensor:
        return x.reshape(tuple(own))

    match kind:
        case "reshape":
            return view(aten.reshape.default, factors(rng, math.prod(shape)), local=reshaped)
        case "flatten":
            start = rng.randrange((ndim + 1) // 2)
            end = rng.randrange(ndim // 2, ndim)
            return view(aten.flatten.using_ints, start, end, local=reshaped)
        case "unflatten":
            dim = rng.randrange(ndim)
            return view(aten.unflatten.int, dim, factors(rng, shape[dim]) or [1], local=reshaped)
        case "permute":
            return view(aten.permute.default, rng.sample(range(ndim), ndim))
        case "transpose":
            return view(aten.transpose.int, rng.randrange(-ndim, ndim), rng.randrange(ndim))
        case "squeeze":
            ones = [d for d in range(ndim) if shape[d] == 1 and rng.random() < 0.8]
            return view(aten.squeeze.dims, ones)
        case "unsqueeze":
            return view(aten.unsqueeze.default, rng.randint(-ndim - 1, ndim))
        case "expand":
            sizes = [rng.choice(SIZES) if n == 1 else rng.choice([n, -1]) for n in shape]
            new = [rng.choice(SIZES) for _ in range(rng.randrange(3))]
            return view(aten.expand.default, new + sizes, local=lambda x, own: x.expand(*own))
    times = [rng.choice([1, 2, 3]) for _ in range(ndim + rng.randrange(2))]
    return view(aten.repeat.default, times)


@pytest.mark.parametrize("seed", VIEWS)
def test_a_view_of_a_piece_is_the_piece_of_the_view(seed: int) -> None:
    case = random_view(random.Random(seed))
    merged = case.merged()
    (used,), (out,) = merged.inputs, merged.outputs
    pending = [p if isinstance(p, Partial) else None for p in case.info.placements]
    assert [p if isinstance(p, Partial) else None for p in out] == pending
    x = torch.arange(math.prod(case.info.shape), dtype=torch.float64).reshape(case.info.shape)
    whole = case.func(x, *case.args)
    for at in devices(case.mesh):
        theirs = piece(whole, out, case.mesh, at)
        mine = case.local(piece(x, used, case.mesh, at), theirs.shape)
        assert torch.equal(mine, theirs), (case, merged, at)


# --- the cases -----------------------------------------------------------------------------------


def kinds(inputs: Sequence[TensorInfo], merged: Merged, mesh: Sequence[int]) -> Iterator[str]:
    outs = [p for out in merged.outputs for p in out]
    for info, used in zip(inputs, merged.inputs, strict=True):
        yield "kept" if info.placements == used else "moved"
        for m, p in enumerate(used):
            dim = shard_dim(p)
            if dim is not None and info.shape[dim] % mesh[m]:
                yield "uneven input"
            if dim is not None and info.shape[dim] < mesh[m]:
                yield "smaller than the mesh dim"
        if any(isinstance(p, Partial) for p in used):
            yield "partial input"
    if any(shard_dim(p) is not None for p in outs):
        yield "sharded output"
    if any(split_factor(p) > 1 for p in outs):
        yield "strided output"
    if any(isinstance(p, Partial) for p in outs):
        yield "partial output"
    if len({d for d in map(shard_dim, outs) if d is not None}) < sum(
        shard_dim(p) is not None for p in outs
    ):
        yield "a dim sharded twice"


def test_the_cases_are_of_all_kinds() -> None:
    found: Counter[str] = Counter()
    for seed in NOTATIONS:
        case = random_notation(random.Random(seed))
        found.update(set(kinds(case.inputs, case.merged(), case.mesh)))
        found.update(x for x in ("!", "...", ONE) if x in case.text)
        found[case.notation.reduction] += 1
        found["multilinear"] += case.notation.multilinear
    for seed in VIEWS:
        view = random_view(random.Random(seed))
        found.update(set(kinds([view.info], view.merged(), view.mesh)))
        found[view.func.__name__] += 1
    rare = {kind: n for kind, n in found.items() if n < 10}
    assert not rare
    assert len(found) == 25, found
