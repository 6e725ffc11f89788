"""What the dispatcher knows about an overload before it sees a call: from its schema, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_dtensor.lowering import Lowering, ViewLowering, find_lowering, find_view, on_change

# Where and how a result is stored is the runtime's business, not a lowering's.
DROPPED = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"}
)

# Functional overloads whose name isn't the in-place one's without its underscore.
_FUNCTIONAL_NAMES = {
    "aten::normal_.default": "aten::normal_functional.default",
    "aten::bernoulli_.float": "aten::bernoulli.p",
    "aten::rrelu_with_noise_.default": "aten::rrelu_with_noise_functional.default",
    "aten::_native_batch_norm_legit.default": "aten::_native_batch_norm_legit_functional.default",
    "aten::_batch_norm_with_update.default": "aten::_batch_norm_with_update_functional.default",
}


@dataclass(frozen=True)
class OpInfo:
    """An overload's static facts.

    Attributes:
        name: qualified, ``"aten::add.Tensor"``.
        mutated: the arguments that it writes to, positions or keyword names, in schema order.
        view: its view lowering, if it is a view.
        lowering: of itself, or of its functional counterpart if it mutates.
        argument_names: all of the schema's.
        scalar_arguments: names of ``Scalar`` arguments (numbers that may be traced).
        returns_mutated: per schema return, the position in ``mutated`` that it aliases, or None.
        returns_lists: per schema return, whether it is a list of tensors.
        lowered_returns: whether the lowering also returns the results that alias nothing.
    """

    name: str
    func: Any
    mutated: tuple[int | str, ...]
    view: ViewLowering | None
    lowering: Lowering | None
    argument_names: tuple[str, ...]
    scalar_arguments: frozenset[str]
    tensor_arguments: frozenset[str]
    returns_mutated: tuple[int | None, ...]
    returns_lists: tuple[bool, ...]
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def is_identity(self) -> bool:
        """Whether it is a view of exactly what it is given."""
        return self.name in _IDENTITIES


_IDENTITIES = frozenset({"aten::detach.default", "aten::alias.default", "aten::lift_fresh.default"})
_infos: dict[Any, OpInfo] = {}
on_change(_infos.clear)


def info_of(func: Any) -> OpInfo:
    """The `OpInfo` of an overload, made once."""
    info = _infos.get(func)
    if info is None:
        info = _infos[func] = _make(func)
    return info


def _make(func: Any) -> OpInfo:
    schema = func._schema
    name = f"{schema.name}.{schema.overload_name or 'default'}"
    mutated: list[int | str] = []
    alias_names: dict[str, int] = {}
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            for alias_name in alias.before_set:
                alias_names[alias_name] = len(mutated)
            mutated.append(argument.name if argument.kwarg_only else position)
    returns_mutated = tuple(
        next((alias_names.get(n) for n in r.alias_info.before_set), None)
        if r.alias_info is not None and r.alias_info.is_write
        else None
        for r in schema.returns
    )
    types = {argument.name: str(argument.type) for argument in schema.arguments}
    view = None if mutated else find_view(name)
    lowering = find_lowering(name)
    if lowering is None and mutated:
        functional = functional_name(func)
        lowering = None if functional is None else find_lowering(functional)
    return OpInfo(
        name=name,
        func=func,
        mutated=tuple(mutated),
        view=view,
        lowering=lowering,
        argument_names=tuple(argument.name for argument in schema.arguments),
        scalar_arguments=frozenset(n for n, t in types.items() if "number" in t.lower()),
        tensor_arguments=frozenset(n for n, t in types.items() if "Tensor" in t),
        returns_mutated=returns_mutated,
        returns_lists=tuple("List[" in str(r.type) for r in schema.returns),
        defaults={
            argument.name: argument.default_value
            for argument in schema.arguments
            if argument.has_default_value()
        },
    )


def functional_name(func: Any) -> str | None:
    """The name of the functional overload that computes what ``func`` writes, if torch has one."""
    schema = func._schema
    name = f"{schema.name}.{schema.overload_name or 'default'}"
    if name in _FUNCTIONAL_NAMES:
        return _FUNCTIONAL_NAMES[name]
    namespace, base = schema.name.split("::")
    signature = [(a.name, str(a.type)) for a in schema.arguments if not _is_out(a)]
    is_out = len(signature) < len(schema.arguments)
    packet_name = base if is_out else base.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if packet is None:
        return None
    for overload_name in packet.overloads():
        candidate = getattr(packet, overload_name)._schema
        if any(a.alias_info is not None and a.alias_info.is_write for a in candidate.arguments):
            continue
        if [(a.name, str(a.type)) for a in candidate.arguments] == signature:
            return f"{namespace}::{packet_name}.{overload_name}"
    # Some in-place overloads differ from the functional one in a default or a keyword only.
    same = getattr(packet, schema.overload_name or "default", None)
    if same is not None and same is not func and not is_out:
        return f"{namespace}::{packet_name}.{schema.overload_name or 'default'}"
    return None


def _is_out(argument: Any) -> bool:
    return argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write


SpecialHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
SPECIAL: dict[str, SpecialHandler] = {}


def handles(*names: str) -> Callable[[SpecialHandler], SpecialHandler]:
    """Register a function that handles the named overloads instead of the general path."""

    def register(function: SpecialHandler) -> SpecialHandler:
        for name in names:
            SPECIAL[name] = function
        return function

    return register
