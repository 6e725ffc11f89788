"""Marks: facts about a group's dim that also hold for every dim sharded together with it.

And nodes whose results are only added to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

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


def mark_added(
    nodes: Sequence[Node],
    equations: Sequence[Any],
    given: Sequence[Any],
    value: Callable[[Any], Any],
) -> None:
    """Products of which nobody wants but their sum: what devices have of each is added first, and
    summed along an axis once, by XLA's compilers of TPUs and GPUs; the CPU's sums each.

    Args:
        nodes: that are marked.
        equations: in order, those of loops' bodies among them.
        given: what a program, or a loop's body, gives besides.
        value: says of a variable whose value it has.
    """
    taken = [atom for equation in equations for atom in equation.invars]
    takers = Counter(value(v) for v in (*taken, *given) if not isinstance(v, Literal))
    products = (node for node in nodes if node.work and len(node.results) == 1)
    parts = {value(v): [node] for node in products for v in node.results if v is not None}
    for equation in equations:
        name, atoms = equation.primitive.name, equation.invars
        if name == "mul":  # by one, as torch adds a gradient
            atoms = [v for v in atoms if not (isinstance(v, Literal) and v.val == 1)]
        is_sum = name in ("add", "add_any")
        if not (is_sum or name == "convert_element_type" or len(atoms) < len(equation.invars)):
            continue
        values = [None if isinstance(v, Literal) else value(v) for v in atoms]
        if values and all(takers[v] == 1 and v in parts for v in values):
            added = [node for v in values for node in parts[v]]
            parts[value(equation.outvars[0])] = added
            for node in added if is_sum else ():
                node.added[:] = added
