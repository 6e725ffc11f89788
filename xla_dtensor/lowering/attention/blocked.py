"""Attention block by block: no more scores at a time than of one block of queries and keys.

The softmax's maximum and sum are brought up to date with each block of keys (online softmax); the
backward pass computes each block's scores again from their normalisers. Blocks that a causal mask
hides altogether are left out. All of it is one device's: XLA's partitioner would have to cut loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.linalg.matmul import _precision
from xla_dtensor.lowering.promotion import math_dtype

QUERIES, KEYS = 256, 256
"""The sides of a block; the fastest of those that were measured (docs/design.md, "Attention over
long sequences")."""


class Blocks:
    """One attention in blocks.

    Args:
        query: ``[..., heads, L, E]``.
        key, value: ``[..., key heads, S, E]`` and ``[..., key heads, S, F]`` with the same leading
            dims; the key heads divide the heads.
        mask: bool (which to see) or added to the scores; broadcasts to ``[..., heads, L, S]``.
        is_causal: a query sees the keys up to its own position.
        scale: of the scores.
        first: the position of the first query, a number or traced.
        keep: gives what a block's probabilities are multiplied with (dropout), of the shape
            ``[batch, key heads, heads of a group, queries, keys]``, from the block's first row and
            its column's number.
    """

    def __init__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None,
        is_causal: bool,
        scale: Any,
        first: Any = 0,
        keep: Callable[[Any, Any], jax.Array] | None = None,
    ) -> None:
        self.shape = query.shape
        *lead, heads, self.length, _ = query.shape
        self.keys, kv_heads = key.shape[-2], key.shape[-3]
        self.wide = math_dtype(query.dtype)
        self.scale = jnp.asarray(scale, self.wide)
        self.is_causal, self.first, self.keep = is_causal, first, keep
        self.rows, self.columns = min(QUERIES, self.length), min(KEYS, self.keys)
        self.groups = kv_heads, heads // kv_heads
        self.batch = int(np.prod(lead))
        self.q = self.by_query(query)
        self.k, self.v = self._by_key(key), self._by_key(value)
        self.mask_shape = None if mask is None else mask.shape
        self.mask = None if mask is None else self._mask(mask, lead)

    def by_query(self, x: jax.Array) -> jax.Array:
        """``[..., heads, L, n]`` as [batch, key heads, heads of a group, rows, n], whole blocks."""
        x = x.reshape(self.batch, *self.groups, *x.shape[-2:])
        return _padded(x, 3, self.rows)

    def _by_key(self, x: jax.Array) -> jax.Array:
        return _padded(x.reshape(self.batch, self.groups[0], *x.shape[-2:]), 2, self.columns)

    def _mask(self, mask: jax.Array, lead: list[int]) -> jax.Array:
        mask = mask.reshape((1,) * (len(lead) + 3 - mask.ndim) + mask.shape)
        own = mask.shape[: len(lead)]
        if any(n != 1 for n in own):
            mask = jnp.broadcast_to(mask, (*lead, *mask.shape[len(lead) :]))
        batch = int(np.prod(mask.shape[: len(lead)]))
        heads, length, keys = mask.shape[len(lead) :]
        mask = mask.reshape(batch, *((1, 1) if heads == 1 else self.groups), length, keys)
        mask = mask if length == 1 else _padded(mask, 3, self.rows)
        return mask if keys == 1 else _padded(mask, 4, self.columns)

    def _pairs(self, by_key: bool) -> np.ndarray:
        """The blocks that aren't hidden, as (row, column, whether it is the first of its row or,
        ``by_key``, of its column)."""
        rows, columns = self.q.shape[3] // self.rows, self.k.shape[2] // self.columns
        known = self.is_causal and isinstance(self.first, int)
        pairs = [
            (i, j)
            for i in range(rows)
            for j in range(columns)
            if not known or j * self.columns < self.first + (i + 1) * self.rows
        ]
        line = 1 if by_key else 0
        pairs.sort(key=lambda pair: (pair[line], pair[1 - line]))
        starts = [n == 0 or pairs[n - 1][line] != pair[line] for n, pair in enumerate(pairs)]
        return np.array(
            [(*p, start) for p, start in zip(pairs, starts, strict=True)], np.int32
        ).reshape(-1, 3)

    def _scores(self, q: jax.Array, k: jax.Array, i: Any, j: Any) -> jax.Array:
        scores = _contract("bkgle,bkse->bkgls", q, k) * self.scale
        top = self.first + i * self.rows
        if self.mask is not None:
            mask = self._mask_of(self.mask, i, j)
            if mask.dtype.kind == "b":
                scores = jnp.where(mask, scores, -jnp.inf)
            else:
                scores = scores + mask.astype(scores.dtype)
        shape = scores.shape[-2:]
        column = lax.broadcasted_iota(np.int32, shape, 1) + j * self.columns
        visible = None
        if self.is_causal:
            visible = lax.broadcasted_iota(np.int32, shape, 0) + top >= column
        if self.k.shape[2] != self.keys:
            inside = column < self.keys
            visible = inside if visible is None else visible & inside
        return scores if visible is None else jnp.where(visible, scores, -jnp.inf)

    def _mask_of(self, mask: jax.Array, i: Any, j: Any) -> jax.Array:
        if mask.shape[3] > 1:
            mask = lax.dynamic_slice_in_dim(mask, i * self.rows, self.rows, 3)
        if mask.shape[4] > 1:
            mask = lax.dynamic_slice_in_dim(mask, j * self.columns, self.columns, 4)
        return mask

    def _kept(self, i: Any, j: Any) -> jax.Array:
        assert self.keep is not None
        return self.keep(self.first + i * self.rows, j)

    def _loop(self, by_key: bool, body: Callable[..., Any], carry: Any) -> Any:
        hidden_later = self.is_causal and not isinstance(self.first, int)

        def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
            i, j, starts = pair[0], pair[1], pair[2] != 0
            if not hidden_later:
                return body(carry, i, j, starts), None
            # Skip blocks that the causal mask hides from this shard's rows. The first block of a
            # row always runs, as it initialises the carry.
            seen = starts | (j * self.columns < self.first + (i + 1) * self.rows)
            return lax.cond(seen, lambda c: body(c, i, j, starts), lambda c: c, carry), None

        return lax.scan(step, carry, self._pairs(by_key))[0]

    def forward(self) -> tuple[jax.Array, jax.Array]:
        """The output ``[..., heads, L, F]`` in the query's dtype, and the logs of the rows' sums
        ``[..., heads, L]`` in the dtype of computation (-inf where a row sees nothing)."""
        lead, width = (self.batch, *self.groups), self.v.shape[-1]
        total = (*lead, self.rows, 1)
        begin = (
            jnp.full(total, -jnp.inf, self.wide),
            jnp.zeros(total, self.wide),
            jnp.zeros((*lead, self.rows, width), self.wide),
        )

        def body(carry: Any, i: Any, j: Any, starts: Any) -> Any:
            *running, out, log_sums = carry
            highest, sums, acc = (
                jnp.where(starts, b, r) for b, r in zip(begin, running, strict=True)
            )
            q = lax.dynamic_slice_in_dim(self.q, i * self.rows, self.rows, 3)
            k = lax.dynamic_slice_in_dim(self.k, j * self.columns, self.columns, 2)
            v = lax.dynamic_slice_in_dim(self.v, j * self.columns, self.columns, 2)
            scores = self._scores(q, k, i, j)
            above = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
            # Of a row that has seen nothing so far -inf - -inf would be NaN.
            finite = jnp.where(above == -jnp.inf, 0, above)
            weights, old = jnp.exp(scores - finite), jnp.exp(highest - finite)
            sums = sums * old + jnp.sum(weights, axis=-1, keepdims=True)
            if self.keep is not None:
                weights = weights * self._kept(i, j)
            acc = acc * old + _contract("bkgls,bkse->bkgle", weights.astype(v.dtype), v)
            done = (acc / jnp.where(sums == 0, 1, sums)).astype(out.dtype)
            out = lax.dynamic_update_slice_in_dim(out, done, i * self.rows, 3)
            logs = jnp.log(sums) + finite
            log_sums = lax.dynamic_update_slice_in_dim(log_sums, logs, i * self.rows, 3)
            return above, sums, acc, out, log_sums

        height = self.q.shape[3]
        results = (
            jnp.zeros((*lead, height, width), self.q.dtype),
            jnp.full((*lead, height, 1), -jnp.inf, self.wide),
        )
        *_, out, log_sums = self._loop(False, body, (*begin, *results))
        return self._of_queries(out), self._of_queries(log_sums)[..., 0]

    def backward(
        self, grad: jax.Array, out: jax.Array, log_sums: jax.Array, of_mask: bool
    ) -> tuple[jax.Array | None, ...]:
        """The gradients of query, key, value, and with ``of_mask`` of the mask.

        Args:
            grad: of the output.
            out, log_sums: what `forward` has given.
        """
        wide = self.wide
        shift = jnp.sum(grad.astype(wide) * out.astype(wide), axis=-1, keepdims=True)
        shift = self.by_query(shift)
        # A row that sees nothing has no weights.
        log_sums = jnp.where(log_sums == -jnp.inf, jnp.inf, log_sums)
        log_sums, grad = self.by_query(log_sums[..., None]), self.by_query(grad)
        narrow = self.q.dtype

        def body(carry: Any, i: Any, j: Any, starts: Any) -> Any:
            of_k, of_v, dq, dk, dv, dmask = carry
            of_k, of_v = (jnp.where(starts, 0, x) for x in (of_k, of_v))
            rows = lambda x: lax.dynamic_slice_in_dim(x, i * self.rows, self.rows, 3)
            columns = lambda x: lax.dynamic_slice_in_dim(x, j * self.columns, self.columns, 2)
            q, k, v, g = rows(self.q), columns(self.k), columns(self.v), rows(grad)
            weights = jnp.exp(self._scores(q, k, i, j) - rows(log_sums))
            of_weights = _contract("bkgle,bkse->bkgls", g, v)
            kept = weights
            if self.keep is not None:
                keep = self._kept(i, j)
                of_weights, kept = of_weights * keep, weights * keep
            of_scores = weights * (of_weights - rows(shift))
            if dmask is not None:
                dmask = self._add_to_mask(dmask, of_scores, i, j)
            of_v = of_v + _contract("bkgls,bkgle->bkse", kept.astype(narrow), g)
            of_scores = (of_scores * self.scale).astype(narrow)
            of_k = of_k + _contract("bkgls,bkgle->bkse", of_scores, q)
            more = rows(dq) + _contract("bkgls,bkse->bkgle", of_scores, k)
            dq = lax.dynamic_update_slice_in_dim(dq, more, i * self.rows, 3)
            put = lambda x, part: lax.dynamic_update_slice_in_dim(
                x, part.astype(x.dtype), j * self.columns, 2
            )
            return of_k, of_v, dq, put(dk, of_k), put(dv, of_v), dmask

        block = lambda x: jnp.zeros((*x.shape[:2], self.columns, x.shape[-1]), wide)
        carry = (
            block(self.k),
            block(self.v),
            jnp.zeros(self.q.shape, wide),
            jnp.zeros_like(self.k),
            jnp.zeros_like(self.v),
            jnp.zeros(self.mask.shape, wide) if of_mask and self.mask is not None else None,
        )
        _, _, dq, dk, dv, dmask = self._loop(True, body, carry)
        unpadded = lambda x: x[:, :, : self.keys].reshape(
            *self.shape[:-3], self.groups[0], self.keys, x.shape[-1]
        )
        return (
            self._of_queries(dq).astype(narrow),
            unpadded(dk),
            unpadded(dv),
            None if dmask is None else self._of_mask(dmask),
        )

    def _add_to_mask(self, total: jax.Array, of_scores: jax.Array, i: Any, j: Any) -> jax.Array:
        summed = tuple(dim for dim, size in enumerate(total.shape) if size == 1)
        part = jnp.sum(of_scores, axis=summed, keepdims=True)
        old = self._mask_of(total, i, j)
        at = [0, 0, 0, 0 if 3 in summed else i * self.rows, 0 if 4 in summed else j * self.columns]
        return lax.dynamic_update_slice(total, old + part, [jnp.asarray(n, np.int32) for n in at])

    def _of_mask(self, total: jax.Array) -> jax.Array:
        assert self.mask_shape is not None
        lead = self.shape[:-3]
        length, keys = min(total.shape[3], self.length), min(total.shape[4], self.keys)
        total = total[:, :, :, :length, :keys]
        heads = 1 if total.shape[1:3] == (1, 1) else self.shape[-3]
        batch = lead if total.shape[0] != 1 else (1,) * len(lead)
        total = total.reshape(*batch, heads, length, keys)
        wanted = (1,) * (total.ndim - len(self.mask_shape)) + tuple(self.mask_shape)
        summed = tuple(d for d, n in enumerate(wanted) if n == 1 and total.shape[d] != 1)
        return jnp.sum(total, axis=summed).reshape(self.mask_shape)

    def _of_queries(self, x: jax.Array) -> jax.Array:
        return x[:, :, :, : self.length].reshape(*self.shape[:-1], x.shape[-1])


def _contract(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    wide = math_dtype(x.dtype)
    precision = _precision() if wide == x.dtype else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=wide)


def _padded(x: jax.Array, dim: int, block: int) -> jax.Array:
    missing = -x.shape[dim] % block
    if missing == 0:
        return x
    return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])
