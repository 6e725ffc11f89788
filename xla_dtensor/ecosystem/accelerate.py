"""Hugging Face accelerate: its device, its generator in checkpoints, what isn't supported.

transformers' Trainer and trl compute with it. The device is "xla" where `device_choice` says so.

accelerate starts a process per device. Here it is one process with the one device ``xla:0``;
`accelerate_sharding` has its ways to shard a model. Read and checked in 1.15.0.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import torch

from xla_dtensor.ecosystem import accelerate_sharding, random_states
from xla_dtensor.ecosystem.device_choice import device_for, refuse_processes
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over


def install() -> None:
    """When its modules are imported."""
    on_import("accelerate.state", _hook_state)
    on_import("accelerate.utils.modeling", lambda m: take_over(m.get_grad_scaler, _scaler))
    on_import("accelerate.checkpointing", _hook_checkpoints)
    on_import("accelerate.accelerator", accelerate_sharding.install)
    on_import("accelerate.data_loader", accelerate_sharding.install_loaders)


def on_xla() -> bool:
    """Whether accelerate has been started, on the xla device."""
    from accelerate.state import PartialState

    device = PartialState._shared_state.get("device")
    return device is not None and device.type == "xla"


def asked_for() -> bool:
    """Whether accelerate's own variable says xla."""
    return os.environ.get("ACCELERATE_TORCH_DEVICE", "").startswith("xla")


def _hook_state(module: Any) -> None:
    take_over(module.PartialState.set_device, _set_device)
    take_over(module.AcceleratorState.__init__, _state)


def _set_device(original: Any, args: Any, kwargs: Any) -> None:
    original(*args, **kwargs)
    state = args[0]
    if state._cpu:
        return
    own = os.environ.get("ACCELERATE_TORCH_DEVICE")  # goes before what we would choose
    device = state.device if own else device_for(state.device)
    if device.type != "xla":
        return
    try:
        refuse_processes("accelerate")
    except UnsupportedOpError:
        type(state)._reset_state()  # or the next one would find this one ready
        raise
    state.device = torch.device("xla", 0)


def _state(original: Any, args: Any, kwargs: Any) -> None:
    state = args[0]
    is_first = not state.initialized
    original(*args, **kwargs)
    if state.device.type != "xla" or not is_first:  # accelerate doesn't look at later ones, either
        return
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    try:
        accelerate_sharding.take_plugin(state, given)
    except UnsupportedOpError:
        # A plugin that was given sets this, too, and the next Accelerator would make one by it.
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        type(state)._reset_state(reset_partial_state=True)
        raise


def _scaler(original: Any, args: Any, kwargs: Any) -> Any:
    if not on_xla():
        return original(*args, **kwargs)
    kwargs.pop("distributed_type", None)
    return torch.amp.GradScaler("xla", **kwargs)


def _hook_checkpoints(module: Any) -> None:
    def folder_of(function: Any, args: Any, kwargs: Any) -> Any:
        return next(iter(inspect.signature(function).bind(*args, **kwargs).arguments.values()))

    def call(then: Any, original: Any, args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if on_xla():
            then(folder_of(original, args, kwargs))
        return result

    take_over(module.save_accelerator_state, functools.partial(call, random_states.save))
    take_over(module.load_accelerator_state, functools.partial(call, random_states.load))
