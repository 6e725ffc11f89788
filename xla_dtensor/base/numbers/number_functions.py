"""``max``, ``min`` and the value of numbers that may be symbolic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base.numbers.traced_number import NumberNode


def larger(*values: Any, **options: Any) -> Any:
    """Python's ``max``, which of traced numbers is one, in place of a decision."""
    return _extreme(max, ">", values, options)


def smaller(*values: Any, **options: Any) -> Any:
    """Python's ``min``, which of traced numbers is one, in place of a decision."""
    return _extreme(min, "<", values, options)


def _extreme(
    function: Callable[..., Any], symbol: str, values: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    node = next((x.node for x in values if isinstance(x, torch.SymFloat)), None)
    if not isinstance(node, NumberNode):
        return function(*values, **options)

    def choose(a: Any, b: Any) -> Any:
        """Of two tracers what ``function`` returns, also of NaN."""
        import jax.numpy as jnp

        return jnp.where(b > a if symbol == ">" else b < a, b, a)

    def of_two(x: Any, y: Any) -> Any:
        first, second = (
            v.node.sym_float()
            if isinstance(v, torch.SymFloat | torch.SymInt)
            else node.wrap_float(float(v))
            for v in (x, y)
        )
        return torch.SymFloat(first._binary(second, symbol, function, choose))

    return functools.reduce(of_two, values)


def number_value(leaf: Any) -> Any:
    """The traced JAX scalar of a symbolic number; anything else as it is."""
    if isinstance(leaf, torch.SymFloat | torch.SymInt) and isinstance(leaf.node, NumberNode):
        return leaf.node.traced
    return leaf


def plain_number(leaf: Any) -> Any:
    """A symbolic number as its present Python number, which it then must keep; anything else as it
    is."""
    if isinstance(leaf, torch.SymFloat):
        return float(leaf)
    return int(leaf) if isinstance(leaf, torch.SymInt) else leaf
