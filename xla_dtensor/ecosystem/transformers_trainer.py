"""Hugging Face transformers' Trainer, and trl's: the device, bfloat16, generator in checkpoints.

Their device is the one that accelerate has. Read and checked in 5.24.0.
"""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.ecosystem import accelerate, random_states
from xla_dtensor.ecosystem.device_choice import device_for
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over


def install() -> None:
    """When its modules are imported."""
    on_import("transformers.training_args", _hook_arguments)
    on_import("transformers.trainer", _hook_trainer)


def _hook_arguments(module: Any) -> None:
    # Its value is cached, and asks for devices that it knows; only here it is asked for Trainer.
    original = module.is_torch_bf16_gpu_available

    def supports_bfloat16() -> bool:
        return original() or accelerate.asked_for() or device_for(torch.device("cpu")).type == "xla"

    module.is_torch_bf16_gpu_available = supports_bfloat16
    take_over(module.TrainingArguments._setup_devices.func, _device)


def _device(original: Any, args: Any, kwargs: Any) -> torch.device:
    """What accelerate has found: the Trainer looks again itself, for devices that it knows."""
    device = original(*args, **kwargs)
    if accelerate.on_xla():
        arguments = args[0]
        arguments._n_gpu = min(arguments._n_gpu, 1)  # torch's own, over which it copies the model
        device = arguments.distributed_state.device
    return device


def _hook_trainer(module: Any) -> None:
    trainer = module.Trainer

    def saved(original: Any, args: Any, kwargs: Any) -> None:
        original(*args, **kwargs)
        if accelerate.on_xla():
            random_states.save(args[1] if len(args) > 1 else kwargs["output_dir"])

    def loaded(original: Any, args: Any, kwargs: Any) -> None:
        original(*args, **kwargs)
        checkpoint = args[1] if len(args) > 1 else kwargs["checkpoint"]
        if checkpoint is not None and accelerate.on_xla():
            random_states.load(checkpoint)

    take_over(trainer.create_accelerator_and_postprocess, _refuse_plugins)
    take_over(trainer._save_rng_state, saved)
    take_over(trainer._load_rng_state, loaded)


def _refuse_plugins(original: Any, args: Any, kwargs: Any) -> None:
    """The Trainer divides the number of processes by such a config's sizes, and saves by FSDP's
    own functions, which ask each process for its part."""
    arguments = args[0].args
    config = arguments.parallelism_config
    asked = {
        "fsdp=": arguments.fsdp_plugin_args is not None,
        "parallelism_config=": config is not None and config.total_size > 1,
    }
    if arguments.device.type == "xla" and any(asked.values()):
        name = next(name for name, is_asked in asked.items() if is_asked)
        raise UnsupportedOpError(
            f"TrainingArguments({name}...) on the xla device: it is for a process per device. "
            "Shard the model before the Trainer is made, by xd.fully_shard(model, mesh=mesh['dp']) "
            'or from_pretrained(tp_plan="auto"), and leave it out'
        )
    original(*args, **kwargs)
