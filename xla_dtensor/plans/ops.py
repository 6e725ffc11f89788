"""Static facts about overloads, made of schemas and registries once per overload (`OpInfo`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.base.tables.cache import Table
from xla_dtensor.base.tables.registry import Registry
from xla_dtensor.base.torch_private import DispatchKey, has_kernel, python_kernels
from xla_dtensor.base.torch_private.attributes import kernel_of, schema_of
from xla_dtensor.lowering import Lowering, ViewLowering, find_lowering, find_view
from xla_dtensor.lowering import changes as lowering_changes
from xla_dtensor.lowering.kinds import Kind, is_
from xla_dtensor.lowering.meta import shapes_of
from xla_dtensor.rules import changes as rules_changes
from xla_dtensor.rules import find_registration

# Arguments about where and how a result is stored, which lowerings don't get.
DROPPED = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"}
)

# Functional overloads whose name isn't the in-place one's without its underscore.
_FUNCTIONAL_NAMES = {
    "aten::normal_.default": "aten::normal_functional.default",
    "aten::bernoulli_.float": "aten::bernoulli.p",
    "aten::rrelu_with_noise.default": "aten::rrelu_with_noise_functional.default",
    "aten::rrelu_with_noise_.default": "aten::rrelu_with_noise_functional.default",
    "aten::_native_batch_norm_legit.default": "aten::_native_batch_norm_legit_functional.default",
    "aten::_batch_norm_with_update.default": "aten::_batch_norm_with_update_functional.default",
}


# eq=False: one object per overload, compared by identity, which is fast in every plan's key.
@dataclass(frozen=True, eq=False)
class OpInfo:
    """An overload's static facts.

    Attributes:
        name: qualified, ``"aten::add.Tensor"``.
        mutated: the arguments that it writes to, positions or keyword names, in schema order.
        view: its view lowering, if it is a view.
        lowering: of itself, or of its functional counterpart if it mutates.
        shapes: our meta kernel (lowering/meta.py), of the same, where torch has none.
        argument_names: all of the schema's.
        dynamic_arguments: names of those whose tensors and numbers are inputs of the executable;
            the others' numbers are part of it.
        static_arguments: names of all others.
        symbolic_arguments: of these those whose symbolic numbers are inputs, too.
        converted_arguments: names of those whose numbers torch converts to the dtype of the
            elements, and refuses where they aren't in its range.
        returns_mutated: per schema return, the position in ``mutated`` that it aliases, or None.
        returns_lists: per schema return, whether it is a list of tensors.
        is_out: whether the arguments written are ``out=`` ones, which torch resizes.
        may_contract: whether it may contain a matrix product, whose precision is a setting of
            torch's.
        composition: what it does, as a function of tensors, if it is taken apart: torch's
            composition of other operations, which may give views (``reshape``), end on the host
            (``item``) or read values on the way (``cov``), or one in Python (`kernel_in_python`),
            unless it has a rule for its layouts.
        makes_like: whether it makes a tensor like another one, whose values it doesn't read.
        counts_writes: whether torch's kernel counts its writes to tensors of lists (which autograd
            compares); of tensors that are arguments themselves its autograd does.
        is_identity: whether it is a view of exactly what it is given.
        routes: who may take a call of it over before it is taken apart; ``traced_routes``: in a
            trace.
    """

    name: str
    func: Any
    mutated: tuple[int | str, ...]
    view: ViewLowering | None
    lowering: Lowering | None
    shapes: Callable[..., Any] | None
    argument_names: tuple[str, ...]
    dynamic_arguments: frozenset[str]
    static_arguments: frozenset[str]
    symbolic_arguments: frozenset[str]
    converted_arguments: tuple[str, ...]
    returns_mutated: tuple[int | None, ...]
    returns_lists: tuple[bool, ...]
    is_out: bool
    may_contract: bool
    composition: Callable[..., Any] | None
    makes_like: bool
    counts_writes: bool
    is_identity: bool
    routes: tuple[SpecialHandler, ...]
    traced_routes: tuple[SpecialHandler, ...]


_CONVERTED = {
    **dict.fromkeys(
        ("fill", "masked_fill", "index_fill", "constant_pad_nd", "scatter"), ("value",)
    ),
    **dict.fromkeys(("full", "full_like", "new_full"), ("fill_value",)),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), ("min", "max")),
    "hardtanh": ("min_val", "max_val"),
    "threshold": ("threshold", "value"),
    "scalar_tensor": ("s",),
}
_EXPLICIT = DispatchKey.CompositeExplicitAutograd
_IDENTITIES = frozenset({"aten::detach.default", "aten::alias.default", "aten::lift_fresh.default"})
infos: Table[Any, OpInfo] = Table("overloads", "one per overload that was called", clearable=True)
"""By the overload's C++ operation, which is hashed by address: hashing itself runs Python."""
lowering_changes.listen(infos.clear)
rules_changes.listen(infos.clear)


def info_of(func: Any) -> OpInfo:
    """The `OpInfo` of an overload, made once."""
    info = infos.get(func._op)
    if info is None:
        info = infos.setdefault(func._op, _make(func))  # plans' keys compare it by identity
    return info


def _make(func: Any) -> OpInfo:
    schema = schema_of(func)
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
    lowering, shapes = find_lowering(name), shapes_of(name)
    if lowering is None and mutated:
        functional = functional_name(func)
        lowering = None if functional is None else find_lowering(functional)
        shapes = None if functional is None else shapes_of(functional)
    return OpInfo(
        name=name,
        func=func,
        mutated=tuple(mutated),
        view=view,
        lowering=lowering,
        shapes=shapes,
        argument_names=tuple(argument.name for argument in schema.arguments),
        dynamic_arguments=frozenset(n for n, t in types.items() if _is_dynamic(t, lowering)),
        static_arguments=frozenset(n for n, t in types.items() if not _is_dynamic(t, lowering)),
        symbolic_arguments=frozenset(n for n, t in types.items() if _is_symbolic(t, lowering)),
        converted_arguments=_CONVERTED.get(schema.name.rpartition("::")[2].rstrip("_"), ()),
        returns_mutated=returns_mutated,
        returns_lists=tuple("List[" in str(r.type) for r in schema.returns),
        is_out=any(map(_is_out, schema.arguments)),
        may_contract=view is None and torch.Tag.pointwise not in func.tags,
        composition=None if view or lowering else _composition(func),
        makes_like=is_(Kind.LIKE, name),
        counts_writes=_writes_lists(schema) and not name.startswith(_UNCOUNTED),
        is_identity=name in _IDENTITIES,
        routes=_routes(SPECIAL, name),
        traced_routes=_routes(SPECIAL_IN_TRACES, name) or _routes(SPECIAL, name),
    )


# torch's kernels for the CPU count no writes here.
_UNCOUNTED = ("aten::_fused_", "aten::_amp_foreach_")


def _writes_lists(schema: Any) -> bool:
    return any(
        a.alias_info is not None and a.alias_info.is_write and "List[" in str(a.type)
        for a in schema.arguments
    )


def _is_dynamic(type_name: str, lowering: Lowering | None) -> bool:
    if "number" in type_name.lower():
        return lowering is None or not lowering.static_scalars
    if type_name == "float":
        return lowering is not None and lowering.traced_floats
    return "Tensor" in type_name


def _is_symbolic(type_name: str, lowering: Lowering | None) -> bool:
    if lowering is None:
        return False
    if "number" in type_name.lower():
        return callable(lowering.static_scalars)
    return type_name in ("float", "Optional[float]") and lowering.symbolic_floats


def _composition(func: Any) -> Callable[..., Any] | None:
    if _has_kernel(func, DispatchKey.CompositeImplicitAutograd):
        decompose: Callable[..., Any] = func.decompose
        return decompose
    if kernel_in_python(func) and find_registration(func) is None:
        return kernel_of(func, _EXPLICIT)
    return None


def kernel_in_python(func: Any) -> bool:
    """Whether its kernel for all devices is somebody's Python (``torch.library``), which may read
    and do anything: it is run in each call."""
    namespace, name = func.name().split("::")
    kernel = f"{namespace}/{name}/{_EXPLICIT.name}"
    return kernel in python_kernels and _has_kernel(func, _EXPLICIT)


def _has_kernel(func: Any, key: Any) -> bool:
    return bool(has_kernel(func.name(), key))


def functional_name(func: Any) -> str | None:
    """The name of the functional overload that computes what ``func`` writes, if torch has one."""
    schema = schema_of(func)
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
        candidate = schema_of(getattr(packet, overload_name))
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
SPECIAL: Registry[SpecialHandler] = Registry("handler", lowering_changes)


SPECIAL_IN_TRACES: Registry[SpecialHandler] = Registry("handler in traces", lowering_changes)


def handles(*names: str, traced: bool = False) -> Callable[[SpecialHandler], SpecialHandler]:
    """Register a function that handles the named overloads instead of the general path.

    Args:
        traced: only in a trace, where it takes the place of the one for all executors.
    """
    registry = SPECIAL_IN_TRACES if traced else SPECIAL

    def register(function: SpecialHandler) -> SpecialHandler:
        for name in names:
            registry.add(name, function)
        return function

    return register


def _routes(registry: Registry[SpecialHandler], name: str) -> tuple[SpecialHandler, ...]:
    return () if (handler := registry.get(name)) is None else (handler,)
