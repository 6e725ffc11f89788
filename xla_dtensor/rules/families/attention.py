"""Attention rules: batch, heads and query positions may be sharded; key positions are whole.

Written as tables of slots: which dims of which tensor one mesh dim shards together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.distributed.tensor import Partial, Placement, Shard

from xla_dtensor.rules.alternatives import Alternative, Merged, merge
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import REPLICATE, TensorInfo, shard_dim
from xla_dtensor.rules.registry import register

R = REPLICATE
HEAD_DIM, QUERY_DIM = -3, -2

_FORWARD = """
    scaled_dot_product_attention _scaled_dot_product_attention_math
    _scaled_dot_product_attention_math_for_mps _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
"""
_BACKWARD = """
    _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable_backward
"""


def _dims(q: TensorInfo) -> list[int]:
    """The dims that may be sharded; of equally cheap ones heads come before batch."""
    dims = list(range(q.ndim - 1))
    return sorted(dims, key=lambda d: (d == q.ndim + QUERY_DIM, -d))


def _slot(tensor: Sequence[int], dim: int, q: TensorInfo) -> Placement:
    """`dim` of the query as a dim of a result: leading dims align, after those that keys or values
    alone have; broadcast ones are whole."""
    own = dim + max(len(tensor) - q.ndim, 0)
    return Shard(own) if own < len(tensor) and tensor[own] == q.shape[dim] else R


def _beside(tensor: TensorInfo, dim: int, q: TensorInfo) -> Placement:
    """`dim` of the query as a dim of keys, values or a mask: the last dims align, broadcast ones
    are whole."""
    own = dim + tensor.ndim - q.ndim
    return Shard(own) if own >= 0 and tensor.shape[own] == q.shape[dim] else R


@register(*_FORWARD.split())
def attention(call: Call) -> Merged:
    """b h s d!, b h t! d!, b h t! e! -> b h s e!"""
    q, k, v, *rest = call.tensors
    options = []
    for dim in _dims(q):
        outs = [R if shape is None else _slot(shape, dim, q) for shape in call.out_shapes]
        outs[0] = Shard(dim + len(call.out_shapes[0] or q.shape) - q.ndim)
        masks = tuple(_beside(m, dim, q) for m in rest)
        options += [
            Alternative(tuple(outs), (Shard(dim), *keys, *masks)) for keys in _keys(dim, q, k, v)
        ]
    cheapest = functools.partial(call.merge, new_shards=True)
    return _with_its_keys(cheapest, options, call.tensors, 0)


def _keys(
    dim: int, q: TensorInfo, k: TensorInfo, v: TensorInfo
) -> list[tuple[Placement, Placement]]:
    """How keys and values may lie where the query is sharded by ``dim``.

    Grouped heads shard alike: device i has the queries of its keys. Where that can't be, as they
    are fewer than devices, each device has all, and takes its own
    (`lowering/attention/grouped_heads.py`).
    """
    if dim == q.ndim + QUERY_DIM:
        return [(R, R)]
    alike = _beside(k, dim, q), _beside(v, dim, q)
    if dim != q.ndim + HEAD_DIM or {_heads(k), _heads(v)} <= {1, _heads(q)}:
        return [alike]
    if _heads(k) != _heads(v) or _heads(q) % _heads(k):
        return []
    grouped = Shard(k.ndim + HEAD_DIM), Shard(v.ndim + HEAD_DIM)
    return [grouped, (R, R)] if _grouped(q, k) else [grouped]


def _heads(x: TensorInfo) -> int:
    return x.shape[HEAD_DIM] if x.ndim >= 3 else 1


def _grouped(q: TensorInfo, k: TensorInfo) -> bool:
    return min(q.ndim, k.ndim) >= 4 and _heads(k) not in (1, _heads(q))


def _with_its_keys(
    cheapest: Callable[[list[Alternative]], Merged],
    options: list[Alternative],
    tensors: Sequence[TensorInfo],
    query: int,
) -> Merged:
    """The cheapest in which each device has the keys of its queries' heads.

    Mesh dims that cut queries' heads alone come after those that cut the keys' as well: else a
    device's keys are those of other queries.

    Args:
        query: the query's number among the tensors; the key's is the next.
    """
    found = cheapest(options)
    q, k = tensors[query : query + 2]
    heads = Shard(q.ndim + HEAD_DIM)
    by_head = [
        (of_query, of_key)
        for of_query, of_key in zip(*found.inputs[query : query + 2], strict=True)
        if shard_dim(of_query) == heads.dim
    ]
    alone = [of_key == R for _, of_key in by_head]
    plain = all(of_query == heads for of_query, _ in by_head)
    if not _grouped(q, k) or not any(alone) or (plain and alone == sorted(alone)):
        return found
    return cheapest([o for o in options if o.inputs[query : query + 2] != (heads, R)])


@register(*_BACKWARD.split())
def attention_backward(call: Call) -> Merged:
    """as attention; a sharded query makes the keys' and values' gradients sums"""
    return _backward(call, call.tensors)


def own_attention_backward(call: Call) -> Merged:
    """as attention, in its output's layout; a sharded query makes the keys' and values' gradients
    sums"""
    # The saved output fixes the layout: the gradient is moved there. Priced like the other inputs
    # it would decide alone, because it is often Partial.
    kept = call.args.get("out")
    place = kept if isinstance(kept, TensorInfo) else call.tensor("query")
    tensors = [
        replace(value, placements=place.placements) if name == "grad_out" else value
        for name, value in call.args.items()
        if isinstance(value, TensorInfo)
    ]
    return _backward(call, tensors)


def _backward(call: Call, tensors: Sequence[TensorInfo]) -> Merged:
    q = call.tensor("query")
    data = {"query", "grad_out", "grad_out_", "out", "logsumexp", "log_sums"}
    options = []
    k, v = call.tensor("key"), call.tensor("value")
    places = [(dim, of_keys) for dim in _dims(q) for of_keys in _keys(dim, q, k, v)]
    for dim, of_keys in places:
        inputs: list[Placement] = []
        for name, value in call.args.items():
            if not isinstance(value, TensorInfo):
                continue
            if name in data:
                inputs.append(_slot(value.shape, dim, q))
            elif name in ("key", "value"):
                inputs.append(of_keys[name == "value"])
            elif name in ("attn_bias", "attn_mask"):
                inputs.append(_beside(value, dim, q))
            else:
                inputs.append(R)
        grads: list[Placement] = [Shard(dim)]
        grads += [Partial() if own == R else own for own in of_keys]
        if len(call.out_shapes) > 3:
            bias = call.args.get("attn_bias")
            grads.append(_beside(bias, dim, q) if isinstance(bias, TensorInfo) else R)
        if call.args.get("of_mask"):
            grads[-1] = _mask_grad(call.tensor("attn_mask"), dim, q)
        options.append(Alternative(tuple(grads[: call.n_outputs]), tuple(inputs)))
    cheapest = lambda options: merge(
        options, tensors, call.n_outputs, call.mesh_shape, new_shards=True
    )
    return _with_its_keys(cheapest, options, tensors, list(call.args).index("query"))


def _mask_grad(mask: TensorInfo, dim: int, q: TensorInfo) -> Placement:
    """Where the mask is broadcast each device has a part of the sum."""
    slot = _beside(mask, dim, q)
    return Partial() if slot == R else slot


register("attention_backward", namespace="xla_dtensor")(own_attention_backward)
register("flash_attention", "flash_attention_dropout", namespace="xla_dtensor")(attention)
register("flash_attention_backward", namespace="xla_dtensor")(own_attention_backward)
