"""The executor of the operations in torch's decomposition of an overload, on its tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from xla_dtensor.base.source_line import user_line
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution.tracing import Tracing
from xla_dtensor.forms.host_values import to_numpy


class Nested(Tracing):
    """Runs the operations that torch composes an overload of, on tracers.

    Args:
        keys: gives a fresh JAX PRNG key.
        name: the overload's.
    """

    def __init__(self, keys: Callable[[], Any], name: str) -> None:
        self._keys = keys
        self._name = name
        self.scalars = {}
        self.python_numbers = []

    def random_key(self) -> Any:
        return self._keys()

    def host_tensor(self, tensor: torch.Tensor) -> Any:
        return to_numpy(tensor)

    def refuse(self, what: str, way: str = "") -> NoReturn:
        if not self._name.startswith(("aten::", "prims::")):
            raise UnsupportedOpError(
                f"{what}: the kernel of {self._name} looks at a value on the host, so it "
                "can't become one XLA program; write it in torch operations, or in JAX with "
                f"xla_dtensor.jax_function{user_line()}"
            )
        raise UnsupportedOpError(
            f"{what}: torch's decomposition of {self._name} needs a value in Python, so the "
            "operation can't become one XLA program; it needs a lowering of its own "
            "(xla_dtensor/lowering/README.md)"
        )
