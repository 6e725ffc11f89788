"""`Layout`: how a tensor is laid out over a mesh, as one immutable value.

The same fact has three notations, and programs written for other systems use each of them: torch's
placements (one per mesh dim), alias names (the mesh dims that shard each tensor dim, by name;
MindSpore's and HyperParallel's), and ``dims_mapping`` (the same by number; Paddle's). A `Layout` is
made from any of them, and from JAX's ``PartitionSpec``, and gives all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from xla_dtensor.errors import PlacementError
from xla_dtensor.mesh.dim_names import alias_of, has_placements, layout_text, mesh_dim_of, names_of
from xla_dtensor.mesh.placements import (
    REDUCE_OPS,
    dim_mesh_dims,
    from_partition_spec,
    normalize_placements,
    of_dims,
    pieces_of,
    to_partition_spec,
)

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


class Layout:
    """How a tensor is laid out over a mesh.

    ``Layout((2, 4), ("dp", "tp"))`` is *empty*: it has a mesh and says nothing of a tensor yet.
    Calling it makes a *concrete* one. A layout made from placements alone fits a tensor of any rank
    (``ndim`` is None); what counts tensor dims then raises. Layouts are immutable, and equal if
    their meshes, placements and ranks are. A concrete one also equals ``torch.strided``: what asks
    a tensor whether it is dense (``x.layout == torch.strided``) gets the answer that it is.

    Args:
        mesh_shape: the number of devices along each mesh dim.
        mesh_dim_names: the name of each mesh dim.
        devices: positions in ``jax.devices()``, row-major; the first ones by default.

    Raises:
        MeshError: not as many names as mesh dims, or not enough devices.

    Example::

        import xla_dtensor as xd

        empty = xd.Layout((2, 4), ("dp", "tp"))
        rows = empty("dp", "None")  # per tensor dim the mesh dims that shard it, by name
        assert rows == empty(xd.Shard(0), xd.Replicate(), ndim=2)  # torch's placements
        assert rows.is_concrete and rows.ndim == 2 and rows.mesh is empty.mesh
        assert rows.placements == (xd.Shard(0), xd.Replicate()) and rows.dims_mapping == [0, -1]
        assert rows.alias_tensor_map == ("dp", "None") and rows.tensor_map == (1, -1)
        assert rows.partial == (None, None) and tuple(rows.partition_spec) == ("dp", None)
        assert empty("None", ("tp", "dp")).dims_mapping == [-1, [1, 0]]  # tp cuts first
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
        """The empty layout over ``mesh``.

        Args:
            mesh: an xla mesh.

        Example::

            import xla_dtensor as xd
            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            assert xd.Layout.from_device_mesh(mesh)("dp").placements[0] == xd.Shard(0)
        """
        return cls._make(mesh, None, None)

    @classmethod
    def from_placements(
        cls, mesh: DeviceMesh, placements: Sequence[Placement], ndim: int | None = None
    ) -> Layout:
        """The layout that torch's placements are.

        Args:
            mesh: an xla mesh.
            placements: one per mesh dim.
            ndim: of the tensor; of any rank if None.

        Raises:
            PlacementError: they don't fit the mesh or the rank.

        Example::

            import xla_dtensor as xd
            mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
            assert xd.Layout.from_placements(mesh, [xd.Shard(1)], 2).dims_mapping == [-1, 0]
        """
        placements = tuple(placements)
        highest = max((getattr(p, "dim", -1) for p in placements), default=-1)
        rank = highest + 1 if ndim is None else ndim
        return cls._make(mesh, normalize_placements(placements, mesh, rank, "Layout"), ndim)

    @classmethod
    def from_dims_mapping(
        cls, mesh: DeviceMesh, dims_mapping: Sequence[int | Sequence[int]]
    ) -> Layout:
        """The layout of a tensor by the numbers of the mesh dims that shard its dims.

        Args:
            mesh: an xla mesh.
            dims_mapping: per tensor dim a mesh dim, -1 for none, or a list, major first.

        Raises:
            PlacementError: a mesh dim doesn't exist or is used twice.

        Example::

            import xla_dtensor as xd
            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            assert xd.Layout.from_dims_mapping(mesh, [1, -1]).placements[1] == xd.Shard(0)
        """
        orders = [
            (() if entry == -1 else (entry,)) if isinstance(entry, int) else tuple(entry)
            for entry in dims_mapping
        ]
        what = f"dims_mapping {list(dims_mapping)}"
        return cls._make(mesh, of_dims(orders, mesh, what), len(orders))

    @classmethod
    def from_partition_spec(
        cls, mesh: DeviceMesh, spec: PartitionSpec, ndim: int | None = None
    ) -> Layout:
        """The layout that JAX's ``PartitionSpec`` is.

        Args:
            mesh: an xla mesh.
            spec: over the axes of the root mesh, which are called as its dims.
            ndim: of the tensor; as many as ``spec`` has entries if None.

        Raises:
            PlacementError: ``spec`` names what is no whole mesh dim, or uses one twice.

        Example::

            import jax, xla_dtensor as xd
            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            layout = xd.Layout.from_partition_spec(mesh, jax.sharding.PartitionSpec("dp"), ndim=2)
            assert layout.alias_tensor_map == ("dp", "None")
        """
        ndim = len(tuple(spec)) if ndim is None else ndim
        return cls._make(mesh, from_partition_spec(spec, mesh, ndim), ndim)

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
        orders = [tuple(mesh_dim_of(self._mesh, n) for n in names_of(entry)) for entry in dims]
        placements = of_dims(orders, self._mesh, f"alias names {dims}")
        return self._make(self._mesh, placements, len(orders))

    def with_partial(self, mesh_dim: str | int, reduce_op: str = "sum") -> Layout:
        """This layout with a reduction pending: each device along ``mesh_dim`` holds a part.

        Args:
            mesh_dim: name or number.
            reduce_op: sum, avg, max, min or product.

        Raises:
            MeshDimError: no such mesh dim.
            PlacementError: the mesh dim shards a tensor dim, or torch has no such reduction.

        Example::

            import xla_dtensor as xd
            layout = xd.Layout((2, 4), ("dp", "tp"))("dp", "None").with_partial("tp")
            assert layout.partial == (None, "sum") and layout.placements[1] == xd.Partial()
        """
        placements = list(self._concrete("with_partial"))
        index = mesh_dim_of(self._mesh, mesh_dim)
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
        return tuple(alias_of(self._mesh, order) for order in self._orders("alias_tensor_map"))

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
        """Whether a reduction is pending over any mesh dim.

        Example::

            import xla_dtensor as xd
            assert not xd.Layout((8,), ("dp",))(xd.Shard(0)).is_partial()
        """
        return any(isinstance(p, Partial) for p in self._concrete("is_partial()"))

    @property
    def partition_spec(self) -> PartitionSpec:
        """JAX's ``PartitionSpec`` over the axes of the root mesh; reductions aren't in it."""
        return to_partition_spec(self.placements, self._mesh, self._rank("partition_spec"))

    def local_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what each device holds of a tensor.

        Args:
            global_shape: the tensor's shape.

        Raises:
            PlacementError: another rank, or a dim that doesn't divide: devices hold several shapes.

        Example::

            import xla_dtensor as xd
            assert xd.Layout((2, 4), ("dp", "tp"))("dp", "None").local_shape((8, 16)) == (4, 16)
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
        """The shape of the tensor of which each device holds a piece of equal shape.

        Args:
            local_shape: the piece's shape.

        Raises:
            PlacementError: another rank.

        Example::

            import xla_dtensor as xd
            assert xd.Layout((2, 4), ("dp", "tp"))("dp", "None").global_shape((4, 16)) == (8, 16)
        """
        pieces = self._pieces(local_shape, "global_shape")
        return tuple(size * count for size, count in zip(local_shape, pieces, strict=True))

    def _pieces(self, shape: Sequence[int], what: str) -> list[int]:
        """Per dim of ``shape`` the number of pieces."""
        call = f"{self!r}.{what}({tuple(shape)})"
        return pieces_of(self._concrete(what), tuple(self._mesh.shape), shape, self._ndim, call)

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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return (other is torch.strided and self._placements is not None) or NotImplemented
        return (self._placements, self._ndim) == (other._placements, other._ndim) and (
            self._mesh == other._mesh
        )

    def __hash__(self) -> int:
        return hash(torch.strided)  # torch asks ``x.layout in {torch.strided, ...}``

    def __repr__(self) -> str:
        dims = None if self._ndim is None else self.alias_tensor_map
        return layout_text(self._mesh, self._placements, dims)

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout._make, (self._mesh, self._placements, self._ndim)


@functools.lru_cache(maxsize=4096)
def layout_of(mesh: DeviceMesh, placements: tuple[Placement, ...], ndim: int) -> Layout:
    """The layout of a tensor whose placements are known to be valid."""
    return Layout._make(mesh, placements, ndim)
