"""Layouts chosen over a whole step: where its values lie, so that it communicates least."""

from xla_dtensor.layouts.choice import Choice
from xla_dtensor.layouts.choose import choose_for
from xla_dtensor.layouts.constrain import constrained
from xla_dtensor.layouts.joined import kept_apart

__all__ = ["Choice", "choose_for", "constrained", "kept_apart"]
