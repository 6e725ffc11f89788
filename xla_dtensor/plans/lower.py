"""An overload as a function of arrays: its lowering, or torch's decomposition run on tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base import executor, torch_private
from xla_dtensor.base.dtypes import to_torch_dtype
from xla_dtensor.base.numbers.valueless_number import symbolic_number
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.base.torch_private import DispatchKey, has_kernel
from xla_dtensor.base.torch_private.attributes import kernel_of
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution.nested import Nested
from xla_dtensor.forms.form import device_form
from xla_dtensor.forms.read import logical_value
from xla_dtensor.forms.storage import Storage
from xla_dtensor.plans.foreach_groups import once_for_alike
from xla_dtensor.plans.ops import OpInfo
from xla_dtensor.tensors.device_tensor import XLATensor

# (results that alias no argument, new values of the mutated arguments), both flat
LoweredResult = tuple[list[Any], list[Any]]


def lowered_function(info: OpInfo) -> Callable[[Any, tuple, dict], LoweredResult]:
    """``run(key, args, kwargs)`` on arrays; ``key`` is a JAX PRNG key, or a function that makes
    them.

    Raises:
        UnsupportedOpError: the overload has no lowering and torch no decomposition for it.
    """
    lowering = info.lowering
    if lowering is not None:

        def run(keys: Any, args: tuple, kwargs: dict) -> LoweredResult:
            if info.mutated:
                kwargs = {k: v for k, v in kwargs.items() if k not in info.mutated}
            first = (keys(),) if lowering.random else ()
            out = lowering.function(*first, *args, **kwargs)
            flat = flatten_results(out)
            if not info.mutated:
                return flat, []
            # A functional overload returns its results first, then the new values of the arguments.
            fresh = sum(alias is None for alias in info.returns_mutated)
            return flat[:fresh], flat[fresh:]

        return run
    if info.view is not None:
        view = info.view
        return lambda keys, args, kwargs: (flatten_results(view.get(*args, **kwargs)), [])
    decomposition = find_decomposition(info)
    if decomposition is None:
        raise UnsupportedOpError(
            f"{info.name} has no lowering to XLA and torch has no decomposition for it. Add one: "
            f"a function decorated with @xla_dtensor.lowering.lowers({info.name!r}), see "
            "xla_dtensor/lowering/README.md"
        )
    return once_for_alike(
        info,
        lambda keys, args, kwargs: run_on_arrays(decomposition, info, keys, args, kwargs),
    )


def find_decomposition(info: OpInfo) -> Callable[..., Any] | None:
    """torch's own decomposition of the overload, as a function of tensors.

    Dispatch takes implicit compositions apart (`OpInfo.composition`) and never asks for theirs; the
    rule checker does, which compiles any call as one program.
    """
    func = info.func
    decomposition_table = torch_private.decomposition_table
    # No other overload is in torch's core table, which takes long to make.
    if info.composition or func in decomposition_table:
        table = _core_table(torch_private.core_aten_decompositions)
        if func in table:
            return table[func]
    if info.composition:
        return info.composition
    if has_kernel(func.name(), DispatchKey.CompositeExplicitAutograd):
        return kernel_of(func, DispatchKey.CompositeExplicitAutograd)
    if func in decomposition_table:
        return decomposition_table[func]
    composite = getattr(DispatchKey, "CompositeExplicitAutogradNonFunctional", None)
    if composite is not None and has_kernel(func.name(), composite):
        return kernel_of(func, composite)
    return None


_table: Cache[str, dict[Any, Any]] = Cache("torch's core decompositions", 2, stays=True)


def _core_table(make: Callable[[], Any]) -> dict[Any, Any]:
    # `in` and indexing, not .get: the latter misses entries (torch materialises them lazily).
    return _table.get_or_make("core", lambda: {**make()})


def run_on_arrays(
    function: Callable[..., Any], info: OpInfo, keys: Any, args: tuple, kwargs: dict
) -> LoweredResult:
    """Run ``function``, written in torch operations, on arrays."""
    with executor.running(Nested(keys, info.name)), torch.no_grad():
        wrapped_args = _wrap(args)
        wrapped_kwargs = {name: _wrap(value) for name, value in kwargs.items()}
        out = function(*wrapped_args, **wrapped_kwargs)
        if out is NotImplemented:
            raise UnsupportedOpError(
                f"torch's decomposition of {info.name} doesn't cover these arguments; add a "
                "lowering (xla_dtensor/lowering/README.md)"
            )
        mutated: list[Any] = []
        for where in info.mutated:
            argument = (
                wrapped_args[where]
                if isinstance(where, int) and where < len(wrapped_args)
                else wrapped_kwargs.get(where)
            )
            mutated += [_value(t) for t in flatten_results(argument) if t is not None]
        results = out if isinstance(out, tuple | list) else (out,)
        if len(info.returns_mutated) == 1 and info.returns_lists[0]:
            results = (results,)
        fresh: list[Any] = []
        for result, alias in zip(results, info.returns_mutated, strict=False):
            if alias is None:
                fresh += [None if t is None else _value(t) for t in flatten_results(result)]
        return fresh, mutated


def _value(tensor: Any) -> Any:
    if isinstance(tensor, torch.Tensor) and not isinstance(tensor, XLATensor):
        return executor.current().host_tensor(tensor)
    return logical_value(tensor)


def _wrap(value: Any) -> Any:
    import jax

    if isinstance(value, list | tuple):
        return [_wrap(v) for v in value] if isinstance(value, list) else tuple(map(_wrap, value))
    if isinstance(value, jax.Array) and not getattr(value, "weak_type", False):
        form = device_form(None, tuple(value.shape), dtype=to_torch_dtype(value.dtype))
        return XLATensor(Storage(value, form), form)
    if isinstance(value, jax.Array):
        # Weakly typed, so it stands for a Python number of the call, and has a dtype of no tensor.
        return symbolic_number(value)
    return value


def flatten_results(out: Any) -> list[Any]:
    """Results (one, a tuple, lists inside) as a flat list."""
    if isinstance(out, list | tuple):
        return [leaf for item in out for leaf in flatten_results(item)]
    return [out]
