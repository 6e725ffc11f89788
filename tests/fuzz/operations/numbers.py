"""Elementwise operations, reductions, norms, dtypes and choices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.fuzz.draw import Draw, UnsuitableError, operation

SMOOTH = [
    "{0}.sin()",
    "{0}.cos()",
    "{0}.tanh()",
    "{0}.sigmoid()",
    "{0} * {n}",
    "{0} + {n}",
    "{n} - {0}",
    "-{0}",
    "{0} / {n}",
    "{0}.square()",
    "{0} ** 3",
    "F.gelu({0})",
    "F.silu({0})",
    "F.softplus({0})",
    "({0} * 0.5).exp()",
    "({0}.square() + 0.5).log()",
    "({0}.square() + 0.5).sqrt()",
    "({0}.square() + 0.5).rsqrt()",
    "1 / ({0}.square() + 0.5)",
    "torch.erf({0})",
    "torch.atan({0})",
]
# Not differentiable, or not continuous, at these borders.
KINKED = {
    "{0}.abs()": (0.0,),
    "{0}.relu()": (0.0,),
    "{0}.clamp(-0.7, 0.9)": (-0.7, 0.9),
    "F.leaky_relu({0}, 0.1)": (0.0,),
    "F.hardtanh({0})": (-1.0, 1.0),
    "{0}.sign()": (0.0,),
    "{0}.clamp_min(0.1)": (0.1,),
    "({0} > 0.3)": (0.3,),
    "({0} <= -0.2)": (-0.2,),
    "F.threshold({0}, 0.2, -1.0)": (0.2,),
}


@operation(5)
def elementwise(d: Draw) -> None:
    d.let(d.choice(SMOOTH).format(d.floats(), n=d.number()))


@operation(2)
def kinked(d: Draw) -> None:
    name = d.floats()
    text = d.choice(list(KINKED))
    d.away(name, *KINKED[text])
    d.let(text.format(name))


@operation(1)
def rounded(d: Draw) -> None:
    name = d.floats()
    kind = d.choice(["floor", "ceil", "trunc", "round", "to"])
    value = d.wide[name].detach() * 2  # borders at halves, too
    d._wide_enough(name, value, (value - value.round()).abs())
    d.let(f"{name}.to(torch.int64)" if kind == "to" else f"{name}.{kind}()")


@operation(1.2)
def of_integers(d: Draw) -> None:
    name = d.pick(lambda t: t.dtype in (torch.int64, torch.int32))
    text = d.choice(
        [
            "{0} * 3",
            "{0} + 2",
            "{0} // 3",
            "{0} % 4",
            "-{0}",
            "{0}.abs()",
            "({0} > 1)",
            "{0} & 5",
            "{0} ^ 3",
            "{0} << 1",
            "{0}.clamp(-3, 4)",
            "{0}.to(torch.float32)",
            "{0} * 0.5",
        ]
    )
    d.let(text.format(name))


@operation(1)
def of_masks(d: Draw) -> None:
    name = d.pick(lambda t: t.dtype == torch.bool)
    kinds = ["~{0}", "{0}.to(torch.int64)", "{0}.to(torch.float32)", "{0}.any()", "{0}.all()"]
    if d.true[name].ndim:
        dim = d.dim(name)
        kinds += [f"{{0}}.any({dim})", f"{{0}}.all({dim})", f"{{0}}.sum({dim})"]
        kinds += [f"{{0}}.cumsum({dim})"]
    d.let(d.choice(kinds).format(name))


@operation(1.2)
def of_complex(d: Draw) -> None:
    name = d.pick(lambda t: t.is_complex())
    text = d.choice(
        [
            "{0} * (1.5 - 0.5j)",
            "{0} * {0}",
            "{0} + 1j",
            "{0}.conj()",
            "{0}.exp()",
            "{0}.sin()",
            "{0}.abs().square()",
            "{0} / (2 + {0}.abs())",
            "{0}.sum()",
            "{0}.mean()",
        ]
    )
    if "abs" in text:
        value = d.wide[name].detach().abs()
        if value.numel() and float(value.min()) < 0.05:
            raise UnsuitableError
    d.let(text.format(name))


@operation(1)
def converted(d: Draw) -> None:
    name = d.pick(lambda t: t.is_floating_point())
    dtype = d.choice(["torch.float32", "torch.float64", "torch.bfloat16", "torch.bfloat16"])
    d.let(f"{name}.to({dtype})", moves=dtype != "torch.bfloat16")


def other(d: Draw, name: str, suits: object = None) -> str:
    """Something to combine with: of the program, or a new input of a shape that broadcasts."""
    shape = list(d.true[name].shape)

    def broadcasts(t: torch.Tensor) -> bool:
        if t.dtype == torch.bool:
            return False
        pairs = list(zip(reversed(t.shape), reversed(shape), strict=False))
        return all(a == b or 1 in (a, b) for a, b in pairs)

    if d.chance(0.6):
        try:
            return d.pick(broadcasts)
        except UnsuitableError:
            pass
    own = [1 if d.chance(0.25) else n for n in shape]
    while own and d.chance(0.2):
        own.pop(0)
    return d.leaf(own, d.rng.choices(["torch.float32", "torch.bfloat16"], (8, 1))[0])


@operation(4)
def combined(d: Draw) -> None:
    name = d.pick(lambda t: t.dtype != torch.bool)
    second = other(d, name)
    kinds = ["{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.add({0}, {1}, alpha=0.5)"]
    if not d.true[name].is_complex() and not d.true[second].is_complex():
        kinds += [
            "{0} / ({1}.square() + 0.5)",
            "torch.lerp({0}, {1}, 0.3)",
            "torch.atan2({0}, {1}.square() + 0.5)",
        ]
    text = d.choice(kinds)
    if "lerp" in text and d.true[name].dtype != d.true[second].dtype:
        raise UnsuitableError
    d.let(text.format(name, second))


@operation(1.5)
def compared(d: Draw) -> None:
    name = d.floats()
    second = other(d, name)
    if d.true[second].is_complex() or d.given.intersection((name, second)):
        raise UnsuitableError
    value, border = d.wide[name].detach(), d.wide[second].detach()
    exact = d.exact.issuperset((name, second))
    difference = value - border
    if difference.numel():
        largest = max(float(value.abs().max()), float(border.abs().max()))
        coarse = d.coarse.intersection((name, second))
        least = 0.0 if exact else (0.06 if coarse else 1e-3) * largest
        if float(difference.abs().min()) <= least:
            raise UnsuitableError
    kinds = [
        "{0} > {1}",
        "{0} < {1}",
        "torch.maximum({0}, {1})",
        "torch.minimum({0}, {1})",
        "{0} != {1}",
    ]
    d.let(d.choice(kinds).format(name, second))


def mask(d: Draw, shape: Sequence[int]) -> str:
    """A mask of a shape: of the program, or a new input."""
    found = [n for n, t in d.true.items() if t.dtype == torch.bool and t.shape == shape]
    if found and d.chance(0.7):
        return d.choice(found)
    return d.leaf(shape, "torch.bool")


@operation(2)
def chosen(d: Draw) -> None:
    if d.chance(0.5):
        where = d.pick(lambda t: t.dtype == torch.bool)
        name = other(d, where)
    else:
        name = d.pick(lambda t: t.dtype != torch.bool)
        shape = d.true[name].shape
        where = mask(d, shape if d.chance(0.7) else shape[-1:])
    if d.chance(0.4):
        d.let(f"torch.where({where}, {name}, {other(d, name)})")
    elif d.chance(0.5):
        d.let(f"torch.where({where}, {name}, {d.number()})")
    else:
        d.let(f"{name}.masked_fill({where}, {d.number()})")


@operation(4)
def reduced(d: Draw) -> None:
    name = d.pick(lambda t: t.is_floating_point() or t.is_complex() or t.dtype == torch.int64)
    value = d.true[name]
    kinds = ["sum", "sum", "mean", "prod"]
    if value.is_floating_point():
        kinds += ["var", "std", "norm", "amax", "amin", "logsumexp", "all_dims"]
    kind = d.choice(kinds)
    if not value.numel() and kind not in ("sum", "prod"):
        raise UnsuitableError
    if kind == "all_dims" or not value.ndim:
        d.let(f"{name}.{d.choice(['sum', 'mean'])}()")
        return
    count = d.rng.randint(1, value.ndim) if kind not in ("prod", "logsumexp") else 1
    dims = sorted(d.rng.sample(range(value.ndim), count))
    where = str(dims if count > 1 else dims[0])
    keep = ", keepdim=True" if d.chance(0.4) else ""
    if kind in ("var", "std"):
        if all(value.shape[i] < 2 for i in dims):
            raise UnsuitableError
        correction = d.choice([0, 1, 1])
        spread = d.wide[name].detach().var(dims, correction=0)
        if kind == "std" and spread.numel() and float(spread.min()) < 1e-2:
            raise UnsuitableError
        d.let(f"{name}.{kind}({where}, correction={correction}{keep})")
    elif kind == "norm":
        sizes = d.wide[name].detach().square().sum(dims)
        if sizes.numel() and float(sizes.min()) < 1e-2:
            raise UnsuitableError
        d.let(f"torch.linalg.vector_norm({name}, {d.choice([2, 2, 1, 3])}, {where}{keep})")
    elif kind in ("amax", "amin"):
        for dim in dims if count == 1 else [None]:
            d.apart(name, dim)
        d.let(f"{name}.{kind}({where}{keep})")
    else:
        d.let(f"{name}.{kind}({where}{keep})")


@operation(1)
def extreme(d: Draw) -> None:
    name = d.pick(lambda t: t.is_floating_point() and t.numel() and t.ndim)
    dim = d.dim(name)
    d.apart(name, dim)
    kind = d.choice(["max", "min", "argmax", "argmin"])
    results = 1 if kind.startswith("arg") else 2
    d.let(f"{name}.{kind}({dim})", results)


@operation(1.5)
def accumulated(d: Draw) -> None:
    name = d.pick(lambda t: t.ndim and t.dtype != torch.bool)
    kinds = ["cumsum"] * 3
    if d.true[name].is_floating_point():
        kinds += ["cumprod", "logcumsumexp"]
    kind = d.choice(kinds)
    if kind == "logcumsumexp" and d.true[name].dtype == torch.bfloat16:
        raise UnsuitableError
    d.let(f"{name}.{kind}({d.dim(name)})")


@operation(2)
def normalized(d: Draw) -> None:
    name = d.pick(lambda t: t.is_floating_point() and t.ndim and t.numel())
    value = d.true[name]
    kind = d.choice(["softmax", "log_softmax", "layer_norm", "layer_norm", "rms_norm", "normalize"])
    if kind in ("softmax", "log_softmax"):
        d.let(f"{name}.{kind}({d.dim(name)})")
    elif kind == "normalize":
        dim = d.dim(name)
        if float(d.wide[name].detach().square().sum(dim).min()) < 1e-2:
            raise UnsuitableError
        d.let(f"F.normalize({name}, dim={dim})")
    else:
        shape = list(value.shape[-d.rng.randint(1, min(2, value.ndim)) :])
        weight = ""
        if d.chance(0.6):
            dtype = str(value.dtype)
            if dtype == "torch.float64":
                raise UnsuitableError
            weight = f", {d.leaf(shape, dtype)}"
            if kind == "layer_norm" and d.chance(0.5):
                weight += f", {d.leaf(shape, dtype)}"
        d.let(f"F.{kind}({name}, {shape}{weight}, eps=0.01)")


@operation(0.6)
def losses(d: Draw) -> None:
    name = d.pick(lambda t: t.dtype == torch.float32 and t.ndim == 2 and t.numel())
    rows, classes = d.true[name].shape
    reduction = d.choice(["mean", "sum", "none"])
    target = d.indices([rows], classes)
    d.let(f"F.cross_entropy({name}, {target}, reduction={reduction!r})")
