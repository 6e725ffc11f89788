"""Compares lowerings with CPU torch, on what torch's own OpInfo samples dispatch.

`check_overloads("add", torch.float32)` runs the OpInfo entry on CPU torch, forward and backward,
and intercepts every aten overload that reaches the dispatcher. Each functional overload with a
lowering is run again through it, under `jax.jit` with 64-bit types, on the very same inputs:

    report = check_overloads("add", torch.float32, limit=5)
    report.mismatches   # Mismatch(overload, inputs, reason), one per failing call
    report.checked      # overloads that ran through a lowering
    report.unlowered    # functional overloads that have none
    report.views        # view overloads that have a view lowering, and ran through it

`check_call(torch.ops.aten.add.Tensor, x, y)` does the same for one direct call.

From a shell: ``python -m tests.lowering.harness --names add,mul --dtype float32 --limit 5``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import xla_dtensor.lowering
from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.lowering import Lowering, find_lowering, find_view

for _module in pkgutil.iter_modules(xla_dtensor.lowering.__path__):
    importlib.import_module(f"xla_dtensor.lowering.{_module.name}")

# What a lowering never sees: it says where or how a tensor is stored, not what it holds.
DROPPED = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"}
)
# Results without defined values: only shapes are compared.
UNDEFINED_VALUES = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
# torch's CPU kernels save empty statistics when they do not train; its meta kernels, which decide
# here, do not.
EMPTY_ON_CPU = frozenset(
    {
        "native_batch_norm",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_no_update",
    }
)
# Wider than assert_close's own: another order of summation, other libm, are no faults.
TOLERANCES = {
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float32: (2e-5, 2e-5),
    torch.complex64: (2e-5, 2e-5),
}


@dataclass(frozen=True)
class Mismatch:
    overload: str
    inputs: str
    reason: str

    def __str__(self) -> str:
        return f"{self.overload}({self.inputs}): {self.reason}"


@dataclass
class Report:
    mismatches: list[Mismatch] = field(default_factory=list)
    checked: set[str] = field(default_factory=set)
    unlowered: set[str] = field(default_factory=set)
    views: set[str] = field(default_factory=set)
    torch_errors: list[str] = field(default_factory=list)

    def merge(self, other: Report) -> None:
        for name in vars(self):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.update(theirs) if isinstance(mine, set) else mine.extend(theirs)


def overload_name(func: torch._ops.OpOverload) -> str:
    return f"{func.namespace}::{func._schema.name.split('::')[1]}.{func._overloadname}"


def check_overloads(
    op_name: str,
    dtype: torch.dtype = torch.float32,
    limit: int = 5,
    backward: bool = True,
    only: Callable[[str], bool] = lambda overload: True,
) -> Report:
    """Replay up to ``limit`` samples of each OpInfo variant of ``op_name`` (``"mm"``).

    ``only(overload)`` restricts which lowerings are run (all overloads are still reported).
    """
    report = Report()
    entries = op_entries(op_name)
    if not entries:
        raise ValueError(f"no OpInfo entry is named {op_name}")
    for entry in entries:
        if dtype not in entry.supported_dtypes("cpu"):
            continue
        differentiable = (
            backward and entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")
        )
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's samples use what torch deprecates
            samples = list(entry.sample_inputs("cpu", dtype, requires_grad=differentiable))
        step = max(1, -(-len(samples) // limit))
        for sample in samples[::step]:
            _replay(entry, sample, differentiable, report, only)
    return report


def check_call(func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Report:
    """Compare one call of ``func``, which must have a lowering."""
    report = Report()
    with _Compare(report, lambda overload: True):
        func(*args, **kwargs)
    if not report.checked | report.views:
        raise AssertionError(f"{overload_name(func)} did not reach a lowering")
    return report


@functools.cache
def _op_table() -> dict[str, list[Any]]:
    with warnings.catch_warnings():
        # Importing torch's test database deprecates modules of torch itself.
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    table: dict[str, list[Any]] = {}
    for entry in op_db:
        table.setdefault(entry.name, []).append(entry)
    return table


def op_entries(op_name: str) -> list[Any]:
    return _op_table().get(op_name, [])


def op_names() -> list[str]:
    return sorted(_op_table())


def _replay(entry: Any, sample: Any, differentiable: bool, report: Report, only: Any) -> None:
    with warnings.catch_warnings():
        # Some samples use deprecated forms on purpose.
        warnings.simplefilter("ignore")
        try:
            with _Compare(report, only):
                outputs = entry(sample.input, *sample.args, **sample.kwargs)
                if sample.output_process_fn_grad is not None:
                    outputs = sample.output_process_fn_grad(outputs)
            if differentiable:
                inputs = (sample.input, sample.args, sample.kwargs)
                _backward(outputs, inputs, _Compare(report, only))
        except Exception as error:
            report.torch_errors.append(f"{entry.name}: {type(error).__name__}: {error}")


def _backward(outputs: Any, inputs: Any, mode: TorchDispatchMode) -> None:
    is_leaf = lambda t: isinstance(t, torch.Tensor) and t.requires_grad
    sources = [t for t in torch.utils._pytree.tree_leaves(inputs) if is_leaf(t)]
    results = [t for t in torch.utils._pytree.tree_leaves(outputs) if is_leaf(t)]
    if sources and results:
        gradients = [torch.randn_like(t) for t in results]
        with mode:
            torch.autograd.grad(results, sources, gradients, allow_unused=True)


class _Compare(TorchDispatchMode):
    def __init__(self, report: Report, only: Callable[[str], bool]) -> None:
        super().__init__()
        self.report, self.only = report, only

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = overload_name(func)
        if name.startswith("prim") or func._schema.is_mutable:
            return result
        if any(r.alias_info is not None for r in func._schema.returns):
            view = find_view(name)
            if view is None:
                self.report.unlowered.add(name)
            elif self.only(name):
                self.report.views.add(name)
                self._compare(func, name, Lowering(view.get), args, kwargs, result)
            return result
        found = find_lowering(name)
        if found is None:
            self.report.unlowered.add(name)
        elif self.only(name):
            self.report.checked.add(name)
            self._compare(func, name, found, args, kwargs, result)
        return result

    def _compare(self, func, name: str, found: Lowering, args, kwargs, expected) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                actual = run_lowering(func, name, found, args, kwargs)
            op = name.split("::")[1].split(".")[0]
            if op in EMPTY_ON_CPU:
                keep = [i for i, e in enumerate(expected) if e.numel()]
                actual, expected = [actual[i] for i in keep], [expected[i] for i in keep]
            values = not found.random and op not in UNDEFINED_VALUES
            reason = _difference(actual, expected, values)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:400]}"
        if reason is not None:
            mismatch = Mismatch(name, describe((args, kwargs)), reason)
            self.report.mismatches.append(mismatch)


def run_lowering(func: Any, name: str, found: Lowering, args: Sequence, kwargs: dict) -> Any:
    """``found`` on torch arguments, jitted as the dispatcher does it."""
    schema = func._schema
    values: list[tuple[Any, Any]] = list(zip(schema.arguments, args, strict=False))
    by_name = {a.name: a for a in schema.arguments}
    static_scalars = bool(found.static_scalars)
    positional = [_prepare(a, v, static_scalars) for a, v in values if a.name not in DROPPED]
    named = {
        k: _prepare(by_name[k], v, static_scalars) for k, v in kwargs.items() if k not in DROPPED
    }
    leaves, structure = jax.tree.flatten((positional, named))
    dynamic = [leaf.value for leaf in leaves if isinstance(leaf, _Dynamic)]
    static = tuple(_DYNAMIC if isinstance(leaf, _Dynamic) else leaf for leaf in leaves)
    types = tuple(type(leaf) for leaf in static)  # 1 == 1.0 == True
    with jax.enable_x64(True):
        jitted = _jitted(name, found, structure, static, types)
        if found.random:
            dynamic.insert(0, jax.random.key(0))
        return jitted(*dynamic)


_DYNAMIC = "<dynamic>"


@dataclass(frozen=True)
class _Dynamic:
    value: Any


def _prepare(argument: Any, value: Any, static_scalars: bool) -> Any:
    """``value`` with what is traced (tensors, Scalars) wrapped in `_Dynamic`."""
    kind = str(argument.type)
    traced_numbers = ("number" in kind and not static_scalars) or "Tensor" in kind

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _Dynamic(to_numpy(leaf))
        if traced_numbers and isinstance(leaf, bool | int | float | complex):
            return _Dynamic(leaf)
        return leaf

    if isinstance(value, list | tuple):
        return [_prepare(argument, v, static_scalars) for v in value]
    return convert(value)


@functools.cache
def _jitted(name: str, found: Lowering, structure: Any, static: tuple, types: tuple) -> Any:
    def call(*dynamic: Any) -> Any:
        remaining: Iterator[Any] = iter(dynamic)
        key = (next(remaining),) if found.random else ()
        leaves = [next(remaining) if leaf is _DYNAMIC else leaf for leaf in static]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return found.function(*key, *args, **kwargs)

    return jax.jit(call)


_BITS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without autograd's lazy forms: conj and neg bits, and zero tensors, which have no memory."""
    if torch._is_zerotensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach().resolve_conj().resolve_neg()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy: JAX would alias torch's memory, which torch's next in-place op may overwrite, and
    release it from one of its own threads."""
    tensor = _plain(tensor)
    if tensor.dtype in _BITS:
        bits, dtype = _BITS[tensor.dtype]
        return np.array(tensor.contiguous().view(bits).numpy()).view(dtype)
    return np.array(tensor.numpy())


def to_torch(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """The JAX ``array`` as a CPU tensor of ``dtype``, cast as the dispatcher does."""
    with jax.enable_x64(True):
        host = np.array(jnp.asarray(array).astype(to_jax_dtype(dtype)))
    if dtype in _BITS:
        bits = {torch.int16: np.int16, torch.uint8: np.uint8}[_BITS[dtype][0]]
        return torch.from_numpy(host.view(bits)).view(dtype)
    return torch.from_numpy(host)


def _difference(actual: Any, expected: Any, values: bool) -> str | None:
    """Why ``actual`` (JAX) is not ``expected`` (torch), or None."""
    if isinstance(expected, list | tuple):
        if not isinstance(actual, list | tuple) or len(actual) != len(expected):
            return f"expected {len(expected)} results, got {type(actual).__name__}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            reason = _difference(a, e, values)
            if reason is not None:
                return f"result {i}: {reason}"
        return None
    if not isinstance(expected, torch.Tensor):
        return None if actual is None else f"expected None, got {actual}"
    if actual is None:
        return "got None"
    if tuple(actual.shape) != tuple(expected.shape):
        return f"shape {tuple(actual.shape)}, torch has {tuple(expected.shape)}"
    if not values:
        return None
    kind = np.dtype(actual.dtype).kind
    if kind == "c" and not expected.is_complex():
        return f"complex result {actual.dtype}, torch has {expected.dtype}"
    rtol, atol = TOLERANCES.get(expected.dtype, (None, None))
    try:
        torch.testing.assert_close(
            to_torch(actual, expected.dtype),
            _plain(expected),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            check_stride=False,
        )
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return None


def describe(value: Any) -> str:
    """Shapes and dtypes of tensors, other values as they are."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(describe, value)) + ")"
    if isinstance(value, dict):
        return ", ".join(f"{k}={describe(v)}" for k, v in value.items())
    return repr(value)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare lowerings with CPU torch.")
    parser.add_argument("--names", default="", help="OpInfo names, comma separated; all if empty")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--no-backward", dest="backward", action="store_false")
    options = parser.parse_args()
    total = Report()
    for name in filter(None, options.names.split(",")) if options.names else op_names():
        report = check_overloads(
            name, getattr(torch, options.dtype), options.limit, options.backward
        )
        total.merge(report)
        if report.unlowered or report.mismatches or report.torch_errors:
            print(f"{name}: without a lowering: {', '.join(sorted(report.unlowered)) or 'none'}")
        for line in dict.fromkeys(map(str, report.mismatches)):
            print(f"    {line}")
        for line in dict.fromkeys(report.torch_errors):
            print(f"    torch: {line[:200]}")
    print(
        f"{len(total.checked)} overloads checked, {len(total.views)} views, "
        f"{len(total.mismatches)} mismatches, {len(total.unlowered)} without a lowering: "
        f"{', '.join(sorted(total.unlowered))}"
    )


if __name__ == "__main__":
    main()
