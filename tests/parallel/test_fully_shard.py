"""``xd.fully_shard``: layouts, gradients, what the compiled step communicates, memory, methods."""

from __future__ import annotations

import copy
import functools
import gc
import operator
from collections import Counter
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from tests.parallel.harness import (
    EPS,
    Block,
    Model,
    averaged_gradients,
    batches,
    check_gradients,
    check_parameters,
    collectives,
    full,
    loss_of,
    per_device,
    reference,
    shard_blocks,
    sharded,
    sizes,
    tensor_parallel,
)
from xla_dtensor.planning.collectives import collectives as program_collectives

# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "up", "down", "up_bias", "root"),
    [
        ("fsdp", [Shard(0)], [Shard(0)], [Shard(0)], [Shard(0)]),
        ("hsdp", *[[Replicate(), Shard(0)]] * 4),
        (
            "fsdp_tp",
            [_StridedShard(0, split_factor=2), Shard(0)],
            [Shard(0), Shard(1)],
            [_StridedShard(0, split_factor=2), Shard(0)],
            [Shard(0)],
        ),
        (
            "hsdp_tp",
            [Replicate(), _StridedShard(0, split_factor=2), Shard(0)],
            [Replicate(), Shard(0), Shard(1)],
            [Replicate(), _StridedShard(0, split_factor=2), Shard(0)],
            [Replicate(), Shard(0)],
        ),
    ],
)
def test_placements_are_torchs(kind: str, up: Any, down: Any, up_bias: Any, root: Any) -> None:
    model, _, _ = sharded(kind)
    assert list(model.blocks[0].up.weight.placements) == up
    assert list(model.blocks[0].up.bias.placements) == up_bias
    assert list(model.blocks[0].down.weight.placements) == down
    assert list(model.inp.weight.placements) == root
    for parameter, value in zip(model.parameters(), reference().parameters(), strict=True):
        assert isinstance(parameter, nn.Parameter) and parameter.is_leaf
        assert torch.equal(full(parameter), value)


def test_the_class_and_names_are_torchs(mesh8: DeviceMesh) -> None:
    plain = reference()
    model = shard_blocks(copy.deepcopy(plain), mesh=mesh8)
    assert type(model).__name__ == "FSDPModel"
    assert isinstance(model, Model)
    assert isinstance(model, xd.FSDPModule) and isinstance(model.blocks[0], TorchFSDPModule)
    assert not isinstance(model.blocks[0].up, xd.FSDPModule)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(model)


def test_state_dict_round_trip(mesh8: DeviceMesh) -> None:
    model = shard_blocks(reference(), mesh=mesh8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    check_parameters(model, reference(), atol=0)


def test_shard_placement_fn(mesh8: DeviceMesh) -> None:
    class Result:
        def __init__(self, placement: Shard, mesh_info: Any) -> None:
            self.placement, self.mesh_info = placement, mesh_info

    other = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "ep"))["ep"]
    model = reference()
    chosen = {
        model.out.weight: Shard(1),
        model.blocks[0].up.weight: Shard(-1),
        model.blocks[0].down.weight: None,
    }
    xd.fully_shard(model, mesh=mesh8, shard_placement_fn=chosen.get)
    assert model.out.weight.placements == (Shard(1),)
    assert model.blocks[0].up.weight.placements == (Shard(1),)
    assert model.blocks[0].down.weight.placements == (Shard(0),)
    expected = reference()
    averaged_gradients(expected, batches(8))
    loss_of(model(per_device(batches(8), mesh8, ["dp"]))).backward()
    check_gradients(model, expected)

    single = nn.Linear(8, 32, bias=False)
    xd.fully_shard(single, mesh=mesh8, shard_placement_fn=lambda p: Result(Shard(1), other))
    assert single.weight.placements == (Shard(1),)
    assert single.weight.device_mesh == other


def test_ignored_params_and_buffers(mesh8: DeviceMesh) -> None:
    model = nn.BatchNorm1d(8)
    xd.fully_shard(model, mesh=mesh8, ignored_params={model.bias})
    assert isinstance(model.weight, DTensor) and not isinstance(model.bias, DTensor)
    assert model.running_mean.device.type == "xla"


def test_default_mesh_is_all_devices_or_the_current_one(mesh4: DeviceMesh) -> None:
    assert xd.fully_shard(nn.Linear(8, 8)).weight.device_mesh.size() == 8
    with mesh4:
        assert xd.fully_shard(nn.Linear(8, 8)).weight.device_mesh == mesh4


# --- gradients, and what the compiled step communicates ----------------------------------------


def test_gradients_eager() -> None:
    model, root, dims = sharded("hsdp_tp")
    inputs = batches(4)
    expected = reference()
    for _ in range(2):  # the second backward adds to the first
        loss_of(model(per_device(inputs, root, dims))).backward()
        averaged_gradients(expected, inputs)
    check_gradients(model, expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "reshard"),
    [
        ("fsdp", True),
        ("fsdp", False),
        ("fsdp", None),
        ("fsdp", 2),
        ("hsdp", True),
        ("fsdp_tp", True),
        ("hsdp_tp", None),
    ],
)
def test_compiled_steps(kind: str, reshard: bool | int | None) -> None:
    """The same three steps as CPU torch; one gathering per weight and use, one scattering of the
    sum per gradient."""
    model, root, dims = sharded(kind, reshard_after_forward=reshard)
    expected = reference()
    devices = 8 if "tp" not in kind else 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)
    wanted = torch.optim.AdamW(expected.parameters(), lr=0.01, eps=EPS)

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for i in range(3):
        inputs = batches(devices, seed=i)
        step(per_device(inputs, root, dims))
        averaged_gradients(expected, inputs)
        wanted.step()
        wanted.zero_grad()
    check_parameters(model, expected)
    assert step.compilations == 1

    # What tensor parallelism leaves of each parameter, and over how many devices that is sharded.
    tp = 2 if "tp" in kind else 1
    shards = {"fsdp": 8, "hsdp": 4, "fsdp_tp": 4, "hsdp_tp": 2}[kind]
    whole = {
        name: count // (tp if name.startswith("blocks") else 1)
        for name, count in sizes(reference()).items()
    }
    assert len(set(whole.values())) == len(whole)
    gathered = Counter(whole.values())  # forward
    for name, count in whole.items():
        weight = name.endswith("weight") and name != "inp.weight"  # its input needs no gradient
        kept = reshard is False or (reshard is None and name == "out.weight")
        if weight and not kept:
            gathered[count] += 1  # backward
    found = collectives(step)
    assert found["all-gather"] == gathered
    assert found["reduce-scatter"] == Counter(count // shards for count in whole.values())
    assert set(found) <= {"all-gather", "reduce-scatter", "all-reduce"}
    reduced = found.get("all-reduce", Counter())
    if kind == "fsdp":
        assert not reduced
    if "hsdp" in kind:  # each scattered gradient is summed over the replicas
        for count in whole.values():
            assert reduced[count // shards] >= 1


def test_reshard_after_forward_int_gathers_over_fewer_devices(mesh8: DeviceMesh) -> None:
    model = shard_blocks(reference(), mesh=mesh8, reshard_after_forward=4)
    x = per_device(batches(8), mesh8, ["dp"])

    @xd.compile
    def step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()

    step(x)
    expected = reference()
    averaged_gradients(expected, batches(8))
    check_gradients(model, expected)
    found = program_collectives(step.compiled_programs()[-1].as_text())
    gathered_over = Counter(one.size for one in found if one.kind == "all-gather")
    assert gathered_over == {8: 8, 4: 5}
    eager = shard_blocks(reference(), mesh=mesh8, reshard_after_forward=4)
    loss_of(eager(x)).backward()
    check_gradients(eager, expected)


def test_uneven_shards(mesh8: DeviceMesh) -> None:
    expected = nn.Sequential(nn.Linear(4, 13), nn.Tanh(), nn.Linear(13, 3))
    model = xd.fully_shard(copy.deepcopy(expected), mesh=mesh8)
    assert [len(s.data) for s in model[0].weight.local_shards] == [2] * 6 + [1, 0]
    loss_of(model(per_device(batches(8), mesh8, ["dp"]))).backward()
    averaged_gradients(expected, batches(8))
    check_gradients(model, expected)


def test_the_same_batch_on_every_device(mesh8: DeviceMesh) -> None:
    """A CPU tensor as the root's input is the same on all: the average is one device's gradient."""
    expected = nn.Linear(4, 8)
    model, x = xd.fully_shard(copy.deepcopy(expected), mesh=mesh8), batches(1)[0]
    loss_of(model(x)).backward()
    loss_of(expected(x)).backward()
    check_gradients(model, expected)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_global_view(kind: str) -> None:
    """With one global batch, a DTensor, the gradient is that of the global loss."""
    model, root, dims = sharded(kind)
    x = torch.cat(batches(8))
    placements = [Shard(0)] * len(dims)

    @functools.partial(xd.compile, layouts="torch")  # of so few rows the gradients' operands move
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x))
        loss.backward()
        return loss

    loss = step(distribute_tensor(x, root, placements))
    expected = reference()
    wanted = loss_of(expected(x))
    wanted.backward()
    torch.testing.assert_close(full(loss), wanted.detach())
    check_gradients(model, expected)
    found = collectives(step)
    gathered = Counter(sizes(expected).values())
    gathered.update(c for n, c in sizes(expected).items() if "blocks" in n and "weight" in n)
    # XLA's CPU backend makes no reduce-scatter of a sum: an all-reduce, of which a slice is used.
    # Over the replicas it is that slice (of a weight) which is summed.
    reduced = Counter({1: 1, **dict.fromkeys(sizes(expected).values(), 1)})  # the loss
    if kind == "hsdp":
        reduced.update(c // 4 for n, c in sizes(expected).items() if "weight" in n)
    assert found == {"all-gather": gathered, "all-reduce": reduced}
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, xd.FSDPModule):
            module.set_gradient_divide_factor(4)
    step(distribute_tensor(x, root, placements))
    assert step.recompilations
    for parameter in expected.parameters():
        parameter.grad /= 4
    check_gradients(model, expected)


@pytest.mark.parametrize("replicas", [1, 2])
def test_memory_falls_as_one_over_n(replicas: int) -> None:
    """Parameters and AdamW's state, per device, read from the compiled step."""
    arguments = {}
    for n in (1, 2, 4, 8):
        if replicas * n > 8:
            continue
        shape, names = ((n,), ("dp",)) if replicas == 1 else ((replicas, n), ("rep", "dp"))
        mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=names)
        model = nn.Sequential(nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False))
        xd.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)

        @xd.compile
        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

        x = xd.from_device_values([torch.ones(1, 64)] * (replicas * n), mesh)
        step(x)
        analysis = step.compiled_programs()[-1].memory_analysis()
        arguments[n] = analysis.argument_size_in_bytes
        state = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
        for tensor in [*model.parameters(), *state]:
            assert tensor.to_local().numel() == 64 * 512 // n
        assert len(state) == 4
    whole = 3 * 2 * 64 * 512 * 4  # bytes
    for n, size in arguments.items():
        assert whole / n <= size <= whole / n + 1024, (n, arguments)  # the batch, step counts
    assert list(arguments) == [n for n in (1, 2, 4, 8) if replicas * n <= 8]


# --- shared, frozen, special parameters ---------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.middle = Block(8, 16, 8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


@pytest.mark.parametrize("group", ["root", "list"])
def test_shared_parameters(mesh4: DeviceMesh, group: str) -> None:
    torch.manual_seed(0)
    expected = Tied()
    model = copy.deepcopy(expected)
    xd.fully_shard(model.middle, mesh=mesh4)
    if group == "list":
        modules = [model.first, model.last]
        assert xd.fully_shard(modules, mesh=mesh4) is modules
    xd.fully_shard(model, mesh=mesh4)
    inputs = [torch.randn(2, 8) for _ in range(4)]
    for _ in range(2):
        assert model.first.weight is model.last.weight
        assert len(list(model.parameters())) == 4
        loss_of(model(per_device(inputs, mesh4, ["dp"]))).backward()
        averaged_gradients(expected, inputs)
        check_gradients(model, expected)


def test_shared_parameter_of_another_group(mesh4: DeviceMesh) -> None:
    model = Tied()
    xd.fully_shard(model.first, mesh=mesh4)
    with pytest.raises(ValueError, match=r"use fully_shard\(\[module_a, module_b\]\)"):
        xd.fully_shard(model, mesh=mesh4)


def test_frozen_parameters(mesh8: DeviceMesh) -> None:
    model, expected = reference(), reference()
    for one in (model, expected):
        one.blocks[0].requires_grad_(False)
    shard_blocks(model, mesh=mesh8)
    loss_of(model(per_device(batches(8), mesh8, ["dp"]))).backward()
    averaged_gradients(expected, batches(8))
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (wanted.grad is None)
    torch.testing.assert_close(full(model.inp.weight.grad), expected.inp.weight.grad)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_rnn_weights(kind: type[nn.RNNBase], compiled: bool, mesh4: DeviceMesh) -> None:
    """nn.LSTM keeps a list of its weights beside the module's parameters, and references to them
    by which it finds out that they have changed."""
    torch.manual_seed(0)
    expected = kind(4, 8)
    model = xd.fully_shard(copy.deepcopy(expected), mesh=mesh4)

    def step(x: torch.Tensor) -> None:
        loss_of(model(x)[0]).backward()

    run = xd.compile(step) if compiled else step
    for seed in range(3):
        torch.manual_seed(seed)
        inputs = [torch.randn(3, 2, 4) for _ in range(4)]
        model.zero_grad()
        expected.zero_grad()
        run(per_device(inputs, mesh4, ["dp"]))
        averaged_gradients(expected, inputs, loss=lambda out: loss_of(out[0]))
        check_gradients(model, expected)
    assert all(map(operator.is_, model._flat_weights, model.parameters()))


def test_a_module_used_twice(mesh8: DeviceMesh) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.tanh(self.linear(x)))

    torch.manual_seed(0)
    expected = Twice()
    model = copy.deepcopy(expected)
    xd.fully_shard(model.linear, mesh=mesh8)
    xd.fully_shard(model, mesh=mesh8)
    for seed, sync in ((1, False), (2, True)):
        model.set_requires_gradient_sync(sync)
        loss_of(model(per_device(batches(8, seed), mesh8, ["dp"]))).backward()
        averaged_gradients(expected, batches(8, seed))
    check_gradients(model, expected)


def test_evaluation_and_another_dtype(mesh8: DeviceMesh) -> None:
    expected = nn.Linear(4, 8)
    model = xd.fully_shard(copy.deepcopy(expected), mesh=mesh8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = model(per_device(batches(8), mesh8, ["dp"]))
        for value, x in zip(output.local_values(), batches(8), strict=True):
            torch.testing.assert_close(value, expected(x).detach())
    model.double()
    expected.double()
    inputs = [x.double() for x in batches(8)]
    loss_of(model(per_device(inputs, mesh8, ["dp"]))).backward()
    averaged_gradients(expected, inputs)
    check_gradients(model, expected)


@pytest.mark.usefixtures("strict_eager")
@pytest.mark.parametrize("reshard", [True, False])
def test_whole_parameters_are_gone_after_forward(mesh8: DeviceMesh, reshard: bool) -> None:
    model = nn.Linear(72, 56, bias=False)
    xd.fully_shard(model, mesh=mesh8, reshard_after_forward=reshard)
    x = per_device([torch.randn(2, 72) for _ in range(8)], mesh8, ["dp"]).requires_grad_()
    loss = loss_of(model(x))
    gc.collect()
    whole = [a for a in jax.live_arrays() if a.shape == (56, 72) and a.is_fully_replicated]
    assert len(whole) == (0 if reshard else 1)
    loss.backward()


def test_meta_device(mesh_dp_tp: DeviceMesh) -> None:
    with torch.device("meta"):
        model = Model()
    tensor_parallel(model, mesh_dp_tp["tp"])
    shard_blocks(model, mesh=mesh_dp_tp["dp"])
    assert model.blocks[0].up.weight.is_meta
    with pytest.raises(RuntimeError, match="materialized from meta device"):
        model(torch.randn(2, 4))
    model.to_empty(device="xla")
    expected = reference()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), expected.parameters(), strict=True):
            mesh = parameter.device_mesh
            parameter.copy_(distribute_tensor(value.detach(), mesh, parameter.placements))
    inputs = batches(4)
    loss_of(model(per_device(inputs, mesh_dp_tp, ["dp"]))).backward()
    averaged_gradients(expected, inputs)
    check_gradients(model, expected)
