"""``jax.Array``s as tensors, and back, in one memory where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base import executor
from xla_dtensor.base.dtypes import to_torch_dtype
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution.on_host import refuse_varying
from xla_dtensor.forms.form import Form, device_form, sharded_form
from xla_dtensor.forms.read import logical_value
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh.placements import normalize_placements
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

_padders: Cache[Form, Any] = Cache("padding of JAX arrays", 256)


def from_jax(
    array: jax.Array,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> XLATensor | XLAShardedTensor:
    """A tensor with the value of a ``jax.Array``.

    With a mesh, an array that lies as the placements say already shares its memory with the tensor;
    another one is moved. JAX's arrays don't change: writing to the tensor gives it another array.
    But a compiled step that overwrites the tensor deletes the array, as ``jax.jit`` does with what
    is donated to it; ``.clone()`` the tensor to keep the array.

    Args:
        array: of any shape and of a dtype that torch has.
        device_mesh: an xla mesh, for a sharded tensor; without one, the tensor is on the device
            "xla", a copy.
        placements: per mesh dim how it is to lie, by default replicated.

    Returns:
        a leaf of the array's shape and dtype that doesn't require grad.

    Raises:
        TypeError: it is no ``jax.Array``, or torch has no such dtype.
        UnsupportedOpError: in a compiled step, or with a ``Partial`` placement.

    Example::

        import jax.numpy as jnp, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        x = xd.from_jax(jnp.ones((8, 4)), mesh, [xd.Shard(0)])
        assert (x * 2).full_tensor().sum().item() == 64
    """
    executor.current().not_in_step(
        "from_jax in a compiled step: the array would be a constant of the program; make it a "
        "tensor before the step, and an argument"
    )
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise TypeError(f"from_jax: a jax.Array is wanted, got {type(array).__name__}")
    shape, dtype = tuple(array.shape), to_torch_dtype(np.dtype(array.dtype))
    if device_mesh is None:
        form = device_form(None, shape, dtype=dtype)
        # An uncommitted copy: JAX refuses to mix an array committed to a device with a mesh's.
        with jax.enable_x64(True):
            return XLATensor(Storage(jax.numpy.asarray(arrays.get(array)), form), form)
    placed = normalize_placements(placements, device_mesh, len(shape), "from_jax")
    if any(placement.is_partial() for placement in placed):
        raise UnsupportedOpError(
            f"from_jax with placements {list(placed)} on {device_mesh!r}: the array is the whole "
            "value; give Replicate() in place of Partial()"
        )
    form = sharded_form(device_mesh, placed, shape, dtype=dtype)
    with jax.enable_x64(True):
        if form.padded_shape == shape:
            array = arrays.put(array, form.sharding)
        else:
            padder = _padders.get_or_make(form, lambda: jax.jit(form.physical))
            array = arrays.put(padder(array), form.sharding)
        array = arrays.strong(array)
    return XLAShardedTensor(Storage(array, form), form)


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The value of an xla tensor as a ``jax.Array`` of the tensor's shape.

    It shares memory with the tensor unless a shard is padded or a reduction is pending, which is
    done first. Like ``x.jax_array``, it is deleted by a compiled step that overwrites the tensor.

    Args:
        tensor: on xla devices.

    Returns:
        an array sharded as the tensor is.

    Raises:
        TypeError: it isn't on xla devices.
        RuntimeError: it requires grad: ``detach()`` it first.
        PerDeviceValueError: devices hold different values: ``x.jax_array`` has them all.
        DataDependentError: in a compiled step (`jax_function` calls JAX there).

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        array = xd.to_jax(xd.distribute_tensor(torch.ones(8, 4), mesh, [xd.Shard(0)]))
        assert array.shape == (8, 4) and array.sharding.spec[0] == "dp"
    """
    if not is_ours(tensor):
        raise TypeError(f"to_jax: a tensor on xla devices is wanted, got one on {tensor.device}")
    executor.current().refuse("to_jax (call JAX by xla_dtensor.jax_function), which")
    if tensor.requires_grad:
        raise RuntimeError("Can't call to_jax on a tensor that requires grad: use tensor.detach()")
    form: Any = tensor._form
    if form.meta:
        raise TypeError("to_jax: a meta tensor has no value")
    refuse_varying(form, "its one jax.Array")
    return logical_value(tensor)
