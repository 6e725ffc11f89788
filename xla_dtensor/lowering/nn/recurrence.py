"""A recurrent layer's time steps in one direction, as a loop: one program for any length.

What needs no former step is left outside: the products of the inputs, before, and those that
give the weights' gradients, after, are one product each of all steps (Appleyard et al., "Optimizing
Performance of Recurrent Neural Networks on GPUs", 2016).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.nn.rnn import gru_of_gates, lstm_of_gates
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers


def _lstm(of_input: jax.Array, of_hidden: jax.Array, h: jax.Array, c: Any) -> tuple[Any, Any]:
    return lstm_of_gates(of_input + of_hidden, c)[:2]


def _gru(of_input: jax.Array, of_hidden: jax.Array, h: jax.Array, c: Any) -> tuple[Any, Any]:
    return gru_of_gates(of_input, of_hidden, h)[0], None


def _tanh(of_input: jax.Array, of_hidden: jax.Array, h: jax.Array, c: Any) -> tuple[Any, Any]:
    return jnp.tanh(of_input + of_hidden), None


def _relu(of_input: jax.Array, of_hidden: jax.Array, h: jax.Array, c: Any) -> tuple[Any, Any]:
    gates = of_input + of_hidden
    return jnp.where(gates <= 0, 0, gates), None  # whose gradient lets NaNs through, as torch's


_CELLS = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}
"""From the parts of the gates that come of the input and of the hidden state, the hidden state and
the cell state (None but in LSTMs), the next two; without products."""


def _cell(mode: str) -> Callable[..., tuple[Any, Any]]:
    """Computed as torch's are: half precision in float32, rounded once at the end."""

    def cell(*arrays: Any) -> tuple[Any, Any]:
        dtype = arrays[0].dtype
        wide = math_dtype(dtype)
        found = _CELLS[mode](*(x if x is None else x.astype(wide) for x in arrays))
        return tuple(x if x is None else x.astype(dtype) for x in found)  # type: ignore[return-value]

    return cell


def _is_running(batch_sizes: jax.Array | None, batch: int) -> jax.Array | None:
    """``[T, B, 1]``: whether a sequence has that step. They are sorted, the longest first."""
    if batch_sizes is None:
        return None
    return (jnp.arange(batch) < batch_sizes[:, None])[..., None]


def _where(condition: Any, x: Any, y: Any) -> Any:
    """`x` where the condition holds, or there is none."""
    return x if condition is None or x is None else jnp.where(condition, x, y)


@lowers("xla_dtensor::recurrence")
def recurrence(
    gates: jax.Array,
    hx: jax.Array,
    cx: jax.Array | None,
    weight: jax.Array,
    bias: jax.Array | None,
    projection: jax.Array | None,
    batch_sizes: jax.Array | None,
    mode: str,
    reverse: bool,
    for_backward: bool,
) -> tuple[jax.Array, ...]:
    """The states after each step, the last ones, and what `backward` needs.

    A sequence that has ended, or, in reverse, not begun, keeps its state.

    Args:
        gates: ``[T, B, gates * hidden]``, the inputs' part.
        hx: ``[B, hidden]``, or of the projection's size.
        weight: ``[gates * hidden, hidden]``.
        projection: ``[projected, hidden]``, of an LSTM.
        batch_sizes: how many sequences have each step.
    """
    cell = _cell(mode)

    def step(state: Any, at: Any) -> Any:
        h, c = state
        of_input, running = at
        of_hidden = h @ weight.T if bias is None else h @ weight.T + bias
        next_h, next_c = cell(of_input, of_hidden, h, c)
        if projection is not None:
            next_h = next_h @ projection.T
        h, c = _where(running, next_h, h), _where(running, next_c, c)
        return (h, c), (h, *((c, of_hidden) if for_backward else (None, None)))

    xs = (gates, _is_running(batch_sizes, len(hx)))
    (h, c), (states, cells, of_hidden) = lax.scan(step, (hx, cx), xs, reverse=reverse)
    none = jnp.zeros((), gates.dtype)
    return tuple(none if x is None else x for x in (states, h, c, cells, of_hidden))


@lowers("xla_dtensor::recurrence_backward")
def recurrence_backward(
    grad_states: jax.Array | None,
    grad_h: jax.Array | None,
    grad_c: jax.Array | None,
    gates: jax.Array,
    hx: jax.Array,
    cx: jax.Array | None,
    weight: jax.Array,
    bias: jax.Array | None,
    projection: jax.Array | None,
    batch_sizes: jax.Array | None,
    states: jax.Array,
    cells: jax.Array,
    of_hidden: jax.Array,
    mode: str,
    reverse: bool,
) -> tuple[jax.Array, ...]:
    """The gradients of the tensors from `gates` to `projection`; scalars where there is none."""
    cell = _cell(mode)

    def before(first: Any, after: jax.Array) -> Any:
        """The states before each step."""
        if first is None:
            return None
        rest = [after[1:], first[None]] if reverse else [first[None], after[:-1]]
        return jnp.concatenate(rest)

    def step(grads: Any, at: Any) -> Any:
        grad_next_h, grad_next_c = grads
        grad_state, running, *arrays = at
        if grad_state is not None:
            grad_next_h = grad_next_h + grad_state
        unprojected, to_grads = jax.vjp(cell, *arrays)
        grad_m = grad_next_h if projection is None else grad_next_h @ projection
        of_input, of_gates, grad_h, grad_c = to_grads((grad_m, grad_next_c))
        of_input, of_gates = (_where(running, x, jnp.zeros_like(x)) for x in (of_input, of_gates))
        grad_h = _where(running, grad_h + of_gates @ weight, grad_next_h)
        grad_c = _where(running, grad_c, grad_next_c)
        # Where the two parts are added up their gradients are one.
        kept = (of_input if mode == "gru" else None, of_gates)
        projected = (None, None)
        if projection is not None:
            grad_projected = _where(running, grad_next_h, jnp.zeros_like(grad_next_h))
            projected = (grad_projected, unprojected[0])
        return (grad_h, grad_c), (*kept, *projected)

    h_before = before(hx, states)
    running = _is_running(batch_sizes, len(hx))
    xs = (grad_states, running, gates, of_hidden, h_before, before(cx, cells))
    start_h = jnp.zeros_like(hx) if grad_h is None else grad_h
    start_c = None if cx is None else jnp.zeros_like(cx) if grad_c is None else grad_c
    found, stacked = lax.scan(step, (start_h, start_c), xs, reverse=not reverse)
    of_inputs, of_gates, grad_projected, unprojected = stacked
    grad_weight = jnp.einsum("tbg,tbh->gh", of_gates, h_before)
    grad_bias = None if bias is None else of_gates.astype(math_dtype(bias.dtype)).sum((0, 1))
    grad_projection = None
    if projection is not None:
        grad_projection = jnp.einsum("tbp,tbh->ph", grad_projected, unprojected)
    grads = (of_gates if of_inputs is None else of_inputs, *found, grad_weight, grad_bias)
    none = jnp.zeros((), gates.dtype)
    return tuple(none if x is None else x for x in (*grads, grad_projection))


are(Kind.PRODUCT, "xla_dtensor::recurrence", "xla_dtensor::recurrence_backward")
