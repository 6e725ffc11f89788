"""The class, layout and dtype of saved tensors, from which like ones are made to load into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base.torch_private import StridedShard
from xla_dtensor.checkpoint.shards import own_chunks
from xla_dtensor.errors import CheckpointError
from xla_dtensor.movement.factories import distribute_tensor
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.sharded_tensor import DTENSORS

Kind = dict[str, Any]
"""Plain data: ``on`` ("cpu", "xla", "varying", "sharded", or another device), ``size`` and
``dtype`` as the checkpoint has them, and of a sharded tensor ``mesh`` and ``placements``."""


def kind_of(tensor: torch.Tensor) -> Kind:
    """The kind of a tensor."""
    kind: Kind = {"on": tensor.device.type, "size": list(size_of(tensor)), "dtype": tensor.dtype}
    if is_ours(tensor):
        form = tensor._form
        if form.placements is not None and form.mesh is not None:
            kind["on"] = "sharded"
            kind["mesh"] = list(form.mesh.shape)
            kind["placements"] = [_encoded(p) for p in form.placements]
        if form.varying:
            kind["on"] = "varying"
            kind["axes"] = list(form.varying)
    return kind


def size_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The size that a checkpoint has of it: of a tensor that varies, of all devices' values."""
    return own_chunks(tensor._form).size if is_ours(tensor) else tuple(tensor.shape)


def text_of(kind: Kind) -> str:
    """For people, and for the manifest."""
    if kind["on"] == "sharded":
        mesh = "x".join(map(str, kind["mesh"]))
        return f"[{', '.join(_text(p) for p in kind['placements'])}] on {mesh}"
    if kind["on"] == "varying":
        return f"varying along {', '.join(kind['axes'])}"
    return str(kind["on"])


def like_saved(kind: Kind, name: str, like: torch.Tensor | None) -> torch.Tensor:
    """A tensor to load into, of the kind that was saved.

    Args:
        name: of the tensor, for the error.
        like: the parameter that it belongs to: says on which mesh it lies, and how, if that isn't
            the one that it was saved from.

    Raises:
        CheckpointError: nothing says where it is to be.
    """
    size, dtype = kind["size"], kind["dtype"]
    if isinstance(like, torch.Tensor) and not is_ours(like):  # trained elsewhere since
        on_host = kind["on"] == "cpu" or not size  # as torch has counts of steps
        return torch.zeros(size, dtype=dtype, device="cpu" if on_host else like.device)
    if kind["on"] == "xla":
        return torch.zeros(size, dtype=dtype, device="xla")
    if kind["on"] == "varying":
        if is_ours(like) and like._form.varying and size_of(like) == tuple(size):
            return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    elif kind["on"] != "sharded":
        return torch.zeros(size, dtype=dtype)  # torch moves it to where it belongs
    elif isinstance(like, DTENSORS):
        mesh = like.device_mesh
        placements: Sequence[Placement] = [Replicate()] * mesh.ndim
        if list(mesh.shape) == kind["mesh"]:
            placements = [_decoded(p) for p in kind["placements"]]
        elif tuple(size) == tuple(like.shape):
            placements = [Replicate() if isinstance(p, Partial) else p for p in like.placements]
        value = torch.zeros((), dtype=dtype).expand(size)
        return distribute_tensor(value, mesh, placements)
    raise CheckpointError(
        f"{name!r} was saved as a tensor {text_of(kind)} of size {size}: nothing says on which mesh"
        " it is to be now; let the object that it belongs to have a tensor of that size in its "
        "state_dict() before it is loaded"
    )


def fits(kind: Kind, tensor: Any) -> bool:
    """Whether a tensor that exists can be loaded into."""
    if not isinstance(tensor, torch.Tensor) or size_of(tensor) != tuple(kind["size"]):
        return False
    on_xla = tensor.device.type == "xla"
    return tensor.dtype == kind["dtype"] and on_xla == (kind["on"] in ("xla", "varying", "sharded"))


def _encoded(placement: Placement) -> list[Any]:
    if isinstance(placement, StridedShard):
        return ["_StridedShard", placement.dim, placement.split_factor]
    if isinstance(placement, Shard):
        return ["Shard", placement.dim]
    return [type(placement).__name__]


def _decoded(encoded: Sequence[Any]) -> Placement:
    kind, *arguments = encoded
    if kind == "_StridedShard":
        return StridedShard(arguments[0], split_factor=arguments[1])
    return Shard(arguments[0]) if kind == "Shard" else Replicate()


def _text(encoded: Sequence[Any]) -> str:
    kind, *arguments = encoded
    return f"{kind}({', '.join(map(str, arguments))})"
