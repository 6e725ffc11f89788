"""Which rule an overload has, and the entry point `infer_placements`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch

from xla_dtensor.base.source_line import caller
from xla_dtensor.base.tables.registry import Changes, Registry
from xla_dtensor.base.torch_private import OpOverload, OpOverloadPacket
from xla_dtensor.base.torch_private.attributes import custom_op_name, packet_name, schema_of
from xla_dtensor.errors import LayoutRuleError
from xla_dtensor.rules.alternatives import Merged
from xla_dtensor.rules.call import Call, base_name, tensors_text
from xla_dtensor.rules.notation import alternatives, expand_ellipsis, parse, validate

AnyRule = TypeVar("AnyRule", bound="Callable[[Call], Merged | None]")

Rule = Callable[[Call], Merged | None]

UserRule: TypeAlias = Callable[[Call], Merged | str | None]

"""The merged layouts, a notation that says them, or None to leave this call to the compiler."""

changes = Changes()
"""Caches of what rules have said listen here, and are emptied."""

_RULES: Registry[Rule] = Registry("layout rule", changes)
"""The families' rules."""


@dataclass(frozen=True)
class Registration:
    """A rule under a name.

    Attributes:
        name: of the op or the overload, "aten::mm", "aten::max.dim".
        rule: takes a `Call`.
        kind: "user", or "torch" if it came by torch's ``register_sharding``, or "jax_function", or
            "family".
        where: the line that registered it, or the module of the family.
    """

    name: str
    rule: UserRule
    kind: str
    where: str

    @property
    def text(self) -> str:
        """A word on what the rule says."""
        return _describe(self.rule)


_USER_RULES: Registry[Registration] = Registry("layout rule", changes)
"""The others; they come first."""

_KINDS: Registry[Callable[[OpOverload], Rule | None]] = Registry("rule", changes)
"""Of the kinds of ops that have a rule by being one what gives it."""

_name_resolvers: list[Callable[[str], Any]] = []


def register_kind(name: str, rule_of: Callable[[OpOverload], Rule | None]) -> None:
    """Let ``rule_of`` give the rules of a kind of ops (`FOREACH`, `ELEMENTWISE`)."""
    _KINDS.add(name, rule_of)


def add_names(resolve: Callable[[str], Any]) -> None:
    """Let ``resolve`` give rules by names that are no op's; None where it knows none."""
    _name_resolvers.append(resolve)


def register_rule(
    op: Any,
    rule: str | UserRule,
    *,
    override: bool = False,
    kind: str = "user",
    where: str | None = None,
) -> UserRule:
    """Register the layout rule of an op, in place of what the library or the compiler would say.

    Results are then laid out as the rule says (XLA is told so, also in a compiled step), and
    arguments that it wants elsewhere are redistributed first. A step that is compiled already keeps
    the layouts that it was compiled with.

    Args:
        op: an overload, an op (``torch.ops.mylib.project``: all overloads that have no rule of
            their own), a ``torch.library.custom_op``, or a name ("mylib::project").
        rule: an einsum notation of the tensor arguments and results ("b s h, h o -> b s o"); the
            name of an op or of a kind of op whose rule to reuse ("aten::relu",
            "elementwise_unary"); or a function that takes a `Call` and returns `Merged` layouts, a
            notation, or None to let the compiler choose. `replicate_rule` replicates everything.
        override: replace the rule that the op has.
        kind, where: how listings name the rule's origin; by default the user's line.

    Returns:
        the rule as a function of a `Call`.

    Raises:
        LayoutRuleError: the op has a rule, ``op`` is no op, or ``rule`` is malformed or names
            nothing.

    Example::

        import torch, xla_dtensor as xd

        xd.register_rule(torch.ops.aten.cumprod, "rows cols! -> rows cols!", override=True)
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        rows, cols = (xd.distribute_tensor(torch.ones(8, 8), mesh, [xd.Shard(i)]) for i in (0, 1))
        assert rows.cumprod(1).placements == (xd.Shard(0),)
        assert cols.cumprod(1).placements == (xd.Replicate(),)  # gathered first
    """
    name = _name_of(op)
    known = _USER_RULES.get(name)
    if not override and (known is not None or name in _RULES):
        where = f" (registered at {known.where})" if known is not None else ""
        text = known.text if known is not None else _describe(_RULES[name])
        raise LayoutRuleError(
            f"{name} already has a layout rule: {text}{where}. Pass override=True to replace it"
        )
    found = _rule_of(name, rule)
    _USER_RULES.add(name, Registration(name, found, kind, where or caller()), override=True)
    return found


def register_family(name: str, rule: str | Rule) -> None:
    """Register a rule of the library's own; a string is a notation, or names a rule."""
    if name in _RULES:
        raise ValueError(f"{name} already has a layout rule: {_describe(_RULES[name])}")
    if isinstance(rule, str):
        rule = notation_rule(rule) if "->" in rule else _RULES[rule]
    _RULES.add(name, rule)


def _name_of(op: Any) -> str:
    if isinstance(op, str):
        return op
    if isinstance(op, OpOverload):
        return op.name()
    if isinstance(op, OpOverloadPacket):
        return packet_name(op)
    if isinstance(op, torch.library.CustomOpDef):
        return custom_op_name(op)
    raise LayoutRuleError(
        f"register_rule: {op!r} is no op: give an overload, torch.ops.mylib.myop, what "
        'torch.library.custom_op returned, or a name ("mylib::myop")'
    )


def _rule_of(name: str, rule: str | UserRule) -> UserRule:
    if not isinstance(rule, str):
        return rule
    if "->" in rule:
        try:
            return notation_rule(rule)
        except ValueError as error:
            raise LayoutRuleError(f"{name}: {error}") from None
    # As an op's rule, with the call's arguments as that op's; some names are of no op.
    named = (resolve(rule) for resolve in _name_resolvers)
    found = next(filter(None, named), None) or _USER_RULES.get(rule, _RULES.get(rule))
    if isinstance(found, Registration):
        return found.rule
    if found is None:
        raise LayoutRuleError(
            f"{name}: {rule!r} is neither a notation nor the name of an op or of a kind of op that "
            "has a rule; xla_dtensor.debug.rules() lists them"
        )
    return found


def register(*names: str, namespace: str = "aten") -> Callable[[AnyRule], AnyRule]:
    """`register_family` as a decorator, for the ops `names` of one namespace."""

    def decorate(rule: AnyRule) -> AnyRule:
        for name in names:
            register_family(f"{namespace}::{name}", rule)
        return rule

    return decorate


def notation_rule(text: str, multilinear: bool = False) -> Rule:
    validate(text)  # a malformed notation fails where it is registered

    def rule(call: Call) -> Merged:
        return _by_notation(text, call, multilinear)

    rule.__doc__ = text
    rule.__module__ = sys._getframe(1).f_globals["__name__"]  # the family that it belongs to
    return rule


def _by_notation(text: str, call: Call, multilinear: bool) -> Merged:
    try:
        named = expand_ellipsis(text, [t.ndim for t in call.tensors])
        notation = parse(named, multilinear=multilinear)
        options = alternatives(notation, [t.shape for t in call.tensors])
    except ValueError as error:
        raise LayoutRuleError(
            f"the layout rule {text!r} of {call.func} doesn't fit {tensors_text(call)}: {error}"
        ) from None
    if len(notation.outputs) != call.n_outputs:
        raise LayoutRuleError(
            f"the layout rule {text!r} of {call.func} gave {len(notation.outputs)} output layouts "
            f"for {call.n_outputs} outputs, of shapes {list(call.out_shapes)}, of "
            f"{tensors_text(call)}"
        )
    return call.merge(options)


def replicate_rule(call: Call) -> Merged:
    """Everything replicated: for those who prefer it to the compiler's choice.

    Args:
        call: the call that is asked about.

    Returns:
        replicated layouts for all tensor arguments and results.

    Example::

        import torch, xla_dtensor as xd

        xd.register_rule("aten::cumprod", xd.rules.replicate_rule, override=True)
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        x = xd.distribute_tensor(torch.ones(8, 4), mesh, [xd.Shard(0)])
        assert x.cumprod(1).placements == (xd.Replicate(),)
    """
    return call.replicate()


def rules() -> dict[str, str]:
    """The registered names, with a word on each rule."""
    return {each.name: each.text for each in registrations()}


def registrations() -> list[Registration]:
    """Every rule that ops can find, by name; a user's in place of the family's that it replaces."""
    families = {
        name: Registration(name, rule, "family", getattr(rule, "__module__", "").split(".")[-1])
        for name, rule in _RULES.items()
    }
    return [each for _, each in sorted((families | _USER_RULES).items())]


def _describe(rule: UserRule) -> str:
    return str(rule.__doc__ or getattr(rule, "__name__", "")).strip().split("\n")[0]


def find_rule(func: OpOverload) -> UserRule | None:
    """The rule of `func`: its own, its op's, or that of the functional or per-tensor form."""
    found = _find(func)
    return None if found is None else found.rule


def find_registration(func: OpOverload) -> Registration | None:
    """The rule of `func` as `find_rule` finds it, with where it comes from."""
    return _find(func)


@cache
def _find(func: OpOverload) -> Registration | None:
    name = rule_name(func)
    if name is None:
        return None
    if name in _USER_RULES:
        return _USER_RULES[name]
    rule = _KINDS[name](func) if name in _KINDS else _RULES[name]
    if rule is None:
        return None
    return Registration(name, rule, "family", rule.__module__.split(".")[-1])


changes.listen(_find.cache_clear)


FOREACH, ELEMENTWISE = "foreach", "elementwise"

"""The names of the rules that ops have by their kind, not by being registered."""


def rule_name(func: OpOverload) -> str | None:
    """The name that the rule of `func` is registered under, or of its kind; None without a rule."""
    for table in (_USER_RULES, _RULES):
        for name in _names(func):
            if name in table:
                return name
    if base_name(func).startswith(("_foreach_", "_amp_foreach_", "_fused_")):
        return FOREACH
    if torch.Tag.pointwise in func.tags or _functional_is_pointwise(func):
        return ELEMENTWISE
    return None


def _names(func: OpOverload) -> Iterator[str]:
    """The names under which `func` may have a rule, the most specific first."""
    full = func.name()
    namespace = full.split("::")[0]
    packet, _, overload = full.partition(".")
    yield full
    yield packet
    base = f"{namespace}::{base_name(func)}"
    functional = _functional(func)
    if functional is not None:
        yield functional.name()
    if base != packet:
        yield f"{base}.{overload}" if overload else base
        yield base
    if base.endswith("_copy") and base != "aten::_to_copy":
        yield base.removesuffix("_copy")


@cache
def _functional(func: OpOverload) -> OpOverload | None:
    """The overload that computes the same without writing to an argument."""
    if not schema_of(func).is_mutable:
        return None
    namespace = getattr(torch.ops, func.namespace)
    packet = getattr(namespace, base_name(func), None)
    if packet is None:
        return None

    def signature(op: OpOverload) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in schema_of(op).arguments if not a.is_out]

    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if not schema_of(candidate).is_mutable and signature(candidate) == signature(func):
            return candidate
    return None


def _functional_is_pointwise(func: OpOverload) -> bool:
    functional = _functional(func)
    return functional is not None and torch.Tag.pointwise in functional.tags
