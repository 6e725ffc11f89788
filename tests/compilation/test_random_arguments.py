"""Random arguments with aliases, and random changes of them between calls, compiled on a mesh
against CPU torch.

A sequence is drawn once, from its seed, and runs in both worlds. The step looks at which object is
which, at attributes and at numbers, changes what it was given, and gives some of it back.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections import OrderedDict, deque, namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.compilation.changes import Mesh, Observation, World, assert_same, observe
from tests.compilation.changes._world import numbers

CALLS = 7
MODES = ("read", "element", "attribute", "tag", "grow", "back", "iterator", "count")


@dataclasses.dataclass
class Box:
    a: Any
    b: Any = 1.0


class Own(list):
    pass


Pair = namedtuple("Pair", "a b")


class Session:
    """What a user holds, and the step."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.made = 0
        self.pool = [self.tensor() for _ in range(3)]
        self.shared = [self.pool[0], 1.5]
        self.tree = [self.node(2), self.node(1)]
        self.step = world.compile(self.function)

    def tensor(self) -> torch.Tensor:
        self.made += 1
        return self.world.tensor(numbers(self.made, 4, 6))

    # --- drawing ------------------------------------------------------------------------------

    def leaf(self) -> Any:
        drawn = self.rng.randrange(9)
        if drawn < 2:
            return self.rng.choice(self.pool)
        if drawn == 2:
            return self.rng.choice(self.pool).detach()
        if drawn == 3:
            return self.rng.choice([True, None, "text", slice(0, 2)])
        if drawn < 6:
            return self.rng.choice([0.5, 1, 2.0, 3])
        return self.tensor()

    def node(self, depth: int) -> Any:
        if not depth:
            return self.leaf()
        drawn = self.rng.randrange(10)
        a, b = self.node(depth - 1), self.node(depth - 1)
        if self.rng.random() < 0.2:
            b = a
        makers = (
            *(lambda: [a, b], lambda: [a, b], lambda: (a, b), lambda: {"a": a, "b": b}),
            *(lambda: Box(a, b), lambda: SimpleNamespace(a=a, b=b), lambda: Pair(a, b)),
            *(lambda: Own([a, b]), lambda: deque([a, b]), lambda: OrderedDict(b=b, a=a)),
        )
        return makers[drawn]()

    def nodes(self) -> list[Any]:
        """All objects in the tree, each once."""
        found: dict[int, Any] = {}

        def visit(value: Any) -> None:
            if id(value) not in found:
                found[id(value)] = value
                for part in parts(value):
                    visit(part)

        visit(self.tree)
        return list(found.values())

    def change(self) -> None:
        """One change of what the step is given next."""
        nodes = self.nodes()
        lists = [n for n in nodes if isinstance(n, list)]
        tensors = [n for n in nodes if isinstance(n, torch.Tensor)]
        drawn = self.rng.randrange(9)
        where = self.rng.choice(lists)
        at = self.rng.randrange(len(where))
        if drawn == 0:
            where[at] = self.leaf()
        elif drawn == 1:
            where[at] = self.shared
        elif drawn == 2:
            others = [n for n in nodes if n is not self.tree and not contains(n, where)]
            where[at] = self.rng.choice(others) if others else 1.0
        elif drawn == 3 and tensors:
            self.rng.choice(tensors).k = self.rng.choice([2.0, "abc", None])
        elif drawn == 4 and tensors:
            vars(self.rng.choice(tensors)).pop("k", None)
        elif drawn == 5:
            self.tree = [self.node(2), self.node(1)]
        elif drawn == 6:
            self.pool[self.rng.randrange(3)] = self.tensor()
        elif drawn == 7:
            self.shared = list(self.shared)
        elif tensors:
            with torch.no_grad():
                self.rng.choice(tensors).mul_(0.5)

    # --- the step -----------------------------------------------------------------------------

    def function(self, tree: list, mode: str, n: float) -> Any:
        out = self.pool[1] * n
        met: list[Any] = []
        todo: list[Any] = [tree]
        while todo:
            value = todo.pop()
            again = any(value is other for other in met) and not isinstance(value, str | None)
            if isinstance(value, torch.Tensor):
                by = 1.0 + 2 * any(value is t for t in self.pool) + 4 * again
                k = getattr(value, "k", None)
                by += k if isinstance(k, float) else len(k) if isinstance(k, str) else 0.25
                out = out + value * by
            elif type(value) in (int, float):
                out = out + value
            elif value is self.shared:
                out = out * 1.5
            if again and not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, int | float):
                met.append(value)
            todo += parts(value)
        lists = [value for value in met if type(value) in (list, Own)]
        tensors = [value for value in met if isinstance(value, torch.Tensor)]
        result: Any = None
        if mode == "element":
            lists[-1][0] = out * 0.5
        elif mode == "count" and type(lists[-1][-1]) is float:
            lists[-1][-1] = lists[-1][-1] + 1
        elif mode == "grow":
            lists[-1].append(2.0)
        elif mode == "attribute" and tensors:
            tensors[0].k = 3.0
        elif mode == "tag":
            out.k, out.of = "tagged", [out * 2, n]
        elif mode == "back":
            result = [lists[-1], tree, {"first": tree[0]}]
        elif mode == "iterator":
            result = zip([out, out + 1], iter(["a", "b"]), strict=True)
        return out, result

    def run(self) -> Iterator[Any]:
        for _ in range(CALLS):
            for _ in range(self.rng.randrange(3)):
                self.change()
            mode, n = self.rng.choice(MODES), self.rng.choice([1.0, 2.0])
            out, result = self.step(self.tree, mode, n)
            if mode == "back":
                nodes = self.nodes()
                result = [r is t for r in result[:2] for t in nodes if isinstance(t, list)]
            elif mode == "iterator":
                result = list(result)
            yield {
                "mode": mode,
                "result": result,
                "out": out,
                "tag": [getattr(out, "k", None), *getattr(out, "of", [])],
                "tree": [self.seen(value) for value in self.nodes()],
                "pool": [*self.pool, *map(self.seen, self.shared)],
            }

    def seen(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [value, getattr(value, "k", None)]
        if isinstance(value, int | float | str | None):
            return value
        return [type(value).__name__, len(parts(value))]


def parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | deque):
        return list(value)
    if isinstance(value, Box | SimpleNamespace):
        return [value.a, value.b]
    return []


def contains(value: Any, inner: Any) -> bool:
    return value is inner or any(contains(part, inner) for part in parts(value))


def sequence(world: World, seed: int) -> Iterator[Observation]:
    return observe(Session(world, seed).run(), world)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.slow] if s >= 8 else []) for s in range(60)]
)
def test_as_torch(mesh_2x4: DeviceMesh, seed: int) -> None:
    expected = list(sequence(World(), seed))
    count = 0
    for actual in sequence(Mesh(mesh_2x4), seed):
        assert_same(actual, expected[count], f"after call {count}")
        count += 1
    assert count == len(expected)


def test_the_sequences_differ() -> None:
    """Every mode is drawn, and the calls see something else each time."""
    modes: collections.Counter[str] = collections.Counter()
    for seed in range(8):
        seen = [o.results for o in sequence(World(), seed)]
        modes.update(o["result.mode"] for o in seen)
        outs = [o["result.out"] for o in seen]
        assert sum(torch.equal(a, b) for a, b in itertools.pairwise(outs)) < CALLS - 1
    assert set(modes) == set(MODES)
