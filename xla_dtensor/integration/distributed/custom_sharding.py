"""Passes ``torch.distributed.tensor.experimental.register_sharding`` on to our rules.

torch wraps the user's function in a strategy of its own and gives it to its sharding propagator.
That is where it is seen here, also if torch's decorator was imported, or used, before this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from xla_dtensor.base import torch_private

_STRATEGY = "register_sharding.<locals>.custom_strategy"


def install() -> None:
    """Take over what was registered, and what will be. Checked on torch 2.11 and 2.13."""
    propagator = torch_private.ShardingPropagator
    original = propagator.register_op_strategy

    @functools.wraps(original)
    def register_op_strategy(self: Any, op_overload: Any, strategy_func: Any, *args: Any) -> Any:
        result = original(self, op_overload, strategy_func, *args)
        _adopt(op_overload, strategy_func)
        return result

    propagator.register_op_strategy = register_op_strategy
    registered = torch_private.op_dispatcher.sharding_propagator.op_strategy_funcs
    for overload, strategy in registered.items():
        _adopt(overload, strategy)


def _adopt(overload: Any, strategy: Any) -> None:
    """Register the rule behind ``strategy``, if ``register_sharding`` made that."""
    if not isinstance(strategy, functools.partial):
        return
    if getattr(strategy.func, "__qualname__", "") != _STRATEGY:
        return
    from xla_dtensor.rules import register_rule

    register_rule(overload, _rule(strategy.args[0]), override=True, kind="torch")


def _rule(acceptable: Callable[..., Any]) -> Callable[[Any], Any]:
    """The user's function, which lists acceptable shardings of one mesh dim, as a rule."""
    from xla_dtensor.rules import Alternative, Call, Merged, TensorInfo

    def rule(call: Call) -> Merged:
        def spec(info: TensorInfo) -> Any:
            return _spec(info, call.mesh)

        args, kwargs = torch_private.pytree.tree_map_only(TensorInfo, spec, call.given)
        options = [
            Alternative(
                tuple(p for p in outputs if p is not None),
                tuple(p for p in inputs if p is not None),
            )
            for outputs, inputs in acceptable(*args, **kwargs)
        ]
        return call.merge(options)

    rule.__doc__ = f"register_sharding: {acceptable.__name__}"
    return rule


def _spec(info: Any, mesh: Any) -> Any:
    """What torch's functions are given for a tensor."""
    from torch import empty

    like = empty(info.shape, device="meta")
    meta = torch_private.TensorMeta(like.shape, like.stride(), info.dtype)
    return torch_private.DTensorSpec(mesh, info.placements, tensor_meta=meta)
