"""Runs torch's meta kernels: shapes, strides and dtypes of a call's results."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.numbers.python_numbers import is_number
from xla_dtensor.forms.form import Form
from xla_dtensor.plans.call import Call, fill
from xla_dtensor.plans.lower import flatten_results
from xla_dtensor.plans.ops import DROPPED, OpInfo


class Meta:
    """What torch's meta kernel says of one result."""

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.stride = tuple(tensor.stride())
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype


def fill_kwargs(kwargs: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    return {name: fill(value, values) for name, value in kwargs.items()}


def meta_results(call: Call) -> list[Any]:
    """Per schema return a `Meta`, None, or a list of them."""
    if not call.info.returns_mutated:
        return []
    leaves = []
    for leaf, form in zip(call.leaves, call.forms, strict=True):
        if isinstance(form, Form):
            leaves.append(_meta_tensor(form))
        else:
            symbolic = isinstance(leaf, torch.SymFloat | torch.SymInt)
            # For a symbolic number without a value any number will do.
            value = leaf.node.value if is_number(leaf) else 1 if symbolic else leaf
            leaves.append(form(value))
    kwargs = fill_kwargs(call.kwargs, leaves) | call.meta_kwargs
    if "device" in call.info.argument_names:
        kwargs["device"] = torch.device("meta")
        if "generator" in call.info.argument_names:
            kwargs["generator"] = None  # factories have overloads that require it
    args = fill(list(call.args), leaves)
    with torch.no_grad():
        if call.info.shapes is not None:
            out = _own_meta(call.info, args, kwargs)
        else:
            out = call.info.func(*args, **kwargs)
    results = [out] if len(call.info.returns_mutated) == 1 else list(out)
    if call.info.view is not None and call.info.returns_lists[0]:
        return [Meta(t) for t in results[0]]
    return [
        [Meta(t) for t in r] if isinstance(r, list | tuple) else None if r is None else Meta(r)
        for r in results
    ]


def _own_meta(info: OpInfo, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What our own meta kernel says: it knows neither ``out=`` nor where tensors are."""
    assert info.shapes is not None
    kwargs = {k: v for k, v in kwargs.items() if k not in info.mutated and k not in DROPPED}
    out = info.shapes(*args, **kwargs)
    # The functional overload's function also gives the new values of the arguments.
    count = len(info.returns_mutated)
    return out[:count] if isinstance(out, tuple) and count > 1 else out


def _meta_tensor(form: Form) -> torch.Tensor:
    if not form.offset:
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
    reach = form.offset + 1
    reach += sum((n - 1) * step for n, step in zip(form.shape, form.stride, strict=True) if n)
    memory = torch.empty(reach, dtype=form.dtype, device="meta")
    return memory.as_strided(form.shape, form.stride, form.offset)


def metas_of_fresh(call: Call, metas: list[Any]) -> list[tuple[Meta | None, int]]:
    """The metas of results that alias no argument, flat, with their schema return's position."""
    flat: list[tuple[Meta | None, int]] = []
    for position, (meta, alias) in enumerate(zip(metas, call.info.returns_mutated, strict=True)):
        if alias is None:
            flat += [(m, position) for m in flatten_results(meta)]
    return flat
