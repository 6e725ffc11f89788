"""Layouts chosen over a whole step: where its values lie, so that it communicates least."""

from xla_dtensor.layouts.choose import Choice, choose
from xla_dtensor.layouts.constrain import constrained

__all__ = ["Choice", "choose", "constrained"]
