"""Convolution and pooling, recurrence, attention, gradient clipping, optimizers, in-place ops."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ops.harness import bools, case, distinct, f, positive

CONV = [
    case(
        "conv2d",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        f("b c w w"),
        f("8 c 3 3"),
        f("8"),
        tolerance=(5e-5, 5e-5),
    ),
    case(
        "conv2d_stride",
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        f("b c w w"),
        f("h c 3 3"),
        light=True,
        tolerance=(5e-5, 5e-5),
    ),
    case(
        "conv2d_1x1",
        lambda x, w: F.conv2d(x, w, stride=2),
        f("b c w w"),
        f("h c 1 1"),
        light=True,
        tolerance=(5e-5, 5e-5),
    ),
    case("conv1d", F.conv1d, f("b c m"), f("h c 3"), f("h"), light=True, tolerance=(5e-5, 5e-5)),
    case("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), distinct("b c w w")),
    case("avg_pool2d", lambda x: F.avg_pool2d(x, 2), f("b c w w"), light=True),
    case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1), f("b c w w"), light=True),
]


def lstm(x: Any, h: Any, c: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Any:
    out, hn, cn = torch.lstm(x, (h, c), [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, True, False, True)
    return out, hn, cn


def packed_attention(x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor) -> torch.Tensor:
    """The attention of nn.MultiheadAttention, as functions."""
    size = x.shape[-1]
    return F.multi_head_attention_forward(
        x, x, x, size, 2, w_in, None, None, None, False, 0.0, w_out, None, need_weights=False
    )[0]


def sdpa(**options: Any) -> Any:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, *mask, **options)

    return function


LAYERS = [
    case(
        "lstm",
        lstm,
        f("b 3 k"),
        f("1 b 4"),
        f("1 b 4"),
        f("16 k"),
        f("16 4"),
        f("16"),
        f("16"),
        light=True,
        tolerance=(5e-5, 5e-5),
    ),
    # The CPU's fused attention leaves the heads' strides as its kernel wrote them.
    case("sdpa", sdpa(), f("b 4 s h"), f("b 4 s h"), f("b 4 s h"), strides=False),
    case(
        "sdpa_causal",
        sdpa(is_causal=True),
        f("b 4 s h"),
        f("b 4 s h"),
        f("b 4 s h"),
        light=True,
        strides=False,
    ),
    case(
        "sdpa_gqa",
        sdpa(is_causal=True, enable_gqa=True),
        f("b 4 s h"),
        f("b 2 s h"),
        f("b 2 s h"),
        strides=False,
        light=True,
    ),
    case(
        "sdpa_bool_mask",
        sdpa(),
        f("b 4 s h"),
        f("b 4 s h"),
        f("b 4 s h"),
        bools("s s"),
        light=True,
        strides=False,
    ),
    case(
        "sdpa_float_mask",
        sdpa(),
        f("b 4 s h"),
        f("b 4 s h"),
        f("b 4 s h"),
        f("b 1 s s").constant,
        light=True,
        strides=False,
    ),
    case(
        "multi_head_attention",
        packed_attention,
        f("s b 8"),
        f("24 8"),
        f("8 8"),
        light=True,
        strides=False,
        tolerance=(1e-3, 1e-4),
    ),
]


def clip(norm_type: float, foreach: bool) -> Any:
    def function(*grads: torch.Tensor) -> Any:
        parameters = [nn.Parameter(torch.zeros_like(g)) for g in grads]
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g.clone()
        total = nn.utils.clip_grad_norm_(parameters, 0.5, norm_type, foreach=foreach)
        return total, *(p.grad for p in parameters)

    return function


def steps(make: Any) -> Any:
    def function(p: torch.Tensor, q: torch.Tensor, g: torch.Tensor, h: torch.Tensor) -> Any:
        parameters = [nn.Parameter(p.clone()), nn.Parameter(q.clone())]
        optimizer = make(parameters)
        for _ in range(2):
            for parameter, grad in zip(parameters, (g, h), strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
        return [p.detach() for p in parameters]

    return function


def optimizer_case(name: str, make: Any, light: bool = True) -> Any:
    inputs = [f("m k"), f("n"), f("m k"), f("n")]
    return case(name, steps(make), *(i.constant for i in inputs), light=light)


OPTIMIZERS = [
    case("clip_grad_norm", clip(2.0, False), f("m k").constant, f("n").constant, light=True),
    case("clip_grad_norm_foreach", clip(2.0, True), f("m k").constant, f("n").constant, light=True),
    case(
        "clip_grad_norm_inf",
        clip(float("inf"), True),
        f("m k").constant,
        f("n").constant,
        light=True,
    ),
    optimizer_case("sgd", lambda p: torch.optim.SGD(p, 0.1, foreach=False)),
    optimizer_case(
        "sgd_momentum",
        lambda p: torch.optim.SGD(
            p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True, foreach=True
        ),
    ),
    optimizer_case("sgd_fused", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True)),
    optimizer_case("adam", lambda p: torch.optim.Adam(p, 0.1, foreach=False)),
    optimizer_case("adam_amsgrad", lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, foreach=True)),
    optimizer_case("adamw", lambda p: torch.optim.AdamW(p, 0.1, foreach=False), light=False),
    optimizer_case("adamw_foreach", lambda p: torch.optim.AdamW(p, 0.1, foreach=True)),
    optimizer_case("adamw_fused", lambda p: torch.optim.AdamW(p, 0.1, fused=True)),
]


def foreach(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = torch._foreach_add([x, y], 1), torch._foreach_mul([x, y], 2.0)
    c = torch._foreach_add(a, b, alpha=0.5)
    torch._foreach_lerp_(c, a, 0.1)
    torch._foreach_addcmul_(c, a, b, 0.5)
    norms = torch._foreach_norm([x, y])
    return *c, *norms, *torch._foreach_sqrt(torch._foreach_mul(a, a))


IN_PLACE = [
    case("foreach", foreach, f("m k").constant, f("n").constant, light=True),
    case("add_", lambda x, y: x.clone().add_(y, alpha=2), f("m k"), f("m k"), light=True),
    case("mul_", lambda x, y: x.clone().mul_(y), f("m k"), f("k"), light=True),
    case("div_", lambda x, y: x.clone().div_(y), f("m k"), positive("m k"), light=True),
    case("lerp_", lambda x, y: x.clone().lerp_(y, 0.1), f("m k"), f("m k"), light=True),
    case(
        "addcdiv_",
        lambda x, y, z: x.clone().addcdiv_(y, z, value=-0.1),
        f("m k"),
        f("m k"),
        positive("m k"),
        light=True,
    ),
    case("relu_", lambda x: F.relu(x.clone(), inplace=True), distinct("m k"), light=True),
    case(
        "masked_fill_",
        lambda x, m: x.clone().masked_fill_(m, 3.0),
        f("m k"),
        bools("m k"),
        light=True,
    ),
    case("copy_", lambda x, y: x.clone().copy_(y), f("m k"), f("k", torch.float64), light=True),
    case("setitem", lambda x, y: _set(x.clone(), y), f("m n"), f("m 2")),
    case(
        "clamp_zero_fill",
        lambda x: (x.clone().clamp_(-1, 1), x.clone().zero_(), x.clone().fill_(2)),
        distinct("m k"),
        light=True,
    ),
]


def _set(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[:, 1:3] = y
    return x


CASES = CONV + LAYERS + OPTIMIZERS + IN_PLACE
