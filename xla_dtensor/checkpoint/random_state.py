"""Saves and restores the random number generators that a training run draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from xla_dtensor.base.random import rng
from xla_dtensor.errors import CheckpointError


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's and the xla device's generators, as plain data."""
    name, keys, *rest = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": (str(name), words, *map(float, rest)),
        "torch": torch.get_rng_state(),
        "xla": rng.position(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on where `random_state` was.

    Raises:
        CheckpointError: ``state`` isn't what it gives.
    """
    try:
        version, words, gauss = state["python"]
        name, keys, position, has_gauss, cached = state["numpy"]
        random.setstate((version, tuple(words), gauss))
        words_of_numpy = keys.numpy().astype(np.uint32)
        np.random.set_state((name, words_of_numpy, int(position), int(has_gauss), cached))
        torch.set_rng_state(state["torch"])
        seed, counter = state["xla"]
        rng.default.restart(seed, counter)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"a random state that is none ({error})") from error
