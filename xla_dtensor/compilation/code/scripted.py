"""TorchScript modules: their attributes are kept in C++, not in a ``__dict__``."""

from __future__ import annotations

import math
from typing import Any

import torch

from xla_dtensor.base.torch_private import ConcreteModuleType
from xla_dtensor.base.torch_private.attributes import scripted_module, type_of_scripted
from xla_dtensor.errors import DataDependentError


class Scripted:
    """Parameters, buffers and attributes of one module, without its submodules.

    Attributes:
        held: what it held when it was found, by name.
    """

    def __init__(self, module: torch.jit.ScriptModule, path: str) -> None:
        self._path, self._module = path, scripted_module(module)
        names = ConcreteModuleType.from_jit_type(type_of_scripted(self._module)).get_attributes()
        self.held = {name: self._module.getattr(name) for name in sorted(names)}

    def value(self, name: str) -> Any:
        """What can be compared of what it holds now."""
        return _comparable(self._module.getattr(name))

    def is_still(self, name: str) -> bool:
        """Whether it holds the same under a name."""
        return bool(self.value(name) == _comparable(self.held[name]))

    def check(self) -> None:
        """Called after a trace: undo what it has changed.

        Raises:
            DataDependentError: it has.
        """
        changed = [name for name in self.held if not self.is_still(name)]
        for name in changed:
            self._module.setattr(name, self.held[name])
        if changed:
            raise DataDependentError(
                f"the step changes {self._path}.{changed[0]} of a torch.jit module, which would "
                "happen when it is traced, not in every call: do it outside of the compiled step, "
                "or give it the module without torch.jit"
            )


def _comparable(value: Any) -> Any:
    """Lists and dicts are made anew whenever they are asked for, tensors are what they were."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return tuple((key, _comparable(item)) for key, item in value.items())
    if isinstance(value, float) and math.isnan(value):
        return "nan"  # which is not equal to itself
    return value if isinstance(value, bool | int | float | complex | str | None) else type(value)
