"""Collectives that write their results into tensors, as those of ``torch.distributed`` do.

What they compute is that of `collectives`; the arguments are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from xla_dtensor.base.torch_private.attributes import is_view
from xla_dtensor.errors import PerDeviceValueError, UnsupportedOpError
from xla_dtensor.mesh.group import MeshGroup
from xla_dtensor.movement import collectives
from xla_dtensor.movement.collective_kernels import check_tensor
from xla_dtensor.tensors.device_tensor import XLATensor

__all__ = [
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "put",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduction_of",
]


class Work(dist.Work):
    """What ``async_op=True`` returns. There is nothing to wait for: XLA's devices work
    asynchronously anyway, and whoever looks at a value waits for it.

    Args:
        tensors: the results.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """True."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> None:
        """None: what goes wrong is raised by the call."""

    def synchronize(self) -> None:
        """Nothing to do."""

    def result(self) -> list[torch.Tensor]:
        """The tensors that were written."""
        return self._tensors

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` that has `result`."""
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


_NAMES = ("SUM", "AVG", "PRODUCT", "MAX", "MIN", "BAND", "BOR", "BXOR")


def reduction_of(op: Any) -> str:
    """The name that `collectives` has for a ``ReduceOp``.

    Raises:
        UnsupportedOpError: none (PREMUL_SUM).
    """
    for name in _NAMES:
        if op == getattr(dist.ReduceOp, name):
            return name.lower()
    raise UnsupportedOpError(
        f"a collective with {op}: the reductions are {', '.join(_NAMES)}; multiply the tensor first"
    )


def _as_written(tensor: Any) -> bool:
    """Whether autograd is to see a write to ``tensor``: not to a leaf, which torch's collectives
    may write to as well."""
    base = tensor._base if is_view(tensor) else None
    is_leaf = tensor.is_leaf or (base is not None and base.is_leaf)
    return torch.is_grad_enabled() and not is_leaf


def put(tensor: XLATensor, value: XLATensor) -> None:
    """Write ``value`` to all of ``tensor``, which varies as ``value`` does then.

    ``copy_`` would leave a tensor that has varied as one that may vary.
    """
    storage = tensor._storage_
    if (
        tensor._steps
        or storage.is_shared(tensor)
        or (torch.is_grad_enabled() and (tensor.requires_grad or value.requires_grad))
        or tensor._form.varying == value._form.varying
        or tensor._form.stride != value._form.stride
        or value._steps
    ):
        tensor.copy_(value)
        return
    storage.write(value._storage_.array, value._form)
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _write(
    name: str, targets: Sequence[Any], source: Any, compute: Callable[[Any], Sequence[Any]]
) -> list[Any]:
    """Compute from ``source``, and write all results or none.

    Raises:
        UnsupportedOpError: a tensor isn't per-device, or has a dtype of its own.
    """
    for tensor in (*targets, source):
        check_tensor(name, tensor)
    for tensor in targets:
        if tensor.dtype != source.dtype:
            raise UnsupportedOpError(
                f"{name} of a tensor of {source.dtype} into one of {tensor.dtype}: as in torch "
                "both have one dtype; convert one of them"
            )
    recorded = all(map(_as_written, targets))
    with torch.set_grad_enabled(recorded):
        values = compute(source)
        for tensor, value in zip(targets, values, strict=True):
            if tensor.shape != value.shape:
                raise UnsupportedOpError(
                    f"{name} into a tensor of shape {list(tensor.shape)}: the result has the shape "
                    f"{list(value.shape)}"
                )
            tensor._storage_.check_write()
        for tensor, value in zip(targets, values, strict=True):
            put(tensor, value)
    return list(targets)


def all_reduce(tensor: Any, group: MeshGroup, op: str) -> list[Any]:
    """``torch.distributed.all_reduce``."""
    return _write("all_reduce", [tensor], tensor, lambda x: [collectives.all_reduce(x, group, op)])


def broadcast(tensor: Any, group: MeshGroup, src: int) -> list[Any]:
    """``torch.distributed.broadcast``, from a coordinate in the group."""
    return _write("broadcast", [tensor], tensor, lambda x: [collectives.broadcast(x, group, src)])


def _write_elements(
    name: str, output: Any, tensor: Any, compute: Callable[[Any], Any]
) -> list[Any]:
    """Compute from the elements in a row, whatever the shapes."""
    return _write(name, [output], tensor, lambda x: [compute(x.reshape(-1)).reshape(output.shape)])


def _check_sizes(name: str, many: Any, one: Any, group: MeshGroup) -> None:
    """torch counts elements: a concatenation and a stack are the same memory."""
    check_tensor(name, many)
    check_tensor(name, one)
    count = group.size()
    if many.numel() != one.numel() * count:
        raise UnsupportedOpError(
            f"{name} with tensors of shapes {list(many.shape)} and {list(one.shape)}: the first "
            f"has to have {count} times the elements of the second, in a group of {count} devices"
        )


def all_gather_into_tensor(output: Any, tensor: Any, group: MeshGroup) -> list[Any]:
    """``torch.distributed.all_gather_into_tensor``."""
    name = "all_gather_into_tensor"
    _check_sizes(name, output, tensor, group)
    return _write_elements(name, output, tensor, lambda x: collectives.all_gather(x, group))


def all_gather(outputs: Sequence[Any], tensor: Any, group: MeshGroup) -> list[Any]:
    """``torch.distributed.all_gather``."""
    _check_length("all_gather", outputs, group)

    def gathered(x: Any) -> Sequence[Any]:
        return collectives.all_gather(x.unsqueeze(0), group).unbind(0)

    return _write("all_gather", outputs, tensor, gathered)


def reduce_scatter_tensor(output: Any, tensor: Any, group: MeshGroup, op: str) -> list[Any]:
    """``torch.distributed.reduce_scatter_tensor``."""
    name = "reduce_scatter_tensor"
    _check_sizes(name, tensor, output, group)
    return _write_elements(
        name, output, tensor, lambda x: collectives.reduce_scatter(x, group, op=op)
    )


def reduce_scatter(output: Any, tensors: Sequence[Any], group: MeshGroup, op: str) -> list[Any]:
    """``torch.distributed.reduce_scatter``."""
    _check_length("reduce_scatter", tensors, group)
    stacked = _stack("reduce_scatter", tensors, output.shape)
    return _write(
        "reduce_scatter",
        [output],
        stacked,
        lambda x: [collectives.reduce_scatter(x, group, op=op).squeeze(0)],
    )


def all_to_all_single(output: Any, tensor: Any, group: MeshGroup, *sizes: Any) -> list[Any]:
    """``torch.distributed.all_to_all_single``; ``sizes`` of pieces have to be equal."""
    name = "all_to_all_single"
    check_tensor(name, tensor)
    check_tensor(name, output)
    for lengths, whole in zip(sizes, (output, tensor), strict=True):
        given = list(lengths or ())
        if given and (len(given) != group.size() or sum(given) != whole.shape[0]):
            raise UnsupportedOpError(
                f"{name} with split sizes {given} of a tensor of shape {list(whole.shape)}: one "
                f"for each of the {group.size()} devices, which add up to its dim 0"
            )
        if len(set(given)) > 1:
            raise UnsupportedOpError(
                f"{name} with split sizes {given}: numbers in Python are the same on all devices, "
                "and then what each sends to another is what it gets only if all are one number. "
                "Sizes that differ from device to device are a tensor's, counts.tolist(); or pad "
                "the pieces"
            )
    if output.shape[1:] != tensor.shape[1:] and output.numel() == tensor.numel():
        raise UnsupportedOpError(
            f"{name} of a tensor of shape {list(tensor.shape)} into one of shape "
            f"{list(output.shape)}: give the output the input's shape"
        )
    return _write(name, [output], tensor, lambda x: [collectives.all_to_all(x, group)])


def all_to_all(outputs: Sequence[Any], tensors: Sequence[Any], group: MeshGroup) -> list[Any]:
    """``torch.distributed.all_to_all``, of tensors of one shape."""
    _check_length("all_to_all", outputs, group)
    _check_length("all_to_all", tensors, group)
    stacked = _stack("all_to_all", tensors, tensors[0].shape)
    return _write(
        "all_to_all",
        outputs,
        stacked,
        lambda x: collectives.all_to_all(x, group).unbind(0),
    )


def _check_length(name: str, tensors: Sequence[Any], group: MeshGroup) -> None:
    if len(tensors) != group.size():
        raise UnsupportedOpError(
            f"{name} with a list of {len(tensors)} tensors: it has to have one for each of the "
            f"{group.size()} devices of the group"
        )


def _stack(name: str, tensors: Sequence[Any], shape: Any) -> Any:
    for tensor in tensors:
        check_tensor(name, tensor)
        if tensor.shape != shape:
            raise UnsupportedOpError(
                f"{name} with tensors of shapes {[list(t.shape) for t in tensors]}: pieces of one "
                "shape alone, because a per-device tensor has the same shape on every device; pad "
                "them"
            )
    return torch.stack(list(tensors))


def coordinate_of(src: int | None, group_src: int | None, group: MeshGroup, name: str) -> int:
    """The coordinate in the group that ``src`` (a device's number) or ``group_src`` means.

    Raises:
        PerDeviceValueError: ``src`` is a device of one of several groups.
        ValueError: not one of them is given, as in torch; or the group has no such device.
    """
    if (src is None) == (group_src is None):
        raise ValueError(f"{name}: give one of src and group_src")
    if group_src is not None:
        return int(group_src)
    devices = group.devices()
    if devices is None:
        raise PerDeviceValueError(
            f"{name}(src={src}, group={str(group)!r}): device {src} is in one of several groups "
            "along that mesh dim, and each has a source of its own; give its coordinate along the "
            "dim, group_src="
        )
    if src not in devices:
        raise ValueError(f"{name}(src={src}): the group's devices are {list(devices)}")
    return devices.index(src)
