"""Elementwise ops: activations, arithmetic, comparisons, dtype promotion, masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.ops.harness import bools, case, distinct, f, ints, positive

bf16, f64, c64 = torch.bfloat16, torch.float64, torch.complex64

UNARY = [
    case("neg", torch.neg, f("m k"), light=True),
    case("abs", torch.abs, distinct("m k"), light=True),
    case("exp", torch.exp, f("m k"), light=True),
    case("log", torch.log, positive("m k"), light=True),
    case("sqrt", torch.sqrt, positive("m k"), light=True),
    case("rsqrt", torch.rsqrt, positive("m k"), light=True),
    case("reciprocal", torch.reciprocal, positive("m k"), light=True),
    case("sin", torch.sin, f("m k"), light=True),
    case("cos", torch.cos, f("m k"), light=True),
    case("tanh", torch.tanh, f("m k"), light=True),
    case("sigmoid", torch.sigmoid, f("m k"), light=True),
    case("relu", F.relu, distinct("m k"), light=True),
    case("silu", F.silu, f("m k"), light=True),
    case("gelu", F.gelu, f("m k"), light=True),
    case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), f("m k"), light=True),
    case("softplus", F.softplus, f("m k"), light=True),
    case("erf", torch.erf, f("m k"), light=True),
    case("square", torch.square, f("m k"), light=True),
    case("pow_number", lambda x: (x.pow(2), x.pow(3.0)), f("m k"), light=True),
    case("number_pow", lambda x: 2.0**x, f("m k"), light=True),
    case("clamp", lambda x: x.clamp(-1, 1), distinct("m k"), light=True),
    case("clamp_min", lambda x: x.clamp(min=0.6), distinct("m k"), light=True),
    case("sign_floor_round", lambda x: (x.sign(), x.floor(), x.round()), f("m k"), light=True),
    case("isfinite", lambda x: (x / x.round()).isfinite(), f("m k").constant, light=True),
    case("logical_not", torch.logical_not, bools("m k"), light=True),
    case("number_operands", lambda x: (2 * x + 1, 1 - x, 3 / x), positive("m k"), light=True),
    case(
        "dropout_off", lambda x: (F.dropout(x, 0.5, False), F.dropout(x, 0.0)), f("m k"), light=True
    ),
]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


BINARY = [
    case("add", torch.add, f("m k"), f("m k")),
    case("add_alpha", lambda x, y: torch.add(x, y, alpha=0.5), f("m k"), f("m k"), light=True),
    case("sub", torch.sub, f("m k"), f("m k"), light=True),
    case("mul", torch.mul, f("m k"), f("m k")),
    case("div", torch.div, f("m k"), positive("m k"), light=True),
    case("floor_divide", torch.floor_divide, ints("m k", 50), ints("m k", 9, 1), light=True),
    case("remainder", torch.remainder, ints("m k", 50, -50), ints("m k", 9, 1), light=True),
    case("pow", torch.pow, positive("m k"), f("m k"), light=True),
    case("maximum", torch.maximum, f("m k"), f("m k"), light=True),
    case("minimum", torch.minimum, f("m k"), f("m k"), light=True),
    case("add_bias", torch.add, f("b s h"), f("h")),
    case("mul_outer", torch.mul, f("m 1"), f("1 n"), light=True),
    case("mul_heads", torch.mul, f("b s k h"), f("s 1 h"), light=True),
    case("mul_0d", torch.mul, f("m k"), f(""), light=True),
    case(
        "comparisons",
        lambda x, y: (x < y, x >= y, x == y),
        ints("m k", 3),
        ints("m k", 3),
        light=True,
    ),
    case("comparisons_number", lambda x: (x > 0, x <= 1, x != 2), ints("m k", 3), light=True),
    case("logical", lambda x, y: (x & y, x | y, x ^ y, ~x), bools("m k"), bools("m k"), light=True),
    case("where", torch.where, bools("m k"), f("m k"), f("m k"), light=True),
    case("where_broadcast", torch.where, bools("s 1"), f("b s h"), f(""), light=True),
    case("where_number", lambda m, x: torch.where(m, x, 0.0), bools("m k"), f("m k"), light=True),
    case("masked_fill", lambda x, m: x.masked_fill(m, -1e9), f("b s s"), bools("s s")),
    case("lerp", torch.lerp, f("m k"), f("m k"), f("m k"), light=True),
    case("lerp_number", lambda x, y: torch.lerp(x, y, 0.1), f("m k"), f("m k"), light=True),
    case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), *[f("m k")] * 3, light=True),
    case(
        "addcdiv",
        lambda x, y, z: torch.addcdiv(x, y, z, value=-2),
        f("m k"),
        f("m k"),
        positive("m k"),
        light=True,
    ),
    case("rotate", rotate, f("b s k 8"), f("s 1 8").constant, f("s 1 8").constant, light=True),
]

DTYPES = [
    case("bf16_mul_add", lambda x, y: x * y + 1, f("m k", bf16), f("m k", bf16), light=True),
    case("bf16_silu", F.silu, f("m k", bf16), light=True),
    case("bf16_to_float", lambda x: x.float(), f("m k", bf16), light=True),
    case("float_to_bf16", lambda x: x.bfloat16(), f("m k"), light=True),
    case("type_as", lambda x, y: x.type_as(y), f("m k"), f("m k", f64), light=True),
    case("f64_mul", torch.mul, f("m k", f64), f("m k", f64), light=True),
    case("f64_times_f32", torch.mul, f("m k", f64), f("m k"), light=True),
    case("bf16_plus_f32", torch.add, f("m k", bf16), f("m k"), light=True),
    case("int_add", torch.add, ints("m k"), ints("m k"), light=True),
    case("int_times_float", torch.mul, ints("m k"), f("m k"), light=True),
    case("int_true_div", torch.div, ints("m k"), ints("m k", 9, 1), light=True),
    case("int32_plus_int64", torch.add, ints("m k", dtype=torch.int32), ints("m k"), light=True),
    case("bool_times_float", torch.mul, bools("m k"), f("m k"), light=True),
    case("bool_plus_bool", torch.add, bools("m k"), bools("m k"), light=True),
    case("int_to_float", lambda x: x.float(), ints("m k"), light=True),
    case("float_to_int", lambda x: x.long(), f("m k").constant, light=True),
    case("complex_mul", torch.mul, f("m k", c64), f("m k", c64), light=True),
    case("complex_times_float", torch.mul, f("m k", c64), f("m k"), light=True),
    case("complex_parts", lambda x: (x.real, x.imag, x.abs()), f("m k", c64), light=True),
    case("complex_conj", lambda x: x.conj() * x, f("m k", c64), light=True),
    case("polar", torch.polar, positive("m k"), f("m k"), light=True),
    case("view_as_complex", lambda x: torch.view_as_complex(x), f("m k 2")),
    case("view_as_real", torch.view_as_real, f("m k", c64)),
]

CASES = UNARY + BINARY + DTYPES
