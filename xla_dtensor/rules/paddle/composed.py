"""Paddle's ops that torch has no op for: compositions, and a few special ones.

They are ops of namespace ``paddle``, so that their rules are found, asked and reused like others.
The implementations say what the rules are of, and give the shapes of the results. A program runs
the ops that it is composed of, each by its own rule. Arguments are Paddle's as far as they matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.families.indexing import ALL_REDUCTIONS
from xla_dtensor.rules.families.matmul import matmul_notation
from xla_dtensor.rules.families.pointwise import elementwise_alternatives, pointwise_rule
from xla_dtensor.rules.families.shape import inactive_dims
from xla_dtensor.rules.merging import REPLICATE, TensorInfo
from xla_dtensor.rules.notation import alternatives, parse
from xla_dtensor.rules.registry import Rule, notation_rule, register_family

R = REPLICATE

NAMESPACE = "paddle"

_library = torch.library.Library(NAMESPACE, "DEF")


def composed(schema: str, rule: Rule | str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define the op of `schema`, which the decorated function computes, with its layout rule."""
    name = schema.partition("(")[0]

    def decorate(compute: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema)
        _library.impl(name, compute, "CompositeImplicitAutograd")
        notation = isinstance(rule, str) and "->" in rule
        register_family(f"{NAMESPACE}::{name}", notation_rule(str(rule)) if notation else rule)
        return compute

    return decorate


@composed("logsigmoid(Tensor x) -> Tensor", pointwise_rule)
def logsigmoid(x: Tensor) -> Tensor:
    return F.logsigmoid(x)


@composed("softsign(Tensor x) -> Tensor", pointwise_rule)
def softsign(x: Tensor) -> Tensor:
    return F.softsign(x)


@composed(
    "stanh(Tensor x, float scale_a=0.67, float scale_b=1.7159) -> Tensor",
    pointwise_rule,
)
def stanh(x: Tensor, scale_a: float = 0.67, scale_b: float = 1.7159) -> Tensor:
    return scale_b * torch.tanh(scale_a * x)


@composed("tanh_shrink(Tensor x) -> Tensor", pointwise_rule)
def tanh_shrink(x: Tensor) -> Tensor:
    return F.tanhshrink(x)


@composed(
    "thresholded_relu(Tensor x, float threshold=1.0, float value=0.0) -> Tensor", pointwise_rule
)
def thresholded_relu(x: Tensor, threshold: float = 1.0, value: float = 0.0) -> Tensor:
    return F.threshold(x, threshold, value)


@composed(
    "label_smooth(Tensor label, Tensor? prior_dist=None, float epsilon=0.0) -> Tensor",
    pointwise_rule,
)
def label_smooth(label: Tensor, prior_dist: Tensor | None = None, epsilon: float = 0.0) -> Tensor:
    prior = 1 / label.shape[-1] if prior_dist is None else prior_dist
    return (1 - epsilon) * label + epsilon * prior


@composed(
    "fused_dropout_add(Tensor x, Tensor y, float p=0.5, bool training=True) -> Tensor",
    pointwise_rule,
)
def fused_dropout_add(x: Tensor, y: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return F.dropout(x, p, training) + y


def _swiglu(call: Call) -> Merged:
    """elementwise; of one input the two halves of the last dim, which is not sharded"""
    if len(call.tensors) == 2:
        return call.merge(elementwise_alternatives(call.tensors))
    return inactive_dims(call, [call.tensors[0].ndim - 1])


@composed("swiglu(Tensor x, Tensor? y=None) -> Tensor", _swiglu)
def swiglu(x: Tensor, y: Tensor | None = None) -> Tensor:
    if y is None:
        x, y = x.chunk(2, -1)
    return F.silu(x) * y


def _add_n(call: Call) -> Merged:
    """elementwise; linear in all inputs together"""
    n = len(call.tensors)
    sums = [Alternative((Partial(op),), (Partial(op),) * n) for op in ("sum", "avg")]
    return call.merge(elementwise_alternatives(call.tensors) + sums)


@composed("add_n(Tensor[] inputs) -> Tensor", _add_n)
def add_n(inputs: list[Tensor]) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*inputs)).sum(0)


def _update_loss_scaling(call: Call) -> Merged:
    """each gradient as it is, scaled or zeroed; the scalars are whole"""
    own = [t.placements for t in call.args["x"]]
    whole = call.replicate()
    scalars = len(call.tensors) - len(own)
    return Merged(
        (*own, *whole.inputs[:scalars]), (*own, *whole.outputs[: call.n_outputs - len(own)])
    )


@composed(
    "update_loss_scaling(Tensor[] x, Tensor found_infinite, Tensor prev_loss_scaling,"
    " Tensor in_good_steps, Tensor in_bad_steps) -> (Tensor[], Tensor, Tensor, Tensor)",
    _update_loss_scaling,
)
def update_loss_scaling(
    x: list[Tensor], found_infinite: Tensor, scale: Tensor, good: Tensor, bad: Tensor
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    found = found_infinite.bool()
    bad, good = torch.where(found, bad + 1, 0), torch.where(found, 0, good + 1)
    grads = [torch.where(found, 0.0, grad) for grad in x]
    return grads, torch.where(found, scale / 2, scale), good, bad


def _matmul(call: Call) -> Merged:
    """... m k, ... k n -> ... m n, either operand's last two dims swapped"""
    x, y = call.tensors
    inputs, _, out = matmul_notation(x.ndim, y.ndim).partition("->")
    terms = [term.split() for term in inputs.split(",")]
    for term, flag in zip(terms, ("transpose_x", "transpose_y"), strict=True):
        if call.args.get(flag) and len(term) > 1:
            term[-2:] = term[:-3:-1]
    text = ", ".join(map(" ".join, terms)) + " -> " + out
    return call.merge(alternatives(parse(text, multilinear=True), [x.shape, y.shape]))


@composed(
    "matmul(Tensor x, Tensor y, bool transpose_x=False, bool transpose_y=False) -> Tensor", _matmul
)
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    x = x.mT if transpose_x and x.ndim > 1 else x
    y = y.mT if transpose_y and y.ndim > 1 else y
    return x @ y


def _linear_param_grad(call: Call) -> Merged:
    """... i, ... o -> i o, o, each added to what is given to add it to"""
    x = call.tensor("x")
    last = x.ndim - 1
    # What one mesh dim does to dweight, dbias, x and dout.
    rows = [(Partial(), Partial(), Shard(d), Shard(d)) for d in range(last)]
    rows += [(Shard(0), R, Shard(last), R), (Shard(1), Shard(0), R, Shard(last))]
    rows += [(Partial(), R, Partial(), R), (Partial(), Partial(), R, Partial())]
    given = [isinstance(call.args[name], TensorInfo) for name in ("dweight", "dbias")]
    options = []
    for *grads, own_x, own_dout in rows:
        addends = [grad for grad, has in zip(grads, given, strict=True) if has]
        options.append(Alternative(tuple(grads), (own_x, own_dout, *addends)))
    return call.merge(options)


@composed(
    "fused_linear_param_grad_add(Tensor x, Tensor dout, Tensor? dweight=None, Tensor? dbias=None)"
    " -> (Tensor, Tensor)",
    _linear_param_grad,
)
def fused_linear_param_grad_add(
    x: Tensor, dout: Tensor, dweight: Tensor | None = None, dbias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x, dout = x.flatten(0, -2), dout.flatten(0, -2)
    weight, bias = x.mT @ dout, dout.sum(0)
    return (
        weight if dweight is None else weight + dweight,
        bias if dbias is None else bias + dbias,
    )


@composed("prod(Tensor x, int[]? dim=None, bool keepdim=False) -> Tensor", "aten::prod")
def prod(x: Tensor, dim: list[int] | None = None, keepdim: bool = False) -> Tensor:
    for d in sorted((d % x.ndim for d in dim or range(x.ndim)), reverse=True):
        x = x.prod(d, keepdim=keepdim)
    return x


@composed("squared_l2_norm(Tensor x) -> Tensor", "... -> ")
def squared_l2_norm(x: Tensor) -> Tensor:
    return x.square().sum()


@composed("numel(Tensor x) -> Tensor", "... -> ")
def numel(x: Tensor) -> Tensor:
    return torch.full((), x.numel(), device=x.device)


def _cross_entropy(call: Call) -> Merged:
    """n c!, n 1 -> n c!, n 1"""
    ndim = call.tensors[0].ndim
    return inactive_dims(call, [call.dim(ndim, "axis", -1)])


@composed(
    "cross_entropy_with_softmax(Tensor logits, Tensor label, bool soft_label=False,"
    " int ignore_index=-100, int axis=-1) -> (Tensor, Tensor)",
    _cross_entropy,
)
def cross_entropy_with_softmax(
    logits: Tensor,
    label: Tensor,
    soft_label: bool = False,
    ignore_index: int = -100,
    axis: int = -1,
) -> tuple[Tensor, Tensor]:
    logs = logits.log_softmax(axis)
    if soft_label:
        return logs.exp(), -(logs * label).sum(axis, keepdim=True)
    ignored = label == ignore_index
    picked = logs.gather(axis, label.masked_fill(ignored, 0))
    return logs.exp(), -picked.masked_fill(ignored, 0)


def _parallel_cross_entropy(call: Call) -> Merged:
    """n c, n ... -> n c, n ...: sharded classes are reduced within"""
    ndim, n = call.tensors[0].ndim, len(call.tensors)
    batch = [Alternative((Shard(d),) * 2, (Shard(d),) * n) for d in range(ndim - 1)]
    classes = Shard(ndim - 1)
    within = Alternative((classes, R), (classes, *(R,) * (n - 1)), exchanges=True)
    return call.merge([*batch, within])


@composed(
    "c_softmax_with_cross_entropy(Tensor logits, Tensor label, int ignore_index=-100)"
    " -> (Tensor, Tensor)",
    _parallel_cross_entropy,
)
def c_softmax_with_cross_entropy(
    logits: Tensor, label: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    return cross_entropy_with_softmax(logits, label, False, ignore_index, -1)


@composed(
    "c_softmax_with_multi_label_cross_entropy(Tensor logits, Tensor label, Tensor smooth_weight,"
    " int ignore_index=-100, bool sum_multi_label_loss=True) -> (Tensor, Tensor)",
    _parallel_cross_entropy,
)
def c_softmax_with_multi_label_cross_entropy(
    logits: Tensor,
    label: Tensor,
    smooth_weight: Tensor,
    ignore_index: int = -100,
    sum_multi_label_loss: bool = True,
) -> tuple[Tensor, Tensor]:
    softmax, loss = cross_entropy_with_softmax(logits, label, False, ignore_index, -1)
    loss = loss * smooth_weight
    return softmax, loss.sum(-1, keepdim=True) if sum_multi_label_loss else loss


def _rope(call: Call) -> Merged:
    """b s h d! for each; 1 s 1 d! for sines and cosines"""
    rotated = call.n_outputs
    options = []
    for dim in (1, 2, 0):  # of equally cheap ones
        tables = [Shard(dim) if dim == 1 else R] * (len(call.tensors) - rotated)
        options.append(Alternative((Shard(dim),) * rotated, (Shard(dim),) * rotated + (*tables,)))
    return call.merge(options)


@composed(
    "fused_rotary_position_embedding(Tensor q, Tensor? k, Tensor? v, Tensor sin, Tensor cos)"
    " -> Tensor[]",
    _rope,
)
def fused_rotary_position_embedding(
    q: Tensor, k: Tensor | None, v: Tensor | None, sin: Tensor, cos: Tensor
) -> list[Tensor]:
    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return [rotate(x) for x in (q, k, v) if x is not None]


def _instance_norm(call: Call) -> Merged:
    """n c *!, c, c -> n c *!"""
    n = len(call.tensors) - 1
    return call.merge(
        [
            Alternative((Shard(0),), (Shard(0), *(R,) * n)),
            Alternative((Shard(1),), (Shard(1), *(Shard(0),) * n)),
        ]
    )


@composed(
    "instance_norm(Tensor x, Tensor? scale=None, Tensor? bias=None, float epsilon=1e-5) -> Tensor",
    _instance_norm,
)
def instance_norm(
    x: Tensor, scale: Tensor | None = None, bias: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def _gather_nd(call: Call) -> Merged:
    """k!... a, i k! -> i a: the index's own dims, and those that it leaves alone; partial passes"""
    x, index = call.tensors
    indexed, batch = index.shape[-1], index.ndim - 1
    options = [Alternative((Shard(d),), (R, Shard(d))) for d in range(batch)]
    options += [
        Alternative((Shard(batch + d - indexed),), (Shard(d), R)) for d in range(indexed, x.ndim)
    ]
    options += [Alternative((Partial(op),), (Partial(op), R)) for op in ALL_REDUCTIONS]
    return call.merge(options)


@composed("gather_nd(Tensor x, Tensor index) -> Tensor", _gather_nd)
def gather_nd(x: Tensor, index: Tensor) -> Tensor:
    return x[index.unbind(-1)]
