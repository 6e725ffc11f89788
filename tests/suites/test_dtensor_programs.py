"""What torch's own tests of DTensor do, written down from what they are about.

Each is a small program that runs twice: on CPU tensors, and on an xla mesh. Results and gradients
are the same, and results have the placements that torch's tests want.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dt
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication, local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.conftest import make_mesh

R, P = Replicate(), Partial()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)

Program = Callable[[Any], Any]
PROGRAMS: dict[str, tuple[str, Program]] = {}


def program(mesh: str = "4") -> Callable[[Program], Program]:
    def register(function: Program) -> Program:
        PROGRAMS[function.__name__] = mesh, function
        return function

    return register


class World:
    """Makes tensors: on the CPU, or in layouts on a mesh."""

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh
        self.leaves: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(0)

    def tensor(self, *shape: int, at: Any = None, grad: bool = True) -> Any:
        return self.of(torch.randn(*shape, generator=self.generator), at, grad)

    def integers(self, high: int, *shape: int, at: Any = None) -> Any:
        value = torch.randint(high, shape, generator=self.generator)
        return self.of(value, at, False)

    def of(self, value: torch.Tensor, at: Any = None, grad: bool = False) -> Any:
        if self.mesh is not None:
            value = distribute_tensor(value, self.mesh, at or [R] * self.mesh.ndim)
        value.requires_grad_(grad)
        if grad:
            self.leaves.append(value)
        return value

    def module(self, module: nn.Module, **at: Any) -> Any:
        """A module, its parameters in these layouts."""
        if self.mesh is not None:

            def place(name: str, part: nn.Module, mesh: Any) -> None:
                for key, value in list(part._parameters.items()):
                    placements = at.get(key) if value is not None else None
                    if placements:
                        new = nn.Parameter(distribute_tensor(value.detach(), mesh, placements))
                        part.register_parameter(key, new)

            dt.distribute_module(module, self.mesh, place)
        self.leaves += module.parameters()
        return module

    def wants(self, tensor: Any, *placements: Any) -> None:
        """What torch's test says of a result's layout."""
        if self.mesh is not None:
            assert tensor.placements == placements, tensor.placements


def values(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        result = result.detach()
        return [result.full_tensor().cpu() if isinstance(result, DTensor) else result.cpu()]
    if isinstance(result, list | tuple):
        return [value for item in result for value in values(item)]
    return [torch.tensor(result)]


def outcome(function: Program, world: World) -> Any:
    torch.manual_seed(0)
    result = function(world)
    grads = [leaf.grad for leaf in world.leaves]
    return values(result), [None if grad is None else values(grad) for grad in grads]


@program()
def sums_of_shards_stay_pending(w: World) -> Any:
    x = w.tensor(8, 3, at=[S0])
    out = x.sum(0)
    w.wants(out, P)
    w.wants(x.sum(1), S0)
    (out * out).sum().backward()
    return out


@program()
def means_variances_and_norms(w: World) -> Any:
    x = w.tensor(8, 6, at=[S1])
    out = [x.mean(), x.mean(1), x.var(1), x.std(), x.norm(), x.norm(1, dim=1), x.amax(1)]
    out += [torch.linalg.vector_norm(x, ord) for ord in (0.5, 1, 3, float("inf"), -float("inf"))]
    sum(o.sum() for o in out).backward()
    return out


@program()
def softmax_over_the_sharded_dim(w: World) -> Any:
    x = w.tensor(4, 8, at=[S1])
    out = [F.softmax(x, 1), F.log_softmax(x, -1), x.logsumexp(1), F.softmax(x, 0)]
    w.wants(out[3], S1)
    sum(o.square().sum() for o in out).backward()
    return out


@program()
def positions_of_extremes(w: World) -> Any:
    x = w.tensor(5, 9, at=[S1], grad=False)
    return [x.argmax(1), x.argmin(), *x.topk(3, 1), *x.sort(1), *x.max(1), x.cumsum(1)]


@program()
def products_of_every_layout(w: World) -> Any:
    kinds = ([R], [S0], [S1])
    pairs = [(left, right) for left in kinds for right in kinds]
    out = [w.tensor(8, 4, at=left) @ w.tensor(4, 12, at=right) for left, right in pairs]
    sum(o.sin().sum() for o in out).backward()
    return out


@program("2x4")
def products_in_batches(w: World) -> Any:
    x, y = w.tensor(4, 3, 8, at=[S0, S2]), w.tensor(4, 8, 5, at=[S0, S1])
    out = torch.bmm(x, y)
    w.wants(out, S0, P)
    added = torch.baddbmm(w.tensor(4, 3, 5, at=[S0, R]), x, y, beta=0.5)
    bias = torch.addmm(w.tensor(5), x[0], y[0])
    (out.sum() + added.square().sum() + bias.sin().sum()).backward()
    return out, added, bias


@program()
def embeddings_by_rows_and_columns(w: World) -> Any:
    ids = w.integers(10, 4, 3, at=[S0])
    rows = w.module(nn.Embedding(10, 8), weight=[S0])
    columns = w.module(nn.Embedding(10, 8, padding_idx=2), weight=[S1])
    out = rows(ids), columns(ids)
    sum(o.square().sum() for o in out).backward()
    return out


@program("2x4")
def losses(w: World) -> Any:
    x, target = w.tensor(8, 5, at=[S0, R]), w.integers(5, 8, at=[S0, R])
    weight = w.of(torch.rand(5, generator=w.generator))
    out = [
        F.cross_entropy(x, target),
        F.cross_entropy(x, target, reduction="none"),
        F.cross_entropy(x, target, weight=weight, ignore_index=2, label_smoothing=0.1),
        F.nll_loss(F.log_softmax(x, 1), target, reduction="sum"),
        F.mse_loss(x, x.detach() * 2),
    ]
    w.wants(out[1], S0, R)
    sum(o.sum() for o in out).backward()
    return out


@program()
def losses_over_sharded_classes(w: World) -> Any:
    x, target = w.tensor(6, 8, at=[S1]), w.integers(8, 6)
    with loss_parallel():
        loss = F.cross_entropy(x, target)
        loss.backward()
    return loss


@program("2x4")
def norms_of_layers(w: World) -> Any:
    x = w.tensor(4, 6, 8, at=[S0, S1])
    layers = [w.module(nn.LayerNorm(8)), w.module(nn.RMSNorm(8)), w.module(nn.LayerNorm([6, 8]))]
    out = [layer(x) for layer in layers]
    w.wants(out[0], S0, S1)
    sum(o.pow(3).sum() for o in out).backward()
    return out


@program()
def views_of_sharded_dims(w: World) -> Any:
    x = w.tensor(8, 6, at=[S0])
    out = [x.view(2, 4, 6), x.view(48), x.reshape(8, 2, 3), x.t(), x.unsqueeze(1), x[None, ..., 1]]
    w.wants(out[2], S0)
    w.wants(out[3], S1)
    out += [x.flatten(), x.expand(2, 8, 6), x.permute(1, 0), x.squeeze(), x.unflatten(0, (4, 2))]
    sum(o.sin().sum() for o in out).backward()
    return out


@program()
def pieces_and_joins(w: World) -> Any:
    x, y = w.tensor(8, 6, at=[S0]), w.tensor(8, 6, at=[S1])
    out = [*x.chunk(3, 0), *y.split([1, 5], 1), torch.cat([x, y]), torch.stack([x, y], 1)]
    out += [*x.unbind(1), torch.hstack([x, y]), *torch.tensor_split(x, 3, dim=1)]
    sum(o.sin().sum() for o in out).backward()
    return out


@program("2x4")
def indices(w: World) -> Any:
    x, at = w.tensor(8, 8, at=[S0, S1]), w.integers(8, 5)
    out = [x[1], x[2:7:2, 1:], x[at], x[:, at], x[at, at], x.gather(1, at.unsqueeze(0))]
    out += [x.index_select(1, at), x[x.detach() > 10], x.masked_fill(x.detach() > 0, -1.0)]
    sum(o.sin().sum() for o in out).backward()
    return out


@program()
def writes(w: World) -> Any:
    x = w.tensor(8, 4, at=[S0], grad=False)
    y = w.tensor(8, 4, at=[S1], grad=False)
    x += y
    w.wants(x, S0)
    x.mul_(2).clamp_(-1, 1)
    x[2:5] = 7
    x[:, 1].add_(1)
    x.index_put_((w.of(torch.tensor([0, 7])),), w.of(torch.full((2, 4), 3.0)))
    out = torch.empty_like(x)
    torch.add(x, y, out=out)
    return x, out, x.zero_(), y.copy_(out)


@program("2x4")
def values_like_others(w: World) -> Any:
    x = w.tensor(4, 8, at=[S0, S1], grad=False)
    out = [torch.zeros_like(x), torch.full_like(x, 3), x.new_ones(3, 2), x.new_zeros(4, 8)]
    for like in out[:2]:
        w.wants(like, S0, S1)
    assert torch.rand_like(x).shape == x.shape
    return out, torch.equal(x, x.clone()), torch.allclose(x, x + 1), bool((x == x).all())


@program()
def conditions_and_numbers(w: World) -> Any:
    x = w.tensor(8, 4, at=[S0])
    out = torch.where(x > 0, x, 0.5), x.clamp(min=0), x * 2 + 1, 1 / (x.abs() + 1), x**2, -x
    sum(o.sum() for o in out).backward()
    return out, (x > 0).any(), x.sum().item() > 0


@program("2x4")
def convolutions(w: World) -> Any:
    x = w.tensor(4, 3, 8, 8, at=[S0, R])
    conv = w.module(nn.Conv2d(3, 8, 3, padding=1), weight=[R, S0], bias=[R, S0])
    out = F.max_pool2d(conv(x).relu(), 2)
    out.square().sum().backward()
    return out


@program()
def gradients_of_local_tensors(w: World) -> Any:
    x = w.tensor(8, 4, at=[S0])
    if w.mesh is None:
        (x * 3).square().sum().backward()
        return x * 3
    local = x.to_local() * 3
    out = DTensor.from_local(local, w.mesh, [S0])
    out.square().sum().backward()
    return out


@program()
def gradients_of_whole_tensors(w: World) -> Any:
    x = w.tensor(8, 4, at=[S0])
    whole = x.full_tensor() if w.mesh is not None else x
    whole.square().sum().backward()
    return whole


@program("2x4")
def redistributions(w: World) -> Any:
    x = w.tensor(8, 8, at=[S0, S1])
    out = []
    for at in ([R, R], [S1, S0], [S0, S0], [S1, S1], [R, S0]):
        out.append(x.redistribute(placements=at, async_op=True) if w.mesh is not None else x * 1)
        w.wants(out[-1], *at)
    sum(o.sin().sum() for o in out).backward()
    return out


@program()
def plain_tensors_count_as_replicated(w: World) -> Any:
    x = w.tensor(8, 4, at=[S0])
    scale = torch.arange(4.0)
    with implicit_replication():
        out = x * (scale if w.mesh is None else scale.to("xla")) + 1
    w.wants(out, S0)
    out.sum().backward()
    return out


@program()
def functions_of_local_tensors(w: World) -> Any:
    x, y = w.tensor(8, 4, at=[S0]), w.tensor(4, 4)
    function = lambda x, y: torch.mm(x, y).relu()
    if w.mesh is not None:
        function = local_map(
            function,
            out_placements=[S0],
            in_placements=([S0], [R]),
            in_grad_placements=([S0], [P]),
            device_mesh=w.mesh,
        )
    out = function(x, y)
    out.square().sum().backward()
    return out


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


@program()
def column_and_row_parallel(w: World) -> Any:
    model = mlp()
    if w.mesh is not None:
        model = model.to("xla")
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, w.mesh, plan)
    w.leaves += model.parameters()
    x = torch.randn(4, 8, generator=w.generator)
    out = model(x if w.mesh is None else x.to("xla"))
    out.square().sum().backward()
    return out


@program("2x4")
def checkpointed_modules(w: World) -> Any:
    model = w.module(mlp(), weight=[R, S0])
    out = checkpoint(model, w.tensor(4, 8, at=[S0, R]), use_reentrant=False)
    out.square().sum().backward()
    return out


@program("2x4")
def clipped_steps(w: World) -> Any:
    model = w.module(mlp(), weight=[S0, S1], bias=[R, S0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, norms = w.tensor(4, 8, at=[S0, R], grad=False), []
    for foreach in (True, False):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
    return norms, list(model.parameters())


@program("2x4")
def states_of_modules(w: World) -> Any:
    model = w.module(mlp(), weight=[R, S0])
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    model.load_state_dict(other.state_dict())
    first = next(iter(model.state_dict().values()))
    w.wants(first, R, S0)
    return list(model.state_dict().values())


@program("2x4")
def factories(w: World) -> Any:
    if w.mesh is None:
        return torch.ones(6, 8), torch.zeros(3), torch.full((4, 4), 2.5)
    made = (
        dt.ones(6, 8, device_mesh=w.mesh, placements=[S0, S1]),
        dt.zeros(3, device_mesh=w.mesh, placements=[S0, R]),
        dt.full((4, 4), 2.5, device_mesh=w.mesh, placements=[R, S1]),
    )
    w.wants(made[0], S0, S1)
    return made


@program()
def second_derivatives(w: World) -> Any:
    x = w.tensor(8, 4, at=[S0])
    (first,) = torch.autograd.grad(x.sin().pow(2).sum(), x, create_graph=True)
    first.square().sum().backward()
    return first


@pytest.mark.one_in(7)  # they compile much, and what they do the fast tests do elsewhere
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_program(name: str) -> None:
    mesh, function = PROGRAMS[name]
    wanted = outcome(function, World())
    found = outcome(function, World(make_mesh(mesh)))
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
