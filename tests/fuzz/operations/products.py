"""Products, convolutions and attention."""

from __future__ import annotations

import torch

from tests.fuzz.draw import Draw, UnsuitableError, operation


def _floating(t: torch.Tensor) -> bool:
    return t.dtype in (torch.float32, torch.bfloat16) and t.numel() > 0


def factor(d: Draw, shape: list[int], dtype: torch.dtype) -> str:
    """A tensor of a shape: of the program, or a new input."""
    if d.chance(0.5):
        found = [n for n, t in d.true.items() if list(t.shape) == shape and t.dtype == dtype]
        if found:
            return d.choice(found)
    return d.leaf(shape, str(dtype))


@operation(3)
def matrices(d: Draw) -> None:
    name = d.pick(lambda t: _floating(t) and t.ndim >= 2)
    value = d.true[name]
    *lead, rows, inner = value.shape
    columns = d.size()
    kind = d.choice(["mm", "linear", "linear_bias", "matmul", "batched", "left", "addmm", "mv"])
    if kind == "linear" or kind == "linear_bias":
        weight = factor(d, [columns, inner], value.dtype)
        bias = f", {factor(d, [columns], value.dtype)}" if kind == "linear_bias" else ""
        d.let(f"F.linear({name}, {weight}{bias})")
    elif kind == "matmul":
        d.let(f"{name} @ {factor(d, [inner, columns], value.dtype)}")
    elif kind == "batched":
        batch = [n if d.chance(0.8) else 1 for n in lead]
        d.let(f"{name} @ {factor(d, [*batch, inner, columns], value.dtype)}")
    elif kind == "left":
        d.let(f"{factor(d, [columns, rows], value.dtype)} @ {name}")
    elif kind == "mv":
        d.let(f"{name} @ {factor(d, [inner], value.dtype)}")
    elif lead:
        raise UnsuitableError
    elif kind == "mm":
        d.let(f"torch.mm({name}, {factor(d, [inner, columns], value.dtype)})")
    else:
        second = factor(d, [inner, columns], value.dtype)
        start = factor(d, d.choice([[columns], [rows, columns], [1, columns]]), value.dtype)
        d.let(f"torch.addmm({start}, {name}, {second}, beta=0.5, alpha=0.75)")


@operation(1.5)
def batches(d: Draw) -> None:
    name = d.pick(lambda t: _floating(t) and t.ndim == 3)
    value = d.true[name]
    batch, rows, inner = value.shape
    columns = d.size()
    second = factor(d, [batch, inner, columns], value.dtype)
    if d.chance(0.6):
        d.let(f"torch.bmm({name}, {second})")
    else:
        start = factor(d, d.choice([[columns], [batch, rows, columns]]), value.dtype)
        d.let(f"torch.baddbmm({start}, {name}, {second})")


@operation(2)
def einsum(d: Draw) -> None:
    name = d.pick(lambda t: _floating(t) and 1 <= t.ndim <= 3)
    value = d.true[name]
    letters = "abc"[: value.ndim]
    sizes = dict(zip(letters, value.shape, strict=True))
    sizes |= {"x": d.size(), "y": d.size()}
    others = d.rng.sample([*letters, *"xy"], d.rng.randint(1, 3))
    second = factor(d, [sizes[letter] for letter in others], value.dtype)
    every = sorted({*letters, *others})
    result = d.rng.sample(every, d.rng.randint(0, min(3, len(every))))
    equation = f"{letters},{''.join(others)}->{''.join(result)}"
    d.let(f"torch.einsum({equation!r}, {name}, {second})")


@operation(0.7)
def outer(d: Draw) -> None:
    name = d.pick(lambda t: _floating(t) and t.ndim == 1)
    second = factor(d, [d.size()], d.true[name].dtype)
    d.let(f"torch.outer({name}, {second})")


@operation(1.2)
def convolution(d: Draw) -> None:
    spatial = d.choice([1, 1, 2])
    groups = d.choice([1, 1, 1, 2])
    fits = lambda t: (
        t.dtype == torch.float32
        and t.ndim == spatial + 2
        and t.numel()
        and t.shape[1] % groups == 0
    )
    try:
        name = d.pick(fits)
    except UnsuitableError:
        shape = [d.choice([1, 2, 3]), groups * d.choice([1, 2, 3])]
        name = d.leaf([*shape, *(d.choice([3, 4, 5, 6, 8]) for _ in range(spatial))])
    channels = d.true[name].shape[1]
    kernel = [d.choice([1, 2, 3]) for _ in range(spatial)]
    transposed = d.chance(0.3)
    made = d.choice([1, 2, 3])
    if transposed:
        weight = d.leaf([channels, made, *kernel])
    else:
        weight = d.leaf([made * groups, channels // groups, *kernel])
    stride, padding = d.choice([1, 1, 2]), d.choice([0, 0, 1])
    kind = f"conv_transpose{spatial}d" if transposed else f"conv{spatial}d"
    d.let(f"F.{kind}({name}, {weight}, stride={stride}, padding={padding}, groups={groups})")


@operation(0.5)
def pooled(d: Draw) -> None:
    name = d.pick(lambda t: t.dtype == torch.float32 and t.ndim in (3, 4) and t.shape[-1] >= 2)
    dims = d.true[name].ndim - 2
    size = d.choice([2, 3])
    if d.chance(0.5):
        d.apart(name)
        d.let(f"F.max_pool{dims}d({name}, {size}, {d.choice([1, 2])})")
    else:
        d.let(f"F.avg_pool{dims}d({name}, {size}, {d.choice([1, 2])})")


@operation(1)
def attention(d: Draw) -> None:
    name = d.pick(lambda t: t.dtype == torch.float32 and t.ndim in (3, 4) and t.numel())
    *lead, queries, width = d.true[name].shape
    keys = d.choice([queries, d.size()])
    key = factor(d, [*lead, keys, width], torch.float32)
    value = factor(d, [*lead, keys, d.choice([width, d.size()])], torch.float32)
    if not keys:
        raise UnsuitableError
    extra = ", is_causal=True" if d.chance(0.4) else ""
    if not extra and d.chance(0.3):
        extra = f", attn_mask={factor(d, [queries, keys], torch.float32)}"
    d.let(f"F.scaled_dot_product_attention({name}, {key}, {value}{extra})")
