"""Parameters, gradients and optimizer state in the host's memory.

A tensor that rests there is an argument and a result of programs as any other. They fetch it when
they compute with it, and bring back what is written to it: copies in the program, which XLA places
(`forms/form.py`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch.optim import Optimizer

from xla_dtensor.base import host_memory
from xla_dtensor.errors import MeshError
from xla_dtensor.mesh.memories import HOST, check_host_memory
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.of_form import is_ours, new_tensor


def offload_state(optimizer: Optimizer) -> Optimizer:
    """Keep an optimizer's state in the host's memory, while parameters stay on the devices.

    Args:
        optimizer: any, on parameters that are on a mesh. State of a parameter's shape, which it has
            or will have, rests in the host's memory; numbers (step counts) stay on the devices.

    Returns:
        ``optimizer``; its ``step`` is another one. In a compiled step the state is copied to the
        devices and back within the program; eagerly by each operation that reads or writes it.

    Raises:
        MeshError: a parameter is on no mesh.
        UnsupportedOpError: the devices reach no memory of the host.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        model = xd.fully_shard(torch.nn.Linear(16, 8), mesh=mesh)
        optimizer = xd.parallel.offload_state(torch.optim.AdamW(model.parameters()))
        model(xd.from_device_values([torch.randn(4, 16) for _ in range(8)], mesh)).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["exp_avg"].placements == model.weight.placements
    """
    if getattr(optimizer, "_offloaded", False):
        return optimizer
    ours = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if is_ours(parameter)
    ]
    for parameter in ours:
        form = parameter._form
        if form.frame is None:
            raise MeshError(
                f"offload_state: a parameter of shape {list(parameter.shape)} is on no mesh; lay "
                "the model out first (distribute_module, fully_shard, replicate)"
            )
        check_host_memory(form.frame, "offload_state")
    optimizer.step = types.MethodType(_offloaded(optimizer.step), optimizer)
    optimizer.register_load_state_dict_post_hook(_offload_present)
    optimizer._offloaded = True
    _offload_present(optimizer)
    return optimizer


def _offloaded(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def offloaded(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with host_memory.resting_in(HOST):
            return step(*args, **kwargs)

    return offloaded


def _offload_present(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if is_ours(value) and value.ndim:
                state[key] = to_host(value)


def to_host(tensor: Any) -> Any:
    """A tensor of its own with the value of ``tensor``, which rests in the host's memory; below
    autograd. Inside of a traced step it does so when the step is over."""
    form = tensor._form.reduced().at_start()
    if form.memory == HOST:
        return tensor
    with torch.no_grad():
        value = tensor.clone() if tensor._steps else tensor
        array = value._storage_.array
    resting = form.with_memory(HOST)
    if not isinstance(array, jax.core.Tracer):
        with jax.enable_x64(True):
            array = arrays.put(array, resting.sharding)
    return new_tensor(array, resting)
