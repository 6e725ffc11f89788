"""The functions that tensor classes call but can't import (`xla_dtensor.tensors.backend.Backend`).

Importing this module registers every handler of overloads that have no plan.
"""

from xla_dtensor.dispatch import dispatch
from xla_dtensor.movement import collective_ops, data_dependent  # noqa: F401  (register handlers)
from xla_dtensor.movement.device_values import from_host, local_shards, local_values
from xla_dtensor.movement.factories import distribute_tensor
from xla_dtensor.movement.jax_arrays import to_jax
from xla_dtensor.movement.local_view import as_sharded, to_local
from xla_dtensor.movement.redistribute import full_tensor, redistribute
from xla_dtensor.movement.relayout import to_form

__all__ = [
    "as_sharded",
    "dispatch",
    "distribute_tensor",
    "from_host",
    "full_tensor",
    "local_shards",
    "local_values",
    "redistribute",
    "to_form",
    "to_jax",
    "to_local",
]
