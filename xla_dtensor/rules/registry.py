"""Which rule an overload has, and the entry point `infer_placements`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar

import torch

from ._types import Placements, TensorInfo, replicated, shard_dim
from .alternatives import Alternative, Merged, merge
from .notation import alternatives, expand_ellipsis, parse

OutShapes = Sequence[tuple[int, ...] | None]


@dataclass(frozen=True)
class Call:
    """One call of an overload, its arguments by schema name and defaults filled in."""

    func: torch._ops.OpOverload
    args: dict[str, Any]
    out_shapes: OutShapes
    mesh_shape: tuple[int, ...]

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
"""The merged layouts, or None to leave this call to the compiler."""

_RULES: dict[str, Rule] = {}


def register_rule(
    op: str | torch._ops.OpOverload, rule: str | Rule, *, override: bool = False
) -> Rule:
    """Register the rule of `op`: an overload, or a name ("aten::mm", "aten::max.dim").

    `rule` is a function, a notation ("m k, k n -> m n"), or the name of an op whose rule to reuse.
    A name without an overload serves all overloads that have no rule of their own.
    """
    name = op if isinstance(op, str) else op.name()
    if name in _RULES and not override:
        raise ValueError(f"{name} already has a layout rule: {_describe(_RULES[name])}")
    if isinstance(rule, str):
        if "->" not in rule and rule not in _RULES:
            raise ValueError(f"{name}: {rule!r} is neither a notation nor an op with a rule")
        rule = notation_rule(rule) if "->" in rule else _RULES[rule]
    _RULES[name] = rule
    _find_rule.cache_clear()
    return rule


def register(
    *names: str, namespace: str = "aten", override: bool = False
) -> Callable[[AnyRule], AnyRule]:
    """`register_rule` as a decorator, for the ops `names` of one namespace."""

    def decorate(rule: AnyRule) -> AnyRule:
        for name in names:
            register_rule(f"{namespace}::{name}", rule, override=override)
        return rule

    return decorate


def notation_rule(text: str, reduction: str = "sum", multilinear: bool = False) -> Rule:
    if "..." not in text:
        parse(text, reduction, multilinear)  # a malformed notation fails where it is registered

    def rule(call: Call) -> Merged:
        named = expand_ellipsis(text, [t.ndim for t in call.tensors])
        notation = parse(named, reduction, multilinear)
        if len(notation.outputs) != call.n_outputs:
            raise _wrong_count(call, len(notation.outputs))
        return call.merge(alternatives(notation, [t.shape for t in call.tensors]))

    rule.__doc__ = text
    return rule


def replicate_rule(call: Call) -> Merged:
    """Everything replicated: for those who prefer it to the compiler's choice."""
    return call.replicate()


def rules() -> dict[str, str]:
    """The registered names, with a word on each rule."""
    return {name: _describe(rule) for name, rule in sorted(_RULES.items())}


def _describe(rule: Rule) -> str:
    return str(rule.__doc__ or getattr(rule, "__name__", "")).strip().split("\n")[0]


def find_rule(func: torch._ops.OpOverload) -> Rule | None:
    """The rule of `func`: its own, its op's, or that of the functional or per-tensor form."""
    return _find_rule(func)


@cache
def _find_rule(func: torch._ops.OpOverload) -> Rule | None:
    from .foreach import foreach_rule
    from .pointwise import pointwise_rule

    name = rule_name(func)
    if name == FOREACH:
        return foreach_rule(func)
    return pointwise_rule if name == ELEMENTWISE else _RULES[name] if name else None


FOREACH, ELEMENTWISE = "foreach", "elementwise"
"""The names of the rules that ops have by their kind, not by being registered."""


def rule_name(func: torch._ops.OpOverload) -> str | None:
    """The name that the rule of `func` is registered under, or of its kind; None without a rule."""
    for name in _names(func):
        if name in _RULES:
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
) -> Merged | None:
    """Input and output layouts of one call; None if no rule speaks for it."""
    rule = find_rule(func)
    if rule is None:
        return None
    call = Call(func, bind(func, args, kwargs), tuple(out_shapes), tuple(mesh_shape))
    merged = rule(call)
    if merged is None:
        return None
    if len(merged.outputs) != len(out_shapes):
        raise _wrong_count(call, len(merged.outputs))
    for shape, placements in zip(out_shapes, merged.outputs, strict=True):
        dims = [shard_dim(p) for p in placements]
        if shape is not None and any(d is not None and d >= len(shape) for d in dims):
            raise RuntimeError(
                f"the layout rule of {func} gave {placements} for an output of shape {shape}"
            )
    return _written(call, merged)


def _wrong_count(call: Call, count: int) -> RuntimeError:
    return RuntimeError(
        f"the layout rule of {call.func} gave {count} output layouts for {call.n_outputs} outputs"
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
