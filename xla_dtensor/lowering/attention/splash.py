"""JAX's splash attention, a Pallas kernel for TPUs."""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.base import jax_private
from xla_dtensor.lowering.attention.causal_mask import causal_mask
from xla_dtensor.lowering.attention.grouped_heads import BACKWARD_QUERY, FORWARD_QUERY
from xla_dtensor.lowering.context import ShardNumber, here

_LANES = 128
_BLOCK = 512
_DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))


def takes(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, is_causal: bool) -> bool:
    """Whether the kernel computes this attention.

    It knows masks when it is compiled, so none that is a tensor.

    Args:
        query: ``[..., heads, L, E]``.
        key, value: ``[..., key heads, S, E]`` and ``[..., key heads, S, F]``.
        mask: of the scores, or None.
        is_causal: whether a query sees the keys up to its own position.
    """
    return (
        mask is None
        and query.dtype in _DTYPES
        and query.shape[-2] % _LANES == 0
        and key.shape[-2] % _LANES == 0
    )


def splash(
    query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool, scale: Any
) -> tuple[jax.Array, jax.Array]:
    """The output ``[..., heads, L, F]``, and the logs of the rows' sums ``[..., heads, L]``.

    Args:
        query: ``[..., heads, L, E]``; key, value: with the same leading dims.
        is_causal: whether a query sees the keys up to its own position.
        scale: of the scores.
    """

    part = here().part(FORWARD_QUERY, -2)

    def attend(*tensors: jax.Array) -> Any:
        kernel = _kernel(query, key, is_causal, part, with_log_sums=True)
        return jax.vmap(kernel)(*_inputs(scale, *tensors))

    out, (log_sums,) = _named(attend, query, key, is_causal, part)(query, key, value)
    out = out.reshape(*query.shape[:-1], out.shape[-1])[..., : value.shape[-1]]
    return out, log_sums.reshape(query.shape[:-1])


def splash_backward(
    grad: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    log_sums: jax.Array,
    is_causal: bool,
    scale: Any,
) -> tuple[jax.Array, ...]:
    """The gradients of query, key and value, from what `splash` has given."""
    part = here().part(BACKWARD_QUERY, -2)

    def recomputed(*tensors: jax.Array) -> jax.Array:
        kernel = _kernel(query, key, is_causal, part, with_log_sums=False)
        attended = jax.vmap(kernel)(*_inputs(scale, *tensors))
        return attended.reshape(*query.shape[:-1], attended.shape[-1])[..., : value.shape[-1]]

    def backward(grad: jax.Array, out: jax.Array, log_sums: jax.Array, *tensors: jax.Array) -> Any:
        of_kernel = _backward_of_kernel()
        if of_kernel is None:
            return jax.vjp(recomputed, *tensors)[1](grad)
        inputs, pullback = jax.vjp(lambda *x: _inputs(scale, *x), *tensors)
        kernel = _kernel(query, key, is_causal, part, with_log_sums=False)
        options = [kernel.kwargs[name] for name in _OPTIONS]

        def one(grad: jax.Array, out: jax.Array, log_sums: jax.Array, *qkv: jax.Array) -> Any:
            kept = (*qkv, None, None, out, log_sums, kernel.dq_mask_info, kernel.dkv_mask_info)
            return of_kernel(*options, kept, grad)[3:6]

        batched = lambda x: _lanes(x).reshape(-1, *x.shape[-3:-1], _filled(x))
        sums = log_sums.reshape(-1, *log_sums.shape[-2:])
        found = jax.vmap(one)(batched(grad), batched(out), sums, *inputs)
        return pullback([g.astype(x.dtype) for g, x in zip(found, inputs, strict=True)])

    named = _named(backward, query, key, is_causal, part)
    found: tuple[jax.Array, ...] = named(grad, out, log_sums, query, key, value)
    return found


_OPTIONS = (
    *("save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name"),
    *("mask_function", "attn_logits_soft_cap", "interpret"),
)


def _backward_of_kernel() -> Any:
    """The kernel's own backward function, which takes what forward has given; None in a JAX where
    it is another than we know. ``jax.vjp`` would run the forward kernel once more, and XLA doesn't
    see that the two are one."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as module

    function = jax_private.find("splash_attention_backward")
    kept = typing.get_args(getattr(module, "SplashResidualsType", None))
    if function is None or len(kept) != _KEPT:
        return None
    return function if tuple(inspect.signature(function).parameters)[:-2] == _OPTIONS else None


_KEPT = 9  # three inputs, segments, sinks, output, sums, two masks


_NAME = "splash_attention_of_"


def share_of_blocks(name: str) -> float:
    """Which share of its grid's blocks the kernels in a ``jit`` of this name compute: those that a
    causal mask hides are left out. 1 where there is no kernel of ours in it."""
    return float(name.removeprefix(_NAME)) if name.startswith(_NAME) else 1.0


_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
"""By the kernels' names: of forward, and of the two of backward, which both compute the scores."""


def operations_of_kernel(where: str, query: Sequence[int], key: Sequence[int]) -> float:
    """The floating-point operations of one of the kernels; 0 if it is none.

    Args:
        where: the scopes that it was traced in, and the kernel's name, as XLA has them.
        query, key: their shapes, ``[..., L, E]`` and ``[..., S, E]``.
    """
    scopes = set(re.split(r"[/()]+", where))
    products = next((n for name, n in _PRODUCTS.items() if name in where), 0)
    share = math.prod(map(share_of_blocks, scopes))
    return 2.0 * products * share * math.prod(query) * key[-2]


def _named(
    function: Callable[..., Any],
    query: jax.Array,
    key: jax.Array,
    is_causal: bool,
    part: ShardNumber,
) -> Callable[..., Any]:
    """``function`` under a name that tells `share_of_blocks`."""

    def call(*tensors: jax.Array) -> Any:
        # The kernel's own numbers are int32, which they aren't where 64-bit types are on.
        with jax.enable_x64(False):
            return function(*tensors)

    call.__name__ = name_of_call(query.shape[-2], key.shape[-2], is_causal, part.of)
    return jax.jit(call)


def name_of_call(length: int, keys: int, is_causal: bool, parts: int = 1) -> str:
    """What `share_of_blocks` reads.

    Args:
        length, keys: of the queries and of the keys.
        is_causal: whether a query sees the keys up to its own position.
        parts: how many devices have ``length`` queries each. The last one's see the most, and
            the others wait for it.
    """
    rows, columns = _block(length), _block(keys)
    first = length * (parts - 1) // rows
    grid = [(first + i, j) for i in range(length // rows) for j in range(keys // columns)]
    seen = sum(not is_causal or j * columns < (i + 1) * rows for i, j in grid)
    return f"{_NAME}{seen / len(grid)}"


def _inputs(scale: Any, query: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """As the kernel takes them: one batch dim, lanes filled, the query scaled."""
    scaled = (query.astype(np.float32) * jnp.asarray(scale, np.float32)).astype(query.dtype)
    return [x.reshape(-1, *x.shape[-3:]) for x in map(_lanes, (scaled, *others))]


def _kernel(
    query: jax.Array, key: jax.Array, is_causal: bool, part: ShardNumber, *, with_log_sums: bool
) -> Any:
    """The kernel of one element of the batch; ``with_log_sums`` it can't be differentiated.

    Args:
        part: which of the parts of all queries these are.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    parts = part.of if is_causal else 1  # else all queries see the same
    heads, shape = query.shape[-3], (parts * query.shape[-2], key.shape[-2])
    rows, columns = _block(query.shape[-2]), _block(key.shape[-2])
    kind = causal_mask if is_causal else splash_attention_mask.FullMask
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([kind(shape) for _ in range(heads)]),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=rows,
            block_kv=columns,
            block_kv_compute=columns,
            block_q_dkv=rows,
            block_kv_dkv=columns,
            block_kv_dkv_compute=columns,
            block_q_dq=rows,
            block_kv_dq=columns,
        ),
        head_shards=1,
        q_seq_shards=parts,
        save_residuals=with_log_sums,
        interpret=here().platform != "tpu",  # for tests
    )
    return kernel if parts == 1 else _of_part(kernel, part)


def _of_part(kernel: Any, part: ShardNumber) -> Any:
    """A kernel that knows the mask of all parts of the queries, for one of them."""

    def own(name: str, table: Any) -> Any:
        if table is None:
            return None
        axis = 0 if name == "q_sequence" else 1  # the others begin with the heads
        size = table.shape[axis] // part.of
        return jax.lax.dynamic_slice_in_dim(table, part.index * size, size, axis)

    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    cut = [
        info._replace(**{name: own(name, info._asdict()[name]) for name in _BY_QUERIES})
        for info in infos
    ]
    return type(kernel)(*cut, **kernel.kwargs)


_BY_QUERIES = ("data_next", "mask_next", "block_mask", "q_sequence")
"""The tables of JAX's ``MaskInfo`` that tell of queries, or of blocks of them, one by one."""


def _filled(x: jax.Array) -> int:
    return -(-x.shape[-1] // _LANES) * _LANES


def _lanes(x: jax.Array) -> jax.Array:
    """With zeros in lanes that nothing fills."""
    missing = _filled(x) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _block(length: int) -> int:
    return next(size for size in (_BLOCK, 256, _LANES) if length % size == 0)
