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
            changed |= _mark([(group.uneven, d) for group, d in places])
            changed |= _mark([(group.joint, d) for group, d in places])
            changed |= _order(places)


def _mark(dims: Sequence[tuple[set[int], int]]) -> bool:
    """Mark all dims where one is marked; whether that was new of one."""
    new = [(marked, d) for marked, d in dims if d not in marked]
    if len(new) == len(dims):
        return False
    for marked, d in new:
        marked.add(d)
    return bool(new)


def _order(places: Sequence[tuple[Group, int]]) -> bool:
    """Give all dims the order of the first that has one; whether that was new of one."""
    order = next((group.orders[d] for group, d in places if d in group.orders), None)
    new = [(group, d) for group, d in places if d not in group.orders]
    if order is None:
        return False
    for group, d in new:
        group.orders[d] = order
    return bool(new)


def _is_second(factor: Factor) -> bool:
    """Whether it is for an axis that cuts what another one has cut to length 1."""
    return bool(factor.behind_operand or factor.behind_result)


def _places(node: Node, factor: Factor, group_of: GroupOf) -> Iterator[tuple[Group, int]]:
    for values, dims in ((node.operands, factor.operands), (node.results, factor.results)):
        for i, d in dims.items():
            group = group_of(values[i]) if d != SUM and values[i] is not None else None
            if group is not None:
                yield group, d
