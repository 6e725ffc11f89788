"""Counts the floating-point operations of a step's matrix products and convolutions."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax import lax
from jax.interpreters import partial_eval

from xla_dtensor.base import jax_private
from xla_dtensor.lowering.attention import cudnn
from xla_dtensor.lowering.attention.splash import share_of_blocks
from xla_dtensor.lowering.linalg import megablox
from xla_dtensor.lowering.workarounds import is_among
from xla_dtensor.plans import shard_map_call


def flops(jaxpr: Any, platform: str) -> Counter[str]:
    """Of all devices together, by what is multiplied: a multiplication and an addition per term of
    a product, those in loops, and in the grids of kernels, as often as they run. What runs once per
    device inside of a ``shard_map`` counts as often as there are devices; what nothing needs isn't
    counted.

    Args:
        jaxpr: of a step, from tracing it.
        platform: of the devices, of which alone what is lowered for them counts.

    Returns:
        the counts by ``"fp64"``, ``"fp32"``, ``"tf32"`` (float32 in whatever precision the platform
        takes for it by default), ``"bf16"`` (all of 16 bits), ``"fp8"``, ``"int8"``, or the dtype's
        name.
    """
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _flops(needed, platform)


def _flops(jaxpr: Any, platform: str) -> Counter[str]:
    total: Counter[str] = Counter()
    again = cudnn.found_again(jaxpr)
    for equation in jaxpr.eqns:
        if id(equation) in again:
            continue
        name = equation.primitive.name
        is_jit = name in ("jit", "pjit")
        of_groups = is_jit and megablox.is_product(equation.params["name"])
        if name in ("dot_general", "ragged_dot", "ragged_dot_general") or of_groups:
            total[kind_of(equation)] += _product(equation) * _times(equation)
        elif name == "conv_general_dilated":
            total[kind_of(equation)] += _convolution(equation) * _times(equation)
        elif (of_attention := cudnn.operations(equation)) is not None:
            total[kind_of(equation)] += of_attention
        else:
            times: float = 1
            if name == "scan":
                times = equation.params["length"]
            elif name == "pallas_call":
                times = math.prod(equation.params["grid_mapping"].grid)
            elif name == "for_each":
                times = equation.params["count"]
            elif is_jit:
                times = share_of_blocks(equation.params["name"])
            elif name == "shard_map":
                manual = jax_private.manual_axes(equation)
                times = math.prod(equation.params["mesh"].shape[axis] for axis in manual)
            if name == "cut":  # attention, which is called on shards when it is lowered
                inside: Any = [shard_map_call.inside(equation)]
            else:
                inside = _branch(equation.params, platform) or _inner(equation.params)
            parts = [_flops(inner, platform) for inner in inside]
            if name == "cond":
                parts = [max(parts, key=Counter.total, default=Counter())]
            for part in parts:
                total.update({kind: round(times * count) for kind, count in part.items()})
    return total


def _times(equation: Any) -> int:
    """How many times the operations of real numbers: of complex ones four."""
    return 4 if np.issubdtype(equation.outvars[0].aval.dtype, np.complexfloating) else 1


def kind_of(equation: Any) -> str:
    """What a product's factors are, by the names that `flops` has.

    Args:
        equation: the product, or what else multiplies its first two operands.
    """
    dtype = max((v.aval.dtype for v in equation.invars[:2]), key=lambda dtype: dtype.itemsize)
    if dtype in (np.float32, np.complex64):
        asked = equation.params.get("precision")
        asked = asked[0] if isinstance(asked, tuple) else asked
        return "tf32" if asked in (None, lax.Precision.DEFAULT) else "fp32"
    name = str(dtype)
    if name.startswith("float8"):
        return "fp8"
    return _KINDS.get(name, name)


_KINDS = {
    **dict.fromkeys(("float64", "complex128"), "fp64"),
    **dict.fromkeys(("bfloat16", "float16"), "bf16"),
    **dict.fromkeys(("int8", "uint8"), "int8"),
}


def _branch(params: dict[str, Any], platform: str) -> list[Any]:
    """Of branches that are each for other platforms the one for this, or nothing."""
    pairs = zip(params.get("branches", ()), params.get("branches_platforms") or (), strict=False)
    found = (b.jaxpr for b, names in pairs if names is None or is_among(platform, names))
    return list(itertools.islice(found, 1))


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner


def _product(equation: Any) -> int:
    left, right = (variable.aval.shape for variable in equation.invars[:2])
    if equation.primitive.name != "dot_general":
        return 2 * math.prod(left) * right[-1]  # rows of x times their group's matrix
    (contracting, _), _ = equation.params["dimension_numbers"]
    terms = math.prod(left[dim] for dim in contracting)
    return 2 * math.prod(equation.outvars[0].aval.shape) * terms


def _convolution(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    spec = equation.params["dimension_numbers"].rhs_spec
    window = math.prod(kernel[dim] for dim in spec[1:])
    return 2 * math.prod(equation.outvars[0].aval.shape) * window
