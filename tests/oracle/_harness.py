"""`Oracle`: what a scenario needs, in two forms.

`TorchrunOracle` is one rank of a ``torchrun`` launch, on a ``cpu`` mesh with gloo: torch's own
DTensor, which gives the expected values. `XLAOracle` drives all devices of an ``xla`` mesh from one
process. A scenario is a module with ``WORLD_SIZE`` and ``main(oracle)``; it uses torch's API alone,
and from its oracle only what has to differ between the two.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tests.oracle._entries import Dump, Entry, Pending


class Oracle(ABC):
    """The mesh, the inputs and the dumps of one run of a scenario.

    Attributes:
        device: ``"cpu"`` or ``"xla"``; what ``init_device_mesh`` and ``.to()`` take.
        world_size: number of devices; the scenario's ``WORLD_SIZE``.
    """

    device: str

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._mesh: DeviceMesh | None = None

    def mesh(self, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
        """The scenario's root mesh, over all its devices; made once, before any input."""
        self._mesh = _mesh(self.device, tuple(shape), tuple(names))
        return self._mesh

    # Inputs: functions of their name and of the coordinate along the mesh dims they vary along.

    def full(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        high: int | None = None,
    ) -> torch.Tensor:
        """A CPU tensor, the same on every rank: normal, or integers below ``high``."""
        return _random(name, shape, dtype, high)

    def sharded(
        self,
        name: str,
        shape: Sequence[int],
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        requires_grad: bool = False,
    ) -> DTensor:
        """``distribute_tensor`` of `full`, a leaf."""
        return distribute_tensor(self.full(name, shape), mesh, placements).requires_grad_(
            requires_grad
        )

    def local(
        self,
        name: str,
        shape: Sequence[int],
        vary: Sequence[str] = (),
        *,
        dtype: torch.dtype = torch.float32,
        high: int | None = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """A leaf local tensor whose value differs along the mesh dims ``vary`` of the root mesh."""

        def value(coordinate: tuple[int, ...]) -> torch.Tensor:
            return _random(f"{name}{coordinate if vary else ''}", shape, dtype, high)

        return self._per_device(value, vary).requires_grad_(requires_grad)

    def axis_index(self, dim: str) -> torch.Tensor:
        """The device's coordinate along a mesh dim, as a local 0-d int64 tensor."""
        return self._per_device(lambda coordinate: torch.tensor(coordinate[0]), (dim,))

    def module(self, make: Callable[[], nn.Module]) -> Any:
        """``make()`` with the same initial parameters on every rank, on the oracle's device."""
        torch.manual_seed(0)
        return make().to(self.device)

    @abstractmethod
    def _per_device(
        self, value: Callable[[tuple[int, ...]], torch.Tensor], vary: Sequence[str]
    ) -> torch.Tensor:
        """``value`` of the device's coordinate along the mesh dims ``vary``, as a local tensor."""

    # What torch and xla_dtensor name differently.

    @property
    @abstractmethod
    def fully_shard(self) -> Callable[..., Any]:
        """``torch.distributed.fsdp.fully_shard``, or ``xla_dtensor``'s."""

    @property
    @abstractmethod
    def replicate(self) -> Callable[..., Any]:
        """``torch.distributed._composable.replicate`` (DDP; takes ``device_mesh=``), or
        ``xla_dtensor``'s."""

    # Dumps.

    def dump(
        self,
        name: str,
        tensor: torch.Tensor | None,
        *,
        layout: bool = True,
        strides: bool = False,
        pending: tuple[str, Sequence[str]] | None = None,
    ) -> None:
        """Record a tensor of either view under a name.

        Args:
            layout: False compares the (full) value alone, whichever view it is of.
            strides: compare the strides, too.
            pending: for a local tensor that is unreduced: the operation (``sum``, ``avg``, ``max``,
                ``min``) and the mesh dims; the reduced values are compared.
        """
        mesh_shape = tuple(self._root.shape)
        if tensor is None:
            return self._record(name, [{"kind": "none"}] * len(self._dumps))
        fields: dict[str, Any] = {
            "kind": "local",
            "mesh_shape": mesh_shape,
            "shape": tuple(tensor.shape),
            "dtype": tensor.dtype,
            "requires_grad": tensor.requires_grad,
            "stride": tuple(tensor.stride()) if strides else None,
        }
        values: dict[str, list[torch.Tensor]] = {}
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            partial = any(isinstance(p, Partial) for p in tensor.placements)
            fields["kind"] = "partial" if partial else "sharded"
            fields["placements"] = str(tuple(tensor.placements))
            values["full"] = self._local_values(tensor.full_tensor())
            if not partial:
                values["local"] = self._shards(tensor)
        else:
            values["local"] = self._local_values(tensor)
            if pending is not None:
                names = self._root.mesh_dim_names
                assert names is not None
                op, dims = pending
                fields |= {
                    "kind": "partial",
                    "pending": Pending(op, tuple(names.index(d) for d in dims)),
                }
        if not layout:
            values = {"full": values.get("full", values.get("local", []))}
            fields = {"kind": "value", "mesh_shape": mesh_shape}
        self._record(
            name,
            [
                fields | {key: value[i] for key, value in values.items()}
                for i in range(len(self._dumps))
            ],
        )
        return None

    def dump_grad(self, name: str, leaf: torch.Tensor, *, layout: bool = True) -> None:
        """Record a leaf's gradient.

        The gradient of a DTensor is recorded in its leaf's layout, ``Partial`` mesh dims
        replicated. xla_dtensor lands gradients there; torch's may be ``Partial`` or replicated
        where the leaf isn't, which means the same.
        """
        grad = leaf.grad
        if isinstance(grad, DTensor):
            assert isinstance(leaf, DTensor)
            landing = [Replicate() if isinstance(p, Partial) else p for p in leaf.placements]
            grad = grad.redistribute(placements=landing)
        self.dump(name, grad, layout=layout)

    def dump_step(
        self,
        name: str,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        layout: bool = True,
    ) -> None:
        """Record a module's gradients, take an optimizer step, record the new parameters."""
        for key, parameter in module.named_parameters():
            self.dump_grad(f"{name}.grad.{key}", parameter, layout=layout)
        optimizer.step()
        optimizer.zero_grad()
        for key, parameter in module.named_parameters():
            self.dump(f"{name}.updated.{key}", parameter, layout=layout)

    @property
    def _root(self) -> DeviceMesh:
        assert self._mesh is not None, "call oracle.mesh() first"
        return self._mesh

    @property
    @abstractmethod
    def _dumps(self) -> list[Dump]:
        """The dumps that this process makes: one rank's, or all."""

    @abstractmethod
    def _local_values(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The values of a local tensor, as CPU tensors: one for each of `_dumps`."""

    @abstractmethod
    def _shards(self, tensor: DTensor) -> list[torch.Tensor]:
        """Likewise, what the ranks hold of a DTensor."""

    def _record(self, name: str, fields: Sequence[dict[str, Any]]) -> None:
        for dump, own in zip(self._dumps, fields, strict=True):
            assert name not in dump, f"{name!r} was dumped before"
            dump[name] = Entry(**own)


class TorchrunOracle(Oracle):
    """One rank of a ``torchrun`` launch: ``cpu`` mesh, gloo."""

    device = "cpu"

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.own: Dump = {}

    @property
    def _dumps(self) -> list[Dump]:
        return [self.own]

    def _per_device(
        self, value: Callable[[tuple[int, ...]], torch.Tensor], vary: Sequence[str]
    ) -> torch.Tensor:
        coordinate = self._root.get_coordinate()
        names = self._root.mesh_dim_names
        assert coordinate is not None and names is not None
        return value(tuple(coordinate[names.index(dim)] for dim in vary))

    @property
    def fully_shard(self) -> Callable[..., Any]:
        from torch.distributed.fsdp import fully_shard

        return fully_shard

    @property
    def replicate(self) -> Callable[..., Any]:
        from torch.distributed._composable import replicate

        return replicate

    def _local_values(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        return [tensor.detach().clone(memory_format=torch.contiguous_format)]

    def _shards(self, tensor: DTensor) -> list[torch.Tensor]:
        return self._local_values(tensor.to_local())


def own_ranks(world_size: int) -> range:
    """The devices of this process, of so many in all processes."""
    import xla_dtensor

    count = world_size // xla_dtensor.distributed.process_count()
    first = xla_dtensor.distributed.process_index() * count
    return range(first, first + count)


class XLAOracle(Oracle):
    """All of this process's devices of an ``xla`` mesh. Rank r is the mesh's r-th device,
    row-major: the numbering that ``init_device_mesh`` gives ranks."""

    device = "xla"

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.all: list[Dump] = [{} for _ in own_ranks(world_size)]

    @property
    def _dumps(self) -> list[Dump]:
        return self.all

    def _per_device(
        self, value: Callable[[tuple[int, ...]], torch.Tensor], vary: Sequence[str]
    ) -> torch.Tensor:
        return _per_device_xla(value, self._root, vary)

    @property
    def fully_shard(self) -> Callable[..., Any]:
        import xla_dtensor

        return xla_dtensor.fully_shard

    @property
    def replicate(self) -> Callable[..., Any]:
        import xla_dtensor

        return xla_dtensor.replicate

    def _local_values(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        import xla_dtensor

        if isinstance(tensor, xla_dtensor.XLATensor):
            values = tensor.local_values()
        else:
            values = [tensor.cpu()]
        if len(values) == 1:  # the same on every device
            values = values * len(self.all)
        assert len(values) == len(self.all)
        return values

    def _shards(self, tensor: DTensor) -> list[torch.Tensor]:
        # Not to_local(), which an unevenly sharded tensor doesn't have.
        return [shard.data for shard in tensor.local_shards]


def _per_device_xla(
    value: Callable[[tuple[int, ...]], torch.Tensor], mesh: DeviceMesh, vary: Sequence[str]
) -> torch.Tensor:
    """THE place where a per-device tensor is built from the devices' values.

    ``xla_dtensor.from_device_values(values, mesh, vary)`` takes one CPU tensor per device of the
    mesh that this process drives, in row-major order, and the names of the mesh dims along which
    they differ (along the others the values given are equal).
    """
    import xla_dtensor

    names = mesh.mesh_dim_names
    assert names is not None
    positions = [names.index(dim) for dim in vary]
    coordinates = list(itertools.product(*map(range, mesh.shape)))
    coordinates = [coordinates[rank] for rank in own_ranks(mesh.size())]
    values = [value(tuple(c[i] for i in positions)) for c in coordinates]
    return xla_dtensor.from_device_values(values, mesh, tuple(vary))


@functools.cache
def _mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    # Kept: each cpu mesh makes process groups, and a launch runs many scenarios.
    return init_device_mesh(device, shape, mesh_dim_names=names)


def _random(name: str, shape: Sequence[int], dtype: torch.dtype, high: int | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if high is not None:
        return torch.randint(high, tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator, dtype=dtype)


def scenario_names() -> list[str]:
    """The scenarios: the modules of ``tests.oracle.scenarios``."""
    from tests.oracle import scenarios

    return sorted(m.name for m in pkgutil.iter_modules(scenarios.__path__) if m.name[0] != "_")


def scenario(name: str) -> ModuleType:
    """The module of a scenario."""
    return importlib.import_module(f"tests.oracle.scenarios.{name}")


def run_rank(main: Callable[[Oracle], None]) -> Dump:
    """One rank's dump of a scenario; in a process of ``torchrun``, its process group started."""
    oracle = TorchrunOracle(dist.get_world_size())
    _run(main, oracle)
    return oracle.own


def run_xla(main: Callable[[Oracle], None], world_size: int) -> list[Dump]:
    """The dumps of a scenario of this process's devices: every rank's, where it is alone."""
    import xla_dtensor  # noqa: F401  (the device; torchrun's ranks have to do without)

    oracle = XLAOracle(world_size)
    _run(main, oracle)
    return oracle.all


def _run(main: Callable[[Oracle], None], oracle: Oracle) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # torch 2.13 renames all_gather_tensor and its kin; 2.11 has the old names only.
        warnings.filterwarnings("ignore", ".*_functional_collectives.*is deprecated", FutureWarning)
        main(oracle)
