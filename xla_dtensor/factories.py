"""What makes sharded tensors, under the name that the design gives its module."""

from xla_dtensor.movement.factories import distribute_module, distribute_tensor

__all__ = ["distribute_module", "distribute_tensor"]
