"""A JAX function of torch tensors, with a backward pass that runs no torch code again.

`xd.jax_function`'s backward computes the function again. A branch or a body is the user's Python,
which may say something else by then: `lambda x: layer(x)` in a loop over layers means the last one,
and `fully_shard` has taken the weights away. So JAX differentiates while the forward pass is
traced, and what its backward pass needs are results, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.base.source_line import user_line
from xla_dtensor.custom_ops.jax_function import is_exact, jax_function, no_cotangent
from xla_dtensor.errors import UnsupportedOpError


class _Differentiated:
    """The forward pass of a JAX function, and its backward pass.

    Args:
        function: of arrays; returns a list of arrays.
        wanted: by argument whether its gradient is.
    """

    def __init__(self, function: Callable[..., list[Any]], wanted: Sequence[bool]) -> None:
        self._function, self._at = function, [i for i, w in enumerate(wanted) if w]
        self._pull: Any = None
        self._outs: list[Any] = []
        self.forward = jax_function(self._forward)
        self.backward = jax_function(self._backward)

    def _forward(self, *arrays: Any) -> Any:
        def of_wanted(*some: Any) -> Any:
            given = list(arrays)
            for i, x in zip(self._at, some, strict=True):
                given[i] = x
            return self._function(*given)

        outs, pull = jax.vjp(of_wanted, *(arrays[i] for i in self._at))
        kept, self._pull = jax.tree.flatten(pull)
        self._outs = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs]
        return outs, kept

    def _backward(self, kept: Any, cotangents: Any) -> Any:
        given = map(jnp.conj, cotangents)  # JAX's gradients are torch's conjugates
        every = [
            next(given) if jnp.issubdtype(out.dtype, jnp.inexact) else no_cotangent(out)
            for out in self._outs
        ]
        return [jnp.conj(g) for g in jax.tree.unflatten(self._pull, kept)(every)]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: _Differentiated, *tensors: Any) -> Any:
        outs, kept = program.forward(*tensors)
        ctx.program = program
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(*filter(is_exact, outs))
        ctx.exact = [*map(is_exact, outs)]
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedOpError(
                "a gradient with create_graph=True through torch.cond, scan or map of a compiled "
                f"step, which are differentiated once there{user_line()}\nTake that gradient "
                "outside of the step, where Python decides"
            )
        given = [g for g, exact in zip(grads, ctx.exact, strict=True) if not exact]
        found = iter(ctx.program.backward(list(ctx.saved_tensors), given))
        return (None, *(next(found) if w else None for w in ctx.needs_input_grad[1:]))


def call(function: Callable[..., list[Any]], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The results of ``function`` on tensors, as one operation.

    Args:
        function: of arrays, in JAX; returns a list of arrays.
    """
    wanted = [x.requires_grad and torch.is_grad_enabled() for x in tensors]
    if not any(wanted):
        found: list[Any] = jax_function(function)(*tensors)
        return found
    return list(_Function.apply(_Differentiated(function, wanted), *tensors))
