"""Training steps as one XLA program: ``xla_dtensor.compile``.

``step.py`` is what the user holds, ``program.py`` one compiled form of it, ``trace.py`` what
happens while the step's Python runs on tracers, ``optimizers.py`` the hyperparameters,
``arguments.py`` the arguments of a call.
"""

from xla_dtensor.compilation.buckets import Buckets
from xla_dtensor.compilation.entry import compile
from xla_dtensor.compilation.replayed import ReplayedStep
from xla_dtensor.compilation.scan_layers import scan_layers
from xla_dtensor.compilation.step import CompiledStep

__all__ = [
    "Buckets",
    "CompiledStep",
    "ReplayedStep",
    "compile",
    "scan_layers",
]
