"""Which dim of which tensor a layout cuts, over which mesh axes: for torch and for JAX.

`PARAMETERS` and `ACTIVATIONS` are the whole of it. The placements that `distribute_tensor` gets and
JAX's `PartitionSpec` are two ways to write the same row down, so that both sides of a comparison
hold the same part of every weight and every array of the batch on every device. The optimizer's
state lies as the parameters do.

The last axis of a mesh with more than one is "tp". The others are the batch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec
from torch.distributed.tensor import Placement, Replicate, Shard

MESHES: dict[str, tuple[str, ...]] = {
    "8": ("dp",),
    "2x4": ("dp", "tp"),
    "4x2": ("dp", "tp"),
    "2x2x2": ("r", "dp", "tp"),
    "4x4": ("dp", "tp"),
    "2x2x4": ("r", "dp", "tp"),
}
"""The names of the axes by a mesh's shape."""

LARGEST = -1
"""The largest dim of a parameter, of several that are as large the first."""

Cut = tuple[int | None, int | None]
"""The dim that the batch's axes cut, and the dim that "tp" cuts; None for neither. The same dim
twice is cut over all axes, in the mesh's order."""

WHOLE: Cut = (None, None)

PARAMETERS: dict[str, dict[str, Cut]] = {
    # [out, in]; what comes out is cut: q, k, v, the first product of an MLP, the logits.
    "column": {
        "tp": (None, 0),
        "fsdp0": (0, None),
        "fsdp-largest": (LARGEST, None),
        "fsdp+tp": (1, 0),
        "ep": (0, 0),
    },
    "column bias": {"tp": (None, 0), "fsdp+tp": (None, 0)},
    # [out, in]; what goes in is cut: attention's output, the last product of an MLP.
    "row": {
        "tp": (None, 1),
        "fsdp0": (0, None),
        "fsdp-largest": (LARGEST, None),
        "fsdp+tp": (0, 1),
        "ep": (0, 0),
    },
    # [vocabulary, d], or [position, d].
    "embedding": {
        "fsdp0": (0, None),
        "fsdp-largest": (LARGEST, None),
        "fsdp+tp": (1, None),
        "ep": (0, 0),
    },
    # Scales and shifts of norms, and biases of what isn't cut: too small to be worth a gather.
    "vector": {},
    # [out, in, height, width] or [out, in]: what comes out is used whole.
    "matrix": {
        "fsdp0": (0, None),
        "fsdp-largest": (LARGEST, None),
        "fsdp+tp": (0, None),
        "ep": (0, 0),
    },
    # [expert, in, out].
    "expert": {
        "tp": (None, 0),
        "fsdp0": (0, None),
        "fsdp-largest": (LARGEST, None),
        "fsdp+tp": (1, 0),
        "ep": (None, 0),
    },
}
"""By role and layout. Where there is no row the parameter is whole on every device."""

ACTIVATIONS: dict[str, tuple[str | None, ...]] = {
    "stream": ("batch", "sequence", None),
    "heads": ("batch", None, "tp", None),
    "hidden": ("batch", None, "tp"),
    "router's input": ("batch", None, None),
    "expert's tokens": ("tp", "batch", None, None),
    "token's experts": (None, "batch", None, None),
    "image": ("batch", None, None, None),
    "column's image": ("batch", "tp", None, None),
}
"""What an expert writes in JAX of an activation, dim by dim. "batch": cut over the axes that the
batch is cut over. "tp": cut over "tp" where that cuts parameters. "sequence": cut over "tp" in a
layout with sequence parallelism. None: whole."""


def axes_of(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The axes that cut each dim; JAX has one axis without a tuple, and None for no axis."""
    return [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]


@dataclass(frozen=True)
class Layout:
    """One way to lay a training step out.

    Args:
        parameters: the column of `PARAMETERS`; "" where all of them are whole on every device.
        all_axes: whether the batch is cut over all axes, "tp", too.
        sequence: whether the residual stream is cut along its sequence over "tp" (sequence
            parallelism), which both sides say.
    """

    parameters: str = ""
    all_axes: bool = False
    sequence: bool = False


LAYOUTS: dict[str, Layout] = {
    "dp": Layout(),
    "dp-all": Layout(all_axes=True),
    "tp": Layout("tp"),
    "fsdp0": Layout("fsdp0"),
    "hsdp": Layout("fsdp0", all_axes=True),
    "fsdp-largest": Layout("fsdp-largest"),
    "fsdp+tp": Layout("fsdp+tp"),
    "fsdp+tp+sp": Layout("fsdp+tp", sequence=True),
    "ep": Layout("ep", all_axes=True),
}

ONE_AXIS = ("dp", "fsdp0", "fsdp-largest")
"""The layouts of a mesh that has the batch's axis alone."""


def on_mesh(layouts: Sequence[str], mesh: str) -> list[str]:
    """Those that make sense on a mesh, one of `MESHES`."""
    return [layout for layout in layouts if len(MESHES[mesh]) > 1 or layout in ONE_AXIS]


@dataclass(frozen=True)
class OnMesh:
    """A layout on a mesh.

    Args:
        layout: one of `LAYOUTS`.
        shape: of the mesh.
        axes: its names.
    """

    layout: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, layout: str, mesh: str) -> OnMesh:
        """Of a name in `LAYOUTS` and one in `MESHES`."""
        return cls(layout, tuple(map(int, mesh.split("x"))), MESHES[mesh])

    @property
    def tp(self) -> tuple[str, ...]:
        """("tp",), or () where the mesh has one axis."""
        return self.axes[1:] and self.axes[-1:]

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes over which dim 0 of every array of the batch is cut."""
        whole = LAYOUTS[self.layout].all_axes
        return self.axes if whole else self._others

    @property
    def _others(self) -> tuple[str, ...]:
        return self.axes[: len(self.axes) - len(self.tp)]

    def parameter(self, role: str, shape: Sequence[int]) -> PartitionSpec:
        """How a parameter is cut.

        A dim that the devices don't divide stays whole: JAX takes no uneven arguments.

        Args:
            role: one of `PARAMETERS`.
            shape: of the whole parameter.

        Returns:
            JAX's spec, with an entry for each dim.
        """
        column = LAYOUTS[self.layout].parameters
        found = PARAMETERS[role].get(column, WHOLE)
        entries: list[tuple[str, ...]] = [() for _ in shape]
        for dim, axes in zip(found, (self._others, self.tp), strict=True):
            if dim is not None:
                entries[list(shape).index(max(shape)) if dim == LARGEST else dim] += axes
        sizes = dict(zip(self.axes, self.shape, strict=True))
        divides = lambda axes, size: size % math.prod(sizes[axis] for axis in axes) == 0
        return PartitionSpec(
            *(
                (axes if axes and divides(axes, n) else None)
                for axes, n in zip(entries, shape, strict=True)
            )
        )

    def activation(self, kind: str) -> PartitionSpec:
        """How an expert cuts an activation.

        Args:
            kind: one of `ACTIVATIONS`.

        Returns:
            JAX's spec, with an entry for each dim.
        """
        layout = LAYOUTS[self.layout]
        cuts_tp = any(
            row.get(layout.parameters, WHOLE)[1] is not None for row in PARAMETERS.values()
        )
        named = {
            "tp": self.tp if cuts_tp else (),
            "batch": self.batch,
            "sequence": self.tp if layout.sequence else (),
            None: (),
        }
        entries: list[tuple[str, ...]] = []
        for dim in ACTIVATIONS[kind]:
            taken = {axis for entry in entries for axis in entry}
            entries.append(tuple(axis for axis in named[dim] if axis not in taken))
        return PartitionSpec(*(axes or None for axes in entries))

    def placements(self, spec: PartitionSpec) -> list[Placement]:
        """The same cut in torch's words: an axis that cuts a dim is a `Shard` of it, and several
        axes cut a dim one within the other, in the mesh's order, as JAX has it."""
        found: list[Placement] = [Replicate() for _ in self.axes]
        for dim, axes in enumerate(axes_of(spec)):
            for axis in axes:
                found[self.axes.index(axis)] = Shard(dim)
        return found
