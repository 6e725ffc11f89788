"""Weights from one mesh to another: ``xd.transfer``, and how fused weights consist of others."""

from xla_dtensor.weights.recipes import Fused, PartOf
from xla_dtensor.weights.transfer import Transferred, transfer

__all__ = ["Fused", "PartOf", "Transferred", "transfer"]
