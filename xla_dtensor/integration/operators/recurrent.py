"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: layers whose steps are a loop, and their autograd.

torch takes them apart into one cell per step before a backend sees them, which makes programs as
long as the sequences. Here a layer is one product with all inputs, and one operation that goes
through the steps, each way (`lowering/nn/recurrence.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from xla_dtensor.base.torch_private import DispatchKey
from xla_dtensor.base.torch_private.attributes import kernel_of
from xla_dtensor.integration.operators.autocast import cast
from xla_dtensor.integration.patching.calls import are_others, dispatched, is_transformed

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

_LAYER = (
    "Tensor gates, Tensor hx, Tensor? cx, Tensor weight, Tensor? bias, Tensor? projection, "
    "Tensor? batch_sizes"
)


def define(library: torch.library.Library) -> None:
    """Define the operations in ``library``."""
    library.define(
        f"recurrence({_LAYER}, str mode, bool reverse, bool for_backward) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    library.impl("recurrence", _forward_meta, "Meta")
    library.define(
        f"recurrence_backward(Tensor? grad_states, Tensor? grad_h, Tensor? grad_c, {_LAYER}, "
        "Tensor states, Tensor cells, Tensor of_hidden, str mode, bool reverse) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    library.impl("recurrence_backward", _backward_meta, "Meta")


def count_flops(module: Any) -> None:
    """Tell ``FlopCounterMode`` of them."""
    ops = torch.ops.xla_dtensor

    def of_step(gates: Any, weight: Any, projection: Any) -> int:
        steps = 2 * math.prod(gates[:2])
        return steps * (math.prod(weight) + math.prod(projection or (0,)))

    @module.register_flop_formula(ops.recurrence)
    def of_forward(
        gates: Any, hx: Any, cx: Any, weight: Any, bias: Any, projection: Any, *_: Any, **__: Any
    ) -> int:
        return of_step(gates, weight, projection)

    @module.register_flop_formula(ops.recurrence_backward)
    def of_backward(
        grad_states: Any,
        grad_h: Any,
        grad_c: Any,
        gates: Any,
        hx: Any,
        cx: Any,
        weight: Any,
        bias: Any,
        projection: Any,
        *_: Any,
        **__: Any,
    ) -> int:
        return 2 * of_step(gates, weight, projection)  # of the states, and of the weights


def _forward_meta(
    gates: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    for_backward = rest[-1]
    steps, none = len(gates), gates.new_empty(())
    return (
        hx.new_empty((steps, *hx.shape)),
        hx.new_empty(hx.shape),
        none if cx is None else cx.new_empty(cx.shape),
        cx.new_empty((steps, *cx.shape)) if cx is not None and for_backward else none,
        gates.new_empty(gates.shape) if for_backward else none,
    )


def _backward_meta(
    grad_states: Any, grad_h: Any, grad_c: Any, gates: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(gates.new_empty(() if x is None else x.shape) for x in (gates, *rest[:5]))


# --- one layer, one way -----------------------------------------------------------------------


class _Recurrence(torch.autograd.Function):
    """The steps of a layer, one way. What its backward differentiates again is torch's cells."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], batch_sizes: Any, *tensors: Any) -> Any:
        mode, reverse, with_grad = options
        for_backward = with_grad and any(ctx.needs_input_grad)
        op = torch.ops.xla_dtensor.recurrence.default
        states, h, c, *kept = dispatched(op, *tensors, batch_sizes, mode, reverse, for_backward)
        # Others may write to the states, as to those that torch has put together.
        ctx.save_for_backward(
            *tensors, batch_sizes, states.clone() if for_backward else None, *kept
        )
        ctx.options = mode, reverse
        ctx.set_materialize_grads(False)
        return (states, h, c) if mode == "lstm" else (states, h)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mode, reverse = ctx.options
        saved = ctx.saved_tensors
        inputs, batch_sizes = saved[:6], saved[6]
        needed = ctx.needs_input_grad[2:]
        found: Sequence[Any]
        if torch.is_grad_enabled():  # differentiated again
            # By themselves: two may come from one tensor, and each has a gradient of its own.
            inputs = tuple(x if x is None else x.view_as(x) for x in inputs)
            results = _step_by_step(mode, reverse, batch_sizes, *inputs)
            given = [(r, g) for r, g in zip(results, grads, strict=False) if g is not None]
            wanted = [x for x, of in zip(inputs, needed, strict=True) if of]
            each = torch.autograd.grad(
                [r for r, _ in given],
                wanted,
                [g for _, g in given],
                create_graph=True,
                allow_unused=True,
            )
            of_wanted = iter(each)
            found = [next(of_wanted) if of else None for of in needed]
        else:
            op = torch.ops.xla_dtensor.recurrence_backward.default
            of_states, of_h, of_c = (*grads, None)[:3]
            found = dispatched(op, of_states, of_h, of_c, *saved, mode, reverse)
        return None, None, *(g if of else None for g, of in zip(found, needed, strict=True))


def _step_by_step(
    mode: str,
    reverse: bool,
    batch_sizes: torch.Tensor | None,
    gates: torch.Tensor,
    h: torch.Tensor,
    c: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    projection: torch.Tensor | None,
) -> tuple[Any, ...]:
    """The same, of torch's operations, which have gradients of gradients."""
    ops = torch.ops.aten
    states: list[torch.Tensor] = [h] * len(gates)
    for t in reversed(range(len(gates))) if reverse else range(len(gates)):
        of_hidden, next_c = F.linear(h, weight, bias), None
        if mode == "lstm":
            next_h, next_c, _ = ops._thnn_fused_lstm_cell(gates[t], of_hidden, c)
        elif mode == "gru":
            next_h, _ = ops._thnn_fused_gru_cell(gates[t], of_hidden, h)
        else:
            next_h = (torch.tanh if mode == "rnn_tanh" else torch.relu)(gates[t] + of_hidden)
        if projection is not None:
            next_h = F.linear(next_h, projection)
        if batch_sizes is not None:
            running = (torch.arange(len(h), device=h.device) < batch_sizes[t])[:, None]
            next_h = torch.where(running, next_h, h)
            next_c = None if c is None else torch.where(running, next_c, c)
        h, c = next_h, next_c
        states[t] = h
    return torch.stack(states), h, c


# --- all layers -------------------------------------------------------------------------------


def _layers(
    mode: str,
    x: torch.Tensor,
    batch_sizes: torch.Tensor | None,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    dropout: float,
    bidirectional: bool,
    has_biases: bool,
) -> tuple[torch.Tensor, ...]:
    """The last layer's states after each step, and the last states of all layers.

    Args:
        x: ``[T, B, features]``; with batch sizes ``[steps of all, features]``.
        dropout: between layers; 0 outside of training.
    """
    ways = 1 + bidirectional
    each = len(params) // len(states[0])
    packing = None if batch_sizes is None else _Packing(batch_sizes, x.device)
    last: list[list[torch.Tensor]] = [[] for _ in states]
    for layer in range(len(states[0]) // ways):
        if layer and dropout:
            x = F.dropout(x, dropout, True)
        both = []
        for way in range(ways):
            number = layer * ways + way
            of_input, weight, *rest = params[number * each : (number + 1) * each]
            biases = rest[:2] if has_biases else [None, None]
            projection = rest[2 * has_biases] if len(rest) > 2 * has_biases else None
            gates = F.linear(x, of_input, biases[0])
            h, c = (*(state[number] for state in states), None)[:2]
            tensors = (gates, h, c, weight, biases[1], projection)
            if torch.is_autocast_enabled("xla"):  # as of torch's cells
                tensors = cast(torch.get_autocast_dtype("xla"), tensors)
            sizes = None
            if packing is not None:
                tensors, sizes = (packing.padded(tensors[0]), *tensors[1:]), packing.sizes
            options = mode, bool(way), torch.is_grad_enabled()  # not within an autograd function
            after, *ends = _Recurrence.apply(options, sizes, *tensors)
            both.append(after if packing is None else packing.packed(after))
            for found, end in zip(last, ends, strict=True):
                found.append(end)
        x = torch.cat(both, -1) if bidirectional else both[0]
    return x, *map(torch.stack, last)


class _Packing:
    """Between a packed sequence's rows, step by step, and ``[T, B, ...]``.

    Attributes:
        sizes: how many sequences have each step, on the device.
    """

    def __init__(self, batch_sizes: torch.Tensor, device: torch.device) -> None:
        self.shape = len(batch_sizes), int(batch_sizes[0])
        steps = torch.arange(self.shape[1]) < batch_sizes[:, None]
        self.positions = steps.flatten().nonzero().flatten().to(device)
        self.sizes = batch_sizes.to(device)

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Zeros where a sequence has no step."""
        flat = rows.new_zeros(math.prod(self.shape), rows.shape[-1])
        return flat.index_copy(0, self.positions, rows).unflatten(0, self.shape)

    def packed(self, steps: torch.Tensor) -> torch.Tensor:
        return steps.flatten(0, 1).index_select(0, self.positions)


# --- in place of torch's ----------------------------------------------------------------------


def _fits(
    mode: str,
    shape: Sequence[int],
    tensors: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    count: int,
) -> bool:
    """Whether it is what the modules ask for; of what isn't, torch's own says what is wrong.

    Args:
        shape: of each step's input, ``[B, features]``.
        tensors: the input and the states.
        count: of layers, each way counted.
    """
    states, every = tensors[1:], (*tensors, *params)
    if {t.device.type for t in every} != {"xla"} or len({t.dtype for t in every}) > 1:
        return False
    if any(t.ndim != 3 or t.shape[:-1] != (count, shape[0]) for t in states) or min(shape) == 0:
        return False
    out, hidden = states[0].shape[-1], states[-1].shape[-1]
    gates = _GATES[mode] * hidden
    of_layer = [(gates, out), *[(gates,)] * (2 * has_biases), *[(out, hidden)] * (out != hidden)]
    each = 1 + len(of_layer)
    return (
        tensors[0].is_floating_point()
        and len(params) == count * each
        and all(p.shape == of_layer[i % each - 1] for i, p in enumerate(params) if i % each)
    )


def _kernel(mode: str, packed: bool) -> Callable[..., Any]:
    overload = getattr(torch.ops.aten, mode)
    func = overload.data if packed else overload.input

    def kernel(x: torch.Tensor, *rest: Any) -> Any:
        batch_sizes, *given = rest if packed else (None, *rest)
        hx, params, has_biases, num_layers, dropout, train, bidirectional, *order = given
        states = list(hx) if mode == "lstm" else [hx]
        batch_first = order == [True]
        steps = x.transpose(0, 1) if batch_first and x.ndim == 3 else x
        shape = (int(batch_sizes[0]), *x.shape[1:]) if packed else steps.shape[1:]
        count = num_layers * (1 + bidirectional)
        plain = x.ndim == (2 if packed else 3) and len(x) and len(states) == 1 + (mode == "lstm")
        every = (mode, shape, (x, *states), params, has_biases, count)
        if is_transformed():
            return func.decompose(x, *rest)  # in Python, of what has a forward derivative
        if not plain or are_others(x, *states, *params) or not _fits(*every):
            return kernel_of(func, DispatchKey.CompositeImplicitAutograd)(x, *rest)
        found = _layers(
            *(mode, steps, batch_sizes, states, params),
            *(dropout if train else 0.0, bidirectional, has_biases),
        )
        return found[0].transpose(0, 1) if batch_first else found[0], *found[1:]

    return kernel


KERNELS = {
    f"{mode}.{kind}": _kernel(mode, kind == "data") for mode in _GATES for kind in ("input", "data")
}
"""By the overloads of ``aten`` whose place they take."""
