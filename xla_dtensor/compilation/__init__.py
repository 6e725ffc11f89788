"""Training steps as one XLA program: ``xla_dtensor.compile``.

``step.py`` is what the user holds, ``program.py`` one compiled form of it, ``trace.py`` what
happens while the step's Python runs on tracers, ``optimizers.py`` the hyperparameters,
``arguments.py`` the arguments of a call.
"""

from xla_dtensor.compilation.call.buckets import Buckets
from xla_dtensor.compilation.scan.layers import scan_layers
from xla_dtensor.compilation.step.compiled_step import CompiledStep
from xla_dtensor.compilation.step.entry import compile
from xla_dtensor.compilation.step.replayed import ReplayedStep

__all__ = [
    "Buckets",
    "CompiledStep",
    "ReplayedStep",
    "compile",
    "scan_layers",
]
