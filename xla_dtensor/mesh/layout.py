"""`Layout`: how a tensor is laid out over a mesh, as one immutable value.

The same fact has three notations, and programs written for other systems use each of them: torch's
placements (one per mesh dim), alias names (the mesh dims that shard each tensor dim, by name;
MindSpore's and HyperParallel's), and ``dims_mapping`` (the same by number; Paddle's). A `Layout` is
made from any of them, and from JAX's ``PartitionSpec``, and gives all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from xla_dtensor.errors import MeshDimError, PlacementError
from xla_dtensor.mesh.dim_names import NONE, has_placements, name_of, names_of
from xla_dtensor.mesh.placements import (
    REDUCE_OPS,
    dim_mesh_dims,
    from_partition_spec,
    normalize_placements,
    placements_of,
    to_partition_spec,
)

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


class Layout:
    """How a tensor is laid out over a mesh.

    ``Layout((2, 4), ("dp", "tp"))`` is *empty*: it has a mesh and says nothing of a tensor yet.
    Calling it makes a *concrete* one:

        layout = Layout((2, 4), ("dp", "tp"))
        layout("dp", "None")                # per tensor dim the mesh dims that shard it, by name
        layout("None", ("tp", "dp"))        # two of them: tp cuts first
        layout(Shard(0), Replicate())       # per mesh dim, torch's placements
        Layout.from_dims_mapping(mesh, [0, -1])

    A layout made from placements alone fits a tensor of any rank (``ndim`` is None); what counts
    tensor dims then raises. Layouts are equal if their meshes, placements and ranks are.

    Args:
        mesh_shape: the number of devices along each mesh dim.
        mesh_dim_names: the name of each mesh dim.
        devices: positions in ``jax.devices()``, row-major; the first ones by default.

    Raises:
        MeshError: not as many names as mesh dims, or not enough devices.
    """

    __slots__ = ("_mesh", "_ndim", "_placements")

    _mesh: DeviceMesh
    _placements: tuple[Placement, ...] | None
    _ndim: int | None

    def __init__(
        self,
        mesh_shape: Sequence[int],
        mesh_dim_names: Sequence[str],
        devices: Sequence[int] | None = None,
    ) -> None:
        names = tuple(mesh_dim_names)
        if devices is None:
            mesh = init_device_mesh("xla", tuple(mesh_shape), mesh_dim_names=names)
        else:
            numbers = torch.tensor(list(devices)).reshape(tuple(mesh_shape))
            mesh = DeviceMesh("xla", numbers, mesh_dim_names=names)
        self._set(mesh, None, None)

    def _set(
        self, mesh: DeviceMesh, placements: tuple[Placement, ...] | None, ndim: int | None
    ) -> None:
        object.__setattr__(self, "_mesh", mesh)
        object.__setattr__(self, "_placements", placements)
        object.__setattr__(self, "_ndim", ndim)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Layout is immutable: {name!r} can't be set")

    @classmethod
    def _make(
        cls, mesh: DeviceMesh, placements: tuple[Placement, ...] | None, ndim: int | None
    ) -> Layout:
        layout = cls.__new__(cls)
        layout._set(mesh, placements, ndim)
        return layout

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> Layout:
        """The empty layout over ``mesh``."""
        return cls._make(mesh, None, None)

    @classmethod
    def from_placements(
        cls, mesh: DeviceMesh, placements: Sequence[Placement], ndim: int | None = None
    ) -> Layout:
        """The layout that ``placements`` are of a tensor of ``ndim`` dims (of any rank if None).

        Raises:
            PlacementError: they don't fit the mesh or the rank.
        """
        placements = tuple(placements)
        highest = max((getattr(p, "dim", -1) for p in placements), default=-1)
        rank = highest + 1 if ndim is None else ndim
        return cls._make(mesh, normalize_placements(placements, mesh, rank, "Layout"), ndim)

    @classmethod
    def from_dims_mapping(
        cls, mesh: DeviceMesh, dims_mapping: Sequence[int | Sequence[int]]
    ) -> Layout:
        """The layout with tensor dim ``i`` sharded by mesh dim ``dims_mapping[i]``: by none if it
        is -1, by several if it is a list, the first one cutting first.

        Raises:
            PlacementError: a mesh dim doesn't exist or is used twice.
        """
        orders = [
            (() if entry == -1 else (entry,)) if isinstance(entry, int) else tuple(entry)
            for entry in dims_mapping
        ]
        return cls._of_orders(mesh, orders, f"dims_mapping {list(dims_mapping)}")

    @classmethod
    def from_partition_spec(
        cls, mesh: DeviceMesh, spec: PartitionSpec, ndim: int | None = None
    ) -> Layout:
        """The layout that JAX's ``spec`` is of a tensor of ``ndim`` dims (as many as it has
        entries if None).

        Raises:
            PlacementError: ``spec`` names what is no whole mesh dim, or uses one twice.
        """
        ndim = len(tuple(spec)) if ndim is None else ndim
        return cls._make(mesh, from_partition_spec(spec, mesh, ndim), ndim)

    @classmethod
    def _of_orders(cls, mesh: DeviceMesh, orders: Sequence[Sequence[int]], what: str) -> Layout:
        used: dict[int, int] = {}
        for dim, order in enumerate(orders):
            for mesh_dim in order:
                if not 0 <= mesh_dim < mesh.ndim:
                    raise PlacementError(
                        f"Layout: {what}: {mesh!r} has no mesh dim {mesh_dim}; -1 is for a tensor "
                        "dim that isn't sharded"
                    )
                if mesh_dim in used:
                    raise PlacementError(
                        f"Layout: {what} uses mesh dim {name_of(mesh, mesh_dim)!r} of {mesh!r} for "
                        f"tensor dim {used[mesh_dim]} and again for tensor dim {dim}; a mesh dim "
                        "shards one tensor dim"
                    )
                used[mesh_dim] = dim
        return cls._make(mesh, placements_of(orders, tuple(mesh.shape)), len(orders))

    def __call__(self, *dims: Any, ndim: int | None = None) -> Layout:
        """A concrete layout over this one's mesh.

        Args:
            dims: either, per *tensor* dim, the names of the mesh dims that shard it (``"None"`` or
                None: none; a tuple: several), or, per *mesh* dim, its placement.
            ndim: with placements, the number of tensor dims.

        Raises:
            MeshDimError: the mesh has no dim of that name.
            PlacementError: a mesh dim is used twice, or placements don't fit the mesh.
        """
        if len(dims) == 1 and isinstance(dims[0], list | tuple) and has_placements(dims[0]):
            dims = tuple(dims[0])
        if has_placements(dims):
            return Layout.from_placements(self._mesh, dims, ndim)
        if ndim is not None and ndim != len(dims):
            raise PlacementError(f"Layout: {len(dims)} alias names for a tensor of {ndim} dims")
        orders = [tuple(self._mesh_dim(name) for name in names_of(entry)) for entry in dims]
        return self._of_orders(self._mesh, orders, f"alias names {dims}")

    def with_partial(self, mesh_dim: str | int, reduce_op: str = "sum") -> Layout:
        """This layout with the value pending a reduction over ``mesh_dim``: each device along it
        holds a part.

        Raises:
            PlacementError: the mesh dim shards a tensor dim, or torch has no such reduction.
        """
        placements = list(self._concrete("with_partial"))
        index = self._mesh_dim(mesh_dim)
        if not isinstance(placements[index], Replicate | Partial):
            raise PlacementError(
                f"{self!r}.with_partial({mesh_dim!r}): that mesh dim shards the tensor already "
                f"({placements[index]!r}); a mesh dim does one or the other"
            )
        if reduce_op not in REDUCE_OPS:
            raise PlacementError(
                f"{self!r}.with_partial({mesh_dim!r}, {reduce_op!r}): the reductions are "
                f"{', '.join(REDUCE_OPS)}"
            )
        placements[index] = Partial(reduce_op)
        return Layout.from_placements(self._mesh, placements, self._ndim)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that it is over."""
        return self._mesh

    @property
    def ndim(self) -> int | None:
        """The number of tensor dims; None where only placements are known."""
        return self._ndim

    @property
    def is_concrete(self) -> bool:
        """Whether it says how a tensor is laid out, and not only over which mesh."""
        return self._placements is not None

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Per mesh dim, torch's placement."""
        return self._concrete("placements")

    @property
    def dims_mapping(self) -> list[int | list[int]]:
        """Per tensor dim: -1, the mesh dim that shards it, or the list of them, major first."""
        return [
            -1 if not order else order[0] if len(order) == 1 else list(order)
            for order in self._orders("dims_mapping")
        ]

    @property
    def alias_tensor_map(self) -> tuple[str | tuple[str, ...], ...]:
        """Per tensor dim: ``"None"``, the name of the mesh dim that shards it, or a tuple of
        names, major first."""
        named = (
            tuple(name_of(self._mesh, m) for m in order)
            for order in self._orders("alias_tensor_map")
        )
        return tuple(NONE if not n else n[0] if len(n) == 1 else n for n in named)

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """`dims_mapping` with mesh dims counted from the last, which is 0 (MindSpore's numbers)."""
        last = self._mesh.ndim - 1
        counted = (tuple(last - m for m in order) for order in self._orders("tensor_map"))
        return tuple(-1 if not n else n[0] if len(n) == 1 else n for n in counted)

    @property
    def partial(self) -> tuple[str | None, ...]:
        """Per mesh dim the reduction that is pending over it, or None."""
        return tuple(
            p.reduce_op if isinstance(p, Partial) else None for p in self._concrete("partial")
        )

    def is_partial(self) -> bool:
        """Whether a reduction is pending over any mesh dim."""
        return any(isinstance(p, Partial) for p in self._concrete("is_partial()"))

    @property
    def partition_spec(self) -> PartitionSpec:
        """JAX's ``PartitionSpec`` over the axes of the root mesh; reductions aren't in it."""
        return to_partition_spec(self.placements, self._mesh, self._rank("partition_spec"))

    def local_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what each device holds of a tensor of ``global_shape``.

        Raises:
            PlacementError: another rank, or a dim that doesn't divide: then devices hold tensors
                of several shapes.
        """
        pieces = self._pieces(global_shape, "local_shape")
        for dim, (size, count) in enumerate(zip(global_shape, pieces, strict=True)):
            if size % count:
                raise PlacementError(
                    f"{self!r}.local_shape({tuple(global_shape)}): dim {dim} of size {size} "
                    f"doesn't divide by {count}, so devices would hold several shapes; pad it"
                )
        return tuple(size // count for size, count in zip(global_shape, pieces, strict=True))

    def global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor of which each device holds ``local_shape``.

        Raises:
            PlacementError: another rank.
        """
        pieces = self._pieces(local_shape, "global_shape")
        return tuple(size * count for size, count in zip(local_shape, pieces, strict=True))

    def _pieces(self, shape: Sequence[int], what: str) -> list[int]:
        """Per dim of ``shape`` the number of pieces."""
        placements = self._concrete(what)
        if self._ndim is not None and len(shape) != self._ndim:
            raise PlacementError(
                f"{self!r}.{what}({tuple(shape)}): the layout is of a tensor of {self._ndim} dims"
            )
        mesh_shape = tuple(self._mesh.shape)
        try:
            orders = dim_mesh_dims(placements, mesh_shape, len(shape))
        except IndexError:
            raise PlacementError(
                f"{self!r}.{what}({tuple(shape)}): it shards a dim that the tensor doesn't have"
            ) from None
        return [math.prod(mesh_shape[m] for m in order) for order in orders]

    def _concrete(self, what: str) -> tuple[Placement, ...]:
        if self._placements is None:
            raise PlacementError(
                f"{self!r} has a mesh alone and no {what}; call it with alias names or placements: "
                'layout("dp", "None")'
            )
        return self._placements

    def _rank(self, what: str) -> int:
        self._concrete(what)
        if self._ndim is None:
            raise PlacementError(
                f"{self!r} was made of placements, so the number of tensor dims that {what} needs "
                "is unknown; give it: layout(*placements, ndim=2)"
            )
        return self._ndim

    def _orders(self, what: str) -> tuple[tuple[int, ...], ...]:
        ndim = self._rank(what)
        return dim_mesh_dims(self.placements, tuple(self._mesh.shape), ndim)

    def _mesh_dim(self, name: str | int) -> int:
        names = self._mesh.mesh_dim_names or ()
        if isinstance(name, int) and -self._mesh.ndim <= name < self._mesh.ndim:
            return name % self._mesh.ndim
        if name not in names:
            raise MeshDimError(
                f"Layout: {self._mesh!r} has no mesh dim {name!r}; its dims are "
                f"{names or 'unnamed'}"
            )
        return names.index(name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return (self._placements, self._ndim) == (other._placements, other._ndim) and (
            self._mesh == other._mesh
        )

    def __hash__(self) -> int:
        return hash((self._mesh, self._placements, self._ndim))

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name_of(self._mesh, m)}={size}" for m, size in enumerate(self._mesh.shape)
        )
        if self._placements is None:
            return f"Layout({sizes})"
        if self._ndim is None:
            return f"Layout({sizes}; {', '.join(map(str, self._placements))})"
        tensor = ", ".join(
            name if isinstance(name, str) else f"({', '.join(name)})"
            for name in self.alias_tensor_map
        )
        pending = "".join(
            f"; {op} over {name_of(self._mesh, m)}"
            for m, op in enumerate(self.partial)
            if op is not None
        )
        return f"Layout({sizes}; [{tensor}]{pending})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout._make, (self._mesh, self._placements, self._ndim)


@functools.lru_cache(maxsize=4096)
def layout_of(mesh: DeviceMesh, placements: tuple[Placement, ...], ndim: int) -> Layout:
    """The layout of a tensor whose placements are known to be valid."""
    return Layout._make(mesh, placements, ndim)
