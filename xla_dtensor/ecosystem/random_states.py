"""Saves the xla generator's state in libraries' checkpoints, as a file of its own.

Those libraries save the generators of the devices that they know.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("xla_dtensor")

FILE = "xla_rng_state.pth"


def save(folder: Any) -> None:
    """Write the state of the device's generator.

    Args:
        folder: the checkpoint, which is there.
    """
    torch.save(torch.xla.get_rng_state(), Path(folder) / FILE)


def load(folder: Any) -> None:
    """Have the generator go on where it was; without the file, as in a checkpoint that another
    device has written, it is said that it doesn't.

    Args:
        folder: the checkpoint.
    """
    path = Path(folder) / FILE
    if path.exists():
        torch.xla.set_rng_state(torch.load(path, weights_only=True))
    else:
        logger.warning(
            "xla_dtensor: %s has no %s, so it wasn't written on the xla device: random numbers of "
            "the device don't go on from it",
            folder,
            FILE,
        )
