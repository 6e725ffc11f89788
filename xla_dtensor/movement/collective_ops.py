"""torch's functional collectives, which arrive as operations with the name of a group."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.numbers.row_comparisons import executor
from xla_dtensor.base.numbers.row_counts import has_counts
from xla_dtensor.dispatch import dispatch
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.mesh.group import MeshGroup, resolve_group
from xla_dtensor.movement.collective_kernels import run
from xla_dtensor.plans.ops import handles

_NS = "_c10d_functional::"


def _group(func: Any, group: Any) -> MeshGroup:
    found = resolve_group(group)
    if found is None:
        raise UnsupportedOpError(
            f"{func.name()} of an xla tensor with group {group!r}: give an xla mesh of one dim, "
            "(mesh, dim) or mesh.get_group(dim)"
        )
    return found


def _run(func: Any, name: str, tensor: Any, group: Any, *options: Any) -> Any:
    return run(name, tensor, _group(func, group), *options)


@handles(f"{_NS}all_reduce.default")
def _all_reduce(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, op, group = args
    return _run(func, "all_reduce", tensor, group, op.lower())


@handles(f"{_NS}all_reduce_.default")
def _all_reduce_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0].copy_(_all_reduce(func, args, kwargs))


@handles(f"{_NS}all_reduce_coalesced.default")
def _all_reduce_coalesced(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return [_all_reduce(func, (tensor, *args[1:]), kwargs) for tensor in args[0]]


@handles(f"{_NS}all_reduce_coalesced_.default")
def _all_reduce_coalesced_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    results = _all_reduce_coalesced(func, args, kwargs)
    # In one operation, so that all are written, or none.
    dispatch(torch.ops.aten._foreach_copy_.default, (args[0], results), {})
    return args[0]


@handles(f"{_NS}all_gather_into_tensor.default")
def _all_gather(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, _, group = args
    return _run(func, "all_gather", tensor, group)


@handles(f"{_NS}all_gather_into_tensor_out.default")
def _all_gather_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return kwargs["out"].copy_(_all_gather(func, args, {}))


@handles(f"{_NS}all_gather_into_tensor_coalesced.default")
def _all_gather_coalesced(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return [_all_gather(func, (tensor, *args[1:]), kwargs) for tensor in args[0]]


@handles(f"{_NS}reduce_scatter_tensor.default")
def _reduce_scatter(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, op, _, group = args
    return _run(func, "reduce_scatter", tensor, group, op.lower())


@handles(f"{_NS}reduce_scatter_tensor_out.default")
def _reduce_scatter_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return kwargs["out"].copy_(_reduce_scatter(func, args, {}))


@handles(f"{_NS}reduce_scatter_tensor_coalesced.default")
def _reduce_scatter_coalesced(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return [_reduce_scatter(func, (tensor, *args[1:]), kwargs) for tensor in args[0]]


@handles(f"{_NS}all_to_all_single.default")
def _all_to_all(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, outputs, inputs, group = args
    if has_counts(outputs) or has_counts(inputs):
        return executor().run(func, args, kwargs)
    if len({*outputs, *inputs}) > 1:
        raise UnsupportedOpError(
            f"{func.name()} with split sizes {list(inputs)} -> {list(outputs)}: numbers in Python "
            "are the same on all devices, and then what each sends to another is what it gets only "
            "if all are one number. Sizes that differ from device to device are a tensor's, "
            "counts.tolist(); or pad the pieces (xd.row_exchange.send)"
        )
    return _run(func, "all_to_all", tensor, group)


@handles(f"{_NS}broadcast.default")
def _broadcast(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, src, group = args
    return _run(func, "broadcast", tensor, group, src)


@handles(f"{_NS}broadcast_.default")
def _broadcast_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0].copy_(_broadcast(func, args, kwargs))


@handles(f"{_NS}wait_tensor.default")
def _wait(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0]  # JAX waits when a value is read


@handles(f"{_NS}_wrap_tensor_autograd.default")
def _wrap(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return dispatch(torch.ops.aten.alias.default, (args[0],), {})


# --- torch's context parallelism, whose operators have collectives inside ------------------------


@handles("cplib::flex_cp_allgather.default")
def _gather_keys(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    *tensors, dim, group = args
    size = _group(func, group).size()
    gathered = (_run(func, "all_gather", tensor, group) for tensor in tensors)
    return tuple(torch.cat(whole.chunk(size), dim) for whole in gathered)


@handles("cplib::flex_cp_allgather_backward.default")
def _scatter_gradients(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    *grads, dim, group = args
    size = _group(func, group).size()
    stacked = (torch.cat(grad.chunk(size, dim)) for grad in grads)
    return tuple(_run(func, "reduce_scatter", grad, group, "sum") for grad in stacked)
