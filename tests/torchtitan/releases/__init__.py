"""What differs between torchtitan's releases for `tests/torchtitan/harness.py`: the installed one
is ``release``."""

from __future__ import annotations

import importlib
import importlib.util

# By a module that no other has.
_BY_MODULE = {
    "torchtitan.config.job_config": "v0_2_2",
    "torchtitan.distributed.full_dtensor": "v0_3_0",
}


def _installed() -> str:
    for module, name in _BY_MODULE.items():
        if importlib.util.find_spec(module) is not None:
            return name
    return "main_line"


NAME = _installed()
release = importlib.import_module(f"{__name__}.{NAME}").RELEASE
