"""A rank's own torch tensors as arrays for an exchange, and its results as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from xla_dtensor.base import executor
from xla_dtensor.base.dtypes import to_jax_dtype, to_torch_dtype
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import device_form
from xla_dtensor.forms.host_values import from_numpy, to_numpy
from xla_dtensor.forms.read import read
from xla_dtensor.forms.storage import Storage
from xla_dtensor.horovod.collectives.collective import HorovodCollective, Request
from xla_dtensor.horovod.ranks.exchange import Exchanged
from xla_dtensor.horovod.world.write_into import write
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.device_tensor import XLATensor


def request_of(
    collective: HorovodCollective,
    name: str,
    tensors: Sequence[Any],
    ranks: Sequence[int],
    set_id: int = 0,
) -> Request:
    """A rank's part of a collective.

    Args:
        collective: what is to be done, as the rank asks for it.
        name: the operation's name, with its kind.
        tensors: the rank's.
        ranks: the members of the process set.
        set_id: the process set's number.
    """
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    dtypes = tuple(str(to_jax_dtype(tensor.dtype)) for tensor in tensors)
    return Request(collective, name, tuple(ranks), set_id, shapes, dtypes)


def to_array(tensor: torch.Tensor) -> Any:
    """The value of a CPU tensor, or of an xla tensor of the rank's own.

    Raises:
        UnsupportedOpError: it is neither.
    """
    executor.current().not_in_step(
        "a collective of horovod's in a compiled step, where ranks are threads, or processes "
        "with several devices each: one program has no way out to the others; compile what is "
        "around it, or start one process per device, or one process for all devices"
    )
    if isinstance(tensor, XLATensor):
        value, frame = read(tensor.detach()), tensor._form.frame
        if frame is not None and frame.one_each:
            return arrays.own_shard(value).reshape(tensor._form.shape)
        if value.is_fully_addressable and not tensor.varying:
            return arrays.get(value) if len(value.sharding.device_set) > 1 else value
    elif tensor.device.type == "cpu" and not tensor.is_sparse:
        return to_numpy(tensor)
    raise UnsupportedOpError(
        f"a collective of a {type(tensor).__name__} of shape {list(tensor.shape)} on "
        f"{tensor.device}: where each rank is a process or a thread, it gives a dense CPU tensor, "
        "or one on the xla device that is its own"
    )


def to_tensor(output: Exchanged, rank: int, like: torch.Tensor) -> torch.Tensor:
    """A rank's result as a tensor where ``like`` is."""
    if not isinstance(like, XLATensor):
        return from_numpy(output.result(rank, on_host=True))
    with jax.enable_x64(True):
        array = jax.numpy.asarray(output.result(rank, on_host=False))
    form = device_form(None, array.shape, dtype=to_torch_dtype(array.dtype))
    return XLATensor(Storage(array, form), form)


def put_into(targets: Sequence[Any] | None, results: list[Any]) -> list[Any]:
    """The tensors that the results are written to, where there are such; else the results."""
    if targets is None:
        return results
    for target, result in zip(targets, results, strict=True):
        write(target, result)
    return list(targets)
