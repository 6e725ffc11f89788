"""Random cases of the operations for which XLA's partitioner has given wrong numbers.

Each case is a function of torch tensors; `run` compares it on CPU and laid out at random on a mesh.

    python -m tests.lowering.partitioning --cases 300 --names scatter_add,index_put --mesh 2x2x2
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.conftest import MESHES, make_mesh  # isort: skip  (sets the environment: first)

import torch
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from tests.conformance.layouts import Distributor

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One call: what is computed, and of which CPU tensors."""

    name: str
    number: int
    function: Function
    args: tuple[Any, ...]


def _shape(rng: random.Random, least: int = 1, most: int = 4) -> list[int]:
    # Sizes that divide by mesh dims, and ones that don't.
    return [rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 8, 16]) for _ in range(rng.randint(least, most))]


def _values(shape: Any) -> torch.Tensor:
    # Whole numbers: sums are exact in every order.
    return torch.randint(-50, 50, tuple(shape)).float()


def _permutations(shape: list[int], dim: int, size: int) -> torch.Tensor:
    """Indices into ``size`` positions of ``dim`` that don't repeat along it."""
    return torch.rand(*shape[:dim], size, *shape[dim + 1 :]).argsort(dim).narrow(dim, 0, shape[dim])


def _scatter_args(rng: random.Random, unique: bool = False) -> tuple[Any, ...]:
    index_shape = _shape(rng)
    smaller = rng.random() < 0.3
    shape = [n + rng.choice([0, 1, 3]) if smaller else n for n in index_shape]
    dim = rng.randrange(len(shape))
    shape[dim] = index_shape[dim] if unique else rng.choice([1, 3, 8, 12])
    if unique:
        shape[dim] += rng.choice([0, 3])
        index = _permutations(index_shape, dim, shape[dim])
    else:
        index = torch.randint(0, shape[dim], index_shape)
    return _values(shape), dim, index, _values(index_shape)


def _scatter(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    return torch.scatter, _scatter_args(rng, unique=True)


def _scatter_add(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    return torch.scatter_add, _scatter_args(rng)


def _scatter_reduce(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    reduce, include = rng.choice(["amax", "amin", "mean", "sum"]), rng.random() < 0.5

    def function(x: Any, dim: Any, index: Any, src: Any) -> torch.Tensor:
        return torch.scatter_reduce(x, dim, index, src, reduce, include_self=include)

    return function, _scatter_args(rng)


def _far(family: Callable[[random.Random], tuple[Function, tuple[Any, ...]]]) -> Any:
    """The same along a dim with so many positions that they aren't compared one by one."""

    def made(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
        function, (x, dim, index, source) = family(rng)
        more = list(x.shape)
        more[dim] = 32 * index.shape[dim] + rng.choice([1, 8])
        return function, (torch.cat([x, _values(more)], dim), dim, index, source)

    return made


def _gather(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    return torch.gather, _scatter_args(rng)[:3]


def _along_args(rng: random.Random, unique: bool = False) -> tuple[Any, ...]:
    shape = _shape(rng)
    dim = rng.randrange(len(shape))
    count = rng.choice([1, 3, 4, 8, 13])
    if unique:
        count = min(count, shape[dim])
        index = torch.randperm(shape[dim])[:count]
    else:
        index = torch.randint(0, shape[dim], (count,))
    source = _values([*shape[:dim], count, *shape[dim + 1 :]])
    return _values(shape), dim, index, source


def _index_add(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    return torch.index_add, _along_args(rng)


def _index_copy(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    return torch.index_copy, _along_args(rng, unique=True)


def _index_fill(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    x, dim, index, _ = _along_args(rng)
    return torch.index_fill, (x, dim, index, 3.0)


def _index_reduce(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    reduce, include = rng.choice(["amax", "amin", "mean"]), rng.random() < 0.5

    def function(x: Any, dim: Any, index: Any, src: Any) -> torch.Tensor:
        return torch.index_reduce(x, dim, index, src, reduce, include_self=include)

    return function, _along_args(rng)


def _index_select(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    return torch.index_select, _along_args(rng)[:3]


def _indices(rng: random.Random, x: torch.Tensor, unique: bool) -> list[torch.Tensor | None]:
    """Index tensors, broadcast against each other, for some of the dims of ``x``."""
    dims = sorted(rng.sample(range(x.ndim), rng.randint(1, min(x.ndim, 3))))
    shape = _shape(rng, 1, 2)
    if unique:
        total = 1
        for dim in dims:
            total *= x.shape[dim]
        count = min(total, rng.choice([1, 3, 8]))
        flat, found = torch.randperm(total)[:count], []
        for dim in reversed(dims):
            found.append(flat % x.shape[dim])
            flat = flat // x.shape[dim]
        return [found[len(dims) - 1 - dims.index(d)] if d in dims else None for d in range(x.ndim)]
    made: list[torch.Tensor | None] = []
    for dim in range(x.ndim):
        own = [n if rng.random() < 0.7 else 1 for n in shape]
        made.append(torch.randint(-x.shape[dim], x.shape[dim], own) if dim in dims else None)
    return made


def _index(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    x = _values(_shape(rng))
    return torch.ops.aten.index.Tensor, (x, _indices(rng, x, False))


def _index_put(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    x = _values(_shape(rng))
    accumulate = rng.random() < 0.6
    indices = _indices(rng, x, not accumulate)
    shape = list(torch.ops.aten.index.Tensor(x, indices).shape)
    while shape and rng.random() < 0.2:
        shape.pop(0)

    def function(x: Any, indices: Any, values: Any) -> torch.Tensor:
        return torch.ops.aten.index_put.default(x, indices, values, accumulate)

    return function, (x, indices, _values(shape))


def _take(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    x = _values(_shape(rng))
    return torch.take, (x, torch.randint(-x.numel(), x.numel(), tuple(_shape(rng, 1, 2))))


def _put(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    x = _values(_shape(rng))
    index = torch.randint(0, x.numel(), tuple(_shape(rng, 1, 2)))

    def function(x: Any, index: Any, source: Any) -> torch.Tensor:
        return torch.ops.aten.put.default(x, index, source, True)

    return function, (x, index, _values(index.shape))


def _masked_scatter(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    shape = _shape(rng)
    return torch.masked_scatter, (_values(shape), torch.rand(*shape) < 0.5, _values(shape))


def _embedding(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    weight = _values([rng.choice([5, 8, 16]), rng.choice([3, 4, 8])])
    index = torch.randint(0, len(weight), tuple(_shape(rng, 1, 3)))
    return torch.nn.functional.embedding, (index, weight)


def _embedding_backward(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    rows, index = rng.choice([5, 8, 16]), torch.randint(0, 5, tuple(_shape(rng, 1, 3)))
    by_freq = rng.random() < 0.3
    padding = rng.choice([-1, 2])

    def function(grad: Any, index: Any) -> torch.Tensor:
        return torch.ops.aten.embedding_dense_backward(grad, index, rows, padding, by_freq)

    return function, (_values([*index.shape, rng.choice([3, 4, 8])]), index)


def _take_along(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    x, dim, index, _ = _scatter_args(rng)
    shape = [n if d == dim else index.shape[d] for d, n in enumerate(x.shape)]
    x = x[tuple(slice(0, n) for n in shape)]
    return torch.take_along_dim, (x, index, dim)


def _sort(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    x = _values(_shape(rng))
    return lambda x, dim: torch.sort(x, stable=True, dim=dim)[1].float(), (x, rng.randrange(x.ndim))


def _as_strided(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    x = _values(_shape(rng))
    size = (min(3, x.numel()), min(2, x.numel()))
    stride = (rng.randint(0, max(0, (x.numel() - 1) // 4)), rng.randint(0, x.numel() // 4))
    return torch.as_strided_copy, (x, size, stride)


def _conv(rng: random.Random) -> tuple[Function, tuple[Any, ...]]:
    """Result and both gradients of a convolution, in one tensor."""
    groups, spatial = rng.choice([1, 2, 4]), rng.choice([1, 2])
    transposed = rng.random() < 0.4
    batch, each_in, each_out = rng.choice([1, 2, 4]), rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    x = _values([batch, groups * each_in, *[rng.choice([4, 6, 8])] * spatial])
    kernel = [rng.choice([1, 2, 3])] * spatial
    sizes = [groups * each_in, each_out] if transposed else [groups * each_out, each_in]
    weight = _values([*sizes, *kernel])
    stride, padding = rng.choice([1, 2]), rng.choice([0, 1])
    static = ([stride] * spatial, [padding] * spatial, [1] * spatial)

    def function(x: Any, weight: Any) -> torch.Tensor:
        rest = (*static, transposed, [0] * spatial, groups)
        out = torch.ops.aten.convolution(x, weight, None, *rest)
        mask = [True, True, False]
        grads = torch.ops.aten.convolution_backward(out, x, weight, None, *rest, mask)
        flat = [t.reshape(-1) for t in (out, *grads[:2])]
        return torch.cat(flat)

    return function, (x, weight)


FAMILIES: dict[str, Callable[[random.Random], tuple[Function, tuple[Any, ...]]]] = {
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "scatter_reduce": _scatter_reduce,
    "scatter_far": _far(_scatter),
    "scatter_add_far": _far(_scatter_add),
    "scatter_reduce_far": _far(_scatter_reduce),
    "gather": _gather,
    "take_along_dim": _take_along,
    "index_add": _index_add,
    "index_copy": _index_copy,
    "index_fill": _index_fill,
    "index_reduce": _index_reduce,
    "index_select": _index_select,
    "index": _index,
    "index_put": _index_put,
    "take": _take,
    "put": _put,
    "masked_scatter": _masked_scatter,
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "sort": _sort,
    "as_strided": _as_strided,
    "conv": _conv,
}


def case(name: str, number: int) -> Case:
    """Case ``number`` of a family, the same one on every run."""
    rng = random.Random(f"{name} {number}")
    torch.manual_seed(rng.randrange(2**31))
    function, args = FAMILIES[name](rng)
    return Case(name, number, function, args)


def run(case: Case, mesh: DeviceMesh) -> str | None:
    """What is wrong with the case on the mesh, or None.

    Every other case is compiled with arithmetic before it: what pads uneven shards isn't 0 then.
    """
    wanted = case.function(*case.args)
    to_mesh = Distributor(mesh, f"{case.name} {case.number} {tuple(mesh.shape)}")
    args = to_mesh(case.args)
    try:
        function = case.function
        if case.number % 2:
            function = xd.compile(_after_arithmetic(function))
        actual = function(*args).full_tensor().cpu()
    except Exception as error:
        return f"{'; '.join(to_mesh.layouts)}: {type(error).__name__}: {error}"[:400]
    if actual.shape != wanted.shape or not torch.allclose(actual, wanted, rtol=1e-5, atol=1e-3):
        return f"{'; '.join(to_mesh.layouts)}: {_difference(actual, wanted)}"
    return None


def _after_arithmetic(function: Function) -> Function:
    def same(value: Any) -> Any:
        if isinstance(value, list):
            return [same(v) for v in value]
        if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
            return value
        # exp(0) is 1; 5 and 2 can't be folded into one number with it.
        return ((value + 5) - (value - value).exp().to(value.dtype)) - 4

    return lambda *args: function(*map(same, args))


def _difference(actual: torch.Tensor, wanted: torch.Tensor) -> str:
    if actual.shape != wanted.shape:
        return f"shape {list(actual.shape)}, not {list(wanted.shape)}"
    return f"{int((actual != wanted).sum())} of {wanted.numel()} numbers are wrong"


def failures(names: list[str], mesh: DeviceMesh, numbers: range) -> Iterator[str]:
    """A line for each of these cases that is wrong on the mesh."""
    for name in names:
        for number in numbers:
            problem = run(case(name, number), mesh)
            if problem is not None:
                yield f"{name} {number} on {tuple(mesh.shape)}: {problem}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="per family and mesh")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--names", default=",".join(FAMILIES))
    parser.add_argument("--mesh", default="2x4,4x2,2x2x2,8", help=f"of {', '.join(MESHES)}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names = options.names.split(",")
    for mesh in options.mesh.split(","):
        for name in names:
            numbers = range(options.first, options.first + options.cases)
            found = list(failures([name], make_mesh(mesh), numbers))
            print(f"{mesh} {name}: {len(found)} of {options.cases} wrong", flush=True)
            for line in found[:4]:
                print("   ", line, flush=True)


if __name__ == "__main__":
    main()
