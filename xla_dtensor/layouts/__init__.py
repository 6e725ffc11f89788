"""Layouts chosen over a whole step: where its values lie, so that it communicates least."""

from xla_dtensor.layouts.choose import Choice
from xla_dtensor.layouts.constrain import constrained
from xla_dtensor.layouts.joined import kept_apart
from xla_dtensor.layouts.report import report

__all__ = ["Choice", "constrained", "kept_apart", "report"]
