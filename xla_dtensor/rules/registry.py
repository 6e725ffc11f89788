"""Which rule an overload has, and the entry point `infer_placements`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch.distributed.tensor import Placement

from xla_dtensor.base.source_line import caller
from xla_dtensor.errors import LayoutRuleError
from xla_dtensor.rules.alternatives import Alternative, Merged, merge
from xla_dtensor.rules.merging import Placements, TensorInfo, replicated, shard_dim
from xla_dtensor.rules.notation import alternatives, expand_ellipsis, parse, validate

OutShapes = Sequence[tuple[int, ...] | None]


@dataclass(frozen=True)
class Call:
    """One call of an overload, its arguments by schema name and defaults filled in."""

    func: torch._ops.OpOverload
    args: dict[str, Any]
    out_shapes: OutShapes
    mesh_shape: tuple[int, ...]
    mesh: Any = None
    """The ``DeviceMesh``, if there is one."""
    given: tuple[tuple[Any, ...], dict[str, Any]] = field(default=((), {}))
    """The arguments as they were given, without defaults."""

    @cached_property
    def name(self) -> str:
        """The op without its namespace, overload and in-place underscore."""
        return base_name(self.func)

    @cached_property
    def tensors(self) -> list[TensorInfo]:
        """The tensor arguments, lists flattened, in schema order; `out=` tensors are left out."""
        outs = {a.name for a in self.func._schema.arguments if a.is_out}
        return [t for name, arg in self.args.items() if name not in outs for t in _tensors(arg)]

    @property
    def n_outputs(self) -> int:
        return len(self.out_shapes)

    def tensor(self, name: str) -> TensorInfo:
        value = self.args[name]
        assert isinstance(value, TensorInfo), f"{self.func}: {name} is not a tensor"
        return value

    def dim(self, ndim: int, name: str = "dim", default: int = 0) -> int:
        value = self.args.get(name)
        return (default if value is None else value) % max(ndim, 1)

    def dims(self, ndim: int, name: str = "dim") -> list[int] | None:
        """A dim or list of dims, non-negative; None where the argument is absent or None."""
        value = self.args.get(name)
        if value is None:
            return None
        return [d % max(ndim, 1) for d in ([value] if isinstance(value, int) else value)]

    def merge(self, options: Sequence[Alternative], *, new_shards: bool = False) -> Merged:
        return merge(options, self.tensors, self.n_outputs, self.mesh_shape, new_shards=new_shards)

    def follow(self, inputs: Sequence[Placements], *outputs: Placements) -> Merged:
        """The given layouts; a single output layout serves all outputs."""
        outs = outputs * self.n_outputs if len(outputs) == 1 else outputs
        return Merged(tuple(inputs), tuple(outs))

    def replicate(self) -> Merged:
        whole = replicated(self.mesh_shape)
        return Merged((whole,) * len(self.tensors), (whole,) * self.n_outputs)


AnyRule = TypeVar("AnyRule", bound="Callable[[Call], Merged | None]")
Rule = Callable[[Call], Merged | None]
UserRule: TypeAlias = Callable[[Call], Merged | str | None]
"""The merged layouts, a notation that says them, or None to leave this call to the compiler."""

_RULES: dict[str, Rule] = {}
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


_USER_RULES: dict[str, Registration] = {}
"""The others; they come first."""

_listeners: list[Callable[[], None]] = []


def on_change(listener: Callable[[], None]) -> None:
    """Call ``listener`` whenever a rule is registered."""
    _listeners.append(listener)


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

    Raises:
        LayoutRuleError: the op has a rule, the notation is malformed, or nothing has that name.
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
    _USER_RULES[name] = Registration(name, found, kind, where or caller())
    _changed()
    return found


def register_family(name: str, rule: str | Rule) -> None:
    """Register a rule of the library's own; a string is a notation, or names a rule."""
    if name in _RULES:
        raise ValueError(f"{name} already has a layout rule: {_describe(_RULES[name])}")
    if isinstance(rule, str):
        rule = notation_rule(rule) if "->" in rule else _RULES[rule]
    _RULES[name] = rule
    _changed()


def _changed() -> None:
    _find.cache_clear()
    for listener in _listeners:
        listener()


def _name_of(op: Any) -> str:
    if isinstance(op, str):
        return op
    if isinstance(op, torch._ops.OpOverload):
        return op.name()
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    if isinstance(op, torch.library.CustomOpDef):
        return op._qualname
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
    from xla_dtensor.rules.names import rule_of_name

    # As an op's rule, with the call's arguments as that op's; some names are of no op.
    found = rule_of_name(rule) or _USER_RULES.get(rule, _RULES.get(rule))
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


def notation_rule(text: str, reduction: str = "sum", multilinear: bool = False) -> Rule:
    validate(text)  # a malformed notation fails where it is registered

    def rule(call: Call) -> Merged:
        return _by_notation(text, call, reduction, multilinear)

    rule.__doc__ = text
    rule.__module__ = sys._getframe(1).f_globals["__name__"]  # the family that it belongs to
    return rule


def _by_notation(
    text: str, call: Call, reduction: str = "sum", multilinear: bool = False
) -> Merged:
    try:
        named = expand_ellipsis(text, [t.ndim for t in call.tensors])
        notation = parse(named, reduction, multilinear)
        options = alternatives(notation, [t.shape for t in call.tensors])
    except ValueError as error:
        raise LayoutRuleError(
            f"the layout rule {text!r} of {call.func} doesn't fit {_tensors_of(call)}: {error}"
        ) from None
    if len(notation.outputs) != call.n_outputs:
        raise LayoutRuleError(
            f"the layout rule {text!r} of {call.func} gave {len(notation.outputs)} output layouts "
            f"for {call.n_outputs} outputs, of shapes {list(call.out_shapes)}, of "
            f"{_tensors_of(call)}"
        )
    return call.merge(options)


def replicate_rule(call: Call) -> Merged:
    """Everything replicated: for those who prefer it to the compiler's choice."""
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


def find_rule(func: torch._ops.OpOverload) -> UserRule | None:
    """The rule of `func`: its own, its op's, or that of the functional or per-tensor form."""
    found = _find(func)
    return None if found is None else found.rule


def find_registration(func: torch._ops.OpOverload) -> Registration | None:
    """The rule of `func` as `find_rule` finds it, with where it comes from."""
    return _find(func)


@cache
def _find(func: torch._ops.OpOverload) -> Registration | None:
    from xla_dtensor.rules.foreach import foreach_rule
    from xla_dtensor.rules.pointwise import pointwise_rule

    name = rule_name(func)
    if name is None:
        return None
    if name in _USER_RULES:
        return _USER_RULES[name]
    rule = (
        foreach_rule(func)
        if name == FOREACH
        else pointwise_rule
        if name == ELEMENTWISE
        else _RULES[name]
    )
    if rule is None:
        return None
    return Registration(name, rule, "family", rule.__module__.split(".")[-1])


FOREACH, ELEMENTWISE = "foreach", "elementwise"
"""The names of the rules that ops have by their kind, not by being registered."""


def rule_name(func: torch._ops.OpOverload) -> str | None:
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


def _names(func: torch._ops.OpOverload) -> Iterator[str]:
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


def base_name(func: torch._ops.OpOverload) -> str:
    """The op's name without its namespace, overload and in-place underscore."""
    name = func._schema.name.split("::")[1]
    dunder = name.startswith("__") and name.endswith("__")
    return name if dunder else name.removesuffix("_")


@cache
def _functional(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload that computes the same without writing to an argument."""
    if not func._schema.is_mutable:
        return None
    namespace = getattr(torch.ops, func.namespace)
    packet = getattr(namespace, base_name(func), None)
    if packet is None:
        return None

    def signature(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]

    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if not candidate._schema.is_mutable and signature(candidate) == signature(func):
            return candidate
    return None


def _functional_is_pointwise(func: torch._ops.OpOverload) -> bool:
    functional = _functional(func)
    return functional is not None and torch.Tag.pointwise in functional.tags


def _tensors(value: object) -> Iterator[TensorInfo]:
    if isinstance(value, TensorInfo):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def bind(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call by schema name, with defaults."""
    bound = {}
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def infer(
    func: torch._ops.OpOverload,
    args: tuple,
    kwargs: dict,
    out_shapes: OutShapes,
    mesh_shape: tuple[int, ...],
    mesh: Any = None,
) -> Merged | None:
    """Input and output layouts of one call; None if no rule speaks for it.

    Raises:
        LayoutRuleError: what the rule says doesn't fit the call.
    """
    found = find_registration(func)
    if found is None:
        return None
    call = Call(
        func, bind(func, args, kwargs), tuple(out_shapes), tuple(mesh_shape), mesh, (args, kwargs)
    )
    merged = ask(found.rule, call)
    if merged is None:
        return None
    _check(found, call, merged)
    return _written(call, merged)


def ask(rule: UserRule, call: Call) -> Merged | None:
    """What `rule` says of `call`, a notation read.

    Raises:
        LayoutRuleError: a notation doesn't fit the call.
    """
    said = rule(call)
    return said if not isinstance(said, str) else _by_notation(said, call)


def _tensors_of(call: Call) -> str:
    shapes = [list(t.shape) for t in call.tensors]
    return f"tensors of shapes {shapes} on a mesh of shape {call.mesh_shape}"


def _check(found: Registration, call: Call, merged: Any) -> None:
    """Raise if what a rule said can't be true of the call."""
    about = (
        f"the layout rule of {call.func} ({found.text!r}, {found.kind} rule from {found.where}), "
        f"called with {_tensors_of(call)},"
    )
    if not isinstance(merged, Merged):
        raise LayoutRuleError(
            f"{about} returned {merged!r}; it returns Merged layouts (call.merge, call.follow), a "
            "notation, or None"
        )
    if len(merged.outputs) != call.n_outputs:
        raise LayoutRuleError(
            f"{about} gave {len(merged.outputs)} output layouts for {call.n_outputs} outputs"
        )
    outputs = list(zip(call.out_shapes, merged.outputs, strict=True))
    inputs: list[Any] = []
    if found.kind != "family":  # ours may name fewer
        if len(merged.inputs) != len(call.tensors):
            raise LayoutRuleError(
                f"{about} gave {len(merged.inputs)} input layouts for {len(call.tensors)} tensors"
            )
        inputs = [(t.shape, p) for t, p in zip(call.tensors, merged.inputs, strict=True)]
    for what, each in (("an output", outputs), ("an input", inputs)):
        for shape, placements in each:
            if shape is None:
                continue
            if len(placements) != len(call.mesh_shape) or not all(
                isinstance(p, Placement) for p in placements
            ):
                raise LayoutRuleError(
                    f"{about} gave {placements} for {what} of shape {list(shape)}: a layout has "
                    "one placement per mesh dim"
                )
            dims = [shard_dim(p) for p in placements]
            if any(d is not None and not 0 <= d < len(shape) for d in dims):
                raise LayoutRuleError(
                    f"{about} gave {placements} for {what} of shape {list(shape)}, which has "
                    f"{len(shape)} dims"
                )


def infer_placements(
    func: torch._ops.OpOverload,
    args: tuple,
    kwargs: dict,
    out_shapes: list[tuple[int, ...] | None],
    mesh_shape: tuple[int, ...],
) -> list[Placements] | None:
    """The placements of each tensor result; None if no rule speaks for `func`.

    `out_shapes` is flat, with None for a result that is no tensor (its placements mean nothing).
    """
    merged = infer(func, args, kwargs, out_shapes, mesh_shape)
    return None if merged is None else list(merged.outputs)


def _written(call: Call, merged: Merged) -> Merged:
    """A result that is an argument, written in place, stays laid out as that argument is; an
    ``out=`` tensor that gets another shape is laid out as the rule says."""
    outputs = list(merged.outputs)
    written = [a for a in call.func._schema.arguments if a.alias_info and a.alias_info.is_write]
    by_alias = {tuple(a.alias_info.before_set): a for a in written}
    at = 0
    for result in call.func._schema.returns:
        argument = by_alias.get(tuple(result.alias_info.before_set)) if result.alias_info else None
        targets = list(_tensors(call.args[argument.name])) if argument else [None]
        for target in targets:
            if target is not None and at < len(outputs):
                shape = call.out_shapes[at]
                if shape is None or tuple(shape) == tuple(target.shape):
                    outputs[at] = target.placements
            at += 1
    return replace(merged, outputs=tuple(outputs))
