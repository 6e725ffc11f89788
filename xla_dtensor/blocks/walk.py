"""Evaluates a jaxpr with everything that adds numbers up computed in blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from xla_dtensor.blocks.convolutions import convolution
from xla_dtensor.blocks.mapped import Cut, mapped
from xla_dtensor.blocks.products import elementwise, product, total
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.layouts.calls import CALLS, called
from xla_dtensor.layouts.factors import is_elementwise
from xla_dtensor.lowering.ops.rounded import rounded
from xla_dtensor.mesh import Frame
from xla_dtensor.plans.shard_map_call import whole_call

_CUTS: dict[str, Callable[[Any], Cut | None]] = {
    "dot_general": product,
    "reduce_sum": total,
}

# What only moves numbers, or takes some of them: the same on any mesh. What gives no floating point
# numbers is exact, too.
_MOVES = """
    abs argmax argmin broadcast_in_dim clamp concatenate copy copy_p cummax cummin dynamic_slice
    dynamic_update_slice expand_dims gather imag iota max min neg optimization_barrier pad padded
    pin real reduce_and reduce_max reduce_min reduce_or reduce_precision reshape reshard rev
    scattered select_n sharding_constraint sign slice sort split squeeze stack stop_gradient
    strided_slice top_k transpose
"""
# What runs the jaxprs among its parameters, as they are.
_RUNS = "scan while cond for_each custom_vmap_call checkpoint remat"
_REFUSES = {
    "code for each shard (per-device tensors, which to_local() and parallelize_module give, too; a "
    "DFunction; collectives)": "shard_map psum all_gather all_to_all ppermute",
    "what is computed outside of XLA": "pure_callback io_callback",
    "a factorization": """
        cholesky eig eigh hessenberg householder_product lu qr schur svd triangular_solve
        tridiagonal tridiagonal_solve
    """,
}
# Elementwise operations that XLA writes out as sums and products, which it fuses with others and
# rounds otherwise in vectors than alone.
_WRITTEN = """
    acos acosh asin asinh atan atan2 atanh cosh digamma erf_inv erfc lgamma polynomial sinh
"""
_EXACT, _BODIES = frozenset(_MOVES.split()), frozenset(_RUNS.split())
_REFUSED = {name: what for what, names in _REFUSES.items() for name in names.split()}
_WRITTEN_OUT = frozenset(_WRITTEN.split())
_ARITHMETIC = {"add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div"}


def in_blocks(jaxpr: Jaxpr, constants: Sequence[Any], frame: Frame | None) -> list[Any]:
    """The results of a jaxpr that takes nothing but constants, with the same bits on any mesh.

    Args:
        jaxpr: of a step.
        constants: its constants, in their order.
        frame: the devices that it runs on; None for one.

    Raises:
        UnsupportedOpError: something in it can't be computed so.
    """
    return _run(jaxpr, constants, [], frame)


def _run(jaxpr: Any, constants: Sequence[Any], given: Sequence[Any], frame: Frame | None) -> Any:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, given, strict=True))

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [*map(value_of, equation.invars)]
        with equation.ctx.manager, jax.named_scope(str(equation.source_info.name_stack)):
            results = _computed(equation, operands, frame)
        values.update(zip(equation.outvars, results, strict=True))
    return [*map(value_of, jaxpr.outvars)]


def _computed(equation: Any, operands: Sequence[Any], frame: Frame | None) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name in CALLS:
        inner = params.get("jaxpr") or params["call_jaxpr"]
        return _run(called(equation), getattr(inner, "consts", ()), operands, frame)
    if name == "cut":
        found = whole_call(equation)
        return _run(found.jaxpr, found.consts, operands, frame)
    if name == "custom_partitioning":
        call = params["call"]
        return _run(call.jaxpr, call.consts, operands, frame)
    if name in _REFUSED:
        raise UnsupportedOpError(
            f"{_REFUSED[name]}, {name} in the program, in a step with xd.config.reproducible = "
            '"across meshes": its bits depend on the mesh. Write it as plain operations on sharded '
            "tensors, or compile this step without the switch"
        )
    if name in _BODIES:
        return _bind(equation, *operands, **_inside(params, frame))
    if any(v.aval.size == 0 for v in equation.invars):  # sums of nothing are 0
        return _bind(equation, *operands)
    is_complex = any(map(_is_complex, equation.invars))
    is_exact = name in _EXACT and not (is_complex and name in ("abs", "sign"))
    if is_exact or not any(map(_is_float, equation.outvars)):
        return _bind(equation, *operands)
    narrow = [v for v in equation.outvars if v.aval.dtype.itemsize < 4 and _is_float(v)]
    if any(v.aval.dtype != jnp.bfloat16 for v in narrow):
        raise UnsupportedOpError(
            f'{name} in {narrow[0].aval.dtype} in a step with xd.config.reproducible = "across '
            'meshes": it is for float32, float64, bfloat16 and complex numbers; compute it in '
            "bfloat16, or compile this step without the switch"
        )
    if name == "convert_element_type":
        return [_to_bfloat16(operands[0])] if narrow else _bind(equation, *operands)
    if is_elementwise(equation) and not is_complex:
        return _rounded(equation, operands, frame)
    arrays = [*map(jnp.asarray, operands)]
    groups = params.get("feature_group_count"), params.get("batch_group_count")
    if name in _CUTS or groups == (1, 1):
        # In bfloat16 it is rounded once, when all blocks have been added up.
        dtype = jnp.float32 if narrow else equation.outvars[0].aval.dtype
        wide = [x.astype(dtype) for x in arrays]
        if name in _CUTS:
            add_up = functools.partial(_added_up, equation)
            found = mapped(add_up, wide, _CUTS[name](equation), frame)
        else:
            found = convolution(equation, wide[0], wide[1], frame)
        return [*map(_to_bfloat16, found)] if narrow else found
    # The order of running sums depends on how many devices there are.
    own = {"devices": 1} if name == "prefix_scan" else {}
    return mapped(functools.partial(_bind, equation, **own), arrays, None, frame)


def _to_bfloat16(value: Any) -> jax.Array:
    """XLA leaves out the rounding of what it widens again, if it sees both."""
    value = jnp.asarray(value)
    if _is_wider(value):
        value = lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
    return value.astype(jnp.bfloat16)


def _is_wider(value: jax.Array) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating)) and value.dtype.itemsize > 2


def _added_up(equation: Any, *operands: jax.Array) -> list[jax.Array]:
    """A product or a sum, in the dtype of its operands."""
    params = equation.params
    if equation.primitive.name == "reduce_sum":
        return [jnp.sum(operands[0], params["axes"])]
    how = {key: params[key] for key in ("dimension_numbers", "precision")}
    return [lax.dot_general(*operands, **how, preferred_element_type=operands[0].dtype)]


def _bind(equation: Any, *operands: Any, **changed: Any) -> Sequence[Any]:
    """The results of one equation."""
    given = [Var(v.aval) for v in equation.invars]
    alone = equation.replace(invars=given, params={**equation.params, **changed})
    parts = {"invars": given, "outvars": equation.outvars, "effects": equation.effects}
    jaxpr = _nothing().replace(**parts, eqns=[alone])
    results: Sequence[Any] = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*operands)
    return results


def _rounded(equation: Any, operands: Sequence[Any], frame: Frame | None) -> Sequence[Any]:
    """An elementwise operation, rounded for itself: XLA would rearrange it together with those that
    it is fused with, and which these are depends on the mesh."""
    name = equation.primitive.name
    if name in _ARITHMETIC:
        return [rounded(_ARITHMETIC[name], *map(jnp.asarray, operands))]
    if name in _WRITTEN_OUT:
        cut = elementwise(equation)
        return mapped(functools.partial(_bind, equation), operands, cut, frame)
    return [jnp.where(x != x, jnp.nan, x) for x in _bind(equation, *operands)]


def _is_complex(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.complexfloating)


@functools.cache
def _nothing() -> Any:
    """A jaxpr that does nothing, with no names of arguments and results."""
    jaxpr = jax.make_jaxpr(lambda: None)().jaxpr
    debug = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    return jaxpr.replace(debug_info=debug)


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _inside(params: dict[str, Any], frame: Frame | None) -> dict[str, Any]:
    """The jaxprs among an equation's parameters, of loops and branches, in blocks."""

    def changed(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            run = functools.partial(_flat, value.jaxpr, value.consts, frame)
            return jax.make_jaxpr(run)(*value.in_avals)
        if isinstance(value, Jaxpr):
            run = functools.partial(_flat, value, (), frame)
            return jax.make_jaxpr(run)(*[v.aval for v in value.invars]).jaxpr
        return value

    return {
        key: jax.tree.map(changed, value)
        for key, value in params.items()
        if any(isinstance(each, ClosedJaxpr | Jaxpr) for each in jax.tree.leaves(value))
    }


def _flat(jaxpr: Any, constants: Sequence[Any], frame: Frame | None, *given: Any) -> Any:
    return _run(jaxpr, constants, given, frame)
