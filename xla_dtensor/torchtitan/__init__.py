"""torchtitan's trainer on xla meshes: ``python -m xla_dtensor.torchtitan`` with its arguments.

And what a script says of torchtitan's experts here.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_dtensor.ecosystem.torchtitan.experts import dropped_rows, set_expert_capacity

__all__ = ["dropped_rows", "set_expert_capacity"]


def __getattr__(name: str) -> Any:
    # The command sets what JAX reads when it is imported, so nothing here may import it before.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from xla_dtensor.ecosystem.torchtitan import experts

    return getattr(experts, name)
