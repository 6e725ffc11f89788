"""The fused recurrent cells, one step each: of ``nn.LSTMCell`` and ``nn.GRUCell``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.registry import lowers


@meta_of("_thnn_fused_lstm_cell")
def _lstm_cell_shapes(
    input_gates: Any, hidden_gates: Any, cx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[torch.Tensor, ...]:
    """torch's own wants biases."""
    return (*(cx.new_empty(cx.shape) for _ in range(2)), cx.new_empty(input_gates.shape))


@meta_of("_thnn_fused_gru_cell")
def _gru_cell_shapes(
    input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[torch.Tensor, ...]:
    batch, hidden = hx.shape
    return hx.new_empty(hx.shape), hx.new_empty(batch, 5 * hidden)


@meta_of("_thnn_fused_gru_cell_backward")
def _gru_cell_backward_shapes(
    grad_hy: Any, workspace: Any, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    batch, hidden = grad_hy.shape
    gates = [grad_hy.new_empty(batch, 3 * hidden) for _ in range(2)]
    biases = [grad_hy.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return (*gates, grad_hy.new_empty(grad_hy.shape), *biases)


def lstm_of_gates(gates: Any, cx: Any) -> tuple[Any, Any, Any]:
    """The hidden state, the cell state and the activated gates."""
    i, f, g, o = jnp.split(gates, 4, axis=1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    cy = f * cx + i * g
    return o * jnp.tanh(cy), cy, (i, f, g, o)


def gru_of_gates(input_gates: Any, hidden_gates: Any, hx: Any) -> tuple[Any, Any]:
    """The hidden state, and what the backward needs."""
    ir, iz, i_n = jnp.split(input_gates, 3, axis=1)
    hr, hz, hn = jnp.split(hidden_gates, 3, axis=1)
    r, z = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
    n = jnp.tanh(i_n + r * hn)
    return n + z * (hx - n), (r, z, n, hx, hn)


@lowers("_thnn_fused_lstm_cell")
def lstm_cell(
    input_gates: Any, hidden_gates: Any, cx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Any, Any, Any]:
    """Gates ``[batch, 4 * hidden]``; returns hidden state, cell state, activated gates."""
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    hy, cy, activated = lstm_of_gates(gates, cx)
    return hy, cy, jnp.concatenate(activated, axis=1)


@lowers("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, workspace: Any, has_bias: bool
) -> tuple[Any, Any, Any]:
    """Gradients of the gates, the former cell state and the bias; ``workspace`` is the activated
    gates."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = jnp.split(workspace, 4, axis=1)
    tanh_cy = jnp.tanh(cy)
    grad_cell = jnp.zeros_like(cy) if grad_cy is None else grad_cy
    grad_o = jnp.zeros_like(o)
    if grad_hy is not None:
        grad_cell = grad_cell + grad_hy * o * (1 - tanh_cy**2)
        grad_o = grad_hy * tanh_cy
    grad_gates = jnp.concatenate(
        [
            grad_cell * g * i * (1 - i),
            grad_cell * cx * f * (1 - f),
            grad_cell * i * (1 - g**2),
            grad_o * o * (1 - o),
        ],
        axis=1,
    )
    return grad_gates, grad_cell * f, grad_gates.sum(0) if has_bias else None


@lowers("_thnn_fused_gru_cell")
def gru_cell(
    input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Any, Any]:
    """Gates ``[batch, 3 * hidden]`` in torch's order (reset, update, new); returns the hidden state
    and what the backward needs, ``[batch, 5 * hidden]``: reset, update, new gates, the former
    hidden state and the hidden part of the new gate."""
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    hy, workspace = gru_of_gates(input_gates, hidden_gates, hx)
    return hy, jnp.concatenate(workspace, axis=1)


@lowers("_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    grad_hy: Any, workspace: Any, has_bias: bool
) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients of the input gates, hidden gates, hidden state and the two biases."""
    r, z, n, hx, hn = jnp.split(workspace, 5, axis=1)
    grad_n = grad_hy * (1 - z) * (1 - n**2)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    grad_r = grad_n * hn * r * (1 - r)
    grad_input = jnp.concatenate([grad_r, grad_z, grad_n], axis=1)
    grad_hidden = jnp.concatenate([grad_r, grad_z, grad_n * r], axis=1)
    bias = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * z, *bias
