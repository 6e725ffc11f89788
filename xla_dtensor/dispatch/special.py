"""Calls that leave the general path: moves between devices, values in Python, sizes that depend on
values."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base import thread_state
from xla_dtensor.dispatch.ops import handles, info_of
from xla_dtensor.errors import PerDeviceValueError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.read import constant_recipe, logical_value, read
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

Ours = XLAShardedTensor | XLATensor


def to_cpu(tensor: Any) -> torch.Tensor:
    """The full value of an xla tensor as a CPU tensor."""
    from xla_dtensor.forms.host_values import fetch, to_host

    if tensor._form.meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    refuse_varying(tensor._form, "its value on the host (.cpu(), .item(), printing, ...)")
    trace = thread_state.current()
    if trace is None:
        form = tensor._form
        array = logical_value(tensor) if form.unreduced else read(tensor)
        # Padding is cut off here: on the devices that would be a program per shape.
        value = to_host(fetch(array, form.shape))
    else:
        recipe = constant_recipe(tensor)
        if recipe is None:
            trace.refuse(f"the value of a tensor of shape {list(tensor.shape)} on the host")
        form = tensor._form
        value = to_host(fetch(recipe(), form.shape))
    # A copy to another device keeps the order of the strides, not their gaps.
    model = torch.empty_strided(tensor.shape, tensor.stride(), dtype=value.dtype, device="meta")
    out = torch.empty_like(model, device="cpu")
    return value if out.stride() == value.stride() else out.copy_(value)


def refuse_varying(form: Form, what: str) -> None:
    """Raise if the tensor is another one on each device, so that ``what`` would be too."""
    if form.varying:
        raise PerDeviceValueError(
            f"a per-device tensor of shape {list(form.shape)} varies along {list(form.varying)}: "
            f"{what} would differ from device to device. Look at .local_values() (one CPU tensor "
            "per device), or make it one value first: DTensor.from_local(x, mesh, placements)"
            ".full_tensor(), or a collective (all_reduce, all_gather_tensor)"
        )


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
    from xla_dtensor.dispatch import dispatch

    return dispatch(torch.ops.aten.zeros.default, args, kwargs)


def _with_a_value(tensor: Any) -> Any:
    """A tensor with the layout of one on the meta device; zeros, as memory has to be something."""
    import jax
    import jax.numpy as jnp

    from xla_dtensor.dispatch.plan import new_tensor

    form = tensor._form.reduced().with_meta(False)
    with jax.enable_x64(True):
        array = jnp.zeros(form.array_shape, form.jax_dtype, device=form.sharding)
    return new_tensor(array, form)


@handles("aten::copy_.default")
def _copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], Ours):
        return NotImplemented
    return args[0].copy_(to_cpu(args[1]))


@handles("aten::_local_scalar_dense.default")
def _item(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    trace = thread_state.current()
    if trace is not None and constant_recipe(args[0]) is None:
        return trace.item(args[0])
    return to_cpu(args[0]).item()


@handles("aten::_linalg_check_errors.default")
def _check_errors(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Raises if a factorisation failed. A compiled step can't: its results are then not finite."""
    if thread_state.current() is None:
        tensor = args[0]
        if tensor._form.varying:
            sharded = isinstance(tensor, XLAShardedTensor)
            parts = [s.data for s in tensor.local_shards] if sharded else tensor.local_values()
            for info in parts:
                func(info, *args[1:], **kwargs)
        else:
            func(to_cpu(args[0]), *args[1:], **kwargs)


@handles("aten::allclose.default")
def _allclose(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return on_host(func, args, kwargs)


@handles("aten::detach_.default")
def _detach_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0]  # autograd has done it already


@handles("aten::is_pinned.default")
def _is_pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return False


@handles(
    "aten::nonzero.default",
    "aten::masked_select.default",
    "aten::_unique.default",
    "aten::_unique2.default",
    "aten::unique_dim.default",
    "aten::unique_consecutive.default",
    "aten::unique_dim_consecutive.default",
    "aten::repeat_interleave.Tensor",
    "aten::bincount.default",
    "aten::equal.default",
    "aten::argwhere.default",
    "aten::histogram.bin_ct",
)
def on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Results whose shape (or Python value) depends on values: computed by CPU torch, and returned
    replicated."""
    trace = thread_state.current()
    if trace is not None:
        trace.refuse(f"{info_of(func).name}, whose result's shape depends on values,")
    ours = [t for t in _tensors((args, kwargs)) if isinstance(t, Ours)]
    for tensor in ours:
        refuse_varying(tensor._form, f"the shape of {info_of(func).name}'s result")
    out = func(*_map(args, _to_host_argument), **_map(kwargs, _to_host_argument))
    mesh = next((t._form.mesh for t in ours if t._form.mesh is not None), None)

    def back(tensor: torch.Tensor) -> torch.Tensor:
        if mesh is None:
            return tensor.to("xla")
        from xla_dtensor.movement.factories import distribute_tensor

        return distribute_tensor(tensor, mesh, None)

    return _map(out, lambda x: back(x) if isinstance(x, torch.Tensor) else x)


_ON_HOST_OUT = {
    "aten::masked_select.out": torch.ops.aten.masked_select.default,
    "aten::nonzero.out": torch.ops.aten.nonzero.default,
}


@handles(*_ON_HOST_OUT)
def _on_host_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    out = kwargs["out"]
    result = on_host(_ON_HOST_OUT[info_of(func).name], args, {})
    if out.dtype != result.dtype:
        raise RuntimeError(
            f"{info_of(func).name}: expected out to have dtype {result.dtype}, not {out.dtype}"
        )
    return _into(out, result)


_RANGES_OUT = {
    "aten::arange.out": torch.ops.aten.arange.default,
    "aten::arange.start_out": torch.ops.aten.arange.start_step,
    "aten::logspace.out": torch.ops.aten.logspace.default,
    "aten::logspace.Tensor_Tensor_out": torch.ops.aten.logspace.Tensor_Tensor,
    "aten::logspace.Tensor_Scalar_out": torch.ops.aten.logspace.Tensor_Scalar,
    "aten::logspace.Scalar_Tensor_out": torch.ops.aten.logspace.Scalar_Tensor,
}


@handles(*_RANGES_OUT)
def _range_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Their numbers decide the shape, and ``out``'s dtype how the numbers are rounded."""
    out = kwargs["out"]
    return _into(out, _RANGES_OUT[info_of(func).name](*args, dtype=out.dtype))


def _into(out: Any, result: torch.Tensor) -> Any:
    """Write a result into an ``out=`` tensor, resized to it."""
    from xla_dtensor.dispatch import dispatch

    dispatch(torch.ops.aten.resize_.default, (out, list(result.shape)), {})
    return dispatch(torch.ops.aten.copy_.default, (out, result), {})


@handles("aten::index.Tensor", "aten::index_put.default")
def _index_by_mask(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
        return on_host(func, args, kwargs)
    return NotImplemented


@handles("aten::index_put_.default", "aten::_index_put_impl_.default")
def _index_put_by_mask(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
        accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        out = on_host(torch.ops.aten.index_put.default, (*args[:3], accumulate), {})
        return args[0].copy_(out)
    return NotImplemented


@handles("aten::native_batch_norm.default")
def _batch_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Its schema hides that it writes the running statistics."""
    from xla_dtensor.dispatch import dispatch

    x, weight, bias, running_mean, running_var, training, momentum, eps = args
    if not training:
        functional = torch.ops.aten._native_batch_norm_legit_no_training.default
        return dispatch(functional, (x, weight, bias, running_mean, running_var, momentum, eps), {})
    if running_mean is None:
        functional = torch.ops.aten._native_batch_norm_legit.no_stats
        return dispatch(functional, (x, weight, bias, training, momentum, eps), {})
    functional = torch.ops.aten._native_batch_norm_legit_functional.default
    *results, new_mean, new_var = dispatch(
        functional, (x, weight, bias, running_mean, running_var, training, momentum, eps), {}
    )
    # One operation: both are written, or none. It counts as no write, as in torch: backward is
    # given the statistics, but doesn't look at them.
    statistics = [running_mean, running_var]
    with torch.autograd._unsafe_preserve_version_counter(tuple(statistics)):
        dispatch(torch.ops.aten._foreach_copy_.default, (statistics, [new_mean, new_var]), {})
    return tuple(results)


@handles("aten::_native_batch_norm_legit.out")
def _batch_norm_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    outs = (kwargs["out"], kwargs["save_mean"], kwargs["save_invstd"])
    for out in outs:
        out._storage_.check_write()
    results = _batch_norm(torch.ops.aten.native_batch_norm.default, args, {})
    return tuple(map(_into, outs, results))


def _to_host_argument(value: Any) -> Any:
    return to_cpu(value) if isinstance(value, Ours) else value


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_map(v, function) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, function) for k, v in value.items()}
    return function(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    return []
