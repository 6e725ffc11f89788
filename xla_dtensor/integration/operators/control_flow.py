"""``torch.cond``, ``while_loop``, ``scan`` and ``map`` of xla tensors.

torch hands them to ``torch.compile`` where they are called eagerly; XLA is the compiler here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base import executor, torch_private
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.integration.patching.take_over import take_over


def install() -> None:
    """Let them take xla tensors; for those of other devices nothing changes."""
    take_over(torch.cond, _handler("cond"))
    for name in ("while_loop", "scan", "map_along"):
        take_over(getattr(torch_private, name), _handler(name))


def _handler(name: str) -> Any:
    def handler(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        in_step = not executor.current().has_values
        if not in_step and not any(map(_is_xla, pytree.tree_leaves((args, kwargs)))):
            return original(*args, **kwargs)
        from xla_dtensor.control_flow import loops  # which imports JAX

        return getattr(loops, name)(*args, **kwargs)

    return handler


def _is_xla(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"
