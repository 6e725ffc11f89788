"""Random programs over both views: local ops, DTensor ops, crossings, collectives, a gradient.

`chain` draws a program from a seed and runs it through an `Oracle`, dumping every intermediate and
the gradient of every leaf. All that it draws is well defined in torch, so it keeps to what torch's
documentation asks of a program:

- ``Replicate`` in ``from_local`` is said of values that are equal along that mesh dim alone;
- the gradient that flows into ``to_local`` has the layout that the program said it has. So where a
  replicated value is used locally with the default ``grad_placements``, it is used in the same way
  by all devices of that mesh dim: such a dim is called *pinned* below, until a ``from_local`` with
  ``Replicate`` (whose gradient is replicated) ends it;
- ``to_local`` of a ``Partial`` value is the implementation's choice: it is reduced first;
- shards are even, and so are an op's results.

Values are kept near 1, so that an absolute tolerance means something.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.placement_types import Placement

from tests.oracle._harness import Oracle

WORLD_SIZE = 4
MESHES = (((4,), ("x",)), ((2, 2), ("a", "b")))
MAX_SIZE = 512

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "neg": torch.neg,
    "halve": lambda x: x * 0.5,
    "square": lambda x: 0.3 * x * x,
}


def chain(oracle: Oracle, seed: int) -> None:
    """Run the program of a seed."""
    _Chain(oracle, seed).run()


class _Chain:
    """The program's state: one tensor, of either view, and what is known of it.

    Attributes:
        x: the tensor; a DTensor is on ``x.device_mesh``, the root mesh or a submesh.
        vary: mesh dims along which a local tensor's values may differ; of a DTensor, those of them
            that its mesh leaves out.
        pinned: mesh dims along which its gradient has to be the same.
    """

    def __init__(self, oracle: Oracle, seed: int) -> None:
        self.oracle = oracle
        self.rng = random.Random(seed)
        self.seed = seed
        shape, self.dims = MESHES[seed % len(MESHES)]
        self.mesh = oracle.mesh(shape, self.dims)
        self.sizes = dict(zip(self.dims, shape, strict=True))
        self.leaves: dict[str, torch.Tensor] = {}
        self.vary: set[str] = set()
        self.pinned: set[str] = set()
        self.step = 0
        size = (self.rng.choice((4, 8)), self.rng.choice((4, 8)))
        if self.rng.random() < 0.5:
            self.x = self.local_leaf(size, self.some_dims())
        else:
            self.x = self.sharded_leaf(size, self.mesh)

    def run(self) -> None:
        self.dump("start")
        for _ in range(self.rng.randint(6, 14)):
            self.step += 1
            self.dump(self.random_step())
        self.step += 1
        weight = self.leaf(tuple(self.x.shape))
        loss = (self.x * weight).sum()
        self.dump("loss", loss)
        if isinstance(loss, DTensor):
            if self.rng.random() < 0.5:
                loss = loss.full_tensor()
            else:
                loss = loss.redistribute(placements=[Replicate()] * loss.device_mesh.ndim)
        loss.backward()
        for name, leaf in self.leaves.items():
            self.oracle.dump_grad(f"grad {name}", leaf)

    def dump(self, what: str, value: torch.Tensor | None = None) -> None:
        self.oracle.dump(f"{self.step} {what}", self.x if value is None else value)

    def random_step(self) -> str:
        """Take one step; what it was."""
        if isinstance(self.x, DTensor):
            steps = [*GLOBAL_STEPS, *[self.redistribute] * 3, *[self.to_local] * 5]
        else:
            steps = [*LOCAL_STEPS, *COLLECTIVES * 3, *[self.from_local] * 6]
        while True:
            step = self.rng.choice(steps)
            if step in (self.redistribute, self.to_local, self.from_local):
                return step()
            name = step(self)
            if name is not None:
                return name

    # Leaves

    def some_dims(self) -> list[str]:
        """Mesh dims that a new local value may differ along."""
        return [d for d in self.dims if d not in self.pinned and self.rng.random() < 0.6]

    def local_leaf(self, shape: Sequence[int], vary: Sequence[str]) -> torch.Tensor:
        name = f"leaf{len(self.leaves)} of {self.seed}"
        leaf = self.oracle.local(name, shape, vary, requires_grad=True)
        self.leaves[name] = leaf
        self.vary |= set(vary)
        return leaf

    def sharded_leaf(self, shape: Sequence[int], mesh: DeviceMesh) -> DTensor:
        name = f"leaf{len(self.leaves)} of {self.seed}"
        placements = self.layout(shape, mesh)
        leaf = self.oracle.sharded(name, shape, mesh, placements, requires_grad=True)
        self.leaves[name] = leaf
        return leaf

    def leaf(self, shape: Sequence[int]) -> torch.Tensor:
        """A leaf that may be combined with ``x``."""
        if isinstance(self.x, DTensor):
            return self.sharded_leaf(shape, self.x.device_mesh)
        return self.local_leaf(shape, self.some_dims())

    def layout(self, shape: Sequence[int], mesh: DeviceMesh) -> list[Placement]:
        """A random layout without Partial, of even shards."""
        left = list(shape)
        placements: list[Placement] = []
        for size in mesh.shape:
            choices: list[Placement] = [Replicate()]
            choices += [Shard(i) for i, n in enumerate(left) if n % size == 0]
            placement = self.rng.choice(choices)
            if isinstance(placement, Shard):
                left[placement.dim] //= size
            placements.append(placement)
        return placements

    # Crossings and redistributions

    def redistribute(self) -> str:
        assert isinstance(self.x, DTensor)
        target = self.layout(self.x.shape, self.x.device_mesh)
        text = f"redistribute {self.x.placements} -> {target}"
        self.x = self.x.redistribute(placements=target)
        return text

    def to_local(self) -> str:
        x = self.x
        assert isinstance(x, DTensor)
        names = x.device_mesh.mesh_dim_names
        assert names is not None
        if any(p.is_partial() for p in x.placements):
            x = x.redistribute(placements=self.layout(x.shape, x.device_mesh))
        grads: list[Placement] = []
        pinned = []
        for name, placement in zip(names, x.placements, strict=True):
            if isinstance(placement, Shard):
                self.vary.add(name)
                grads.append(placement)
            elif self.rng.random() < 0.6:
                grads.append(Partial())
            else:
                grads.append(placement)
                pinned.append(name)
        self.pinned |= set(pinned)
        given = grads if any(isinstance(g, Partial) for g in grads) else None
        text = f"to_local {x.placements} grad_placements {given}"
        self.x = x.to_local(grad_placements=given)
        return text

    def from_local(self) -> str:
        names = self.dims if self.rng.random() < 0.6 else (self.rng.choice(self.dims),)
        mesh = self.mesh if names == self.dims else self.mesh[names[0]]
        placements: list[Placement] = []
        for name in names:
            different: list[Placement] = [Shard(0), Shard(1), Partial()]
            if name in self.pinned:
                placements.append(Replicate())
            elif name in self.vary:
                placements.append(self.rng.choice(different))
            else:
                placements.append(self.rng.choice([Replicate(), Replicate(), *different]))
        # times 1: torch 2.13's local_map waits for a collective's result outside of autograd.
        self.x = DTensor.from_local(self.x * 1.0, mesh, placements)
        self.vary -= set(names)
        self.pinned -= set(names)
        return f"from_local {names} {placements}"


Step = Callable[[_Chain], str | None]
LOCAL_STEPS: list[Step] = []
GLOBAL_STEPS: list[Step] = []
COLLECTIVES: list[Step] = []


def _in(*tables: list[Step]) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        for table in tables:
            table.append(step)
        return step

    return register


# Steps in both views. A step that doesn't fit the state returns None and has no effect.


@_in(LOCAL_STEPS, GLOBAL_STEPS, GLOBAL_STEPS)
def _unary(c: _Chain) -> str:
    name = c.rng.choice(list(UNARY))
    c.x = UNARY[name](c.x)
    return name


@_in(LOCAL_STEPS, GLOBAL_STEPS, GLOBAL_STEPS)
def _binary(c: _Chain) -> str:
    name = c.rng.choice(("add", "mul", "sub"))
    shape = list(c.x.shape)
    if c.rng.random() < 0.3 and not isinstance(c.x, DTensor):
        shape[c.rng.randrange(2)] = 1
    other = c.leaf(shape)
    c.x = c.x * other.tanh() if name == "mul" else getattr(torch, name)(c.x, other) * 0.7
    return name


@_in(LOCAL_STEPS, GLOBAL_STEPS, GLOBAL_STEPS)
def _matmul(c: _Chain) -> str | None:
    rows, columns = c.x.shape
    wanted = c.rng.choice((4, 8))
    c.x = c.x @ c.leaf((columns, wanted)) / math.sqrt(columns)
    return f"matmul {rows}x{columns}x{wanted}"


@_in(LOCAL_STEPS, GLOBAL_STEPS)
def _softmax(c: _Chain) -> str:
    dim = c.rng.randrange(2)
    c.x = 3 * c.x.softmax(dim)
    return f"softmax {dim}"


@_in(LOCAL_STEPS, GLOBAL_STEPS)
def _center(c: _Chain) -> str:
    dim = c.rng.randrange(2)
    # Not mean(): over a sharded dim it is Partial(avg), which torch 2.13 fails to redistribute a
    # gradient to.
    c.x = c.x - c.x.sum(dim, keepdim=True) / c.x.shape[dim]
    return f"center {dim}"


@_in(LOCAL_STEPS, GLOBAL_STEPS)
def _normalize(c: _Chain) -> str:
    c.x = F.layer_norm(c.x, (c.x.shape[1],), eps=0.1)
    return "layer_norm"


@_in(LOCAL_STEPS, GLOBAL_STEPS)
def _transpose(c: _Chain) -> str:
    c.x = c.x.transpose(0, 1)
    return "transpose"


@_in(LOCAL_STEPS, GLOBAL_STEPS)
def _clone_write(c: _Chain) -> str:
    x = c.x.clone()
    x.mul_(0.5)
    x.add_(c.leaf(tuple(x.shape)))
    c.x = x
    return "written"


# Local steps


@_in(LOCAL_STEPS)
def _concatenate(c: _Chain) -> str | None:
    if c.x.numel() * 2 > MAX_SIZE:
        return None
    dim = c.rng.randrange(2)
    c.x = torch.cat([c.x, c.x.flip(dim).sin()], dim)
    return f"cat {dim}"


@_in(LOCAL_STEPS)
def _narrow(c: _Chain) -> str | None:
    dim = c.rng.randrange(2)
    size = c.x.shape[dim]
    if size < 8:
        return None
    c.x = c.x.narrow(dim, c.rng.randrange(size // 2), size // 2)
    return f"narrow {dim}"


@_in(LOCAL_STEPS)
def _sort(c: _Chain) -> str:
    dim = c.rng.randrange(2)
    c.x = c.x.sort(dim).values
    return f"sort {dim}"


@_in(LOCAL_STEPS)
def _write_row(c: _Chain) -> str:
    x = c.x.clone()
    row = x[0]
    row.mul_(c.leaf(tuple(row.shape)).sigmoid())
    c.x = x
    return "write row"


@_in(LOCAL_STEPS)
def _by_coordinate(c: _Chain) -> str | None:
    dims = [d for d in c.dims if d not in c.pinned]
    if not dims:
        return None
    dim = c.rng.choice(dims)
    index = c.oracle.axis_index(dim)
    c.x = torch.where(index == 0, c.x, c.x.sin()) / (index + 1)
    c.vary.add(dim)
    return f"by coordinate of {dim}"


# Global steps


@_in(GLOBAL_STEPS)
def _local_map(c: _Chain) -> str | None:
    x = c.x
    assert isinstance(x, DTensor)
    if any(p.is_partial() for p in x.placements):
        return None
    names = x.device_mesh.mesh_dim_names
    assert names is not None
    sharded = [n for n, p in zip(names, x.placements, strict=True) if isinstance(p, Shard)]
    shape = list(x.shape)
    for size, placement in zip(x.device_mesh.shape, x.placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] //= size
    before = set(c.vary)
    factor = c.local_leaf(shape, sharded)
    c.vary = before
    c.x = local_map(
        lambda local: local.tanh() * factor,
        out_placements=list(x.placements),
        in_placements=(list(x.placements),),
    )(x)
    return f"local_map {x.placements}"


# Collectives over one mesh dim, or all of them


def _group(c: _Chain) -> tuple[str, ...] | None:
    choices: list[tuple[str, ...]] = [(d,) for d in c.dims if d not in c.pinned]
    if len(c.dims) > 1 and not c.pinned:
        choices.append(c.dims)
    return c.rng.choice(choices) if choices else None


def _as_group(c: _Chain, names: tuple[str, ...]) -> DeviceMesh | tuple[DeviceMesh, int]:
    """The group in one of the ways to say it."""
    if len(names) > 1:
        return c.mesh._flatten("all")
    if c.rng.random() < 0.5:
        return c.mesh[names[0]]
    return c.mesh, c.dims.index(names[0])


def _size(c: _Chain, names: tuple[str, ...]) -> int:
    return math.prod(c.sizes[n] for n in names)


@_in(COLLECTIVES)
def _all_reduce(c: _Chain) -> str | None:
    names = _group(c)
    if names is None:
        return None
    c.x = funcol.all_reduce(c.x, "sum", _as_group(c, names)) / _size(c, names)
    c.vary -= set(names)
    return f"all_reduce {names}"


@_in(COLLECTIVES)
def _all_gather(c: _Chain) -> str | None:
    names = _group(c)
    if names is None or c.x.numel() * _size(c, names) > MAX_SIZE:
        return None
    dim = c.rng.randrange(2)
    c.x = funcol.all_gather_tensor_autograd(c.x, dim, _as_group(c, names))
    c.vary -= set(names)
    return f"all_gather {names} {dim}"


@_in(COLLECTIVES)
def _reduce_scatter(c: _Chain) -> str | None:
    names = _group(c)
    dim = c.rng.randrange(2)
    if names is None or c.x.shape[dim] % _size(c, names):
        return None
    group = _as_group(c, names)
    c.x = funcol.reduce_scatter_tensor_autograd(c.x, "sum", dim, group) / _size(c, names)
    c.vary |= set(names)
    return f"reduce_scatter {names} {dim}"


@_in(COLLECTIVES)
def _all_to_all(c: _Chain) -> str | None:
    names = _group(c)
    if names is None or c.x.shape[0] % _size(c, names):
        return None
    group = _as_group(c, names)
    c.x = funcol.all_to_all_single_autograd(c.x.contiguous(), None, None, group)
    c.vary |= set(names)
    return f"all_to_all {names}"


@_in(COLLECTIVES)
def _without_gradient(c: _Chain) -> str | None:
    names = _group(c)
    if names is None:
        return None
    group, size = _as_group(c, names), _size(c, names)
    x = c.x.detach()
    kind = c.rng.choice(("max", "min", "avg", "broadcast", "permute"))
    if kind == "broadcast":
        other = funcol.broadcast(x.contiguous(), c.rng.randrange(size), group)
    elif kind == "permute":
        order = c.rng.sample(range(size), size)
        other = funcol.permute_tensor(x.flatten(), order, group).reshape(x.shape)
    else:
        other = funcol.all_reduce(x, kind, group)
    c.x = (c.x - other) * 0.7
    return f"{kind} {names}"
