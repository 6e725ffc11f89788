"""Routes of calls that have no plan: copies to and from the CPU, and values in Python."""

from __future__ import annotations

import math
from typing import Any

import torch

from xla_dtensor.base import events, executor
from xla_dtensor.base.numbers import row_comparisons
from xla_dtensor.dispatch.execute import dispatch
from xla_dtensor.execution.value_checks import assert_true
from xla_dtensor.forms.host_values import to_devices
from xla_dtensor.forms.sharing import lock
from xla_dtensor.plans.ops import handles
from xla_dtensor.runtime import arrays, processes
from xla_dtensor.tensors.of_form import is_ours, new_tensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


def to_cpu(tensor: Any) -> torch.Tensor:
    """The full value of an xla tensor as a CPU tensor."""
    _refuse_meta(tensor)
    value = executor.current().on_host(tensor)
    # A copy to another device keeps the order of the strides, not their gaps.
    model = torch.empty_strided(tensor.shape, tensor.stride(), dtype=value.dtype, device="meta")
    out = torch.empty_like(model, device="cpu")
    return value if out.stride() == value.stride() else out.copy_(value)


def _refuse_meta(tensor: Any) -> None:
    if tensor._form.meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")


@handles("aten::_to_copy.default")
def _to_copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    if args[0]._form.meta and device is not None and torch.device(device).type != "meta":
        raise NotImplementedError(
            "Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() "
            "instead of torch.nn.Module.to() when moving module from meta to a different device."
        )
    if device is None or torch.device(device).type == "xla" or args[0]._form.meta:
        return NotImplemented
    tensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    if torch.device(device).type == "meta":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    if torch.device(device).type == "cpu" and row_comparisons.executor().stays(tensor):
        return row_comparisons.executor().on_host(tensor.to(dtype, copy=True))
    with executor.current().recording():
        return to_cpu(tensor).to(device=device, dtype=dtype)


@handles(
    "aten::empty_like.default",
    "aten::zeros_like.default",
    "aten::ones_like.default",
    "aten::full_like.default",
    "aten::rand_like.default",
    "aten::randn_like.default",
    "aten::new_empty.default",
    "aten::new_empty_strided.default",
    "aten::new_zeros.default",
    "aten::new_ones.default",
    "aten::new_full.default",
)
def _like_elsewhere(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A tensor like an xla tensor on another device, which ``device=`` names."""
    device = kwargs.get("device")
    like = args[0]
    if like._form.meta and device is not None and torch.device(device).type == "xla":
        return func(_with_a_value(like), *args[1:], **kwargs)
    if device is None or torch.device(device).type == "xla" or like._form.meta:
        return NotImplemented
    model = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return func(model, *args[1:], **kwargs)


@handles("aten::_efficientzerotensor.default")
def _zero_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """torch's zeros without memory, which its derivative formulas make; XLA has constants."""
    return dispatch(torch.ops.aten.zeros.default, args, kwargs)


def _with_a_value(tensor: Any) -> Any:
    """A tensor with the layout of one on the meta device; zeros, as memory has to be something."""
    form = tensor._form.reduced().with_meta(False)
    array = arrays.full(form.array_shape, 0, form.jax_dtype, form.sharding)
    return new_tensor(array, form)


@handles("aten::copy_.default")
def _copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source = args[:2]
    if not is_ours(target):
        with executor.current().recording():
            return target.copy_(to_cpu(source))
    form = target._storage_.form
    if (
        type(source) not in (torch.Tensor, torch.nn.Parameter)
        or source.device.type != "cpu"
        or target._steps
        or form.varying
        or form.meta
        or executor.enclosing() is not None
        or processes.several()  # which see to it that they have the same value
        or events.observer is not None
        or not _broadcasts(source.shape, form.shape)
    ):
        return NotImplemented
    # From the host to where it belongs: no program, and no waiting for what was there.
    value = source.detach().to(form.dtype).expand(form.shape)
    form = form.reduced()
    array = to_devices(value, form)
    with lock:  # another thread may be about to give the storage what waits to be computed
        target._storage_.write(array, form)
    return target


def _broadcasts(shape: Any, wanted: tuple[int, ...]) -> bool:
    if len(shape) > len(wanted):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(wanted), strict=False))


@handles("aten::_local_scalar_dense.default")
def _item(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    _refuse_meta(args[0])
    return executor.current().item(args[0])


@handles("aten::record_stream.default")
def _record_stream(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """XLA frees no memory that an operation still reads."""


@handles("aten::is_same_size.default")
def _is_same_size(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape


@handles("aten::is_set_to.default")
def _is_set_to(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether two tensors are the same view of one memory."""
    one, other = args
    if not (is_ours(one) and is_ours(other)) or one._storage_ is not other._storage_:
        return False
    seen = lambda tensor: (tensor.shape, tensor.stride(), tensor.storage_offset())
    return seen(one) == seen(other)


@handles("aten::_has_same_storage_numel.default")
def _has_same_storage_numel(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Forward-mode AD asks it of a tensor and its tangent, to copy a tangent with gaps."""
    one, other = (math.prod(tensor._storage_.form.shape) for tensor in args)
    return one == other


@handles("aten::_linalg_check_errors.default")
def _check_errors(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Raises if a factorisation failed."""
    tensor = args[0]
    if tensor._form.varying:
        sharded = isinstance(tensor, XLAShardedTensor)
        parts = [s.data for s in tensor.local_shards] if sharded else tensor.local_values()
        for info in parts:
            func(info, *args[1:], **kwargs)
    else:
        func(to_cpu(args[0]), *args[1:], **kwargs)


@handles("aten::_linalg_check_errors.default", traced=True)
def _check_no_errors(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A compiled step can't raise: its results are then not finite."""


_FACTORISATIONS = {
    "aten::linalg_cholesky_ex.default": "linalg.cholesky_ex",
    "aten::linalg_inv_ex.default": "linalg.inv_ex",
    "aten::linalg_ldl_factor_ex.default": "torch.linalg.ldl_factor_ex",
    "aten::linalg_lu_factor_ex.default": "torch.linalg.lu_factor_ex",
    "aten::_linalg_solve_ex.default": "torch.linalg.solve_ex",
}


@handles(*_FACTORISATIONS)
def _checked_factorisation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """With ``check_errors=True`` torch's kernels raise for what they report otherwise."""
    if not kwargs.get("check_errors"):
        return NotImplemented
    results = dispatch(func, args, {**kwargs, "check_errors": False})
    name, is_matrix = _FACTORISATIONS[f"{func.namespace}::{func.__name__}"], args[0].ndim == 2
    check = torch.ops.aten._linalg_check_errors.default
    dispatch(check, (results[-1], name), {"is_matrix": is_matrix})
    return results


@handles("aten::_assert_async.default", "aten::_assert_async.msg")
def _assert_async(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    message = "Expected Tensor with single nonzero value, but got zero"
    assert_true(args[0], args[1] if len(args) > 1 else kwargs.get("assert_msg", message))


@handles("aten::_is_all_true.default", traced=True)
def _is_all_true(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """In a step it is asserted, and true: who asks (``torch.distributions`` of its arguments,
    ``torch._check_tensor_all``) raises where it isn't."""
    message = (
        "values that have to be valid aren't (of an argument of torch.distributions, or of what "
        "torch._check_tensor_all was given); outside of a compiled step the error says which"
    )
    assert_true(args[0].all(), message, ValueError)
    return torch.ones((), dtype=torch.bool)


@handles("aten::detach_.default")
def _detach_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0]  # autograd has done it already


@handles("aten::is_pinned.default")
def _is_pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return False
