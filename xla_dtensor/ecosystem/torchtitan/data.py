"""The batches of torchtitan's data-parallel ranks, of which one process has several.

torchtitan's trainer asks the "batch" mesh for its rank, makes the dataloader of that rank, and
counts its tokens on the host. Here the answer stands for all ranks (`AllRanks`): each gets the
dataloader that it has elsewhere (`RankLoaders`), and their batches travel together until they reach
the devices (`RankValues`). No rank's data is left out, and none is read twice.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xla_dtensor.base.torch_private import disable_function_of_subclasses, make_subclass, pytree
from xla_dtensor.base.torch_private.attributes import is_view
from xla_dtensor.errors import PerDeviceValueError, UnsupportedOpError


class AllRanks:
    """Every rank along a mesh of one dim, where torchtitan wants its own. It is no number, so
    nothing but a dataloader can be made of it."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __repr__(self) -> str:
        return f"all ranks of {self.mesh!r}"


class RanksOfBatch:
    """The "batch" mesh, as the trainer asks it: how many ranks there are, and which it is."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def size(self) -> int:
        """The number of ranks."""
        return self._mesh.size()

    def get_local_rank(self) -> AllRanks:
        """All of them."""
        return AllRanks(self._mesh)


class RankLoaders:
    """The dataloaders of all ranks, as one.

    Args:
        loaders: in the order of the ranks.
        mesh: along which they are.
    """

    def __init__(self, loaders: list[Any], mesh: Any) -> None:
        self.loaders, self.mesh = loaders, mesh

    def __iter__(self) -> Iterator[Any]:
        # One that runs out ends them all, as elsewhere it would leave the others waiting.
        for batches in zip(*self.loaders, strict=False):
            yield together(list(batches), self.mesh)

    def state_dict(self) -> dict[str, Any]:
        """Each rank's state, by its rank, as torchtitan's loaders name them."""
        state: dict[str, Any] = {}
        for loader in self.loaders:
            state |= loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Each takes its own part."""
        for loader in self.loaders:
            loader.load_state_dict(state)

    def close(self) -> None:
        """Each ends its threads."""
        for loader in self.loaders:
            loader.close()


def together(batches: list[Any], mesh: Any) -> Any:
    """One batch, in which each tensor is `RankValues` of those in ``batches``."""
    leaves, shapes = zip(*map(pytree.tree_flatten, batches), strict=True)
    if any(shape != shapes[0] for shape in shapes):
        raise UnsupportedOpError(
            "the data-parallel ranks' batches differ in their structure; one program computes all"
        )
    merged = [_merged(list(values), mesh) for values in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(merged, shapes[0])


def _merged(values: list[Any], mesh: Any) -> Any:
    """What the ranks have in one place."""
    if isinstance(values[0], torch.Tensor):
        if len({(tuple(v.shape), v.dtype) for v in values}) > 1:
            raise UnsupportedOpError(
                f"the data-parallel ranks' batches have shapes {[list(v.shape) for v in values]}; "
                "one program computes all, so they must be the same: pad or drop the last"
            )
        return RankValues.of(values, mesh)
    if all(type(v) is type(values[0]) and v == values[0] for v in values):
        return values[0]
    raise PerDeviceValueError(
        f"the data-parallel ranks have {values!r}, and one process stands for all of them: a value "
        "that differs has to be a tensor"
    )


class RankValues(torch.Tensor):
    """Tensors of the host, one per rank along a mesh, which go through torch's operations together
    and become a per-device tensor on the xla device.

    ``int()`` of a count is that of all ranks: what the process has. What else would be another
    number on each rank raises.
    """

    values: list[torch.Tensor]
    mesh: Any

    @staticmethod
    def of(values: list[torch.Tensor], mesh: Any) -> RankValues:
        """One of these tensors, of the same shape and dtype."""
        made = make_subclass(RankValues, values[0])
        made.values, made.mesh = values, mesh
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, shape = pytree.tree_flatten((args, kwargs))
        if _goes_to_devices(func, args, kwargs) or any(map(_is_on_devices, leaves)):
            leaves = list(map(_of_each_device, leaves))
            args, kwargs = pytree.tree_unflatten(leaves, shape)
            return func(*args, **kwargs)
        if func is torch.Tensor.__int__ and not args[0].is_floating_point():
            return sum(map(int, args[0].values))
        return _for_each(func, leaves, shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RankValues({self.values}, {self.mesh!r})"


def _is_on_devices(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, RankValues)
        and (value.device.type == "xla")
    )


def _of_each_device(value: Any) -> Any:
    """What each device has of an operand: its rank's value, and a replicated ``DTensor`` (the loss
    under ``full_dtensor``) as it is everywhere."""
    if isinstance(value, RankValues):
        return to_devices(value)
    from torch.distributed.tensor import DTensor, Replicate  # takes long to import

    if isinstance(value, DTensor) and all(isinstance(p, Replicate) for p in value.placements):
        return value.to_local()
    return value


def _goes_to_devices(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call moves its tensor to the xla device."""
    if func is not torch.Tensor.to:
        return False
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    return isinstance(target, str | torch.device) and torch.device(target).type == "xla"


def to_devices(value: RankValues) -> torch.Tensor:
    """The per-device tensor: each device has its rank's."""
    from xla_dtensor.movement.device_values import from_device_values

    return from_device_values(value.values, value.mesh)


def _for_each(func: Callable[..., Any], leaves: list[Any], shape: Any) -> Any:
    """``func`` of each rank's own values."""
    own = [leaf for leaf in leaves if isinstance(leaf, RankValues)]
    mesh, count = own[0].mesh, len(own[0].values)
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and type(leaves[0]) is torch.Tensor:
        _become(leaves[0], count, mesh)  # ``total += count``: from now on a total for each rank
    results = []
    with disable_function_of_subclasses():
        for rank in range(count):
            of_rank = [x.values[rank] if isinstance(x, RankValues) else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(of_rank, shape)
            results.append(func(*args, **kwargs))
    first = leaves[0]
    if isinstance(first, RankValues) and all(map(operator.is_, first.values, results)):
        return first  # it was written to
    flat, shapes = zip(*map(pytree.tree_flatten, results), strict=True)
    merged = [_merged(list(values), mesh) for values in zip(*flat, strict=True)]
    return pytree.tree_unflatten(merged, shapes[0])


def _become(tensor: torch.Tensor, count: int, mesh: Any) -> None:
    """Let a tensor of the host be `RankValues` of its value, to be written to."""
    if is_view(tensor) or tensor.requires_grad:
        raise PerDeviceValueError(
            "the data-parallel ranks would write different values to a view, or to a tensor that "
            "autograd follows; make it a tensor of its own first"
        )
    values = [tensor.clone() for _ in range(count)]
    as_any: Any = tensor
    as_any.__class__ = RankValues
    as_any.values, as_any.mesh = values, mesh


def build_loaders(original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """``Config.build(dp_rank=)`` of a dataloader, for all ranks where it is `AllRanks`."""
    ranks = kwargs.get("dp_rank")
    owner = getattr(args[0], "_owner", None)
    if not isinstance(ranks, AllRanks) or not hasattr(owner, "__iter__"):
        return original(*args, **kwargs)
    one = functools.partial(original, *args)
    # In several processes those of this one's devices.
    own = ranks.mesh.get_group().own_ranks()
    loaders = [one(**{**kwargs, "dp_rank": rank}) for rank in own]
    return RankLoaders(loaders, ranks.mesh)
