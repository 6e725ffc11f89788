"""What a training step will need on a pod: see README.md."""

from xla_dtensor.plan.abstract import abstract
from xla_dtensor.plan.planning import plan
from xla_dtensor.plan.report import Report

__all__ = ["Report", "abstract", "plan"]
