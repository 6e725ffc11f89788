"""Training steps as one XLA program: ``xla_dtensor.compile``.

README.md here says what is in which room.
"""

from xla_dtensor.compilation.call.buckets import Buckets
from xla_dtensor.compilation.scan.layers import scan_layers
from xla_dtensor.compilation.step.compiled_step import CompiledStep
from xla_dtensor.compilation.step.entry import compile, load_compiled
from xla_dtensor.compilation.step.replayed import ReplayedStep

__all__ = [
    "Buckets",
    "CompiledStep",
    "ReplayedStep",
    "compile",
    "load_compiled",
    "scan_layers",
]
