"""torchtitan's expert parallelism in buffers of static shapes.

torchtitan's dispatcher asks the host how many rows go to which device, and sends so many. Here
every device has room for all that any other could send it (`movement.row_exchange`), so nothing
depends on where the tokens go. Only those steps of the dispatcher do something else that know of
such sizes; its order of tokens, its scores and its sums stay.

A capacity makes the buffers smaller. Rows that don't fit pass the experts by, and are counted.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

from xla_dtensor.base.config import config
from xla_dtensor.integration.patching.take_over import take_over
from xla_dtensor.mesh.group import MeshGroup, resolve_group
from xla_dtensor.movement import row_exchange


def set_expert_capacity(factor: float | None) -> None:
    """Say how many rows a device may send to another, over what that would be if all got as many.

    It is read when a program is traced. This sets ``xd.config.expert_capacity``.

    Args:
        factor: 1.25 for a quarter more than the mean; ``None`` for room for all rows: none is
            dropped, and buffers are as many times larger as there are devices.

    Raises:
        ValueError: ``factor`` isn't above 0.

    Example::

        from xla_dtensor import torchtitan

        torchtitan.set_expert_capacity(1.25)
    """
    if factor is not None and not factor > 0:
        raise ValueError(f"a capacity is above 0, not {factor}")
    config.expert_capacity = factor


def dropped_rows(model: torch.nn.Module) -> dict[str, int]:
    """How many rows (tokens times experts chosen) have found no room since training began.

    Args:
        model: with torchtitan's experts, parallelized with ``expert_parallel_degree`` above 1.

    Returns:
        by the name of each ``RoutedExperts``, the sum over all devices. What activation
        checkpointing computes again counts again.

    Example::

        losing = {name: count for name, count in dropped_rows(model).items() if count}
    """
    found = {}
    for name, module in model.named_modules():
        counter = getattr(getattr(module, "token_dispatcher", None), _DROPPED, None)
        if counter is not None:
            found[name] = sum(int(value) for value in counter.local_values())
    return found


_DROPPED = "_xla_dtensor_dropped"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What torchtitan's lists of split sizes are here.

    Attributes:
        rows: that each device has, to send.
        counts: how many of them go to each device.
        slots: of the buffer for each.
        group: the devices.
    """

    rows: int
    counts: torch.Tensor
    slots: int
    group: MeshGroup


def hook_experts(module: Any) -> None:
    """``torchtitan.models.common.moe`` of 0.3.0 and after it."""
    if hasattr(module, "RoutedExperts"):
        take_over(module.RoutedExperts.forward, _count_own_tokens)


def hook_dispatcher(module: Any) -> None:
    """``torchtitan.models.common.token_dispatcher`` of 0.3.0 and after it."""
    dispatcher = module.AllToAllTokenDispatcher
    take_over(dispatcher.wire_meshes, _make_counter)
    take_over(dispatcher.dispatch, _dispatch)
    take_over(dispatcher._token_count_exchange, _exchange_counts)
    take_over(dispatcher._sync_token_count_exchange, _sizes)
    take_over(dispatcher._dispatch_token_exchange, _send)
    take_over(dispatcher._permute, _permute)
    take_over(dispatcher._combine_token_exchange, _give_back)


def _given(original: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return inspect.signature(original).bind(*args, **kwargs).arguments


def _count_own_tokens(original: Any, args: Any, kwargs: Any) -> Any:
    """torchtitan counts the tokens of a sharded tensor, and takes each device's part of the pending
    sum. That is one number here, cut up in no particular way (docs/design.md), so each device's
    own tokens are counted. Under ``spmd_types`` tensors are each device's already."""
    from torchtitan.distributed.utils import get_spmd_backend

    given = _given(original, args, kwargs)
    # The letters behind are the dims', which are others after 0.3.0.
    (chosen,) = (x for name, x in given.items() if name.startswith("topk_expert_ids_"))
    if chosen.device.type == "xla" and get_spmd_backend() != "spmd_types":
        experts = given["self"].inner_experts.num_experts
        kinds = torch.arange(experts, device=chosen.device)
        counts = (chosen.reshape(-1, 1) == kinds).sum(0)
        given["num_local_tokens_per_expert_E"] = counts
    return original(**given)


def _group(dispatcher: Any) -> MeshGroup | None:
    """The devices of an xla mesh that have experts of their own; of other meshes, None."""
    mesh = dispatcher.ep_mesh
    if mesh is None or mesh.device_type != "xla":
        return None
    return resolve_group(mesh.get_group())


def _dispatch(original: Any, args: Any, kwargs: Any) -> Any:
    """Remember how many rows there are: the steps below are given less."""
    given = _given(original, args, kwargs)
    given["self"]._xla_dtensor_rows = given["topk_expert_ids_TK"].numel()
    return original(**given)


def _slots(dispatcher: Any, group: MeshGroup) -> int:
    return row_exchange.slots_for(
        dispatcher._xla_dtensor_rows, group.size(), config.expert_capacity
    )


def _exchange_counts(original: Any, args: Any, kwargs: Any) -> Any:
    """Only what fits is announced."""
    given = _given(original, args, kwargs)
    dispatcher = given["self"]
    group = _group(dispatcher)
    if group is None or config.expert_capacity is None:
        return original(**given)
    counts = given["num_local_tokens_per_expert_E"].view(group.size(), -1)
    fitting = row_exchange.kept(counts, _slots(dispatcher, group))
    getattr(dispatcher, _DROPPED).add_(counts.sum() - fitting.sum())
    given["num_local_tokens_per_expert_E"] = fitting
    return original(**given)


def _make_counter(original: Any, args: Any, kwargs: Any) -> Any:
    """Of dropped rows: what a compiled step writes to has to be there before it."""
    given = _given(original, args, kwargs)
    result = original(**given)
    dispatcher = given["self"]
    if _group(dispatcher) is not None:
        counter = torch.zeros((), dtype=torch.int64, device="xla")
        setattr(dispatcher, _DROPPED, counter)
    return result


def _sizes(original: Any, args: Any, kwargs: Any) -> Any:
    """The sizes as tensors on the devices."""
    given = _given(original, args, kwargs)
    dispatcher = given["self"]
    group = _group(dispatcher)
    if group is None:
        return original(**given)
    counts = given["num_local_tokens_per_expert_E"].view(group.size(), -1).sum(1)
    sizes = Sizes(dispatcher._xla_dtensor_rows, counts, _slots(dispatcher, group), group)
    return given["num_global_tokens_per_local_expert_EP_e"].reshape(-1), sizes, sizes


def _send(original: Any, args: Any, kwargs: Any) -> Any:
    given = _given(original, args, kwargs)
    sizes = given["input_splits"]
    if not isinstance(sizes, Sizes):
        return original(**given)
    return row_exchange.send(given["routed_input_ND"], sizes.counts, sizes.slots, sizes.group)


def _permute(original: Any, args: Any, kwargs: Any) -> Any:
    """From the order of the devices to that of the experts, the slots left empty at the end, where
    no expert looks."""
    given = _given(original, args, kwargs)
    dispatcher, rows = given["self"], given["routed_input_RD"]
    group = _group(dispatcher)
    if group is None:
        return original(**given)
    counts = given["num_global_tokens_per_local_expert_E"].view(group.size(), -1)
    order = row_exchange.by_kind(counts, _slots(dispatcher, group))
    return rows.shape, rows[order], order, counts.sum(0)


def _give_back(original: Any, args: Any, kwargs: Any) -> Any:
    given = _given(original, args, kwargs)
    sizes = given["input_splits"]
    if not isinstance(sizes, Sizes):
        return original(**given)
    rows = given["routed_output_RD"]
    return row_exchange.give_back(rows, sizes.rows, sizes.counts, sizes.slots, sizes.group)
