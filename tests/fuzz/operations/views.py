"""Views, copies that only move values, and moves between layouts."""

from __future__ import annotations

import re

from tests.fuzz.draw import Draw, UnsuitableError, operation


def _factors(d: Draw, total: int) -> list[int]:
    """A shape of so many elements."""
    if not total:
        return [0, d.size()]
    shape: list[int] = []
    while total > 1 and len(shape) < 3 and d.chance(0.75):
        n = d.choice([n for n in range(1, total + 1) if total % n == 0])
        shape.append(n)
        total //= n
    shape.append(total)
    d.rng.shuffle(shape)
    return shape


@operation(3)
def redistribute(d: Draw) -> None:
    name = d.pick()
    value = d.true[name]
    layout = re.sub(r"Partial\('\w+'\)", "Replicate()", d.layout(value.shape, value.dtype))
    # Whether the result shares memory is the layouts' business: nobody writes to either.
    copy = ".clone()" if d.chance(0.5) else ""
    (new,) = d.let(f"redistribute({name}, {layout}){copy}", moves=True)
    if not copy:
        d.kept.update((d.memory(name), d.memory(new)))


@operation(3)
def reshape(d: Draw) -> None:
    name = d.pick()
    shape = [-1] if d.chance(0.3) else _factors(d, d.true[name].numel())
    d.let(f"{name}.{d.choice(['reshape', 'reshape', 'view'])}({shape})", moves=True)


@operation(2)
def permuted(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim >= 2)
    n = d.true[name].ndim
    kind = d.choice(["permute", "transpose", "movedim", "t", "mT"])
    if kind == "permute":
        d.let(f"{name}.permute({d.rng.sample(range(n), n)})", moves=True)
    elif kind in ("transpose", "movedim"):
        d.let(f"{name}.{kind}({d.dim(name)}, {d.dim(name)})", moves=True)
    else:
        d.let(f"{name}.t()" if kind == "t" else f"{name}.mT", moves=True)


@operation(3)
def sliced(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim >= 1)
    parts = []
    for size in d.true[name].shape:
        kind = d.choice(["all", "all", "part", "part", "step", "one", "last"])
        start = d.rng.randint(0, max(0, size - 1))
        if kind == "all":
            parts.append(":")
        elif kind == "part":
            parts.append(f"{start}:{d.rng.randint(start, size + 1)}" if size else ":")
        elif kind == "step":
            parts.append(f"{start}::{d.choice([2, 2, 3])}")
        elif kind == "last":
            parts.append(f"-{d.rng.randint(1, size)}:" if size else ":")
        else:
            parts.append(str(start - size if d.chance(0.3) else start))
    if d.chance(0.15):
        parts.insert(d.rng.randint(0, len(parts)), "None")
    (new,) = d.let(f"{name}[{', '.join(parts)}]", moves=True)
    if not d.true[new].numel() and not d.chance(0.05):
        raise UnsuitableError


@operation(1.5)
def narrowed(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim >= 1)
    dim = d.dim(name)
    size = d.true[name].shape[dim]
    if not size:
        raise UnsuitableError
    if d.chance(0.3):
        d.let(f"{name}.select({dim}, {d.rng.randrange(size)})", moves=True)
        return
    start = d.rng.randrange(size)
    d.let(f"{name}.narrow({dim}, {start}, {d.rng.randint(1, size - start)})", moves=True)


@operation(1.5)
def dims_added(d: Draw) -> None:
    name = d.pick()
    n = d.true[name].ndim
    kind = d.choice(["unsqueeze", "squeeze", "squeeze_all", "flatten", "unflatten"])
    if kind == "unsqueeze":
        d.let(f"{name}.unsqueeze({d.rng.randint(-n - 1, n)})", moves=True)
    elif kind == "squeeze_all":
        d.let(f"{name}.squeeze()", moves=True)
    elif not n:
        raise UnsuitableError
    elif kind == "squeeze":
        d.let(f"{name}.squeeze({d.dim(name)})", moves=True)
    elif kind == "flatten":
        start = d.rng.randrange(n)
        d.let(f"{name}.flatten({start}, {d.rng.randint(start, n - 1)})", moves=True)
    else:
        dim = d.dim(name)
        d.let(f"{name}.unflatten({dim}, {_factors(d, d.true[name].shape[dim])})", moves=True)


@operation(1.2)
def expanded(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim <= 3)
    shape = [d.size() if n == 1 else n for n in d.true[name].shape]
    if d.chance(0.5):
        shape.insert(0, d.choice((2, 3, 4, 5)))
    call = f"torch.broadcast_to({name}, {shape})" if d.chance(0.3) else f"{name}.expand({shape})"
    (new,) = d.let(call, moves=True)
    d.overlapping(new)


@operation(1.5)
def split(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim >= 1)
    dim = d.dim(name)
    size = d.true[name].shape[dim]
    if size < 2:
        raise UnsuitableError
    kind = d.choice(["chunk", "split", "sizes", "tensor_split", "unbind"])
    if kind == "chunk":
        call = f"{name}.chunk({d.choice([2, 2, 3, 4])}, {dim})"
    elif kind == "split":
        call = f"{name}.split({d.rng.randint((size + 2) // 3, size)}, {dim})"
    elif kind == "sizes":
        first = d.rng.randint(0, size)
        call = f"{name}.split([{first}, {size - first}], {dim})"
    elif kind == "tensor_split":
        call = f"{name}.tensor_split({d.choice([2, 3])}, {dim})"
    else:
        call = f"{name}.unbind({dim})"
    count = len(eval(call, {}, d.true))
    if not 1 < count <= 5:
        raise UnsuitableError
    d.let(call, results=count, moves=True)


@operation(1)
def turned(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim >= 1)
    if d.chance(0.5):
        d.let(f"{name}.flip({d.dim(name)})", moves=True)
    else:
        d.let(f"{name}.roll({d.rng.randint(-3, 3)}, {d.dim(name)})", moves=True)


@operation(1)
def diagonals(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim >= 2)
    kind = d.choice(["diagonal", "tril", "triu", "diag_embed"])
    offset = d.rng.randint(-1, 1)
    if kind == "diagonal":
        first, second = d.rng.sample(range(d.true[name].ndim), 2)
        d.let(f"{name}.diagonal({offset}, {first}, {second})", moves=True)
    elif kind == "diag_embed":
        d.let(f"{name}.diag_embed({offset})")
    else:
        d.let(f"{name}.{kind}({offset})")


@operation(0.8)
def windows(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim >= 1 and t.numel())
    dim = d.dim(name)
    size = d.true[name].shape[dim]
    window = d.rng.randint(1, size)
    step = d.rng.randint(1, 3)
    (new,) = d.let(f"{name}.unfold({dim}, {window}, {step})", moves=True)
    d.overlapping(new)


@operation(0.6)
def strided(d: Draw) -> None:
    name = d.pick(lambda t: t.numel() and t.is_contiguous() and not t.storage_offset())
    total = d.true[name].numel()
    size = [d.rng.randint(1, 4) for _ in range(d.rng.randint(1, 2))]
    stride = [d.rng.randint(1, 4) for _ in size]
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if last >= total:
        raise UnsuitableError
    offset = d.rng.randint(0, total - 1 - last)
    (new,) = d.let(f"{name}.as_strided({size}, {stride}, {offset})", moves=True)
    d.overlapping(new)


@operation(2)
def joined(d: Draw) -> None:
    first = d.pick(lambda t: t.ndim >= 1)
    shape, dim = d.true[first].shape, d.dim(first)
    rest = lambda t: [n for i, n in enumerate(t.shape) if i != dim % len(shape)]
    fits = lambda t: (
        t.ndim == len(shape) and rest(t) == rest(d.true[first]) and t.dtype == d.true[first].dtype
    )
    others = [d.pick(fits) for _ in range(d.rng.randint(1, 2))]
    parts = [first, *others]
    d.rng.shuffle(parts)
    d.let(f"torch.cat([{', '.join(parts)}], {dim})", moves=True)


@operation(1)
def stacked(d: Draw) -> None:
    first = d.pick()
    alike = lambda t: t.shape == d.true[first].shape and t.dtype == d.true[first].dtype
    parts = [first, *(d.pick(alike) for _ in range(d.rng.randint(1, 2)))]
    dim = d.rng.randint(0, d.true[first].ndim)
    d.let(f"torch.stack([{', '.join(parts)}], {dim})", moves=True)


@operation(1)
def repeated(d: Draw) -> None:
    name = d.pick(lambda t: 1 <= t.ndim <= 3)
    if d.chance(0.5):
        times = [d.choice((1, 1, 2, 3)) for _ in d.true[name].shape]
        d.let(f"{name}.repeat({times})", moves=True)
    else:
        d.let(f"{name}.repeat_interleave({d.choice((2, 3))}, {d.dim(name)})", moves=True)


@operation(0.8)
def padded(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim >= 1 and t.is_floating_point())
    pads = [d.rng.randint(0, 2) for _ in range(2 * d.rng.randint(1, d.true[name].ndim))]
    d.let(f"F.pad({name}, {pads}, value=0.5)")


@operation(1)
def copied(d: Draw) -> None:
    name = d.pick()
    d.let(
        f"{name}.{d.choice(['clone()', 'clone()', 'contiguous()', 'detach().clone()'])}", moves=True
    )


@operation(0.7)
def parts_of_complex(d: Draw) -> None:
    kind = d.choice(["real", "imag", "as_real", "as_complex", "conj"])
    if kind == "as_complex":
        name = d.pick(lambda t: t.dtype.is_floating_point and t.ndim and t.shape[-1] == 2)
        if str(d.true[name].dtype) == "torch.bfloat16":
            raise UnsuitableError
        d.let(f"torch.view_as_complex({name})", moves=True)
        return
    name = d.pick(lambda t: t.is_complex())
    if kind == "as_real":
        d.let(f"torch.view_as_real({name})", moves=True)
    else:
        d.let(f"{name}.conj()" if kind == "conj" else f"{name}.{kind}", moves=True)
