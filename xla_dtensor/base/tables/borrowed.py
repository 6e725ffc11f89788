"""Looks up private names of another package under public names of ours.

`torch_private` and `jax_private` are made of these.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


class Borrowed:
    """Looks a name up when it is first used: what takes long to import waits until then, and a
    version of the package that lacks one name lacks what needs it, and nothing else.

    Args:
        package: its name, for the message.
        places: where it has what we call by a name: ``"module:attribute.attribute"``, or a module.
        module: the name of the module of ours that shows them; what was found becomes its global.
    """

    def __init__(self, package: str, places: Mapping[str, str], module: str) -> None:
        self._package, self._places, self._module = package, places, module

    def get(self, name: str) -> Any:
        """What the package has under our ``name``.

        Raises:
            AttributeError: ``name`` is none of ours.
            ImportError: this version of the package doesn't have it.
        """
        if name not in self._places:
            raise AttributeError(f"module {self._module!r} has no attribute {name!r}")
        try:
            owner, attribute = self._owner(name)
            found = getattr(owner, attribute) if attribute else owner
        except (ImportError, AttributeError) as error:
            version = getattr(sys.modules.get(self._package), "__version__", "of this version")
            raise ImportError(
                f"{self._package} {version} has no {self._places[name]}, which xla_dtensor uses "
                f"({self._module}, {name!r}): {error}"
            ) from error
        vars(sys.modules[self._module])[name] = found
        return found

    def find(self, name: str) -> Any:
        """The same; None where this version doesn't have it."""
        try:
            return self.get(name)
        except ImportError:
            return None

    def replace(self, name: str, value: Any) -> None:
        """Put ``value`` in the place of what the package has, for all who look it up there from now
        on; who has imported it by name before keeps what it was."""
        owner, attribute = self._owner(name)
        setattr(owner, attribute, value)
        vars(sys.modules[self._module]).pop(name, None)

    def _owner(self, name: str) -> tuple[Any, str]:
        module, _, path = self._places[name].partition(":")
        *owners, attribute = path.split(".")
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        return owner, attribute
