"""``torch_xla.core.xla_model``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compat.torch_xla import runtime
from xla_dtensor.compat.torch_xla.core.steps import add_step_closure, optimizer_step, sync
from xla_dtensor.compat.torch_xla.distributed.spmd.marking import ShardingSpec
from xla_dtensor.compat.torch_xla.distributed.spmd.meshes import get_global_mesh
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.movement import collectives
from xla_dtensor.movement.factories import distribute_tensor
from xla_dtensor.runtime import memory

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "add_step_closure",
    "all_reduce",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "get_xla_supported_devices",
    "is_master_ordinal",
    "mark_step",
    "master_print",
    "optimization_barrier_",
    "optimizer_step",
    "rendezvous",
    "save",
    "send_cpu_data_to_device",
    "set_rng_state",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
    "xrt_world_size",
]

REDUCE_SUM, REDUCE_MUL, REDUCE_AND = "sum", "mul", "and"
REDUCE_OR, REDUCE_MIN, REDUCE_MAX = "or", "min", "max"
_OPS = {"mul": "product", "and": "band", "or": "bor"}


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The device that all tensors are on, whatever their sharding.

    Args:
        n, devkind: torch_xla's number and kind of a device; there is one.

    Example::

        import xla_dtensor.compat.torch_xla.core.xla_model as xm

        assert xm.xla_device().type == "xla"
    """
    return runtime.xla_device()


def xla_device_hw(device: Any) -> str:
    """What is behind it: ``"CPU"``, ``"TPU"``, ``"CUDA"``."""
    return runtime.device_type() or "CPU"


def get_xla_supported_devices(
    devkind: str | None = None, max_devices: int | None = None
) -> list[str]:
    """The names of the devices."""
    names = [f"xla:{i}" for i in range(runtime.global_runtime_device_count())]
    return names[:max_devices]


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """`torch_xla.sync`."""
    sync(wait, reset_scope)


def wait_device_ops(devices: Sequence[Any] = ()) -> None:
    """Wait until the devices have done what was asked of them."""
    memory.synchronize()


xrt_world_size = runtime.process_count
get_ordinal = runtime.process_index
get_local_ordinal = runtime.local_ordinal


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is the first process (of its host)."""
    return (runtime.local_ordinal() if local else runtime.process_index()) == 0


def master_print(*args: Any, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    """Print in the first process."""
    if is_master_ordinal(local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait for the other processes.

    Raises:
        SpmdError: with a payload: use ``torch.distributed.all_gather_object``.
    """
    if payload:
        raise SpmdError(
            f"rendezvous({tag!r}, payload=...): payloads aren't exchanged; use "
            "torch.distributed.all_gather_object after init_process_group('xla')"
        )
    memory.synchronize()
    return [b""] * runtime.process_count()


def save(
    data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False
) -> None:
    """``torch.save`` of the values on the CPU.

    Args:
        data: trees of tensors.
        file_or_path: as of ``torch.save``.
        master_only: in the first process alone.
        global_master: the first of all processes, and not of each host.
    """
    on_cpu = pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, data)
    if not master_only or is_master_ordinal(not global_master):
        torch.save(on_cpu, file_or_path)


def send_cpu_data_to_device(
    datas: Any, device: Any, input_sharding: ShardingSpec | None = None
) -> list[Any]:
    """CPU tensors on the devices.

    Args:
        datas: trees of tensors.
        device: the xla device.
        input_sharding: how those are laid out that have its number of dims.

    Returns:
        the same trees, of tensors on the devices.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla.core.xla_model as xm
        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        spec = xs.ShardingSpec(xs.get_1d_mesh("data"), ("data", None))
        (x,) = xm.send_cpu_data_to_device([torch.ones(16, 4)], xm.xla_device(), spec)
        assert x.partition_spec == (0, None)
    """

    def send(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if input_sharding is None or not input_sharding.can_apply(value):
            return value.to("xla")
        return distribute_tensor(value, input_sharding.mesh, input_sharding.placements())

    return pytree.tree_map(send, datas)


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Sequence[Sequence[int]] | None = None,
    cctx: Any = None,
    pin_layout: bool = True,
) -> Any:
    """The reduction of what the devices hold, between `enable_manual_sharding` and
    `disable_manual_sharding`.

    Args:
        reduce_type: ``REDUCE_SUM`` and the like.
        inputs: a per-device tensor; or a list of them, which are changed in place.
        scale: the result is multiplied by it.
        groups: the numbers of the devices that reduce together; by default all.
        cctx, pin_layout: torch_xla's; no effect.

    Returns:
        the reduced tensor, or the list.

    Raises:
        SpmdError: there is no global mesh, or the groups aren't those of one of its axes.
    """
    if isinstance(inputs, list):
        for value in inputs:
            value.copy_(all_reduce(reduce_type, value, scale, groups))
        return inputs
    mesh = get_global_mesh()
    if mesh is None:
        raise SpmdError(
            "all_reduce: over which mesh? set one by set_global_mesh(mesh), or call "
            "xla_dtensor.collectives.all_reduce(x, (mesh, axis))"
        )
    result = inputs
    for axis in _axes(mesh, groups):
        result = collectives.all_reduce(result, (mesh, axis), _OPS.get(reduce_type, reduce_type))
    return result if scale == 1.0 else result * scale


def _axes(mesh: Any, groups: Sequence[Sequence[int]] | None) -> list[int]:
    """The axes whose lines of devices these groups are."""
    devices = mesh.mesh
    if not groups or [sorted(g) for g in groups] == [sorted(devices.flatten().tolist())]:
        return list(range(mesh.ndim))
    wanted = sorted(map(sorted, groups))
    for axis in range(mesh.ndim):
        lines = devices.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
        if sorted(map(sorted, lines)) == wanted:
            return [axis]
    raise SpmdError(
        f"all_reduce(groups={[list(g) for g in groups]}): the groups of {mesh!r} are the lines "
        "along one of its axes, or all devices"
    )


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Nothing: XLA orders the operations of a compiled step."""


def set_rng_state(seed: int, device: Any = None) -> None:
    """``torch.manual_seed``."""
    torch.manual_seed(seed)


def get_rng_state(device: Any = None) -> int:
    """The seed."""
    return torch.initial_seed()


def get_memory_info(device: Any = None) -> dict[str, int]:
    """Bytes in use and in all, of the device that holds the most."""
    free, total = memory.free_and_total()
    return {"bytes_used": total - free, "bytes_limit": total, "peak_bytes_used": memory.peak()}


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """`torch_xla.sync`."""
    sync()


def do_on_ordinals(
    target: Callable[..., Any], data: Any = (), ordinals: Sequence[int] = (0,)
) -> Any:
    """Call ``target(*data)`` in these processes."""
    return target(*data) if runtime.process_index() in ordinals else None
