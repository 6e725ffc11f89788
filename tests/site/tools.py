"""The site's tools, which are scripts beside the package and no modules of one."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from tests.launch import ROOT


def tool(name: str) -> Any:
    """``tools/site/<name>.py`` as a module."""
    path = ROOT / "tools" / "site" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"site_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module
