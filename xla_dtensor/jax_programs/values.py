"""Arrays of JAX's as tensors and back, in a JAX program and outside; dtypes on the way."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from xla_dtensor.base import executor
from xla_dtensor.forms.read import logical_value
from xla_dtensor.jax_programs.differentiated import plain_form
from xla_dtensor.jax_programs.program_trace import ProgramTrace
from xla_dtensor.movement.jax_arrays import to_jax
from xla_dtensor.runtime.arrays import strong
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.of_form import is_ours, new_tensor


def view(array: jax.Array) -> XLATensor:
    """A tensor over a ``jax.Array``, in one memory.

    It is the whole array, wherever that lies, as a tensor on the device "xla". JAX's arrays don't
    change: writing to the tensor gives it another array. In a function that `call` runs (or a
    module's forward) the array may be a tracer.

    Args:
        array: of a dtype that torch has.

    Returns:
        a tensor that doesn't require grad, of the array's shape and dtype.

    Raises:
        TypeError: it is none, or a tracer outside of `call`: torch functions compute on tracers
            inside of it.

    Example::

        import jax.numpy as jnp, xla_dtensor as xd

        x = xd.jax.view(jnp.arange(3.0))
        assert (x * 2).tolist() == [0, 2, 4]
    """
    if not isinstance(array, jax.Array):
        raise TypeError(f"xd.jax.view: a jax.Array is wanted, got {type(array).__name__}")
    if isinstance(array, jax.core.Tracer) and not _in_program():
        raise TypeError(
            "xd.jax.view of a tracer: torch functions compute on those of JAX inside of "
            "xd.jax.call(function, *arrays), which gives the function tensors"
        )
    tensor: XLATensor = new_tensor(strong(array), plain_form(array))
    return tensor


def array(tensor: torch.Tensor) -> jax.Array:
    """The value of an xla tensor as a ``jax.Array``: `view` the other way round.

    Outside of JAX programs the same as ``xd.to_jax``. In a function that `call` runs it gives the
    tracer, of a tensor that doesn't require grad: JAX code gets gradients there by
    ``xd.jax_function``.

    Args:
        tensor: on xla devices.

    Returns:
        an array of the tensor's shape and dtype.

    Raises:
        TypeError: it isn't on xla devices.
        RuntimeError: it requires grad.

    Example::

        import torch, xla_dtensor as xd

        assert xd.jax.array(torch.ones(3, device="xla")).shape == (3,)
    """
    if not _in_program() or not is_ours(tensor):
        return to_jax(tensor)
    if tensor.requires_grad:
        raise RuntimeError(
            "xd.jax.array of a tensor that requires grad: what JAX computes of it would get no "
            "gradient; call JAX by xd.jax_function, or detach() the tensor"
        )
    value: jax.Array = logical_value(tensor)
    return value


def _in_program() -> bool:
    return isinstance(executor.current(), ProgramTrace)


def to_program(array: Any) -> Any:
    """An array as torch code is given it. Where JAX has its 64-bit types off, its int32 stands for
    the int64 that torch code wants for indices."""
    array = strong(array)
    if jax.config.jax_enable_x64 or array.dtype != np.int32:
        return array
    with jax.enable_x64(True):
        return jax.numpy.asarray(array).astype(np.int64)


def from_program(array: Any, enabled: bool) -> Any:
    """A result as JAX's setting of 64-bit types wants it."""
    dtype = array.dtype
    if enabled or dtype not in _NARROW:
        return array
    return array.astype(_NARROW[dtype])


_NARROW: dict[Any, Any] = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (
        *(("int64", "int32"), ("uint64", "uint32"), ("float64", "float32")),
        ("complex128", "complex64"),
    )
}


def words_of(key: Any) -> Any:
    """The state of a random stream that a key of JAX's begins. That of ``jax.random.key(seed)`` is
    the one that ``torch.manual_seed(seed)`` begins on the device (`base.random.rng.words_at`)."""
    data = (
        jax.random.key_data(key) if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    )
    if data.shape != (2,):  # another generator's than threefry
        data = jax.random.bits(key, (2,), np.uint32)
    zero = jax.numpy.zeros((), np.uint32)
    return jax.numpy.stack([data[1], data[0], zero, zero])
