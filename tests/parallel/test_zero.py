"""``xd.parallel.zero``: the numbers are those of CPU torch, the optimizer's state is sharded, the
compiled program is as small and communicates as little as that means."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from tests.parallel.harness import (
    EPS,
    averaged_gradients,
    batches,
    check_parameters,
    collectives,
    loss_of,
    per_device,
    reference,
    sizes,
)
from xla_dtensor.errors import MeshError, UnsupportedOpError

R = Replicate()


@pytest.fixture
def mesh() -> DeviceMesh:
    return xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))


def on_mesh(mesh: DeviceMesh) -> nn.Module:
    return xd.distribute_module(reference(), mesh)


def batch(mesh: DeviceMesh, seed: int) -> tuple[torch.Tensor, Any]:
    value = torch.cat(batches(8, seed=seed))
    return value, distribute_tensor(value, mesh, [Shard(0), *[R] * (mesh.ndim - 1)])


def train(
    model: nn.Module, optimizer: Any, run: Callable[..., Any], data: list[Any], clip: bool = True
) -> None:
    def step(x: Any) -> None:
        loss_of(model(x)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()

    compiled = run(step)
    for x in data:
        compiled(x)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, eps=EPS, weight_decay=0.1),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=0.05, eps=EPS, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=EPS, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=EPS),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eager(name: str, stage: int, mesh: DeviceMesh) -> None:
    model, expected = on_mesh(mesh), reference()
    objects = {id(p) for p in model.parameters()}
    optimizer = xd.parallel.zero(OPTIMIZERS[name](model.parameters()), mesh, stage=stage)
    data = [batch(mesh, seed) for seed in range(3)]
    train(model, optimizer, lambda step: step, [x for _, x in data])
    train(
        expected, OPTIMIZERS[name](expected.parameters()), lambda step: step, [v for v, _ in data]
    )
    check_parameters(model, expected)
    assert {id(p) for p in model.parameters()} == objects
    assert all(p.placements == (R,) for p in model.parameters())  # type: ignore[attr-defined]
    states = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    assert states and all(isinstance(v.placements[0], Shard) for v in states)


@pytest.mark.parametrize("stage", [1, 2])
def test_compiled(stage: int, mesh: DeviceMesh) -> None:
    model, expected = on_mesh(mesh), reference()
    optimizer = xd.parallel.zero(
        torch.optim.AdamW(model.parameters(), lr=0.05, eps=EPS), mesh, stage=stage
    )
    wanted = torch.optim.AdamW(expected.parameters(), lr=0.05, eps=EPS)

    @functools.partial(xd.compile, layouts="torch")  # of so few rows the gradients' operands move
    def step(x: Any) -> None:
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(3):
        value, x = batch(mesh, seed)
        step(x)
        loss_of(expected(value)).backward()
        wanted.step()
        wanted.zero_grad()
    check_parameters(model, expected)
    assert step.compilations == 1
    found, count = collectives(step), sum(sizes(expected).values())
    # One gather of each updated parameter. What is reduced are the gradients, on the CPU, which has
    # no reduce-scatter, as a whole.
    assert set(found) <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert sum(size * n for size, n in found["all-gather"].items()) == count
    reduced = found.get("all-reduce", Counter()) + found.get("reduce-scatter", Counter())
    assert set(reduced) <= {*sizes(expected).values(), *(n // 8 for n in sizes(expected).values())}
    assert sum(reduced.values()) == len(sizes(expected))


def bytes_of_arguments(stage: int, mesh: DeviceMesh) -> tuple[int, int, int]:
    """Of a compiled step that keeps its gradients: bytes that it is given per device, of
    parameters, and of the batch."""
    model = xd.distribute_module(nn.Linear(256, 128, bias=False), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=EPS)
    if stage:
        xd.parallel.zero(optimizer, mesh, stage=stage)

    @xd.compile
    def step(x: Any) -> None:
        loss_of(model(x)).backward()  # adds to the gradients, which stay
        optimizer.step()

    for _ in range(2):
        step(distribute_tensor(torch.ones(8, 256), mesh, [Shard(0)]))
    analysis = step.compiled_programs()[-1].memory_analysis()
    return analysis.argument_size_in_bytes, 256 * 128 * 4, 256 * 4


def test_memory(mesh: DeviceMesh) -> None:
    """A parameter, its gradient and two moments are four of a size."""
    for stage, whole, shards in ((0, 4, 0), (1, 2, 2), (2, 1, 3)):
        size, parameter, x = bytes_of_arguments(stage, mesh)
        expected = whole * parameter + shards * parameter // 8 + x
        assert expected <= size < expected + 2000


def test_gradients_of_stage_2_are_sharded(mesh: DeviceMesh) -> None:
    model, expected = on_mesh(mesh), reference()
    optimizer = xd.parallel.zero(torch.optim.SGD(model.parameters(), lr=0.1), mesh, stage=2)
    value, x = batch(mesh, 0)
    for _ in range(2):  # they add up, and stay sharded after a step
        loss_of(model(x)).backward()
        loss_of(expected(value)).backward()
        optimizer.step()
        for parameter in expected.parameters():
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    for parameter, wanted in pairs:
        grad: Any = parameter.grad
        assert isinstance(grad.placements[0], Shard)
        torch.testing.assert_close(grad.cpu(), wanted.grad, rtol=1e-4, atol=1e-6)


def test_per_device_batches(mesh: DeviceMesh) -> None:
    """Under `replicate` parameters are what each device holds, and no ``DTensor``s."""
    grid = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "tp"))
    for run in (lambda step: step, xd.compile):
        model, expected = xd.replicate(reference(), mesh=grid["dp"]), reference()
        optimizer = xd.parallel.zero(
            torch.optim.AdamW(model.parameters(), lr=0.05, eps=EPS), grid["dp"]
        )
        wanted = torch.optim.AdamW(expected.parameters(), lr=0.05, eps=EPS)
        for seed in range(2):
            inputs = batches(4, seed=seed)
            train(model, optimizer, run, [per_device(inputs, grid, ["dp"])], clip=False)
            averaged_gradients(expected, inputs)
            wanted.step()
            wanted.zero_grad()
        check_parameters(model, expected)
        weight = model.out.weight
        assert type(weight) is xd.XLATensor
        assert optimizer.state[weight]["exp_avg"].placements == (Shard(0),)


@pytest.mark.parametrize("stage", [1, 2])
def test_over_tensor_parallelism(stage: int) -> None:
    grid = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    expected = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8, bias=False))

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        shards = {"0": Shard(0), "2": Shard(1)}
        for key, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), mesh, [R, shards[name]])
            module.register_parameter(key, nn.Parameter(placed))

    model = xd.distribute_module(copy.deepcopy(expected), grid, partition)
    optimizer = xd.parallel.zero(
        torch.optim.AdamW(model.parameters(), lr=0.05, eps=EPS), grid["dp"], stage=stage
    )
    data = [batch(grid, seed) for seed in range(2)]
    train(model, optimizer, xd.compile, [x for _, x in data])
    train(
        expected,
        torch.optim.AdamW(expected.parameters(), lr=0.05, eps=EPS),
        lambda step: step,
        [v for v, _ in data],
    )
    check_parameters(model, expected)
    up, bias, down = model.parameters()
    moments = [optimizer.state[p]["exp_avg"].placements for p in (up, bias, down)]
    assert moments[0] == (Shard(1), Shard(0)) and moments[2] == (Shard(0), Shard(1))
    assert isinstance(moments[1][0], _StridedShard) and moments[1][1] == Shard(0)
    assert up.placements == (R, Shard(0)) and down.placements == (R, Shard(1))


def test_over_torchs_tensor_parallel_styles() -> None:
    """The parameters are on ``mesh["tp"]`` alone, their state on both dims."""
    grid = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    expected = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8, bias=False))
    model = copy.deepcopy(expected).to("xla")
    parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    xd.replicate(model, mesh=grid["dp"])
    optimizer = xd.parallel.zero(
        torch.optim.AdamW(model.parameters(), lr=0.05, eps=EPS), grid["dp"]
    )
    inputs = batches(2)
    train(model, optimizer, lambda step: step, [per_device(inputs, grid, ["dp"])], clip=False)
    averaged_gradients(expected, inputs)
    torch.optim.AdamW(expected.parameters(), lr=0.05, eps=EPS).step()
    check_parameters(model, expected)
    state = optimizer.state[model[0].weight]["exp_avg"]
    assert state.device_mesh.shape == (2, 4) and len(state.placements) == 2
    assert isinstance(state.placements[0], Shard) and state.placements[1] == Shard(0)


def test_schedules_closures_and_accumulation(mesh: DeviceMesh) -> None:
    model, expected = on_mesh(mesh), reference()
    data = [batch(mesh, seed) for seed in range(4)]
    for module, which in ((model, 1), (expected, 0)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if module is model:
            xd.parallel.zero(optimizer, mesh)
        for pair in data:

            def closure(module: Any = module, x: Any = pair[which], o: Any = optimizer) -> Any:
                o.zero_grad()
                loss = loss_of(module(x))
                loss.backward()
                loss_of(module(x)).backward()  # gradients of two passes
                return loss

            assert optimizer.step(closure) is not None
            scheduler.step()
        assert scheduler.get_last_lr()[0] == pytest.approx(0.1 / 16)
    check_parameters(model, expected)


def test_a_state_that_is_loaded_is_sharded(mesh: DeviceMesh) -> None:
    model, expected = on_mesh(mesh), reference()
    plain = torch.optim.AdamW(expected.parameters(), lr=0.05, eps=EPS)
    value, x = batch(mesh, 0)
    train(expected, plain, lambda step: step, [value])
    xd_state = copy.deepcopy(plain.state_dict())
    model.load_state_dict(expected.state_dict())
    optimizer = xd.parallel.zero(torch.optim.AdamW(model.parameters(), lr=0.05, eps=EPS), mesh)
    optimizer.load_state_dict(xd_state)
    train(model, optimizer, lambda step: step, [x])
    train(expected, plain, lambda step: step, [value])
    check_parameters(model, expected)
    moment = optimizer.state[next(model.parameters())]["exp_avg"]
    assert isinstance(moment.placements[0], Shard)
    stepped = torch.optim.AdamW(model.parameters())  # and one that had a state before
    train(model, stepped, lambda step: step, [x])
    xd.parallel.zero(stepped, mesh)
    assert isinstance(stepped.state[next(model.parameters())]["exp_avg"].placements[0], Shard)


def test_a_step_that_fails_leaves_everything_as_it_was(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_mesh(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=EPS)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    handle = optimizer.register_step_pre_hook(fails)
    xd.parallel.zero(optimizer, mesh)
    loss_of(model(batch(mesh, 0)[1])).backward()
    before = [p.detach().cpu() for p in model.parameters()]
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    for parameter, value, grad in zip(model.parameters(), before, grads, strict=True):
        assert torch.equal(parameter.cpu(), value) and parameter.placements == (R,)  # type: ignore[attr-defined]
        assert parameter.grad is grad
    handle.remove()
    optimizer.step()
    assert not torch.equal(next(model.parameters()).cpu(), before[0])


HOOKS: dict[str, Callable[..., None]] = {
    "zero_grad": lambda optimizer, *_: optimizer.zero_grad(),
    "zero_grad in place": lambda optimizer, *_: optimizer.zero_grad(set_to_none=False),
    "other gradients": lambda optimizer, *_: [
        setattr(p, "grad", p.grad * 2) for p in optimizer.param_groups[0]["params"]
    ],
    "clamp": lambda optimizer, *_: [
        p.data.clamp_(-0.1, 0.1) for p in optimizer.param_groups[0]["params"]
    ],
}


def clip(optimizer: Any, *_: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("stage", "run"), [(1, lambda step: step), (2, xd.compile)], ids=["eager", "compiled"]
)
def test_what_hooks_of_the_step_change(stage: int, run: Any, mesh: DeviceMesh) -> None:
    """A step's hooks see parameters and gradients in shards; what they do to them stays."""
    x, sharded = batch(mesh, 0)
    for name, hook in HOOKS.items():
        model, expected = on_mesh(mesh), reference()
        optimizer = xd.parallel.zero(
            torch.optim.AdamW(model.parameters(), lr=0.05, eps=EPS), mesh, stage=stage
        )
        on_cpu = torch.optim.AdamW(expected.parameters(), lr=0.05, eps=EPS)
        for one in (optimizer, on_cpu):  # also gradients before a step
            one.register_step_pre_hook(clip)
            one.register_step_post_hook(hook)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            loss_of(model(sharded)).backward()
            optimizer.step()

        step = run(step)
        for _ in range(3):
            step()
            loss_of(expected(x)).backward()
            on_cpu.step()
        check_parameters(model, expected)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor().cpu(), q.grad)  # type: ignore[attr-defined]


class OneByOne(torch.optim.Optimizer):
    """Writes as it goes, and fails before its last parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.fails = True

    def step(self, closure: Any = None) -> None:
        *first, last = self.param_groups[0]["params"]
        for p in first:
            p.data.sub_(p.grad)
        if self.fails:
            raise ZeroDivisionError
        last.data.sub_(last.grad)


def test_an_own_optimizer_that_fails_halfway(mesh: DeviceMesh) -> None:
    """What it has written stays, as without `zero`."""
    x, sharded = batch(mesh, 0)
    model, expected = on_mesh(mesh), reference()
    optimizers = (
        xd.parallel.zero(OneByOne(model.parameters()), mesh),
        OneByOne(expected.parameters()),
    )
    for fails in (True, False):
        for module, optimizer, data in zip(
            (model, expected), optimizers, (sharded, x), strict=True
        ):
            optimizer.fails = fails  # type: ignore[attr-defined]
            optimizer.zero_grad()
            loss_of(module(data)).backward()
            if fails:
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
            else:
                optimizer.step()
        check_parameters(model, expected)


def test_a_closure_that_is_wanted_later(mesh: DeviceMesh) -> None:
    class Sharpness(torch.optim.SGD):
        """Wants the gradient elsewhere (as SAM does)."""

        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad)
            return super().step(closure)

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    _, x = batch(mesh, 0)
    for cls in (Sharpness, Twice):
        model = on_mesh(mesh)
        optimizer = xd.parallel.zero(cls(model.parameters(), lr=0.1), mesh)

        def closure(model: nn.Module = model) -> torch.Tensor:
            loss = loss_of(model(x))
            loss.backward()
            return loss

        with pytest.raises(UnsupportedOpError, match="calls its closure again"):
            optimizer.step(closure)
        assert all(p.placements == (R,) for p in model.parameters())  # type: ignore[attr-defined]


def test_scaled_gradients(mesh: DeviceMesh) -> None:
    """torch's GradScaler takes what is sharded as it is: Paddle's ``shard_scaler``."""
    model, expected = on_mesh(mesh), reference()
    value, x = batch(mesh, 0)
    for module, optimizer, data, device in (
        (
            model,
            xd.parallel.zero(torch.optim.SGD(model.parameters(), lr=0.1), mesh, stage=2),
            x,
            "xla",
        ),
        (expected, torch.optim.SGD(expected.parameters(), lr=0.1), value, "cpu"),
    ):
        scaler = torch.amp.GradScaler(device, init_scale=64.0)
        for factor in (1.0, math.inf):  # the second is skipped
            scaler.scale(loss_of(module(data)) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 32
    check_parameters(model, expected)


def test_what_stays_as_it_is(mesh: DeviceMesh) -> None:
    small, sharded = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(8))
    parameters = [
        nn.Parameter(distribute_tensor(small.detach(), mesh, [R])),
        nn.Parameter(distribute_tensor(sharded.detach(), mesh, [Shard(0)])),
        nn.Parameter(distribute_tensor(torch.tensor(1.0), mesh, [R])),
    ]
    optimizer = xd.parallel.zero(torch.optim.Adam(parameters, lr=0.5), mesh)
    sum(p.square().sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    placements = [optimizer.state[p]["exp_avg"].placements[0] for p in parameters]
    assert placements == [R, Shard(0), R]
    assert [p.detach().cpu().flatten()[0].item() for p in parameters] == pytest.approx([0.5] * 3)


def test_errors(mesh: DeviceMesh) -> None:
    model = on_mesh(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grid = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    with pytest.raises(MeshError, match="of one dim"):
        xd.parallel.zero(optimizer, grid)
    with pytest.raises(ValueError, match="fully_shard"):
        xd.parallel.zero(optimizer, mesh, stage=3)
    with pytest.raises(UnsupportedOpError, match="LBFGS"):
        xd.parallel.zero(torch.optim.LBFGS(model.parameters()), mesh)
    xd.parallel.zero(optimizer, mesh)
    with pytest.raises(ValueError, match="already"):
        xd.parallel.zero(optimizer, mesh)
    other = xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))
    elsewhere = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MeshError, match="give a dim of its mesh"):
        xd.parallel.zero(elsewhere, other, stage=2)
    xd.parallel.zero(elsewhere, mesh)  # nothing was done before


def test_a_group_that_comes_later(mesh: DeviceMesh) -> None:
    model = on_mesh(mesh)
    first, *rest = model.parameters()
    optimizer = xd.parallel.zero(torch.optim.AdamW([first], lr=0.05, eps=EPS), mesh, stage=2)
    optimizer.add_param_group({"params": rest})
    for _ in range(2):
        loss_of(model(batch(mesh, 0)[1])).backward()
        optimizer.step()
    for parameter in model.parameters():
        assert isinstance(optimizer.state[parameter]["exp_avg"].placements[0], Shard)
    model.zero_grad()
    loss_of(model(batch(mesh, 0)[1])).backward()
    assert all(isinstance(p.grad.placements[0], Shard) for p in rest)  # type: ignore[union-attr]
