"""accelerate's FSDP2 plugin and its meshes (``ParallelismConfig``) over the devices of one process.

accelerate shards in as many processes as there are devices, and takes the batches of each to be a
part. Here `prepare` shards the model by accelerate's own rules, lets the optimizer have the new
parameters, and the loader's batch is the global one, laid out over the data-parallel devices. All
else is what accelerate does for one process: checkpoints have whole tensors. Read and checked in
1.15.0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from xla_dtensor import runtime
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching.take_over import take_over

_PLUGINS = {
    "torch_tp_plugin": "parallelism_config=ParallelismConfig(tp_size=n)",
    "deepspeed_plugin": "FullyShardedDataParallelPlugin(fsdp_version=2)",
    "megatron_lm_plugin": "torch's parallelize_module(model, mesh, plan) before prepare",
}


def _refusal(given: dict[str, Any]) -> str | None:
    """What of an ``AcceleratorState``'s arguments has no meaning here, and what to write."""
    for name, way in _PLUGINS.items():
        if given.get(name) is not None:
            return f"{name} on the xla device: it is for a process per device. Use {way}"
    plugin, config = given.get("fsdp_plugin"), given.get("parallelism_config")
    if plugin is not None and plugin.fsdp_version != 2:
        return "fsdp_plugin on the xla device, of version 1: give it fsdp_version=2"
    if plugin is not None and plugin.activation_checkpointing_offload:
        return (
            "fsdp_plugin on the xla device, with activation_checkpointing_offload: leave it out; "
            "xd.scan_layers(layers, offload=True) does it of equal layers, docs/compile.md"
        )
    if config is None or config.total_size == 1:
        return None
    if config.cp_size > 1 or config.sp_size > 1:
        return (
            "parallelism_config on the xla device, with cp_size or sp_size: leave them out and use "
            "torch's context_parallel, docs/context_parallel.md"
        )
    if config.tp_size > 1 and config.data_parallel_size > 1:
        return (
            "parallelism_config on the xla device, with tp_size and data-parallel sizes: leave it "
            "out, and xd.parallel.shard_by_size(model, mesh) before prepare, with both dims"
        )
    if plugin is None and config.data_parallel_size > 1:
        return (
            "parallelism_config on the xla device, with data-parallel sizes and no plugin: add "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or xd.replicate the model "
            "before prepare"
        )
    return None


def install(module: Any) -> None:
    """When ``accelerate.accelerator`` is imported."""
    take_over(module.ParallelismConfig._validate_accelerator, _validate)
    take_over(module.Accelerator.prepare, _prepare)
    # These two are about what a process has of all: this one has all.
    take_over(module.Accelerator._prepare_tp, _unless_xla(lambda args: args[1:]))
    take_over(module.Accelerator._prepare_device_mesh, _unless_xla(lambda args: None))


def install_loaders(module: Any) -> None:
    """When ``accelerate.data_loader`` is imported."""
    for loader in (module.DataLoaderShard, module.DataLoaderDispatcher):
        take_over(loader.__iter__, _batches)


def _is_xla(accelerator: Any) -> bool:
    return accelerator.device.type == "xla"


def _unless_xla(result: Any) -> Any:
    def call(original: Any, args: Any, kwargs: Any) -> Any:
        return result(args) if _is_xla(args[0]) else original(*args, **kwargs)

    return call


def _validate(original: Any, args: Any, kwargs: Any) -> None:
    """accelerate compares the sizes with processes; they are of this process's devices."""
    if not _is_xla(args[1]):
        original(*args, **kwargs)


def _plugin(accelerator: Any) -> Any:
    return getattr(accelerator.state, "fsdp_plugin", None)


def _prepare(original: Any, args: Any, kwargs: Any) -> Any:
    accelerator, *given = args
    if not _is_xla(accelerator) or _plugin(accelerator) is None:
        return original(*args, **kwargs)
    models = [each for each in given if isinstance(each, nn.Module)]
    optimizers = [each for each in given if isinstance(each, torch.optim.Optimizer)]
    if (
        models
        and not optimizers
        and not accelerator._optimizers
        and any(m.training for m in models)
    ):
        raise ValueError(
            "When using FSDP2, a model and optimizer must be passed together to "
            "`Accelerator.prepare()` as the optimizer needs to have its parameters modified after "
            "the model is converted."
        )
    for model in models:
        _shard(accelerator, model, optimizers)
    return original(*args, **kwargs)


def _shard(accelerator: Any, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    from accelerate.utils import fsdp_utils

    def parameters() -> dict[str, nn.Parameter]:
        return dict(
            fsdp_utils.fsdp2_canonicalize_names(
                dict(model.named_parameters(remove_duplicate=False))
            )
        )

    plugin, before = _plugin(accelerator), parameters()
    plugin.cpu_ram_efficient_loading = False  # the one process has loaded the weights
    plugin.set_auto_wrap_policy(model)
    if plugin.activation_checkpointing:
        fsdp_utils.fsdp2_apply_ac(accelerator, model)
    model.to(accelerator.device)
    fsdp_utils.fsdp2_prepare_model(accelerator, model)
    after = parameters()
    new = {id(old): after[name] for name, old in before.items()}
    for optimizer in optimizers:
        state = optimizer.state_dict() if optimizer.state else None
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(each), each) for each in group["params"]]
        if state is not None:
            optimizer.state.clear()
            optimizer.load_state_dict(state)  # in parts, like the parameters


def _batches(original: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    from accelerate.state import AcceleratorState
    from accelerate.utils.operations import recursively_apply

    state = AcceleratorState._shared_state
    mesh = state.get("device_mesh") if state.get("fsdp_plugin") is not None else None
    if mesh is None or mesh.device_type != "xla":
        return original(*args, **kwargs)
    return (
        recursively_apply(lambda tensor: _in_parts(tensor, mesh), batch)
        for batch in original(*args, **kwargs)
    )


def _in_parts(tensor: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if not tensor.ndim or tensor.device.type != "xla" or hasattr(tensor, "placements"):
        return tensor
    cut = [Shard(0) if name.startswith("dp") else Replicate() for name in mesh.mesh_dim_names]
    return distribute_tensor(tensor, mesh, cut)


def tensor_parallel_mesh() -> Any:
    """That of accelerate's ``ParallelismConfig``, for a model that is loaded by a plan; or None."""
    if "accelerate.state" not in sys.modules:
        return None
    from accelerate.state import AcceleratorState

    mesh = AcceleratorState._shared_state.get("device_mesh")
    known = mesh is not None and mesh.device_type == "xla" and "tp" in mesh.mesh_dim_names
    return mesh["tp"] if known else None


def take_plugin(state: Any, given: dict[str, Any]) -> None:
    """Keep the plugin that an ``AcceleratorState`` is made with. It shards over all devices if no
    config says over how many.

    Raises:
        UnsupportedOpError: what is asked for has no meaning in one process.
    """
    from accelerate.parallelism_config import ParallelismConfig

    refused = _refusal(given)
    if refused is not None:
        raise UnsupportedOpError(f"accelerate's {refused}")
    plugin = given.get("fsdp_plugin")
    if plugin is not None:
        if state._mixed_precision != "no":
            plugin.set_mixed_precision(state._mixed_precision)
        state.fsdp_plugin = plugin
        config = given.get("parallelism_config")
        if config is None or config.total_size == 1:
            runtime.start()
            state.parallelism_config = ParallelismConfig(dp_shard_size=runtime.device_count())
