"""Writes in place, to whole tensors and through views."""

from __future__ import annotations

import torch

from tests.fuzz.draw import Draw, UnsuitableError, operation
from tests.fuzz.operations.indexing import index_text
from tests.fuzz.operations.numbers import mask, other


def target(d: Draw) -> str:
    """A tensor that may be written to; views are preferred, which every other draw is."""
    suits = lambda t: t.is_floating_point() and t.numel() and not (t.is_leaf and t.requires_grad)
    views = lambda t: suits(t) and (t._is_view() or t.storage_offset())
    if d.chance(0.6):
        try:
            return d.pick(views)
        except UnsuitableError:
            pass
    try:
        return d.pick(suits)
    except UnsuitableError:
        return d.let(f"{d.floats()}.clone()", moves=True)[0]


@operation(4)
def by_number(d: Draw) -> None:
    name = target(d)
    text = d.choice(
        [
            "{0}.mul_({n})",
            "{0}.add_({n})",
            "{0}.sub_({n})",
            "{0}.div_({n})",
            "{0}.neg_()",
            "{0}.fill_({n})",
            "{0}.zero_()",
            "{0}.sin_()",
            "{0}.tanh_()",
            "{0}.sigmoid_()",
            "{0}.mul_({n})",
            "{0}.add_({n})",
        ]
    )
    d.write(text.format(name, n=d.number()), name)


@operation(3)
def by_tensor(d: Draw) -> None:
    name = target(d)
    second = other(d, name)
    text = d.choice(
        [
            "{0}.add_({1})",
            "{0}.mul_({1})",
            "{0}.sub_({1}, alpha=0.5)",
            "{0}.copy_({1})",
            "{0}.add_({1})",
            "{0}.addcmul_({1}, {1}, value=0.5)",
            "{0}.lerp_({1}, 0.25)",
        ]
    )
    d.write(text.format(name, second), name)


@operation(3)
def assigned(d: Draw) -> None:
    name = target(d)
    if not d.true[name].ndim:
        raise UnsuitableError
    kind = d.choice(["slice", "slice", "index", "mask"])
    if kind == "slice":
        parts = []
        for size in d.true[name].shape:
            start = d.rng.randint(0, max(0, size - 1))
            parts.append(d.choice([":", f"{start}:", f":{start + 1}", f"{start}::2", f"{start}"]))
        where = ", ".join(parts)
    elif kind == "index":
        where = index_text(d, name)
    else:
        where = mask(d, d.true[name].shape)
        if d.chance(0.5):
            d.write(f"{name}.masked_fill_({where}, {d.number()})", name)
        else:
            d.write(f"{name}[{where}] = {d.number()}", name)
        return
    if kind == "index" or d.chance(0.3):  # (with repeated indices, one number for all)
        d.write(f"{name}[{where}] = {d.number()}", name)
        return
    try:
        part = eval(f"{name}[{where}]", {}, d.true)
    except IndexError:
        raise UnsuitableError from None
    shape = [1 if d.chance(0.2) else n for n in part.shape]
    fits = lambda t: list(t.shape) == shape and t.is_floating_point()
    try:
        source = d.pick(fits)
    except UnsuitableError:
        source = d.leaf(shape)
    sign = d.choice(["=", "=", "+=", "*="])
    d.write(f"{name}[{where}] {sign} {source}", name)


@operation(2)
def by_index(d: Draw) -> None:
    name = target(d)
    value = d.true[name]
    if not value.ndim or value.dtype not in (torch.float32, torch.bfloat16):
        raise UnsuitableError
    dim, dtype = d.dim(name) % value.ndim, str(value.dtype)
    kind = d.choice(["index_add_", "index_fill_", "scatter_add_", "index_put_", "index_copy_"])
    if kind == "scatter_add_":
        index = d.indices(list(value.shape), value.shape[dim])
        d.write(f"{name}.scatter_add_({dim}, {index}, {d.leaf(value.shape, dtype)})", name)
        return
    if kind == "index_put_":
        index = d.indices([d.size()], value.shape[0])
        source = d.leaf([len(d.true[index]), *value.shape[1:]], dtype)
        d.write(f"{name}.index_put_(({index},), {source}, accumulate=True)", name)
        return
    if kind == "index_copy_":
        order = d.leaf([value.shape[dim]])
        (index,) = d.let(f"{order}.detach().argsort()")
    else:
        index = d.indices([d.size()], value.shape[dim])
    if kind == "index_fill_":
        d.write(f"{name}.index_fill_({dim}, {index}, {d.number()})", name)
        return
    count = len(d.true[index])
    source = d.leaf([*value.shape[:dim], count, *value.shape[dim + 1 :]], dtype)
    d.write(f"{name}.{kind}({dim}, {index}, {source})", name)


@operation(1)
def into(d: Draw) -> None:
    """``out=`` of what is there: without gradients, as torch wants."""
    name = d.pick(lambda t: t.dtype == torch.float32 and t.numel() and not t.requires_grad)
    shape = d.true[name].shape
    fits = lambda t: t.dtype == torch.float32 and t.shape == shape and not t.requires_grad
    first, second = d.pick(fits), d.pick(fits)
    function = d.choice(["add", "mul", "sub"])
    d.write(f"torch.{function}({first}, {second}, out={name})", name)


@operation(0.8)
def in_place_of_products(d: Draw) -> None:
    name = target(d)
    value = d.true[name]
    if value.ndim != 2 or value.dtype != torch.float32:
        raise UnsuitableError
    inner = d.choice((1, 2, 3, 5, 8))
    first, second = d.leaf([value.shape[0], inner]), d.leaf([inner, value.shape[1]])
    d.write(f"{name}.addmm_({first}, {second})", name)
