"""Folds equal layers of a graph into one, so that their layouts are chosen once.

Groups that look alike, with all that is near them, become one group: layers of one size are told
apart by nothing. Nodes between the same groups then are one node that counts several times. How
near: a neighbour's neighbours, `ROUNDS` steps away (the colours of Weisfeiler and Leman, who
refine a vertex's colour by its neighbours'). A choice for the folded graph is one for the graph,
in which equal things lie alike; so stopping early, as in a long chain of equal time steps, where
each is another number of steps from the end, loses no more than a better unequal choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_dtensor.layouts.factors import Factor
from xla_dtensor.layouts.parts import Group, Node, nbytes_of

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


def fold(
    nodes: Sequence[Node], groups: Sequence[Group], group_of: Callable[[Any], Group | None]
) -> Folds:
    """Make one group of each kind of groups, and tell which nodes are alike then."""
    colours = _Colours(nodes, groups, group_of)
    for _ in range(ROUNDS):
        if not colours.refine():
            break
    return colours.folds()


class _Colours:
    """Numbers of a graph's groups, nodes and operands of nodes, the same for those that look alike
    as far as was looked."""

    def __init__(
        self,
        nodes: Sequence[Node],
        groups: Sequence[Group],
        group_of: Callable[[Any], Group | None],
    ) -> None:
        self._nodes, self._groups = nodes, groups
        number = {id(group): i for i, group in enumerate(self._groups)}
        self._group = {
            v: number[id(group_of(v))]
            for node in nodes
            for v in (*node.operands, *node.results)
            if v is not None
        }
        self._times = {v: n.times for n in nodes for v in n.operands if v is not None}
        # The cost of a move depends on the value's own bytes: a group may have several dtypes.
        self._moved = {v: (times, nbytes_of(v.aval)) for v, times in self._times.items()}
        self._of_group = _numbers([_of_group(group) for group in self._groups])
        self._of_node = _numbers([_of_node(node) for node in nodes])
        self._roles = [_roles(node) for node in nodes]
        self._of_value: dict[Any, Any] = {**self._moved}

    def refine(self) -> bool:
        """Look one step further; whether that tells more apart."""
        before = len({*self._of_group}) + len({*self._of_node})
        self._of_node = self._seen_from_nodes()
        users: dict[Any, Counter[Hashable]] = {v: Counter() for v in self._times}
        around: list[Counter[Hashable]] = [Counter() for _ in self._groups]
        for node, own, (wanted, given) in zip(self._nodes, self._of_node, self._roles, strict=True):
            for role, v in zip(wanted, node.operands, strict=True):
                if v is not None:
                    users[v][own, role] += 1
                    around[self._group[v]][own, role, self._of_value[v]] += 1
            for role, v in zip(given, node.results, strict=True):
                if v is not None:
                    around[self._group[v]][own, role] += 1
        seen = [(self._moved[v], frozenset(own.items())) for v, own in users.items()]
        self._of_value = dict(zip(users, _numbers(seen), strict=True))
        pairs = zip(self._of_group, around, strict=True)
        self._of_group = _numbers([(own, frozenset(seen.items())) for own, seen in pairs])
        return len({*self._of_group}) + len({*self._of_node}) > before

    def _seen_from_nodes(self) -> list[int]:
        def operand(v: Any) -> Hashable:
            return None if v is None else (self._of_group[self._group[v]], self._of_value[v])

        def result(v: Any) -> Hashable:
            return None if v is None else self._of_group[self._group[v]]

        return _numbers(
            [
                (own, tuple(map(operand, node.operands)), tuple(map(result, node.results)))
                for own, node in zip(self._of_node, self._nodes, strict=True)
            ]
        )

    def folds(self) -> Folds:
        """Join the groups that look alike."""
        first: dict[int, Group] = {}
        for group, number in zip(self._groups, self._of_group, strict=True):
            one = first.setdefault(number, group)
            if one is not group:
                group.within = one
        kinds = self._seen_from_nodes()
        counts, some = Counter(kinds), dict(zip(kinds, self._nodes, strict=True))
        nodes = [(some[kind], counts[kind] * some[kind].times) for kind in range(len(counts))]
        # Values are alike only if their groups are.
        both = [(self._of_group[self._group[v]], own) for v, own in self._of_value.items()]
        kind_of_value = dict(zip(self._of_value, _numbers(both), strict=True))
        moved: Counter[int] = Counter()
        for v, kind in kind_of_value.items():
            moved[kind] += self._times[v]
        return Folds(kinds, nodes, kind_of_value, moved)


def _of_group(group: Group) -> Hashable:
    return (
        group.shape,
        group.nbytes,
        group.known,
        frozenset(group.uneven),
        frozenset(group.joint),
        frozenset(group.orders.items()),
        frozenset(group.by_rule),
        group.is_free,
    )


def _of_node(node: Node) -> Hashable:
    return (
        node.equation is None,
        node.required,
        node.times,
        node.work,
        node.fills,
        len(node.added),
        tuple(map(_of_factor, node.factors)),
        tuple(0 if v is None else nbytes_of(v.aval) for v in node.results),
    )


def _roles(node: Node) -> tuple[list[Hashable], list[Hashable]]:
    """What a node does with each operand, and with each result: which dim of it each factor cuts.
    The parameters that a loop over layers stacks all have the same one."""

    def roles(values: Sequence[Any], dims: Sequence[Mapping[int, int]]) -> list[Hashable]:
        return [tuple([of.get(i) for of in dims]) for i in range(len(values))]

    operands = roles(node.operands, [factor.operands for factor in node.factors])
    return operands, roles(node.results, [factor.results for factor in node.factors])


def _of_factor(factor: Factor) -> Hashable:
    dims = tuple(factor.operands.items()), tuple(factor.results.items())
    return dims, factor.exchanges, factor.behind_operand, factor.behind_result


def _numbers(colours: Sequence[Hashable]) -> list[int]:
    """The same number for what is equal, counted from 0 in the order in which they come."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(colour, len(known)) for colour in colours]
