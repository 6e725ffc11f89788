"""Importing this module registers every lowering."""

import importlib
import pkgutil

from xla_dtensor import lowering

for _module in pkgutil.walk_packages(lowering.__path__, "xla_dtensor.lowering."):
    if not _module.name.endswith(".families"):
        importlib.import_module(_module.name)
