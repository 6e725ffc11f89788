"""Whether a library that looks for a device takes "xla": the switch ``xd.config.device``."""

from __future__ import annotations

import os

import torch

from xla_dtensor import runtime
from xla_dtensor.base.config import config
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtime import processes


def device_for(found: torch.device) -> torch.device:
    """The device for a library that has found one by itself.

    Args:
        found: of torch's own devices, the CPU if there is nothing else.

    Returns:
        the xla device if it is asked for, or if JAX has accelerators and torch has none; else
        ``found``.
    """
    asked = config.device == "xla"
    if asked or (config.device == "auto" and found.type == "cpu" and runtime.has_accelerators()):
        return torch.device("xla", 0)
    return found


def refuse_processes(library: str) -> None:
    """Refuse to go on in one of several processes, with a library that would take each for the
    only one: all would compute the same, and write to the same files.

    Args:
        library: whose name to say.

    Raises:
        UnsupportedOpError: this is one of several.
    """
    if processes.several() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnsupportedOpError(
            f"{library} on the xla device in one of several processes: it would take each for the "
            "only one. Start one process, which has all devices of its host; for several hosts "
            "write the loop with a mesh (docs/several_processes.md)"
        )
