"""Whether layers differ in their tensors' values alone, so that one's code can run for all."""

from __future__ import annotations

import types
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from xla_dtensor.compilation.code.reflection import HOOKS, all_slots_of, dict_of, own_of
from xla_dtensor.compilation.objects.found import is_atom, same_atom
from xla_dtensor.compilation.objects.kinds import kind_of
from xla_dtensor.compilation.objects.places import MISSING
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.tensors.of_form import is_ours

# What every module has besides `training`: its parts and hooks, which are compared otherwise.
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
_EMPTY = types.CellType()


def tensors_of(layer: nn.Module) -> dict[str, Any]:
    """A layer's parameters and buffers, those that two of its modules share once."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def check_equal(layers: list[nn.Module]) -> None:
    """See that the layers differ in the values of their tensors alone.

    Raises:
        UnsupportedOpError: they don't.
    """
    equal, found = equal_to_first(layers)
    if found is not None:
        what, own, others = found
        raise UnsupportedOpError(
            f"scan_layers: layer {equal} differs from the first one in {what}: "
            f"{_short(others)} in place of {_short(own)}. A loop runs the "
            "first layer's code for all of them; run layers that differ one by one, or scan "
            "each part of equal ones"
        )


def equal_to_first(layers: list[nn.Module]) -> tuple[int, tuple[str, Any, Any] | None]:
    """How many layers from the first on are equal, and in what the next one differs: a name, the
    first one's value and its own."""
    first, parts = described(layers[0]), _parts(layers[0])
    for i, layer in enumerate(layers[1:], 1):
        found = _difference(first, described(layer)) or _other_attribute(layers[0], layer, parts)
        if found is not None:
            return i, found
    return len(layers), None


def described(layer: nn.Module) -> dict[str, Any]:
    """What is to be the same in all layers, by names: classes, plain values, hooks, and what
    tensors are."""
    found: dict[str, Any] = {}
    for name, module in layer.named_modules():
        where = name or "itself"
        found[f"the class of {where}"] = type(module)
        for key, value in vars(module).items():
            if key not in _OF_EVERY_MODULE and is_atom(value):
                found[f"{where}.{key}"] = value
        for hooks in HOOKS:
            codes = [_code(hook) for hook in getattr(module, hooks).values()]
            found[f"{where}.{hooks}"] = codes
    for name, tensor in tensors_of(layer).items():
        if not is_ours(tensor):
            found[name] = "a tensor that is not on the devices"
            continue
        form = tensor._form
        placements = None if form.placements is None else tuple(map(str, form.placements))
        found[name] = (
            *(tuple(form.shape), form.dtype, placements, form.varying, tensor.requires_grad),
            bool(tensor._steps),
        )
    return found


def same_value(a: Any, b: Any) -> bool:
    """Whether ``b`` is the object ``a``, or a plain value that is the same to a program."""
    return a is b or (is_atom(a) and is_atom(b) and same_atom(a, b))


def changed(before: dict[str, Any], layer: nn.Module) -> str | None:
    """What of a layer isn't as `described` any more; None if all is."""
    found = _difference(before, described(layer))
    return found and found[0]


class Unassigned:
    """In the block, in which a layer's code runs for all layers, it assigns no attributes: those of
    the others would stay as they were, and a tensor of a loop's body is none outside of it.

    Raises:
        UnsupportedOpError: (at the end of the block) it has; the attributes are as before.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        self._before = [(name, m, dict(vars(m))) for name, m in self._layer.named_modules()]

    def __exit__(self, kind: Any, *exc_info: object) -> None:
        assigned = []
        for name, module, before in self._before:
            own = vars(module)
            for key in (before.keys() | own.keys()) - _OF_EVERY_MODULE:
                was, now = before.get(key, MISSING), own.get(key, MISSING)
                if same_value(was, now):
                    continue
                assigned.append(f"{name}.{key}" if name else key)
                if was is MISSING:
                    del own[key]
                else:
                    own[key] = was
        if assigned and kind is None:
            raise UnsupportedOpError(
                f"scan_layers: the layer assigns {', '.join(sorted(assigned))}, which a loop over "
                "layers can't do for each of them; compute it outside of the loop, or run them one "
                "by one"
            )


def _difference(first: dict[str, Any], other: dict[str, Any]) -> tuple[str, Any, Any] | None:
    if first == other:
        return None
    what = next(k for k in (*first, *other) if first.get(k, MISSING) != other.get(k, MISSING))
    return what, first.get(what, "none"), other.get(what, "none")


def _code(hook: Any) -> Any:
    """What is the same in the hooks that one function has put on several layers."""
    while not isinstance(hook, types.FunctionType):
        inner = getattr(hook, "__func__", None) or getattr(hook, "func", None)
        if inner is None:
            return type(hook)
        hook = inner
    return hook.__code__


def _other_attribute(
    first: nn.Module, other: nn.Module, parts: dict[int, str]
) -> tuple[str, Any, Any] | None:
    """An attribute in which two layers of the same description differ: a table, a function, an
    object. ``parts`` are the first one's."""
    compared = _Compared(parts, _parts(other))
    modules = zip(first.named_modules(), other.modules(), strict=True)
    for (name, module), twin in modules:
        own, its = vars(module), vars(twin)
        for key in {**own, **its}:
            value, others = own.get(key), its.get(key)  # only one may have its own: `forward`
            if key not in _OF_EVERY_MODULE and not compared.same(value, others):
                return f"{name or 'itself'}.{key}", value, others
    return None


class _Compared:
    """Whether values that two layers have in the same place mean the same in their code."""

    def __init__(self, first: dict[int, str], other: dict[int, str]) -> None:
        # Names of the layers' modules and tensors, by id: parts of the same name count as equal.
        self._first, self._other = first, other
        self._begun: set[tuple[int, int]] = set()

    def same(self, a: Any, b: Any) -> bool:
        """Whether the first layer's ``a`` is the other's ``b``."""
        if is_atom(a) or is_atom(b):
            return same_atom(a, b)
        part = self._first.get(id(a))
        if a is b or part is not None:
            return part == self._other.get(id(b))
        if type(a) is not type(b) or isinstance(a, torch.Tensor | nn.Module | jax.Array):
            return False
        if (id(a), id(b)) in self._begun:
            return True
        self._begun.add((id(a), id(b)))
        return self._same_content(a, b)

    def _same_content(self, a: Any, b: Any) -> bool:
        if isinstance(a, set | frozenset):
            return bool(a == b)
        if isinstance(a, np.ndarray):
            return a.dtype == b.dtype and bool(np.array_equal(a, b))
        if isinstance(a, types.FunctionType):  # a closure defined in each layer's __init__, say
            return a.__code__ is b.__code__ and self.same(_reads(a), _reads(b))
        kind = kind_of(a)
        if kind is not None:
            (data, parts), (others_data, others) = kind.split(a), kind.split(b)
            same = kind.key(data) == kind.key(others_data) and len(parts) == len(others)
            return same and all(map(self.same, parts, others))
        if type(a).__module__.partition(".")[0] == "xla_dtensor":  # fully_shard's, of one layout
            return True
        if dict_of(a) is None and not all_slots_of(type(a)):  # type: ignore[arg-type]
            return bool(a == b)
        return self.same(own_of(a), own_of(b))


def _parts(layer: nn.Module) -> dict[int, str]:
    named = [*layer.named_modules(remove_duplicate=False), *tensors_of(layer).items()]
    return {id(part): name for name, part in named}


def _reads(function: types.FunctionType) -> tuple[Any, ...]:
    """What a function reads that isn't a global."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
    return function.__defaults__, function.__kwdefaults__, cells, function.__dict__


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]}..."
