"""What a program has to do with the layouts of its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from torch.utils import _pytree as pytree

from xla_dtensor.dispatch import pin
from xla_dtensor.mesh import Frame


def layouts(inputs: Any) -> tuple[Any, ...]:
    """What a program's text doesn't have of its inputs: their layouts, and those that it doesn't
    use."""
    return tuple(
        (x.shape, x.dtype, getattr(x, "sharding", None)) for x in pytree.tree_leaves(inputs)
    )


def shardings_of(inputs: Any, replicated: Any) -> Any:
    """The shardings of all inputs of a program, ``replicated`` for those from the host.

    Where JAX doesn't know the memory of one input or output, it lets an output overwrite an input
    that is in another memory, and XLA fails.
    """
    return pytree.tree_map(lambda x: getattr(x, "sharding", None) or replicated, inputs)


def takes_no_axes_apart(
    jaxpr: Any, frame: Frame | None, inputs: Any, outputs: Iterable[Any]
) -> bool:
    """Whether a program can do without pins (`pin.may_be_loose`).

    Args:
        outputs: the shardings of its outputs.
    """
    if frame is None:
        return False
    known = [x.sharding for x in pytree.tree_leaves(inputs) if isinstance(x, jax.Array)]
    return pin.may_be_loose(jaxpr, frame.jax_mesh, [*known, *outputs])
