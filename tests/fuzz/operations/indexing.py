"""Sorting, and reading and adding by index."""

from __future__ import annotations

import torch

from tests.fuzz.draw import Draw, UnsuitableError, operation


def _ordered(d: Draw) -> tuple[str, int]:
    name = d.pick(lambda t: t.ndim and t.numel() and t.dtype not in (torch.bool, torch.complex64))
    if d.true[name].is_complex():
        raise UnsuitableError
    dim = d.dim(name)
    d.apart(name, dim)
    return name, dim


@operation(2)
def topk(d: Draw) -> None:
    name, dim = _ordered(d)
    k = d.rng.randint(1, d.true[name].shape[dim])
    largest = ", largest=False" if d.chance(0.3) else ""
    d.let(f"{name}.topk({k}, {dim}{largest})", 2)


@operation(2)
def sort(d: Draw) -> None:
    name, dim = _ordered(d)
    down = ", descending=True" if d.chance(0.4) else ""
    if d.chance(0.3):
        d.let(f"{name}.argsort({dim}{down})")
    elif d.chance(0.15):
        k = d.rng.randint(1, d.true[name].shape[dim])
        d.let(f"{name}.kthvalue({k}, {dim})", 2)
    else:
        d.let(f"{name}.sort({dim}{down})", 2)


@operation(2)
def gather(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim and t.numel())
    dim = d.dim(name)
    shape = list(d.true[name].shape)
    shape[dim] = d.size()
    index = d.indices(shape, d.true[name].shape[dim])
    kind = "torch.take_along_dim({0}, {1}, {2})" if d.chance(0.3) else "{0}.gather({2}, {1})"
    d.let(kind.format(name, index, dim), moves=True)


@operation(1.5)
def index_select(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim and t.numel())
    dim = d.dim(name)
    index = d.indices([d.size()], d.true[name].shape[dim])
    d.let(f"{name}.index_select({dim}, {index})", moves=True)


@operation(2)
def indexed(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim and t.numel())
    d.let(f"{name}[{index_text(d, name)}]", moves=True)


def index_text(d: Draw, name: str) -> str:
    """What is between the brackets: index tensors for one or two dims, slices for others."""
    shape = d.true[name].shape
    dims = d.rng.sample(range(len(shape)), min(len(shape), d.choice([1, 1, 2])))
    common = d.shape(1, 2)
    parts = []
    for dim, size in enumerate(shape):
        if dim in dims:
            parts.append(d.indices(common, size))
        elif dim > max(dims):
            break
        else:
            parts.append(d.choice([":", ":", "1:", "::2"]))
    return ", ".join(parts)


@operation(1)
def embedding(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim == 2 and t.is_floating_point() and t.numel())
    index = d.indices(d.shape(1, 2), len(d.true[name]))
    d.let(f"F.embedding({index}, {name})", moves=True)


@operation(2)
def scattered(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim and t.numel() and t.dtype in (torch.float32, torch.bfloat16))
    value, dim = d.true[name], d.dim(name)
    shape = list(value.shape)
    shape[dim] = d.rng.randint(1, shape[dim])
    source = d.leaf(shape, str(value.dtype))
    kind = d.choice(["scatter_add", "scatter", "scatter_reduce", "scatter_value"])
    if kind in ("scatter_add", "scatter_reduce"):
        index = d.indices(shape, value.shape[dim])
        if kind == "scatter_add":
            d.let(f"{name}.scatter_add({dim}, {index}, {source})")
        else:
            # (amax would have ties, whose gradients are shared out)
            d.let(f"{name}.scatter_reduce({dim}, {index}, {source}, 'mean')")
        return
    index = _order(d, source, dim)
    if kind == "scatter_value":
        d.let(f"{name}.scatter({dim}, {index}, {d.number()})")
    else:
        d.let(f"{name}.scatter({dim}, {index}, {source})")


def _order(d: Draw, name: str, dim: int) -> str:
    """Indices along a dim, without repetition: the order of distinct numbers."""
    d.apart(name, dim)
    return d.let(f"{name}.detach().argsort({dim})")[0]


@operation(1.5)
def along_index(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim and t.numel() and t.dtype == torch.float32)
    dim = d.dim(name)
    shape = list(d.true[name].shape)
    count = d.size()
    kind = d.choice(["index_add", "index_add", "index_fill", "index_copy"])
    if kind == "index_fill":
        index = d.indices([count], shape[dim])
        d.let(f"{name}.index_fill({dim}, {index}, {d.number()})")
        return
    if kind == "index_copy":
        order = d.leaf([shape[dim]])
        (index,) = d.let(f"{order}.detach().argsort()")
        count = shape[dim]
    else:
        index = d.indices([count], shape[dim])
    source = d.leaf([*shape[: dim % len(shape)], count, *shape[dim % len(shape) + 1 :]])
    d.let(f"{name}.{kind}({dim}, {index}, {source})")


@operation(1)
def put(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim and t.numel() and t.dtype == torch.float32)
    index = d.indices([d.size()], d.true[name].shape[0])
    rows = [len(d.true[index]), *d.true[name].shape[1:]]
    source = d.leaf(rows)
    d.let(f"{name}.index_put(({index},), {source}, accumulate=True)")


@operation(0.7)
def one_hot(d: Draw) -> None:
    index = d.indices(d.shape(1, 2), d.choice([2, 3, 5, 8]))
    classes = max(8, int(d.true[index].max()) + 1) if d.true[index].numel() else 3
    d.let(f"F.one_hot({index}, {classes})")


@operation(0.6)
def searched(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim == 1 and t.dtype == torch.float32 and t.numel())
    d.apart(name)
    (borders, _) = d.let(f"{name}.detach().sort()", 2)
    values = d.leaf(d.shape(1, 2))
    gaps = (d.wide[values].detach().reshape(-1, 1) - d.wide[borders].detach()).abs()
    d._wide_enough(name, d.wide[borders].detach(), gaps)
    d.let(f"torch.searchsorted({borders}, {values}.detach())")
