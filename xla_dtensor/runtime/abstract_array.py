"""`AbstractArray`: a tensor's shape, dtype and sharding in place of its array (``xd.abstract``)."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import numpy as np

from xla_dtensor.base.jax_private import (
    current_source,
    let_empty_results_be_sharded,
    shard_arg_handlers,
    trace_ctx,
)
from xla_dtensor.errors import DataDependentError


class AbstractArray(jax.ShapeDtypeStruct):
    """Shape, dtype and sharding of an array that isn't there. JAX lowers programs for it; on a
    trace it becomes a constant that is known by its identity, as an array is.

    Args:
        shape: of the array.
        dtype: NumPy's.
        sharding: JAX's, or None for the default device.
    """

    __slots__ = ("__weakref__",)

    # An object each, whatever it says: two tensors of one shape are two inputs.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    is_fully_addressable = True

    def __init__(self, shape: Any, dtype: Any, sharding: Any = None) -> None:
        super().__init__(tuple(shape), np.dtype(dtype), sharding=sharding)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each device has all of it."""
        return self.sharding is None or self.sharding.is_fully_replicated

    def is_deleted(self) -> bool:
        """Never."""
        return False

    @property
    def addressable_shards(self) -> NoReturn:
        """There are none.

        Raises:
            DataDependentError: always.
        """
        self.refuse()

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse()

    def copy(self) -> AbstractArray:
        """Another one that says the same."""
        return AbstractArray(self.shape, self.dtype, self.sharding)

    def refuse(self) -> NoReturn:
        """Say that there is no value.

        Raises:
            DataDependentError: always.
        """
        raise DataDependentError(
            f"a tensor of shape {list(self.shape)} has no value: it was made inside of "
            "xd.abstract(), where tensors have layouts and no data. What the program reads in "
            "Python (.item(), print, if tensor:) it has to make with device='cpu', or leave out"
        )


def _launched(arrays: list[AbstractArray], *args: Any) -> NoReturn:
    arrays[0].refuse()


# What JAX does with an argument of a program that is launched.
shard_arg_handlers[AbstractArray] = _launched
# Whoever runs programs imports this module first.
let_empty_results_be_sharded()


def traced(array: AbstractArray) -> Any:
    """The tracer of a constant that has no value, in the trace that JAX is in."""
    return trace_ctx.trace.to_jaxpr_tracer(array, current_source())
