"""``Layout`` as HyperParallel has it: it is filled in step by step, and changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from xla_dtensor.compat.hyper_parallel.tensor_maps import (
    REDUCTIONS,
    entry_of,
    name_of_reduction,
    numbers_of,
)
from xla_dtensor.errors import PerDeviceValueError, PlacementError
from xla_dtensor.mesh import dim_mesh_dims, normalize_placements, placements_of
from xla_dtensor.mesh import layout as of_package
from xla_dtensor.mesh.dim_names import alias_of, has_placements, mesh_dim_of, names_of

TensorMap = tuple[Any, ...]


class Layout(of_package.Layout):
    """A layout that is filled in step by step: `xla_dtensor.Layout`, but mutable.

    Args:
        mesh_shape: the number of devices along each mesh dim.
        alias_name: their names.
        rank_list: the devices, in row-major order; the first ones by default.
        init_backend: HyperParallel's; no effect.

    Example::

        from xla_dtensor.compat.hyper_parallel import Layout

        layout = Layout((2, 4), ("dp", "tp"))
        rows = layout("dp", "None")
        assert rows.tensor_map == (1, -1) and rows.repeat_num() == 4
        rows.set_partial_by_dev_axis("tp", "sum")
        assert rows.is_partial() and rows.partial == [None, "sum"]
        assert layout.tensor_map is None
    """

    __slots__ = ("_aliases", "_map", "_partial", "_ranks")

    _map: TensorMap | None
    _aliases: tuple[Any, ...] | None
    _partial: list[str | None]
    _ranks: tuple[int, ...]

    def __init__(
        self,
        mesh_shape: Sequence[int],
        alias_name: Sequence[str],
        rank_list: Sequence[int] | None = None,
        init_backend: bool = True,
    ) -> None:
        super().__init__(mesh_shape, alias_name, list(rank_list) if rank_list else None)
        self._begin()

    def _begin(self) -> None:
        self._map = self._aliases = None
        self._partial = [None] * self._mesh.ndim
        self._ranks = tuple(self._mesh.mesh.flatten().tolist())

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> Layout:
        """The empty layout over a mesh."""
        layout = cls.__new__(cls)
        layout._set(mesh, None, None)
        layout._begin()
        return layout

    def __call__(self, *dims: Any, ndim: int | None = None) -> Layout:
        """Another layout over the same mesh: per tensor dim the names of mesh dims, or per mesh dim
        its placement. What is pending in this one isn't in that.

        Raises:
            ValueError: a name isn't the mesh's, or is used twice.
        """
        made = Layout.from_device_mesh(self._mesh)
        if len(dims) == 1 and isinstance(dims[0], list | tuple) and has_placements(dims[0]):
            dims = tuple(dims[0])
        if has_placements(dims):
            made.set_placements(list(dims))
            if ndim is not None:
                made.placement_to_tensor_map(ndim)
            return made
        names = self._mesh.mesh_dim_names or ()
        unknown = [name for entry in dims for name in names_of(entry) if name not in names]
        if unknown:
            raise PlacementError(f"The axis {unknown[0]} is not found in {names}")
        last = self._mesh.ndim - 1
        orders = [tuple(last - mesh_dim_of(self._mesh, n) for n in names_of(e)) for e in dims]
        made.set_tensor_map(tuple(entry_of(order) for order in orders))
        made.tensor_map_to_placement()
        return made

    # --- the mesh -----------------------------------------------------------------------------

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The number of devices along each mesh dim."""
        return tuple(self._mesh.shape)

    @property
    def alias_name(self) -> tuple[str, ...] | None:
        """The names of the mesh dims."""
        return self._mesh.mesh_dim_names

    @property
    def rank_list(self) -> tuple[int, ...]:
        """The devices; may be assigned, which `update_mesh` makes a mesh of."""
        return self._ranks

    @rank_list.setter
    def rank_list(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)

    def update_mesh(self) -> None:
        """Take the mesh that ``rank_list`` says."""
        names = self._mesh.mesh_dim_names or ()
        self._mesh = of_package.Layout(self.mesh_shape, names, self._ranks).mesh

    # --- from one notation to another ---------------------------------------------------------

    @property
    def placements(self) -> Any:
        """Per mesh dim its placement; None before they are set or computed."""
        return self._placements

    def set_placements(self, placements: Sequence[Placement]) -> None:
        """Set them; what the tensor's dims are, `placement_to_tensor_map` says."""
        self._placements, self._ndim = tuple(placements), None

    @property
    def tensor_map(self) -> Any:
        """Per tensor dim the mesh dims that shard it, counted from the last; None before they are
        set or computed."""
        return self._map

    def set_tensor_map(self, tensor_map: Sequence[Any]) -> None:
        """Set it; `tensor_map_to_placement` computes the placements."""
        self._map = tuple(tensor_map)
        last = self._mesh.ndim - 1
        self._aliases = tuple(
            alias_of(self._mesh, tuple(last - n for n in numbers_of(entry))) for entry in self._map
        )

    @property
    def alias_tensor_map(self) -> Any:
        """The same by name; None before."""
        return self._aliases

    def set_alias_tensor_map(self, alias_tensor_map: Sequence[Any]) -> None:
        """Set it, and the tensor map with it."""
        last = self._mesh.ndim - 1
        self.set_tensor_map(
            [
                entry_of(tuple(last - mesh_dim_of(self._mesh, n) for n in names_of(entry)))
                for entry in alias_tensor_map
            ]
        )

    def placement_to_tensor_map(self, dim: int) -> list[Any]:
        """Compute the tensor map of a tensor of ``dim`` dims from the placements.

        Returns:
            the tensor map.

        Raises:
            ValueError: ``dim`` is negative, or a placement shards a dim that isn't there, or has a
                split factor that no mesh dims have.
        """
        if dim < 0:
            raise PlacementError(f"Tensor dimension must be positive, but got {dim}")
        if self._placements is None:
            raise PlacementError("the layout has no placements yet: set_placements([...])")
        call = f"placement_to_tensor_map({dim})"
        placements = normalize_placements(self._placements, self._mesh, dim, call)
        for mesh_dim, placement in enumerate(placements):
            if isinstance(placement, Partial):
                self._partial[mesh_dim] = name_of_reduction(placement.reduce_op)
        last = self._mesh.ndim - 1
        orders = dim_mesh_dims(placements, self.mesh_shape, dim, call)
        self.set_tensor_map([entry_of(tuple(last - m for m in order)) for order in orders])
        self._placements, self._ndim = placements, dim
        assert self._map is not None
        return list(self._map)

    def tensor_map_to_placement(self) -> list[Placement]:
        """Compute the placements from the tensor map and what is pending.

        Returns:
            the placements.

        Raises:
            ValueError: there is no tensor map.
        """
        if self._map is None:
            raise PlacementError("The tensor_map is None, cannot transform to placements.")
        last = self._mesh.ndim - 1
        orders = [tuple(last - n for n in numbers_of(entry)) for entry in self._map]
        used = [m for order in orders for m in order]
        if len(set(used)) != len(used):
            raise PlacementError(f"tensor map {self._map}: a mesh dim has been set more than once")
        pending = {m: REDUCTIONS[op] for m, op in enumerate(self._partial) if op is not None}
        self._placements = placements_of(orders, self.mesh_shape, pending)
        self._ndim = len(orders)
        return list(self._placements)

    @property
    def alias_placements(self) -> Any:
        """The placements; of a dim that several mesh dims shard the names."""
        several = self._aliases and any(isinstance(entry, tuple) for entry in self._aliases)
        return self._aliases if several or self._placements is None else list(self._placements)

    # --- what is pending ----------------------------------------------------------------------

    @property
    def partial(self) -> Any:
        """Per mesh dim the reduction that is pending over it, or None: a list."""
        return self._partial

    def set_partial_by_dev_axis(self, axis: str, op: str | None) -> None:
        """Let a reduction be pending over a mesh dim.

        Raises:
            ValueError: there is no such reduction, or the mesh dim shards a tensor dim.
        """
        if op is not None and op not in REDUCTIONS:
            raise PlacementError(
                f"Partial op must be one of {list(REDUCTIONS)}, but got {op}"
                + (": reduce bools by min, of integers" if op == "all" else "")
            )
        if self.is_dev_axis_apply_shard(axis):
            raise PlacementError(f"Partial dim must be replicate: {axis!r} shards a tensor dim")
        self._partial[mesh_dim_of(self._mesh, axis)] = op
        self.tensor_map_to_placement()

    def get_partial_by_dev_id(self, axis: str) -> str | None:
        """What is pending over a mesh dim."""
        return self._partial[mesh_dim_of(self._mesh, axis)]

    def is_partial(self) -> bool:
        """Whether anything is."""
        return any(self._partial)

    def reset_partial(self) -> None:
        """Let nothing be."""
        self._partial = [None] * self._mesh.ndim
        self.tensor_map_to_placement()

    # --- questions ----------------------------------------------------------------------------

    def is_dev_axis_apply_shard(self, axis: str) -> bool:
        """Whether a mesh dim shards a tensor dim."""
        return self.get_dev_axis_apply_shard_axis(axis) is not None

    def get_dev_axis_apply_shard_axis(self, axis: str) -> int | None:
        """Which tensor dim a mesh dim shards, or None."""
        found = [dim for dim, entry in enumerate(self._aliases or ()) if axis in names_of(entry)]
        return found[0] if found else None

    def get_dim_split_num(self, dim: int) -> int:
        """Into how many pieces a tensor dim is cut; 1 of a dim that there isn't."""
        entries = self._aliases or ()
        if dim >= len(entries):
            return 1
        return math.prod(
            self.mesh_shape[mesh_dim_of(self._mesh, name)] for name in names_of(entries[dim])
        )

    def get_split_id(self, dim: int) -> int:
        """Which piece of a tensor dim a device has: 0 if there is one.

        Raises:
            PerDeviceValueError: there are several, and each device has another one.
        """
        if self.get_dim_split_num(dim) == 1:
            return 0
        raise PerDeviceValueError(
            f"get_split_id({dim}) of {self!r} is another number on each device, and one process "
            "drives them all: xla_dtensor.collectives.axis_index(mesh, name) has the coordinate as "
            "a tensor"
        )

    def repeat_num(self) -> int:
        """How many devices hold each piece.

        Raises:
            ValueError: there is no tensor map.
        """
        if self._map is None:
            raise PlacementError(f"The tensor_map is None, the mesh_shape is {self.mesh_shape}")
        pieces = [self.get_dim_split_num(dim) for dim in range(len(self._map))]
        return math.prod(self.mesh_shape) // math.prod(pieces)

    def get_global_shape(self, slice_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor of which a device has a piece of ``slice_shape``."""
        return tuple(size * self.get_dim_split_num(dim) for dim, size in enumerate(slice_shape))

    # --- texts and copies ---------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The layout as plain values.

        Raises:
            ValueError: there is no tensor map.
        """
        if self._map is None:
            raise PlacementError("The tensor_map of layout is None")
        return {
            "mesh_shape": self.mesh_shape,
            "tensor_map": self._map,
            "interleaved_parallel": "interleaved_parallel" in (self.alias_name or ()),
            "alias_name": self.alias_name,
            "rank_list": self._ranks,
        }

    @property
    def compact_str(self) -> str:
        """A text that equal layouts have in common."""
        return str((self._map, self._partial, self.mesh_shape, self.alias_name, self._ranks))

    def to_string(self) -> str:
        """The layout for people."""
        described = "Not configured" if self._aliases is None else self._aliases
        lines = {
            "Mesh shape": self.mesh_shape,
            "Alias Names": self.alias_name,
            "Partial": self._partial,
            "Tensor Map": described,
            "Rank List": self._ranks,
        }
        return "Layout Configuration:\n" + "\n".join(f"  {k}: {v}" for k, v in lines.items())

    __str__ = to_string

    def __repr__(self) -> str:
        return f"Layout{self.compact_str}"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Layout):
            return self.compact_str == other.compact_str
        if isinstance(other, of_package.Layout):
            return self._map is not None and self._frozen() == other
        return super().__eq__(other)

    __hash__ = of_package.Layout.__hash__

    def _frozen(self) -> of_package.Layout:
        """The same as a layout that doesn't change."""
        self.tensor_map_to_placement()
        assert self._placements is not None
        return of_package.layout_of(self._mesh, self._placements, len(self._map or ()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        made = Layout.from_device_mesh(self._mesh)
        self._copy_to(made)
        memo[id(self)] = made
        return made

    def _copy_to(self, made: Layout) -> None:
        made._placements, made._ndim = self._placements, self._ndim
        made._map, made._aliases, made._ranks = self._map, self._aliases, self._ranks
        made._partial = copy.copy(self._partial)

    def __reduce__(self) -> tuple[Any, ...]:
        state = self._placements, self._ndim, self._map, list(self._partial)
        return _rebuilt, (self.mesh_shape, self.alias_name, self._ranks, *state)


def _rebuilt(
    shape: Any, names: Any, ranks: Any, placements: Any, ndim: Any, tensor_map: Any, partial: Any
) -> Layout:
    made = Layout(shape, names, ranks)
    if tensor_map is not None:
        made.set_tensor_map(tensor_map)
    made._placements, made._ndim, made._partial = placements, ndim, partial
    return made
