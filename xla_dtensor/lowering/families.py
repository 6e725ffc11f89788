"""Importing this module registers every lowering."""

import importlib
import pkgutil

from xla_dtensor import lowering

for _module in pkgutil.iter_modules(lowering.__path__):
    if not _module.name.startswith("_") and _module.name != "families":
        importlib.import_module(f"xla_dtensor.lowering.{_module.name}")
