"""`broadcast_parameters` and `broadcast_optimizer_state`; broadcast and allgather of objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.errors import HorovodInternalError
from xla_dtensor.horovod.api.calls import synchronize
from xla_dtensor.horovod.api.collectives import broadcast_async_
from xla_dtensor.horovod.world.current_world import current
from xla_dtensor.horovod.world.process_sets import global_process_set


def broadcast_parameters(
    params: Any, root_rank: int, process_set: Any = global_process_set
) -> None:
    """Give all ranks the parameters of one.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or another iterable of pairs.
            Values that are no tensors are left alone.
        root_rank: whose they are.
        process_set: the ranks that take part.

    Raises:
        ValueError: it is none of these.
        HorovodInternalError: the ranks differ in names, shapes or dtypes.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        model = torch.nn.Linear(4, 2).to("xla")
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        assert model.weight.varying == ()
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    else:
        pairs = list(params)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                "broadcast_parameters: give model.state_dict(), model.named_parameters() or "
                f"another iterable of (name, tensor), not one of {type(pairs[0]).__name__}"
            )
    handles = [
        broadcast_async_(tensor.detach(), root_rank, name=f"parameters.{name}",
                         process_set=process_set)
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    ]  # fmt: skip
    for handle in handles:
        synchronize(handle)


class _Stand:
    """In the place of a tensor that is broadcast by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: Any = global_process_set,
) -> None:
    """Give all ranks the state and the options of one rank's optimizer; the others need have none
    yet.

    Args:
        optimizer: an optimizer of the same parameters on all ranks.
        root_rank: whose state it is.
        model: has no effect.
        process_set: the ranks that take part.

    Raises:
        ValueError: an LBFGS, whose state has no fixed form, as in Horovod.
        HorovodInternalError: the root takes no part.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        model = torch.nn.Linear(4, 2).to("xla")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.1
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state of torch.optim.LBFGS: its state isn't known")
    state = optimizer.state_dict()
    leaves, structure = pytree.tree_flatten(state)
    plain = [_Stand(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    stripped = pytree.tree_unflatten(plain, structure)
    stripped = broadcast_object(stripped, root_rank, "optimizer", process_set=process_set)
    found, structure = pytree.tree_flatten(stripped)
    is_root = current().is_alone or current().rank == root_rank
    own = iter(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    handles: list[Any] = []
    for i, leaf in enumerate(found):
        if isinstance(leaf, _Stand):
            tensor = next(own) if is_root else torch.zeros(leaf.shape, dtype=leaf.dtype)
            found[i] = tensor
            handles.append(
                broadcast_async_(tensor, root_rank, f"optimizer.{i}", process_set=process_set)
            )
    for handle in handles:
        synchronize(handle)
    if not is_root:
        optimizer.load_state_dict(pytree.tree_unflatten(found, structure))


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """One rank's object, on all.

    Args:
        obj: what can be pickled; that of other ranks than the root isn't looked at. Where one
            process drives all ranks it may be a `PerRank`.
        root_rank: whose it is.
        name: has no effect: objects go in the order in which they are asked for.
        process_set: the ranks that take part.

    Returns:
        the object; a copy on other ranks than the root.

    Raises:
        HorovodInternalError: the root takes no part, or the ranks differ in it.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        assert hvd.broadcast_object({"epoch": 3}, root_rank=0) == {"epoch": 3}
    """
    if int(root_rank) not in process_set.ranks:
        raise HorovodInternalError(
            f"broadcast_object: root rank {root_rank} is none of the ranks {process_set.ranks}"
        )
    (found,) = current().objects(obj, process_set, int(root_rank))
    return found


def allgather_object(
    obj: Any, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Every rank's object, on all.

    Args:
        obj: what can be pickled. Where one process drives all ranks it may be a `PerRank`.
        name: has no effect, as of `broadcast_object`.
        process_set: the ranks that take part.

    Returns:
        a list in the order of the ranks.

    Raises:
        HorovodInternalError: a rank has ended.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        names = hvd.allgather_object(hvd.per_rank(lambda rank: f"rank {rank}"))
        assert names == [f"rank {i}" for i in range(hvd.size())]
    """
    return current().objects(obj, process_set, None)
