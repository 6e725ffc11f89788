"""``Trainer(strategy="xla_fully_shard")``: parameters and batches over a mesh of this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from xla_dtensor import runtime

NAME = "xla_fully_shard"
"""In Lightning's registry."""


class FullyShard:
    """The methods; `class_over` makes the class of them.

    A LightningModule has the mesh as ``self.device_mesh``, as under Lightning's own
    ``ModelParallelStrategy``, and its ``configure_model`` may shard by it. If it has sharded
    nothing, the strategy does, by ``fully_shard`` over the mesh's first dim: each element of a
    ``ModuleList``, and each module that is an attribute of the LightningModule. Batches lie in
    parts along that dim, so a loss is the whole batch's, and there is no averaging.

    Args:
        mesh: an xla mesh; by default a line of the devices that ``Trainer(devices=...)`` says, or
            of all if it says none.
        mp_policy: an `xd.MixedPrecisionPolicy`, as for `xd.fully_shard`.
    """

    parallel_devices: Any = None  # Lightning sets it to what ``devices=`` says

    def __init__(self, mesh: DeviceMesh | None = None, mp_policy: Any = None) -> None:
        super().__init__(device=torch.device("xla", 0))  # type: ignore[call-arg]
        self.device_mesh = mesh
        self._policy = mp_policy

    def setup_environment(self) -> None:
        """Make the mesh, which a LightningModule has from then on."""
        super().setup_environment()  # type: ignore[misc]
        if self.device_mesh is None:
            runtime.start()
            said = len(self.parallel_devices or ())
            count = said if said > 1 else runtime.device_count()
            self.device_mesh = init_device_mesh("xla", (count,), mesh_dim_names=("data_parallel",))
        module: Any = self.lightning_module  # type: ignore[attr-defined]
        module._device_mesh = self.device_mesh

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from xla_dtensor.parallel import fully_shard

        mesh: Any = self.device_mesh
        options: dict[str, Any] = {"mesh": mesh[mesh.mesh_dim_names[0]] if mesh.ndim > 1 else mesh}
        if self._policy is not None:
            options["mp_policy"] = self._policy
        if not any(hasattr(parameter, "placements") for parameter in model.parameters()):
            for module in _units(model.children()):
                fully_shard(module, **options)
        return model

    def teardown(self) -> None:
        """End, and leave the model sharded: on the CPU, where Lightning puts it after each call, it
        would be whole, and its next call would begin with that."""
        for part in (self.precision_plugin, self.accelerator, self.checkpoint_io):  # type: ignore[attr-defined]
            part.teardown()

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """A batch whose tensors lie in parts along their first dim."""
        from lightning_utilities.core.apply_func import apply_to_collection

        moved = super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        return apply_to_collection(moved, torch.Tensor, self._in_parts)

    def _in_parts(self, tensor: Any) -> Any:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh: Any = self.device_mesh
        if not tensor.ndim or tensor.device.type != "xla" or hasattr(tensor, "placements"):
            return tensor
        return distribute_tensor(tensor, mesh, [Shard(0), *[Replicate()] * (mesh.ndim - 1)])


def _units(modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """What is gathered at a time, from the inside out."""
    for module in modules:
        lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
        for each in reversed(lists):
            yield from (unit for unit in each if _has_parameters(unit) and _is_called(unit))
        if _has_parameters(module) and _is_called(module):
            yield module


def _has_parameters(module: nn.Module) -> bool:
    return next(iter(module.parameters()), None) is not None


def _is_called(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def class_over(base: type) -> type:
    """The class for one of Lightning's packages.

    Args:
        base: its ``SingleDeviceStrategy``, which takes this process to be the only one.
    """
    named = {"__module__": __name__, "strategy_name": NAME, "__doc__": FullyShard.__doc__}
    return type("FullyShardStrategy", (FullyShard, base), named)


def fully_shard_strategy(mesh: DeviceMesh | None = None, mp_policy: Any = None) -> Any:
    """``strategy="xla_fully_shard"`` with arguments, for ``lightning.pytorch``, or for
    ``pytorch_lightning`` where that is what is imported.

    Args:
        mesh: an xla mesh, over whose first dim batches and parameters are sharded; by default a
            line of the devices that ``Trainer(devices=...)`` says, or of all if it says none.
        mp_policy: an `xd.MixedPrecisionPolicy`, as for `xd.fully_shard`.

    Returns:
        a strategy, for one Trainer.

    Example::

        import xla_dtensor as xd
        from xla_dtensor.ecosystem.lightning import fully_shard_strategy

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        trainer = lightning.Trainer(accelerator="xla", strategy=fully_shard_strategy(mesh))
    """
    plain = "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules
    package = "pytorch_lightning" if plain else "lightning.pytorch"
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    made: Any = registry[NAME]["strategy"]
    return made(mesh, mp_policy)
