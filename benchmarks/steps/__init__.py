"""The models of `step_vs_jax.py`: each in plain torch, and written by hand in JAX."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from steps.case import Case

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "train_llama"))

NAMES = ("llama", "resnet", "moe")


def load(name: str) -> Case:
    """One of `NAMES`."""
    case: Case = importlib.import_module(f"steps.{name}").CASE
    return case
