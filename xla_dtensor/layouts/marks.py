"""Marks: facts about a group's dim that also hold for every dim sharded together with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from xla_dtensor.layouts.factors import SUM, Factor
from xla_dtensor.layouts.parts import Group, Node

GroupOf = Callable[[Any], "Group | None"]


def mark_joint(node: Node, group_of: GroupOf, sizes: Mapping[str, int]) -> None:
    """Of a reshape several dims become one, or one several: where axes cut some of these to length
    1, others may cut the next one."""
    devices = {1}
    for size in sizes.values():
        devices |= {size * other for other in devices}
    for factor in node.factors:
        joined = bool(factor.behind_operand)
        behind = factor.behind_operand or factor.behind_result
        many, one = node.operands[0], node.results[0]
        if not joined:
            many, one = one, many
        group = group_of(one)
        if not behind or group is None or many is None:
            continue
        if all(many.aval.shape[d] in devices for d in behind):
            group.joint.add((factor.results if joined else factor.operands)[0])


def pass_on(nodes: Sequence[Node], group_of: GroupOf) -> None:
    """Mark the dims that are cut with marked ones, by whatever nodes are between them."""
    # Each set of dims that are sharded together once: equal layers give the same sets again.
    together = dict.fromkeys(
        tuple(_places(node, factor, group_of))
        for node in nodes
        for factor in node.factors
        if not _is_second(factor)
    )
    changed = True
    while changed:
        changed = False
        for places in together:
            for kind in ("uneven", "joint"):
                dims = [(getattr(group, kind), d) for group, d in places]
                if any(d in marked for marked, d in dims):
                    changed = changed or any(d not in marked for marked, d in dims)
                    for marked, d in dims:
                        marked.add(d)
            order = next((g.orders[d] for g, d in places if d in g.orders), None)
            for group, d in places if order is not None else ():
                changed = changed or d not in group.orders
                group.orders.setdefault(d, order or ())


def _is_second(factor: Factor) -> bool:
    """Whether it is for an axis that cuts what another one has cut to length 1."""
    return bool(factor.behind_operand or factor.behind_result)


def _places(node: Node, factor: Factor, group_of: GroupOf) -> Iterator[tuple[Group, int]]:
    for values, dims in ((node.operands, factor.operands), (node.results, factor.results)):
        for i, d in dims.items():
            group = group_of(values[i]) if d != SUM and values[i] is not None else None
            if group is not None:
                yield group, d
