"""Functions that users register with torch, which calls them under no name in the step's code."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

from xla_dtensor.base.torch_private import (
    bijection_registry,
    collate_functions,
    kl_registry,
    pytree,
    transform_registry,
)
from xla_dtensor.compilation.code.installed import is_installed
from xla_dtensor.compilation.code.names import is_library


class TorchRegistry(NamedTuple):
    """A table of torch's.

    Attributes:
        table: what has been registered, or tuples of it, by what it is for.
        named: names in the code that tell that torch may look there.
    """

    path: str
    table: dict[Any, Any]
    named: frozenset[str]

    def functions(self) -> Iterator[tuple[str, FunctionType]]:
        """The user's functions, with their paths. Those of installed packages are left to them."""
        for key, entry in list(self.table.items()):
            for value in entry if isinstance(entry, tuple) else (entry,):
                if isinstance(value, FunctionType):
                    module = value.__module__
                    if not (is_library(module) or is_installed(module)):
                        name = getattr(key, "__qualname__", key)
                        yield f"{self.path}[{name}].{value.__name__}", value


_TREES = {name for name in vars(pytree) if name.startswith("tree_")} | {
    *("vmap", "grad", "grad_and_value", "jacrev", "jacfwd", "hessian", "vjp", "jvp", "linearize"),
    *("functional_call", "stack_module_state", "checkpoint"),
}

REGISTRIES = (
    TorchRegistry("torch.utils._pytree", pytree.SUPPORTED_NODES, frozenset(_TREES)),
    TorchRegistry("kl_divergence", kl_registry, frozenset({"kl_divergence"})),
    TorchRegistry("transform_to", transform_registry, frozenset({"transform_to"})),
    TorchRegistry("biject_to", bijection_registry, frozenset({"biject_to"})),
    TorchRegistry("default_collate", collate_functions, frozenset({"collate", "default_collate"})),
)
