"""Lightning's ``Trainer(accelerator="xla")``, and its ``strategy="xla_fully_shard"``.

For both of its packages (``lightning``, ``pytorch_lightning``), also ``Fabric(accelerator="xla")``.

Lightning starts a process per device. Here one process has them all: to Lightning it is alone, and
the mesh is what the strategy lays batches and parameters out on. What isn't our own, by name, is
refused. Read and checked in 2.6.6.
"""

from xla_dtensor.ecosystem.lightning.hooks import install
from xla_dtensor.ecosystem.lightning.strategy import fully_shard_strategy

__all__ = ["fully_shard_strategy", "install"]
