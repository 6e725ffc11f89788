"""Equal layers as one: what a graph has many times is chosen once.

Groups that look alike, with all that is near them, become one group: layers of one size are told
apart by nothing. Nodes between the same groups then are one node that counts several times. How
near: a neighbour's neighbours, `ROUNDS` steps away (the colours of Weisfeiler and Leman, who
refine a vertex's colour by its neighbours'). A choice for the folded graph is one for the graph,
in which equal things lie alike; so stopping early, as in a long chain of equal time steps, where
each is another number of steps from the end, loses no more than a better unequal choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_dtensor.layouts.factors import Factor
    from xla_dtensor.layouts.graph import Graph, Group, Node

ROUNDS = 8


@dataclass(frozen=True)
class Folds:
    """What is the same in a graph.

    Attributes:
        kind_of_node: per node, the number of its kind.
        nodes: per kind, one node, and how often such nodes run.
        kind_of_value: per operand of a node, the number of its kind.
        values: per kind, how often such values are moved, if they are.
    """

    kind_of_node: Sequence[int]
    nodes: Sequence[tuple[Node, int]]
    kind_of_value: Mapping[Any, int]
    values: Mapping[int, int]


def fold(graph: Graph) -> Folds:
    """Make one group of each kind of groups, and tell which nodes are alike then."""
    values = list({v: None for node in graph.nodes for v in node.operands if v is not None})
    groups = list(graph.groups())
    own = {id(group): number for number, group in enumerate(groups)}
    group_of = {v: own[id(graph.group(v))] for v in values}
    results = [
        [None if v is None else own[id(graph.group(v))] for v in n.results] for n in graph.nodes
    ]
    of_group = _numbers([_of_group(group) for group in groups])
    of_node = _numbers([_of_node(node) for node in graph.nodes])
    times = {v: node.times for node in graph.nodes for v in node.operands if v is not None}
    of_value = dict(times)

    def refined_nodes() -> list[int]:
        return _numbers(
            [
                (
                    of_node[i],
                    tuple(
                        None if v is None else (of_group[group_of[v]], of_value[v])
                        for v in node.operands
                    ),
                    tuple(None if g is None else of_group[g] for g in results[i]),
                )
                for i, node in enumerate(graph.nodes)
            ]
        )

    for _ in range(ROUNDS):
        before = max(of_group, default=0), max(of_node, default=0)
        of_node = refined_nodes()
        users: dict[Any, Counter[Hashable]] = {v: Counter() for v in values}
        around: list[Counter[Hashable]] = [Counter() for _ in groups]
        for i, node in enumerate(graph.nodes):
            for place, v in enumerate(node.operands):
                if v is not None:
                    users[v][of_node[i], place] += 1
                    around[group_of[v]][of_node[i], place, of_value[v]] += 1
            for place, g in enumerate(results[i]):
                if g is not None:
                    around[g][of_node[i], ~place] += 1
        numbers = _numbers([(times[v], frozenset(users[v].items())) for v in values])
        of_value = dict(zip(values, numbers, strict=True))
        of_group = _numbers(
            [(of_group[g], frozenset(around[g].items())) for g in range(len(groups))]
        )
        if before == (max(of_group, default=0), max(of_node, default=0)):
            break
    first: dict[int, Group] = {}
    for group, number in zip(groups, of_group, strict=True):
        one = first.setdefault(number, group)
        if one is not group:
            group.within = one
    kinds = refined_nodes()
    counts = Counter(kinds)
    some = dict(zip(kinds, graph.nodes, strict=True))
    nodes = [(some[kind], counts[kind] * some[kind].times) for kind in range(len(counts))]
    # A value's group is part of what it is.
    of_both = _numbers([(of_group[group_of[v]], of_value[v]) for v in values])
    moved: Counter[int] = Counter()
    for v, kind in zip(values, of_both, strict=True):
        moved[kind] += times[v]
    return Folds(kinds, nodes, dict(zip(values, of_both, strict=True)), moved)


def _of_group(group: Group) -> Hashable:
    return (
        group.shape,
        group.nbytes,
        group.known,
        frozenset(group.uneven),
        frozenset(group.joint),
        group.is_free,
    )


def _of_node(node: Node) -> Hashable:
    return (
        node.equation is None,
        node.required,
        node.times,
        node.work,
        tuple(map(_of_factor, node.factors)),
    )


def _of_factor(factor: Factor) -> Hashable:
    dims = tuple(factor.operands.items()), tuple(factor.results.items())
    return dims, factor.exchanges, factor.behind_operand, factor.behind_result


def _numbers(colours: Sequence[Hashable]) -> list[int]:
    """The same number for what is equal, counted from 0 in the order in which they come."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(colour, len(known)) for colour in colours]
