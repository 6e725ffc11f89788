"""Matrix products: one notation each, linear in every factor."""

from __future__ import annotations

import string
from collections.abc import Sequence

from torch.distributed.tensor import Placement, Shard

from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import REPLICATE, TensorInfo, moved_to, shard_dim
from xla_dtensor.rules.notation import alternatives, parse
from xla_dtensor.rules.registry import notation_rule, register, register_family

PRODUCTS = {
    "mm": "m k, k n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "mv": "m k, k -> m",
    "dot": "i, i ->",
    "vdot": "i, i ->",
    "ger": "i, j -> i j",
    "outer": "i, j -> i j",
    "_int_mm": "m k, k n -> m n",
}
for _name, _text in PRODUCTS.items():
    register_family(f"aten::{_name}", notation_rule(_text, multilinear=True))

# An addend, then the product it is added to; it has the product's layout, partial included.
ADDED_PRODUCTS = {
    "addmm": "m k, k n -> m n",
    "_addmm_activation": "m k, k n -> m n",
    "addmv": "m k, k -> m",
    "addr": "i, j -> i j",
    "baddbmm": "b m k, b k n -> b m n",
    "addbmm": "b m k, b k n -> m n",
}


def with_addend(
    products: Sequence[Alternative], addend: TensorInfo, out_ndim: int, *, first: bool = True
) -> list[Alternative]:
    """`products` with one more input, which is added to (and broadcast over) the output."""
    return [
        Alternative(
            product.outputs,
            (own, *product.inputs) if first else (*product.inputs, own),
        )
        for product in products
        for own in [_as_output(product.outputs[0], addend, out_ndim)]
    ]


def _as_output(output: Placement, addend: TensorInfo, out_ndim: int) -> Placement:
    dim = shard_dim(output)
    if dim is None:
        return output
    own = dim - (out_ndim - addend.ndim)
    return REPLICATE if own < 0 or addend.shape[own] == 1 else moved_to(output, own)


def _register_added(name: str, text: str) -> None:
    multilinear = name != "_addmm_activation"

    def rule(call: Call) -> Merged:
        addend, *factors = call.tensors
        notation = parse(text, multilinear=multilinear)
        products = alternatives(notation, [f.shape for f in factors])
        if not multilinear:
            products = [p for p in products if shard_dim(p.outputs[0]) is not None]
        return call.merge(with_addend(products, addend, len(notation.outputs[0])))

    rule.__doc__ = f"{text}, and an addend like the output"
    register(name)(rule)


for _name, _text in ADDED_PRODUCTS.items():
    _register_added(_name, _text)


def matmul_notation(a_ndim: int, b_ndim: int) -> str:
    """``torch.matmul`` by the ranks of its operands: batch dims broadcast from the right."""
    batch = [f"b{i}" for i in range(max(a_ndim, b_ndim) - 2, 0, -1)]

    def own(ndim: int) -> list[str]:
        return batch[len(batch) - (ndim - 2) :] if ndim > 2 else []

    a = [*own(a_ndim), "m", "k"] if a_ndim > 1 else ["k"]
    b = [*own(b_ndim), "k", "n"] if b_ndim > 1 else ["k"]
    out = [*batch, *["m"] * (a_ndim > 1), *["n"] * (b_ndim > 1)]
    return f"{' '.join(a)}, {' '.join(b)} -> {' '.join(out)}"


@register("matmul")
def matmul(call: Call) -> Merged:
    """... m k, ... k n -> ... m n"""
    a, b = call.tensors
    notation = parse(matmul_notation(a.ndim, b.ndim), multilinear=True)
    return call.merge(alternatives(notation, [a.shape, b.shape]), settled=True)


@register("linear")
def linear(call: Call) -> Merged:
    """... k, o k, o -> ... o"""
    x, weight, *bias = call.tensors
    rows = " ".join(string.ascii_letters[: x.ndim - 1])
    out = "" if weight.ndim == 1 else " _o"
    notation = parse(f"{rows} _k,{out} _k -> {rows}{out}", multilinear=True)
    products = alternatives(notation, [x.shape, weight.shape])
    if bias:
        products = with_addend(products, bias[0], len(notation.outputs[0]), first=False)
    return call.merge(products, settled=True)


@register("linear_weight_grad", namespace="xla_dtensor")
def linear_weight_grad(call: Call) -> Merged:
    """... o, ... i -> o i"""
    grad, x = call.tensors
    rows = " ".join(string.ascii_letters[: x.ndim - 1])
    notation = parse(f"{rows} _o, {rows} _i -> _o _i", multilinear=True)
    return call.merge(alternatives(notation, [grad.shape, x.shape]), settled=True)


@register("linear_input_grad", namespace="xla_dtensor")
def linear_input_grad(call: Call) -> Merged:
    """... o, o i -> ... i"""
    grad, weight = call.tensors
    rows = " ".join(string.ascii_letters[: grad.ndim - 1])
    notation = parse(f"{rows} _o, _o _i -> {rows} _i", multilinear=True)
    return call.merge(alternatives(notation, [grad.shape, weight.shape]), settled=True)


@register("einsum")
def einsum(call: Call) -> Merged | None:
    """the equation itself"""
    equation: str = call.args["equation"].replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    try:
        notation = parse(equation, multilinear=True)
    except ValueError:  # a diagonal names a dim twice
        return None
    return call.merge(alternatives(notation, [t.shape for t in call.tensors]))


@register("_scaled_mm")
def scaled_mm(call: Call) -> Merged | None:
    """m k, k n -> m n; a scale per row goes with its row"""
    a, b, *rest = call.tensors
    if call.args.get("bias") is not None or call.args.get("scale_result") is not None:
        return None
    products = alternatives(parse("m k, k n -> m n", multilinear=True), [a.shape, b.shape])
    scales = rest[:2]

    def scale(placement: Placement, info: TensorInfo) -> Placement:
        dim = shard_dim(placement)
        if dim is None or info.ndim < 2 or info.shape[dim] == 1:
            return REPLICATE
        return placement

    return call.merge(
        [
            Alternative(
                p.outputs,
                p.inputs + tuple(scale(q, s) for q, s in zip(p.inputs, scales, strict=True)),
            )
            for p in products
        ]
    )


@register("_grouped_mm")
def grouped_mm(call: Call) -> Merged | None:
    """m k, k n -> m n per group; the ragged dim is not sharded, nor its offsets"""
    a, b, *rest = call.tensors
    if call.args.get("bias") is not None:
        return None
    notation = {
        (2, 3): "m! k, g! k n -> m! n",
        (3, 2): "g! m k, k n! -> m n!",
        (2, 2): "m k!, k! n -> g! m n",
        (3, 3): "g m k, g k n -> g m n",
    }[a.ndim, b.ndim]
    products = alternatives(parse(notation, multilinear=True), [a.shape, b.shape])
    offsets = (REPLICATE,) * len(rest)
    return call.merge([Alternative(p.outputs, p.inputs + offsets) for p in products])


@register("cdist", "_cdist_forward")
def cdist(call: Call) -> Merged:
    """b p m!, b r m! -> b p r"""
    a, b = call.tensors
    if a.ndim == b.ndim == 2:
        text = "p m!, r m! -> p r"
    else:
        text = matmul_notation(a.ndim, b.ndim)
        text = text.replace("k", "k!")
        left, right = text.split(",", 1)
        second, out = right.split("->")
        swapped = second.replace("k! n", "n k!")
        text = f"{left}, {swapped} -> {out}"
    return call.merge(alternatives(parse(text), [a.shape, b.shape]))


@register("linalg_cross")
def cross(call: Call) -> Merged:
    """elementwise but for the dim of the three components"""
    out = call.out_shapes[0]
    assert out is not None
    active = call.dim(len(out), default=-1)
    return call.merge(
        [Alternative((Shard(d),), (Shard(d),) * 2) for d in range(len(out)) if d != active]
    )
