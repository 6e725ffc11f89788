"""Calls that write to several tensors of which some share memory, with each other or with inputs.

A plan's key has kinds of tensors and not which of them are one tensor, so each call is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base.torch_private import pytree, unseen
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution.interfaces import Slot
from xla_dtensor.plans.call import Call
from xla_dtensor.plans.lower import flatten_results

Dispatch = Callable[[Any, Any, dict[str, Any]], Any]
_BY_ELEMENT = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")


def run_in_order(
    call: Call, written: list[int], func: Any, args: Any, kwargs: Any, dispatch: Dispatch
) -> Any:
    """Execute a call whose writes its own reads have to see: one write after the other.

    Elsewhere everything is computed from what was there before the call, then written; such calls
    get ``NotImplemented``.

    A list is worked off element by element, and ``out=`` tensors are written one after another, as
    torch does both on the CPU.

    Args:
        written: the indices of the leaves that the call writes to, two or more.
        dispatch: executes a call, for those that this one is taken apart into.

    Raises:
        UnsupportedOpError: the call writes twice to one memory, and neither is the case.
    """
    by_element = call.info.name.startswith(_BY_ELEMENT)
    leaves = call.leaves
    owners = {id(leaves[i]._storage_): i for i in written}
    if len(owners) < len(written):
        if by_element and _length(call) > 1:
            return _one_after_another(call, func, args, kwargs, dispatch)
        if call.info.is_out:
            return _through_copies(call, func, args, kwargs, dispatch)
        raise UnsupportedOpError(
            f"{call.info.name} writes to two tensors that share memory in one call; call it once "
            "for each"
        )
    if not by_element or _length(call) == 1:
        return NotImplemented
    # Of each leaf the id of its storage; numbers, and tensors of the CPU, have none.
    storages = [id(getattr(leaf, "_storage_", leaf)) for leaf in leaves]
    read = [i for i, storage in enumerate(storages) if owners.get(storage, i) != i]
    if not read:
        return NotImplemented
    place = _places(call)
    if all(place.get(i) == place.get(owners[id(leaves[i]._storage_)]) for i in read):
        return NotImplemented  # each element reads what it writes, and no other
    return _one_after_another(call, func, args, kwargs, dispatch)


def _one_after_another(
    call: Call, func: Any, args: Any, kwargs: dict[str, Any], dispatch: Dispatch
) -> None:
    length = _length(call)
    for i in range(length):

        def element(value: Any, i: int = i) -> Any:
            is_list = isinstance(value, list | tuple) and len(value) == length
            return [value[i]] if is_list else value

        own = {name: element(value) for name, value in kwargs.items()}
        dispatch(func, tuple(map(element, args)), own)


def _through_copies(
    call: Call, func: Any, args: Any, kwargs: dict[str, Any], dispatch: Dispatch
) -> Any:
    info = call.info
    names = [name for name in info.mutated if isinstance(name, str)]
    with torch.no_grad():
        copies = {name: pytree.tree_map(torch.empty_like, kwargs[name]) for name in names}
        dispatch(func, args, {**kwargs, **copies})
        for name in names:
            pairs = zip(flatten_results(kwargs[name]), flatten_results(copies[name]), strict=True)
            for tensor, copy in pairs:
                if tensor.shape != copy.shape:
                    tensor.resize_(copy.shape)  # refuses what shares memory and doesn't fit in
                tensor.copy_(copy)
        if info.counts_writes:
            count_writes([t for name in names for t in flatten_results(kwargs[name])])
    results = tuple(kwargs[names[alias]] for alias in info.returns_mutated if alias is not None)
    return results[0] if len(results) == 1 else results or None


def count_writes(tensors: list[Any]) -> None:
    """Let autograd know of writes to ``tensors``."""
    with unseen():
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(counted)


def _length(call: Call) -> int:
    return len(call.args[0])


def _places(call: Call) -> dict[int, int]:
    """Per leaf of a list its place there."""
    return {
        slot.index: place
        for value in (*call.args, *call.kwargs.values())
        if isinstance(value, list)
        for place, slot in enumerate(value)
        if isinstance(slot, Slot)
    }
