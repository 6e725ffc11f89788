"""``MpDeviceLoader``: batches of a loader on the devices, sharded as ``input_sharding`` says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compat.torch_xla import runtime
from xla_dtensor.compat.torch_xla.distributed.spmd.marking import ShardingSpec
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.data import shard_batch
from xla_dtensor.data.device_loader import placed_ahead
from xla_dtensor.movement.factories import distribute_tensor


class MpDeviceLoader:
    """The batches of a loader, placed before they are asked for.

    Args:
        loader: of trees of CPU tensors: each the global batch; with ``minibatch`` of the spec each
            process's own part.
        device: the xla device.
        input_sharding: a `ShardingSpec` for the tensors that have its number of dims; a dict of
            them by the batch's keys (None for a value that isn't sharded); or None. What isn't
            sharded is whole on every device.
        device_prefetch_size: how many batches are on their way while one is used.
        kwargs: torch_xla's other settings of threads and sizes; no effect.

    Raises:
        ValueError: (when iterated) a dict for batches that are none, or a spec in a dict that
            doesn't have a tensor's number of dims.
        KeyError: (when iterated) a key of the batch isn't in the dict.
        SpmdError: (when iterated) a ``minibatch`` doesn't divide by the process's devices.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla.distributed.parallel_loader as pl
        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        spec = xs.ShardingSpec(xs.get_1d_mesh("data"), ("data", None))
        for x in pl.MpDeviceLoader([torch.ones(16, 4)], "xla", input_sharding=spec):
            assert x.partition_spec == (0, None)
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Any,
        *,
        input_sharding: ShardingSpec | Mapping[str, ShardingSpec | None] | None = None,
        device_prefetch_size: int = 2,
        **kwargs: Any,
    ) -> None:
        self._loader, self._device = loader, device
        self._input_sharding = input_sharding
        self._prefetch = device_prefetch_size

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return placed_ahead(self._loader, self._placed, self._prefetch)

    def _placed(self, batch: Any) -> Any:
        sharding = self._input_sharding
        if not isinstance(sharding, Mapping):
            return pytree.tree_map(lambda value: _place(value, sharding, strict=False), batch)
        if not isinstance(batch, Mapping):
            raise ValueError(
                "MpDeviceLoader: input_sharding is a dict, so a batch has to be one, too; it is a "
                f"{type(batch).__name__}"
            )
        missing = [key for key in batch if key not in sharding]
        if missing:
            raise KeyError(
                f"MpDeviceLoader: keys are missing from input_sharding: {missing}; give them a "
                "ShardingSpec, or None"
            )
        return {key: _place(value, sharding[key], strict=True) for key, value in batch.items()}


def _place(value: Any, sharding: ShardingSpec | None, *, strict: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if sharding is None or not sharding.can_apply(value):
        if sharding is not None and strict:
            raise ValueError(
                f"MpDeviceLoader: a tensor of shape {list(value.shape)} can't be sharded by "
                f"{sharding.partition_spec}, which has {len(sharding.partition_spec)} dims"
            )
        return value.to("xla")
    if not sharding.minibatch:
        return distribute_tensor(value, sharding.mesh, sharding.placements())
    count = runtime.addressable_runtime_device_count()
    if not value.shape[0] or value.shape[0] % count:
        raise SpmdError(
            "When minibatch is configured, the per-host batch size must be divisible by local "
            f"runtime device count. Per host input data shape {list(value.shape)}, local runtime "
            f"device count {count}"
        )
    return shard_batch(value, sharding.mesh, sharding.placements())


def loader(dataloader: Iterable[Any], device: Any, **kwargs: Any) -> MpDeviceLoader:
    """A `MpDeviceLoader`."""
    return MpDeviceLoader(dataloader, device, **kwargs)
