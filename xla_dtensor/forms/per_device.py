"""Running a function on each device's value of tensors that differ per device.

A tensor that varies has one leading axis per frame axis along which it does (`form.py`). What an
operation does on one device is a function of values without these axes. On per-device tensors alone
it runs under ``jax.shard_map``: each device runs it on what it has, and XLA's partitioner has no
say. On sharded tensors of a submesh XLA must partition the rest, so there it runs under
``jax.vmap``, whose mapped axes are sharded over the mesh axes that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from xla_dtensor.forms.form import Form
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
    function: Callable[..., Any], varying: Sequence[Axes], frame: Frame | None, sharded: bool
) -> Callable[..., Any]:
    """``function`` of one device's values as a function of whole arrays.

    Args:
        function: takes as many positional arguments (arrays or numbers) as ``varying`` has items.
        varying: per argument the axes that its array has in front.
        frame: their frame.
        sharded: whether the values, or parts of the work, are sharded over other axes.

    Returns:
        the function, whose results have all of the axes in front.
    """
    axes = union(frame, varying)
    if not axes:
        return function
    assert frame is not None
    if not sharded:
        return _by_shard_map(function, varying, axes, frame)
    # The first leading axis is the outermost, so its vmap comes last.
    for i in reversed(range(len(axes))):
        function = jax.vmap(
            function,
            in_axes=tuple(0 if axes[i] in own else None for own in varying),
            spmd_axis_name=axes[i],
        )
    return function


def _by_shard_map(
    function: Callable[..., Any], varying: Sequence[Axes], axes: Axes, frame: Frame
) -> Callable[..., Any]:
    spec = jax.sharding.PartitionSpec

    def on_device(*blocks: Any) -> Any:
        values = [
            block.reshape(block.shape[len(own) :]) if own else block
            for block, own in zip(blocks, varying, strict=True)
        ]
        results = function(*values)
        return jax.tree.map(lambda r: jnp.asarray(r).reshape((1,) * len(axes) + r.shape), results)

    return jax.shard_map(
        on_device,
        mesh=frame.jax_mesh,
        in_specs=tuple(spec(*own) for own in varying),
        out_specs=spec(*axes),
        # Loops in lowerings start from constants, which don't vary, and carry values that do: JAX's
        # check calls that an error.
        check_vma=False,
    )


def logical(array: Any, form: Form) -> Any:
    """The logical value in a whole array of ``form``: varying axes, then the tensor's dims.

    Raises:
        NotImplementedError: there is no array: the tensor is on the meta device.
    """
    if array is None:
        raise NotImplementedError(
            "Cannot copy out of meta tensor; no data! (a compiled step gives back or leaves behind "
            f"a tensor of shape {list(form.shape)} that was computed from one on the meta device: "
            'give modules memory before, by to_empty(device="xla"), and initialise them)'
        )
    return over_devices(form.logical, [form.varying], form.frame, form.is_sharded)(array)


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
