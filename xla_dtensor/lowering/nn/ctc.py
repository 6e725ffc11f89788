"""``ctc_loss``: the forward-backward algorithm over the alignments of a target to a sequence.

In log space, after Graves et al., "Connectionist Temporal Classification" (2006). A target of S
labels is walked with a blank before, between and after them: 2 S + 1 states. Lengths may be
tensors: what lies beyond them is masked, so shapes don't depend on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.partitioned.scatter import write_each
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers

Lengths = Any  # a tensor or a list of numbers, per sequence


def _most(targets: Any, lengths: Any) -> int:
    """The most labels that a target can have, from shapes alone if the lengths are a tensor."""
    if isinstance(lengths, Sequence):
        return max(lengths, default=0)
    return int(targets.shape[-1])


@meta_of("_ctc_loss", "_ctc_loss.Tensor")
def _(
    log_probs: Any,
    targets: Any,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, batch, classes = log_probs.shape
    if not 0 <= blank < classes:
        raise RuntimeError("blank must be in label range")
    for lengths in (input_lengths, target_lengths):
        if (len(lengths) if isinstance(lengths, Sequence) else lengths.numel()) != batch:
            raise RuntimeError("input_lengths and target_lengths must be of size batch_size")
    states = 2 * _most(targets, target_lengths) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, states)


@meta_of("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def _(grad: Any, log_probs: Any, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


class _States:
    """What the recursions run over: ``[T, N, states]``."""

    def __init__(
        self,
        log_probs: jax.Array,
        targets: jax.Array,
        input_lengths: Lengths,
        target_lengths: Lengths,
        blank: int,
    ) -> None:
        self.log_probs = log_probs.astype(math_dtype(log_probs.dtype))
        most = _most(targets, target_lengths)
        self.input_lengths = jnp.asarray(input_lengths, np.int32).reshape(-1)
        self.target_lengths = jnp.asarray(target_lengths, np.int32).reshape(-1)
        batch = log_probs.shape[1]
        if targets.ndim == 1:  # one after the other
            starts = jnp.cumsum(self.target_lengths) - self.target_lengths
            places = starts[:, None] + jnp.arange(most)
            targets = jnp.take(targets, places, mode="clip") if targets.size else places
        targets = targets[:, :most].astype(np.int32)
        labels = jnp.full((batch, most + 1, 2), blank, np.int32)
        labels = labels.at[:, :most, 1].set(targets).reshape(batch, -1)[:, :-1]
        self.classes = jnp.clip(labels, 0, log_probs.shape[2] - 1)
        """Per state its class."""
        self.number = jnp.arange(2 * most + 1)
        self.last = 2 * self.target_lengths[:, None]
        """The number of the last state of each target."""
        two_before = jnp.pad(self.classes, ((0, 0), (2, 0)), constant_values=-1)[:, :-2]
        self.skips = (self.number % 2 == 1) & (self.number > 1) & (self.classes != two_before)
        """Whether a state may follow the one two before it."""
        shape = (*log_probs.shape[:2], len(self.number))
        index = jnp.broadcast_to(self.classes, shape)
        self.emitted = jnp.take_along_axis(self.log_probs, index, axis=2, mode="clip")
        self.emitted = jnp.where(self.number <= self.last, self.emitted, -jnp.inf)

    def alphas(self) -> jax.Array:
        """Per step and state, the log of the probability of all ways there."""
        start = jnp.where(self.number < 2, self.emitted[0], -jnp.inf)

        def step(alpha: jax.Array, emitted: jax.Array) -> tuple[jax.Array, jax.Array]:
            skipped = jnp.where(self.skips, _shifted(alpha, 2), -jnp.inf)
            alpha = _log_sum(alpha, _shifted(alpha, 1), skipped) + emitted
            return alpha, alpha

        _, rest = lax.scan(step, start, self.emitted[1:])
        return jnp.concatenate([start[None], rest])

    def betas(self) -> jax.Array:
        """Per step and state, the log of the probability of all ways from there to the end."""
        steps = len(self.emitted)
        ends = (self.number >= self.last - 1) & (self.number <= self.last)
        skips = jnp.pad(self.skips, ((0, 0), (0, 2)))[:, 2:]

        def step(beta: jax.Array, at: Any) -> tuple[jax.Array, jax.Array]:
            time, emitted = at
            skipped = jnp.where(skips, _shifted(beta, -2), -jnp.inf)
            going = _log_sum(beta, _shifted(beta, -1), skipped)
            before = jnp.where(time == self.input_lengths[:, None] - 1, 0.0, going)
            ending = (time == self.input_lengths[:, None] - 1) & ~ends
            beta = jnp.where(ending, -jnp.inf, before) + emitted
            return beta, beta

        none = jnp.full(self.emitted.shape[1:], -jnp.inf, self.emitted.dtype)
        times = jnp.arange(steps)
        _, found = lax.scan(step, none, (times, self.emitted), reverse=True)
        return found

    def loss(self, alphas: jax.Array) -> jax.Array:
        """``[N]``: minus the log of the probability of each target."""
        is_end = jnp.arange(len(alphas))[:, None] == self.input_lengths - 1
        final = jnp.max(jnp.where(is_end[..., None], alphas, -jnp.inf), axis=0)
        ends = (self.number >= self.last - 1) & (self.number <= self.last)
        final = jnp.where(ends, final, -jnp.inf)
        highest = jnp.max(final, axis=1)
        shift = jnp.where(jnp.isfinite(highest), highest, 0)
        total = jnp.log(jnp.sum(jnp.exp(final - shift[:, None]), axis=1)) + shift
        empty = jnp.where(self.target_lengths == 0, 0.0, jnp.inf).astype(total.dtype)
        return jnp.where(self.input_lengths == 0, empty, -total)


def _shifted(values: jax.Array, by: int) -> jax.Array:
    """Each state's predecessor (successor if negative), -inf where there is none."""
    config = ((0, 0), (max(by, 0), max(-by, 0)))
    padded = jnp.pad(values, config, constant_values=-jnp.inf)
    return padded[:, : values.shape[1]] if by > 0 else padded[:, -by:]


def _log_sum(*terms: jax.Array) -> jax.Array:
    highest = jnp.maximum(jnp.maximum(terms[0], terms[1]), terms[2])
    # Where no way leads, -inf - -inf would be NaN.
    shift = jnp.where(jnp.isneginf(highest), 0, highest)
    total = sum((jnp.exp(term - shift) for term in terms), start=jnp.zeros((), highest.dtype))
    return jnp.log(total) + shift


@lowers("_ctc_loss", "_ctc_loss.Tensor")
def ctc_loss(
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[jax.Array, jax.Array]:
    states = _States(log_probs, targets, input_lengths, target_lengths, blank)
    alphas = states.alphas()
    return states.loss(alphas), jnp.swapaxes(alphas, 0, 1)


@lowers("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    grad: jax.Array,
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Lengths,
    target_lengths: Lengths,
    neg_log_likelihood: jax.Array,
    log_alpha: jax.Array,
    blank: int,
    zero_infinity: bool = False,
) -> jax.Array:
    states = _States(log_probs, targets, input_lengths, target_lengths, blank)
    loss = neg_log_likelihood.astype(states.log_probs.dtype)
    alphas = jnp.swapaxes(log_alpha, 0, 1).astype(states.log_probs.dtype)
    # alpha and beta both count the state's own probability.
    own = jnp.where(jnp.isneginf(states.emitted), 0, states.emitted)
    occupied = jnp.exp(alphas + states.betas() - own + loss[:, None])
    occupied = jnp.where(states.number <= states.last, occupied, 0)
    index = jnp.broadcast_to(states.classes, occupied.shape)
    by_class = write_each(jnp.zeros_like(states.log_probs), 2, index, "add", occupied)
    result = (jnp.exp(states.log_probs) - by_class) * grad.astype(loss.dtype)[:, None]
    if zero_infinity:
        result = jnp.where(jnp.isposinf(loss)[:, None], 0, result)
    used = jnp.arange(len(log_probs))[:, None, None] < states.input_lengths[:, None]
    return jnp.where(used, result, 0)
