"""`rules`: what layout rules are registered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xla_dtensor.base.source_line import short_path
from xla_dtensor.custom_ops import distributed_op
from xla_dtensor.rules import registrations
from xla_dtensor.rules.registry import ELEMENTWISE, FOREACH

_BY_KIND = f"""\
Besides, ops have a rule by their kind: "{ELEMENTWISE}" those that torch tags pointwise,
"{FOREACH}" _foreach_*, _amp_foreach_* and _fused_*. Without a rule the compiler chooses."""


@dataclass(frozen=True)
class RegisteredRule:
    """One rule, as `rules` lists it.

    Attributes:
        name: of the op, "aten::mm", the overload, "aten::max.dim", or the `DFunction`'s op.
        kind: "user", "torch" (``register_sharding``), "family" (the library's own), or "DFunction".
        text: what it says, in a few words or as a notation.
        where: the line that registered it, or the module of a family.

    Example::

        import xla_dtensor as xd

        (rule,) = [r for r in xd.debug.rules("aten::mm") if r.name == "aten::mm"]
        assert (rule.kind, rule.text, rule.where) == ("family", "m k, k n -> m n", "matmul")
    """

    name: str
    kind: str
    text: str
    where: str


class RuleTable:
    """Rules by name, which `rules` makes: iterable, and printed as a table.

    Example::

        import xla_dtensor as xd

        table = xd.debug.rules("softmax")
        assert len(table) == len(list(table)) and "aten::_softmax" in str(table)
    """

    def __init__(self, rules: list[RegisteredRule]) -> None:
        self._rules = rules

    def __len__(self) -> int:
        return len(self._rules)

    def __iter__(self) -> Iterator[RegisteredRule]:
        return iter(self._rules)

    def __str__(self) -> str:
        head = ("name", "kind", "rule", "where")
        rows = [(r.name, r.kind, r.text, short_path(r.where)) for r in self._rules]
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(3)]
        lines = [
            "  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in (head, *rows)
        ]
        return "\n".join([*lines, _BY_KIND])

    __repr__ = __str__


def rules(name: str | None = None) -> RuleTable:
    """The layout rules that are registered: of ops, the library's and those of
    `xla_dtensor.register_rule` and torch's ``register_sharding``, and of `DFunction`s.

    Args:
        name: only those with this in their name.

    Returns:
        a `RuleTable` of `RegisteredRule`s, by name.

    Example::

        import xla_dtensor as xd

        assert "aten::mm" in [rule.name for rule in xd.debug.rules("mm")]
    """
    found = [RegisteredRule(r.name, r.kind, r.text, r.where) for r in registrations()]
    for op in distributed_op.OPS.values():
        text = op.rule if op.rule is not None else f"{type(op).__name__}.infer_layout"
        found.append(RegisteredRule(op.op_name, "DFunction", text, op.registered_at))
    return RuleTable(sorted((r for r in found if name is None or name in r.name), key=_by_name))


def _by_name(rule: RegisteredRule) -> tuple[str, str]:
    return rule.name, rule.kind
