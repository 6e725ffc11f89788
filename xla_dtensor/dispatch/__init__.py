"""The one path of every operation on xla tensors; README.md here explains it."""

from xla_dtensor.dispatch import (  # noqa: F401  (register handlers)
    batch_norm,
    fake_quantize,
    host_copies,
    metadata,
    out_arguments,
    packed_sequences,
    transformer_layers,
)
from xla_dtensor.dispatch.execute import dispatch
from xla_dtensor.execution import Batch, batched, writing_down
from xla_dtensor.plans.call import refuse_cpu_leaf, refuse_other_device

__all__ = ["Batch", "batched", "dispatch", "refuse_cpu_leaf", "refuse_other_device", "writing_down"]
