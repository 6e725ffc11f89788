"""Finds the mesh and the layouts for a training step: see README.md."""

from xla_dtensor.tuning.configuration import Configuration
from xla_dtensor.tuning.result import Tuned
from xla_dtensor.tuning.trial import Trial
from xla_dtensor.tuning.tuner import tune

__all__ = ["Configuration", "Trial", "Tuned", "tune"]
