"""Running a function on each device's value of tensors that differ per device.

A tensor that varies has one leading axis per frame axis along which it does (`form.py`). What an
operation does on one device is a function of values without these axes; ``jax.vmap`` over them
makes it a function of whole arrays, and since each leading axis is sharded over the mesh axis that
it stands for, XLA runs every device's part on that device, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from xla_dtensor.form import Form
    from xla_dtensor.mesh import Frame

Axes = tuple[str, ...]


def union(frame: Frame | None, varying: Iterable[Axes]) -> Axes:
    """All the axes of several tensors, in the frame's order."""
    names = {name for axes in varying for name in axes}
    if not names:
        return ()
    assert frame is not None
    return tuple(name for name in frame.sizes if name in names)


def over_devices(
    function: Callable[..., Any], varying: Sequence[Axes], frame: Frame | None
) -> tuple[Callable[..., Any], Axes]:
    """``function`` of one device's arrays as a function of whole arrays.

    Args:
        function: takes as many positional arguments (pytrees of arrays) as ``varying`` has items.
        varying: per argument the axes that its arrays have in front.
        frame: their frame.

    Returns:
        the function, whose results have all of the axes in front, and these axes.
    """
    axes = union(frame, varying)
    # The first axis is the outermost, so it is mapped last.
    for i in reversed(range(len(axes))):
        function = jax.vmap(
            function,
            in_axes=tuple(0 if axes[i] in own else None for own in varying),
            spmd_axis_name=axes[i],
        )
    return function, axes


def logical(array: Any, form: Form) -> Any:
    """The logical value in a whole array of ``form``: varying axes, then the tensor's dims."""
    return over_devices(form.logical, [form.varying], form.frame)[0](array)


def coordinate(frame: Frame, axes: Axes) -> jax.Array:
    """The position along ``axes`` of each device, row-major: an array of shape ``[sizes...]``, to
    be mapped over all of ``axes``."""
    sizes = [frame.sizes[name] for name in axes]
    count = 1
    for size in sizes:
        count *= size
    return jnp.arange(count, dtype=jnp.uint32).reshape(sizes)


def expand(array: Any, own: Axes, axes: Axes, frame: Frame) -> Any:
    """``array``, which varies along ``own``, as one that varies along ``axes`` (more of them): the
    same value along the others."""
    shape: list[int] = []
    position = 0
    for name in axes:
        if name in own:
            position += 1
        else:
            array = jnp.expand_dims(array, position)
            shape.append(frame.sizes[name])
            position += 1
            continue
        shape.append(frame.sizes[name])
    return jnp.broadcast_to(array, (*shape, *array.shape[len(axes) :]))
