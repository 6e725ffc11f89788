"""torchtitan's trainer on xla meshes: ``python -m xla_dtensor.torchtitan`` with its arguments."""

from xla_dtensor.integration.torchtitan_experts import dropped_rows, set_expert_capacity

__all__ = ["dropped_rows", "set_expert_capacity"]
