"""Elementwise ops: every output dim may be sharded, wherever the inputs have it.

Whether a partial input stays partial depends on the function. `PARTIAL_RULES` says for which
reductions f(reduce(x)) = reduce(f(x)); everything else needs the reduced value first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch.distributed.tensor import Partial, Placement, Shard

from xla_dtensor.base.torch_private.attributes import schema_of
from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import REPLICATE, TensorInfo
from xla_dtensor.rules.registry import ELEMENTWISE, register, register_family, register_kind

# Each row is "output <- inputs"; "R" is a replicated input. A row serves the calls with as many
# tensor inputs as it names.
_LINEAR = ["sum <- sum", "avg <- avg"]
_INCREASING = ["max <- max", "min <- min"]
_DECREASING = ["min <- max", "max <- min"]
_FIRST = ["sum <- sum R", "avg <- avg R"]
_SECOND = ["sum <- R sum", "avg <- R avg"]
_SUM = [
    "sum <- sum sum",
    "avg <- avg avg",
    # A constant on every device is its own average, and shifts a maximum or minimum; a negative
    # alpha would turn those of the second operand around.
    "avg <- avg R",
    "max <- max R",
    "min <- min R",
    "avg <- R avg",
]
_MONOTONE = ["max <- max R", "max <- R max", "min <- min R", "min <- R min"]
_ANY = [f"{op} <- {op}" for op in ("sum", "avg", "max", "min")]

_INCREASING_OPS = """
    asinh atan ceil deg2rad erf exp exp2 expm1 floor hardshrink nan_to_num rad2deg relu round sgn
    sigmoid sign sinh special_modified_bessel_i1 tanh threshold trunc
"""

PARTIAL_RULES: dict[str, list[str]] = {
    "add": _SUM,
    "sub": _SUM,
    "mul": _LINEAR + _FIRST + _SECOND,
    "div": _LINEAR + _FIRST,
    "neg": _LINEAR + _DECREASING,
    "positive": _ANY,
    "logaddexp": _MONOTONE,
    "logaddexp2": _MONOTONE,
    "clamp_min": [*_MONOTONE, "max <- max max"],
    "fmax": [*_MONOTONE, "max <- max max"],
    "maximum": [*_MONOTONE, "max <- max max"],
    "clamp_max": [*_MONOTONE, "min <- min min"],
    "fmin": [*_MONOTONE, "min <- min min"],
    "minimum": [*_MONOTONE, "min <- min min"],
    "erfc": _DECREASING,
    "special_erfcx": _DECREASING,
    "special_xlog1py": _FIRST,
    # Decreasing, but only defined above zero: a maximum's parts may lie below it.
    **{
        f"special_{scaled}modified_bessel_k{order}": ["max <- min"]
        for scaled in ("", "scaled_")
        for order in (0, 1)
    },
    **dict.fromkeys(_INCREASING_OPS.split(), _INCREASING),
}

# The rounding division has the division's name and is not linear.
ROUNDING_DIVISIONS = ("Tensor_mode", "Scalar_mode", "out_mode", "Scalar_mode_out")

# Elementwise in effect, and not tagged so in every torch version.
UNTAGGED = """
    __ilshift__ __irshift__ _add_relu _conj _conj_physical _neg_view _prelu_kernel
    _prelu_kernel_backward _standard_gamma absolute alpha_dropout arccos arccosh arcsin arcsinh
    arctan arctan2 arctanh bernoulli binomial cauchy complex conj copysign dropout elu_backward
    exponential fill_diagonal fix float_power floor_divide geometric greater greater_equal
    hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward
    leaky_relu_backward less less_equal log_normal log_sigmoid_backward log_sigmoid_forward
    masked_fill mish_backward native_dropout native_dropout_backward normal normal_functional
    not_equal poisson polar polygamma random rrelu_with_noise rrelu_with_noise_backward
    rrelu_with_noise_functional rsub softplus_backward softshrink_backward special_ndtr uniform
    where xlogy
"""

# Other names of elementwise ops.
ALIASES = {
    "divide": "div",
    "multiply": "mul",
    "negative": "neg",
    "subtract": "sub",
    "true_divide": "div",
}


@cache
def _parse(row: str, n_outputs: int) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    def slot(word: str) -> Placement:
        return REPLICATE if word == "R" else Partial(word)

    output, _, inputs = row.partition("<-")
    return (slot(output.strip()),) * n_outputs, tuple(slot(w) for w in inputs.split())


def partial_alternatives(name: str, n_inputs: int, n_outputs: int = 1) -> list[Alternative]:
    """The rows of op `name` for that many tensor inputs."""
    rules = PARTIAL_RULES.get(ALIASES.get(name, name), ())
    rows = (_parse(row, n_outputs) for row in rules)
    return [Alternative(out, ins) for out, ins in rows if len(ins) == n_inputs]


def elementwise_alternatives(
    tensors: Sequence[TensorInfo], n_outputs: int = 1
) -> list[Alternative]:
    """Shard any one dim of the broadcast shape. A dim that an input broadcasts is whole there."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    result = []
    for d, size in enumerate(shape):
        inputs: list[Placement] = []
        for t in tensors:
            own = d - (len(shape) - t.ndim)
            inputs.append(Shard(own) if own >= 0 and t.shape[own] == size else REPLICATE)
        result.append(Alternative((Shard(d),) * n_outputs, tuple(inputs)))
    return result


def pointwise_rule(call: Call) -> Merged | None:
    """elementwise"""
    if not call.tensors:
        return None
    options = elementwise_alternatives(call.tensors, call.n_outputs)
    # Another library's op may have the name of one of torch's, and be another function.
    known = call.func.namespace in ("aten", "prims")
    if known and schema_of(call.func).overload_name not in ROUNDING_DIVISIONS:
        options += partial_alternatives(call.name, len(call.tensors), call.n_outputs)
    merged = call.merge(options)
    # A second output may be a buffer of no particular shape.
    shape = torch.broadcast_shapes(*(t.shape for t in call.tensors))
    outputs = [
        placements if own is None or len(own) == len(shape) else (REPLICATE,) * len(placements)
        for own, placements in zip(call.out_shapes, merged.outputs, strict=True)
    ]
    return replace(merged, outputs=tuple(outputs))


def _follow(call: Call) -> Merged:
    """as the input, partial included"""
    placements = call.tensors[0].placements
    return call.follow([t.placements for t in call.tensors], placements)


register(*UNTAGGED.split(), *ALIASES, "max.other", "min.other")(pointwise_rule)
register(
    *[
        "alias",
        "contiguous",
        "detach",
        "fill",
        "lift",
        "lift_fresh",
        "lift_fresh_copy",
        "view.dtype",
        "zero",
        "set_.source_Tensor",
        "_autocast_to_full_precision",
    ]
)(_follow)
register_family("prims::view_of", _follow)


def _cast_keeps(reduction: str, source: torch.dtype, target: torch.dtype | None) -> bool:
    """Whether casting the parts is casting the whole: not if the cast rounds the parts away."""
    if target is None or target == source:
        return True
    if target == torch.bool:
        return False
    if reduction in ("max", "min"):
        return True
    return target.is_floating_point or not source.is_floating_point


@register("_to_copy", "to.dtype")
def cast(call: Call) -> Merged:
    """elementwise; partial where the cast commutes with the reduction"""
    x = call.tensors[0]
    kept = [
        Alternative((Partial(op),), (Partial(op),))
        for op in ("sum", "avg", "min", "max", "product")
        if _cast_keeps(op, x.dtype, call.args.get("dtype"))
    ]
    return call.merge(elementwise_alternatives([x]) + kept)


@register("copy")
def copy(call: Call) -> Merged:
    """elementwise; any one reduction on both"""
    both = [Alternative((Partial(op),), (Partial(op),) * 2) for op in ("sum", "avg", "max", "min")]
    return call.merge(elementwise_alternatives(call.tensors) + both)


@register("glu")
def glu(call: Call) -> Merged:
    """elementwise over two halves of `dim`, which is not sharded"""
    x = call.tensors[0]
    halved = call.dim(x.ndim, default=-1)
    return call.merge([a for a in elementwise_alternatives([x]) if a.inputs != (Shard(halved),)])


@register("glu_backward")
def glu_backward(call: Call) -> Merged:
    """as glu, its input's shape"""
    halved = call.dim(call.tensor("self").ndim, default=-1)
    shards = [d for d in range(call.tensor("self").ndim) if d != halved]
    return call.merge([Alternative((Shard(d),), (Shard(d),) * 2) for d in shards])


register_kind(ELEMENTWISE, lambda func: pointwise_rule)
