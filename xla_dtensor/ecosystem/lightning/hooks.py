"""Registers the accelerator and the strategy with Lightning, and patches its checks of devices."""

from __future__ import annotations

import functools
from typing import Any

import torch

from xla_dtensor import runtime
from xla_dtensor.ecosystem.device_choice import device_for
from xla_dtensor.ecosystem.lightning import accelerator, host_copy, strategy
from xla_dtensor.ecosystem.lightning.accelerator import XlaAccelerator
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over

# The packages of the Trainer and of Fabric: of Lightning as a whole, and each by itself.
_PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))


def install() -> None:
    """When its modules are imported."""
    for trainer, fabric in _PACKAGES:
        on_import(f"{trainer}.accelerators", _register_accelerator)
        on_import(f"{trainer}.strategies", _register_strategy)
        on_import(
            f"{trainer}.trainer.connectors.accelerator_connector",
            lambda module: _hook_connector(module, module._AcceleratorConnector),
        )
        on_import(f"{fabric}.accelerators", _register_accelerator)
        on_import(f"{fabric}.connector", lambda module: _hook_connector(module, module._Connector))
        on_import(f"{fabric}.utilities.cloud_io", _hook_files)
        on_import(f"{fabric}.utilities.seed", _hook_seed)


def _register_accelerator(module: Any) -> None:
    registry = getattr(module, "AcceleratorRegistry", None)
    if registry is None:
        registry = module.ACCELERATOR_REGISTRY
    made = accelerator.class_over(module.Accelerator)
    registry.register("xla", made, description="all devices of xla_dtensor")


def _register_strategy(module: Any) -> None:
    made = strategy.class_over(module.SingleDeviceStrategy)
    module.StrategyRegistry.register(strategy.NAME, made, description="xd.fully_shard on a mesh")


def _hook_connector(module: Any, connector: Any) -> None:
    take_over(connector._choose_auto_accelerator, _choose)
    take_over(connector._choose_strategy, functools.partial(_choose_strategy, module))
    take_over(connector._check_strategy_and_fallback, functools.partial(_check, module))
    take_over(connector._check_and_init_precision, functools.partial(_precision, module))


def _choose(original: Any, args: Any, kwargs: Any) -> str:
    found = original(*args, **kwargs)
    # Of others it matters that they are none of the CPU.
    device = device_for(torch.device("cpu" if found == "cpu" else "cuda"))
    return "xla" if device.type == "xla" else found


def _choose_strategy(module: Any, original: Any, args: Any, kwargs: Any) -> Any:
    connector = args[0]
    if not isinstance(connector.accelerator, XlaAccelerator):
        return original(*args, **kwargs)
    devices, nodes = len(connector._parallel_devices), connector._num_nodes_flag
    if devices > 1 or nodes > 1:
        raise UnsupportedOpError(
            f"Lightning with accelerator 'xla', devices={devices}, num_nodes={nodes} and no "
            f"strategy, which would be a process for each: Trainer(strategy={strategy.NAME!r}) "
            "shards over the devices of this process"
        )
    return module.SingleDeviceStrategy(device=torch.device("xla", 0))


def _check(module: Any, original: Any, args: Any, kwargs: Any) -> None:
    connector = args[0]
    asked = connector._strategy_flag
    if isinstance(connector.accelerator, XlaAccelerator):
        known = (module.SingleDeviceStrategy, strategy.FullyShard)
        if asked != strategy.NAME and not isinstance(asked, known):
            raise UnsupportedOpError(
                f"Lightning's strategy {asked!r} with accelerator 'xla': it is for a process per "
                f"device. Leave it out, or give {strategy.NAME!r}"
            )
    elif asked == strategy.NAME or isinstance(asked, strategy.FullyShard):
        raise UnsupportedOpError(
            f"Lightning's strategy {strategy.NAME!r} is for accelerator='xla', not for "
            f"{type(connector.accelerator).__name__}"
        )
    original(*args, **kwargs)


def _precision(module: Any, original: Any, args: Any, kwargs: Any) -> Any:
    """Mixed precision has a device, which Lightning takes to be CUDA's."""
    connector = args[0]
    asked = getattr(connector, "_precision_flag", None) or connector._precision_input
    given = getattr(connector, "_precision_plugin_flag", None) or getattr(
        connector, "_precision_instance", None
    )
    mixed = asked in ("16-mixed", "bf16-mixed") and given is None
    if not mixed or not isinstance(connector.accelerator, XlaAccelerator):
        return original(*args, **kwargs)
    return module.MixedPrecision(asked, "xla")


def _hook_files(module: Any) -> None:
    def written(original: Any, args: Any, kwargs: Any) -> Any:
        checkpoint, *others = args
        return original(host_copy.on_host(checkpoint), *others, **kwargs)

    take_over(module._atomic_save, written)


def _hook_seed(module: Any) -> None:
    """What runs in ``isolate_rng``, as the validation before training, takes no numbers from what
    comes after it."""

    def collected(original: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        states = original(*args, **kwargs)
        if runtime.is_started():
            states["torch.xla"] = torch.xla.get_rng_state()
        return states

    def restored(original: Any, args: Any, kwargs: Any) -> None:
        original(*args, **kwargs)
        state = args[0].get("torch.xla")
        if state is not None:
            torch.xla.set_rng_state(state)

    take_over(module._collect_rng_states, collected)
    take_over(module._set_rng_states, restored)
