"""Runs a callback when a module is imported, so that hooking it doesn't import it early."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any

_waiting: dict[str, list[Callable[[Any], None]]] = {}


class _Finder:
    """Finds what the usual path finder does, for modules that somebody waits for."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for callback in _waiting.pop(name, ()):
                callback(module)

        loader.exec_module = exec_module
        return spec


def on_import(name: str, callback: Callable[[Any], None]) -> None:
    """Call ``callback`` with the module ``name``: now if it is loaded, or else after it is."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    _waiting.setdefault(name, []).append(callback)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
