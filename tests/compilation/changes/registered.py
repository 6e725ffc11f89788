"""Functions that torch calls since they are registered with it, and fields of dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import distributions
from torch.distributions import constraints
from torch.utils import _pytree
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from tests.compilation.changes._table import Program, row, rows
from tests.compilation.changes._world import World

FACTOR = [2.0]


class Box:
    """A container of one number."""

    def __init__(self, value: float) -> None:
        self.value = value


class Sized(distributions.Normal):
    pass


class Everything(constraints.Constraint):
    def check(self, value: torch.Tensor) -> torch.Tensor:
        return value > 0


ANY = Everything()


def _register() -> None:
    """Once in a process, as at a module's import: torch keeps them for good."""
    if Box in default_collate_fn_map:
        return
    _pytree.register_pytree_node(
        Box, lambda box: ([box.value * FACTOR[0]], None), lambda values, _: Box(*values)
    )
    default_collate_fn_map[Box] = lambda boxes, collate_fn_map=None: len(boxes) * FACTOR[0]
    distributions.kl.register_kl(Sized, Sized)(lambda p, q: (p.loc - q.loc) * FACTOR[0])
    for registry in (distributions.transform_to, distributions.biject_to):
        registry.register(
            Everything, lambda constraint: distributions.transforms.AffineTransform(0.0, FACTOR[0])
        )


def _divergence(x: torch.Tensor) -> torch.Tensor:
    one = torch.ones_like(x)
    p, q = (Sized(loc, one, validate_args=False) for loc in (x, x * 0))
    return distributions.kl_divergence(p, q)


@rows(
    {
        "leaves of a container": lambda x: x * sum(_pytree.tree_leaves([Box(3.0)])),
        "mapped container": lambda x: x * _pytree.tree_map(lambda v: v * 2, Box(1.0)).value,
        "collated": lambda x: x * default_collate([Box(1.0), Box(2.0)]),
        "divergence": _divergence,
        "transform": lambda x: distributions.transform_to(ANY)(x),
        "bijection": lambda x: distributions.biject_to(ANY)(x),
    }
)
def number_of_a_registered_function(world: World, use: Callable) -> Program:
    _register()
    FACTOR[:] = [2.0]
    step = world.compile(lambda x: use(x))
    yield step(world.batch(0))
    world.change(FACTOR.__setitem__, 0, 5.0)
    yield step(world.batch(0))
    yield step(world.batch(1))


@row()
def another_function_registered(world: World) -> Program:
    _register()
    FACTOR[:] = [2.0]
    before = default_collate_fn_map[Box]
    step = world.compile(lambda x: x * default_collate([Box(1.0)]))
    try:
        yield step(world.batch(0))
        if world.changes:
            default_collate_fn_map[Box] = lambda boxes, collate_fn_map=None: 7.0
        yield step(world.batch(0))
    finally:
        default_collate_fn_map[Box] = before


_LIBRARY = torch.library.Library("xla_dtensor_changes", "DEF")
_LIBRARY.define("scaled(Tensor x) -> Tensor")
_LIBRARY.define("taken_apart(Tensor x) -> Tensor")
_LIBRARY.impl("scaled", lambda x: x * FACTOR[0], "CompositeExplicitAutograd")
_LIBRARY.impl("taken_apart", lambda x: x * FACTOR[0], "CompositeImplicitAutograd")


def _node_with_a_hook(leaf: torch.Tensor) -> Any:
    factor = FACTOR
    node = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda grads: (grads[0] * factor[0],))
    return node


@row()
def number_of_a_hook_of_a_node(world: World) -> Program:
    FACTOR[:] = [2.0]
    leaf = torch.ones_like(world.batch(0)).requires_grad_()
    node = _node_with_a_hook(leaf)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf.grad = None
        (leaf * x).sum().backward()
        return leaf.grad * 1  # type: ignore[operator]

    step = world.compile(gradient)
    yield step(world.batch(0))
    world.change(FACTOR.__setitem__, 0, 5.0)
    yield step(world.batch(0))
    del node


@rows(
    {
        "implementation": lambda x: torch.ops.xla_dtensor_changes.scaled(x),
        "composition": lambda x: torch.ops.xla_dtensor_changes.taken_apart(x),
    }
)
def number_of_an_operator(world: World, use: Callable) -> Program:
    """torch's dispatcher, which is C++, keeps the function."""
    FACTOR[:] = [2.0]
    step = world.compile(lambda x: use(x))
    yield step(world.batch(0))
    world.change(FACTOR.__setitem__, 0, 5.0)
    yield step(world.batch(0))
    yield step(world.batch(1))


def _of_metadata(settings: Any, x: torch.Tensor) -> torch.Tensor:
    return x * sum(field.metadata["factor"] for field in dataclasses.fields(settings))


def _of_default(settings: Any, x: torch.Tensor) -> torch.Tensor:
    return x * type(settings).__dataclass_fields__["rate"].default


@rows({"metadata": _of_metadata, "default": _of_default})
def field_of_a_dataclass(world: World, use: Callable) -> Program:
    metadata = {"factor": 2.0}

    @dataclasses.dataclass
    class Settings:
        rate: float = dataclasses.field(default=2.0, metadata=metadata)

    settings = Settings()
    step = world.compile(lambda x: use(settings, x))
    yield step(world.batch(0))
    world.change(metadata.update, factor=5.0)
    world.change(setattr, dataclasses.fields(Settings)[0], "default", 5.0)
    yield step(world.batch(0))
