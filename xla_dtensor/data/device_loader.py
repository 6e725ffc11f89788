"""`device_loader`: batches of any loader as sharded tensors, placed before they are asked for.

There is no thread. JAX copies to devices in the background, so it is enough to ask for the next
batches' copies before a batch is handed out; the loader's own workers prepare them meanwhile. So
random numbers, exceptions and interrupts come where they would without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.errors import PlacementError
from xla_dtensor.mesh import get_mesh
from xla_dtensor.movement.factories import distribute_tensor
from xla_dtensor.tensors.sharded_tensor import DTENSORS

Placements = Sequence[Placement]


def device_loader(
    loader: Iterable[Any],
    mesh: DeviceMesh | None = None,
    placements: Any = None,
    *,
    prefetch: int = 2,
) -> DeviceLoader:
    """The batches of a loader, as sharded tensors.

    Args:
        loader: of batches: a ``DataLoader``, or anything to iterate over. A batch is a tensor, or
            tuples, lists and dicts of tensors, each the global batch on the CPU; what else is in
            it stays as it is.
        mesh: an xla mesh; by default the current one (`set_mesh`).
        placements: one placement per mesh dim, for all tensors; or such lists in the tuples, lists
            and dicts of a batch, where a list stands for all below it and None for the default. By
            default dim 0 is sharded over the first mesh dim, and tensors without dims are
            replicated.
        prefetch: how many batches are on their way while one is used. They take memory on the
            devices, and have been taken from ``loader`` when the loop ends early; 0 for none.

    Returns:
        something to iterate over, as often as over ``loader``, with its length.

    Raises:
        ValueError: ``prefetch`` is negative.
        PlacementError: ``placements`` don't fit a batch (when it is placed).

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.arange(12))
        batches = torch.utils.data.DataLoader(data, batch_size=4)
        for x, y in xd.data.device_loader(batches, mesh):
            assert x.placements == (xd.Shard(0), xd.Replicate()) and y.shape == (4,)
    """
    if prefetch < 0:
        raise ValueError(f"device_loader(prefetch={prefetch}): give a number of batches, or 0")
    return DeviceLoader(loader, mesh or get_mesh(), placements, prefetch)


class DeviceLoader:
    """What `device_loader` returns.

    Attributes:
        loader, mesh, placements, prefetch: as given there.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        placed = xd.data.device_loader([torch.ones(8, 2), torch.zeros(8, 2)], mesh)
        assert len(placed) == 2 and placed.prefetch == 2
        assert [x.sum().item() for x in placed] == [16, 0]
    """

    def __init__(
        self, loader: Iterable[Any], mesh: DeviceMesh, placements: Any, prefetch: int
    ) -> None:
        self.loader, self.mesh = loader, mesh
        self.placements, self.prefetch = placements, prefetch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return placed_ahead(self.loader, self._placed, self.prefetch)

    def _placed(self, batch: Any) -> Any:
        return _map(batch, self.placements, self._place, "a batch")

    def _place(self, tensor: torch.Tensor, placements: Placements | None) -> torch.Tensor:
        if placements is None:
            rest: list[Placement] = [Replicate()] * (self.mesh.ndim - 1)
            placements = [Shard(0) if tensor.ndim else Replicate(), *rest]
        if isinstance(tensor, DTENSORS):
            return tensor.redistribute(self.mesh, placements)
        leaf = tensor if tensor.is_leaf else tensor.detach()
        return distribute_tensor(leaf, self.mesh, placements)


def placed_ahead(
    loader: Iterable[Any], place: Callable[[Any], Any], prefetch: int
) -> Iterator[Any]:
    """``place`` of each batch, ``prefetch`` batches before it is asked for."""
    batches = iter(loader)
    ahead: deque[Any] = deque()
    error: Exception | None = None
    ended = False
    while True:
        while not ended and error is None and len(ahead) <= prefetch:
            try:
                ahead.append(place(next(batches)))
            except StopIteration:
                ended = True
            except Exception as raised:  # when it is this batch's turn
                error = raised
        if ahead:
            yield ahead.popleft()
        elif error is not None:
            raise error
        else:
            return


def _is_one(placements: Any) -> bool:
    """Whether this is one list of placements."""
    return isinstance(placements, list | tuple) and all(
        isinstance(p, Placement) for p in placements
    )


def _map(value: Any, placements: Any, place: Callable[..., Any], where: str) -> Any:
    """``place`` of each tensor in ``value``, with the placements that are at the same place in
    ``placements``, or above it."""
    for_all = placements is None or _is_one(placements)
    if isinstance(value, torch.Tensor):
        if not for_all:
            raise PlacementError(
                f"device_loader: placements {placements!r} are for {where}, which is a tensor: "
                "give a list of placements, one per mesh dim"
            )
        return place(value, placements)
    if isinstance(value, Mapping):
        inner = _inner(placements, for_all, value.keys(), where, "keys")
        items = {key: _map(v, inner[key], place, f"{where}[{key!r}]") for key, v in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        inner = _inner(placements, for_all, range(len(value)), where, "elements")
        found = [_map(v, inner[i], place, f"{where}[{i}]") for i, v in enumerate(value)]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def _inner(placements: Any, for_all: bool, keys: Any, where: str, what: str) -> Any:
    """Per key the placements of what is there."""
    if for_all:
        return dict.fromkeys(keys, placements)
    given: Any = placements
    if isinstance(placements, list | tuple):
        given = dict(enumerate(placements))
    if not isinstance(given, Mapping) or set(given) != set(keys):
        raise PlacementError(
            f"device_loader: placements {placements!r} don't fit {where}, whose {what} are "
            f"{list(keys)}: give as many, or one list of placements for all of it"
        )
    return given
