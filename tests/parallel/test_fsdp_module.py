"""``FSDPModule``: accumulation, factors, precision, unshard and reshard, checkpointing, errors."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import (
    register_fsdp_forward_method,
)
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.parallel.harness import (
    Block,
    DataParallelMeshDims,
    Model,
    averaged_gradients,
    batches,
    check_gradients,
    collectives,
    full,
    loss_of,
    per_device,
    reference,
    shard_blocks,
    sharded,
    sizes,
)
from xla_dtensor.parallel._state import states_of

# --- accumulation, factors, precision -------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_accumulation(switch: str) -> None:
    model, root, dims = sharded("hsdp")
    expected = reference()
    models = [model]  # nothing that the step can reach by name

    @xd.compile
    def compiled(x: torch.Tensor) -> None:
        loss_of(models[0](x)).backward()

    def eager(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()

    # The second switch is the first under another name: compiling it again would show nothing new.
    runs = [compiled] * 2 if switch == "set_requires_gradient_sync" else [eager]
    for micro in runs:
        for i in range(3):
            inputs = batches(8, seed=i)
            getattr(model, switch)(i == 2)
            micro(per_device(inputs, root, dims))
            assert (model.out.weight.grad is None) == (i < 2)
            averaged_gradients(expected, inputs)
        check_gradients(model, expected)
        model.zero_grad()
        expected.zero_grad()
    # No gradient waits, one does, one does and all are reduced: found again in a second round.
    assert compiled.compilations == (3 if compiled in runs else 0)


def test_accumulation_in_one_step(mesh8: DeviceMesh) -> None:
    """The microbatches of one compiled step: the gradients are reduced once."""
    model, expected = shard_blocks(reference(), mesh=mesh8), reference()
    inputs = [batches(8, seed=i) for i in range(2)]

    @xd.compile
    def step(*micro: torch.Tensor) -> None:
        for i, x in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            loss_of(model(x)).backward()

    for _ in range(2):
        model.zero_grad()
        step(*(per_device(x, mesh8, ["dp"]) for x in inputs))
    for x in inputs:
        averaged_gradients(expected, x)
    check_gradients(model, expected)
    assert step.compilations == 1
    assert collectives(step)["reduce-scatter"] == Counter(
        count // 8 for count in sizes(expected).values()
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh_name", ["8", "2x4"])
@pytest.mark.parametrize("global_view", [False, True])
def test_finalize_backward(mesh_name: str, global_view: bool) -> None:
    """The gradients of all passes are reduced by the call, once, and added to what was there."""
    mesh = make_mesh(mesh_name)
    names = list(mesh.mesh_dim_names or ())
    model, expected = shard_blocks(reference(), mesh=mesh), reference()
    model.set_manual_backward_finalization(True)

    def run(seed: int) -> None:
        own = [batch + seed for batch in batches(8)]
        if global_view:
            x = distribute_tensor(torch.cat(own), mesh, [Shard(0)] * mesh.ndim)
        else:
            x = per_device(own, mesh, names)
        loss_of(model(x)).backward()
        averaged_gradients(expected, own)

    run(0)  # reduced at its end
    model.set_requires_gradient_sync(False)
    run(1)
    run(2)
    before = [p.grad.full_tensor().cpu() for p in model.parameters()]
    model.finalize_backward()  # they aren't to be reduced yet
    after = [p.grad.full_tensor().cpu() for p in model.parameters()]
    assert all(map(torch.equal, before, after))
    model.set_requires_gradient_sync(True)
    for _ in range(2):
        handle = model.finalize_backward(async_op=True)
        handle.wait()
    check_gradients(model, expected)
    run(3)
    check_gradients(model, expected)
    with pytest.raises(RuntimeError, match="finalize_backward must be called on the root"):
        model.blocks[0].finalize_backward()


def test_gradient_divide_factor(mesh8: DeviceMesh) -> None:
    model, expected = shard_blocks(reference(), mesh=mesh8), reference()
    model.set_gradient_divide_factor(2)  # this module's parameters, not those of its blocks
    model.blocks[0].set_reduce_scatter_divide_factor(1)
    loss_of(model(per_device(batches(8), mesh8, ["dp"]))).backward()
    averaged_gradients(expected, batches(8))
    for factor, module in ((4, expected.inp), (8, expected.blocks[0]), (4, expected.out)):
        for parameter in module.parameters():
            parameter.grad *= factor
    check_gradients(model, expected)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
def test_mixed_precision(mesh4: DeviceMesh, reduce_dtype: torch.dtype | None) -> None:
    seen: list[Any] = []

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, self.weight.dtype))
            return super().forward(x)

    expected = nn.Sequential(Looking(4, 16), nn.Tanh(), Looking(16, 4))
    model = copy.deepcopy(expected)
    policy = xd.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, torch.float64)
    xd.fully_shard(model, mesh=mesh4, mp_policy=policy)
    inputs = batches(4)
    output = model(per_device(inputs, mesh4, ["dp"]))
    assert output.dtype == torch.float64
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
    loss_of(output).backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    # CPU torch: each device's gradient in bfloat16, summed as reduce_dtype, kept in float32.
    low = copy.deepcopy(expected).bfloat16()
    for wanted in expected.parameters():
        wanted.grad = torch.zeros_like(wanted)
    for x in inputs:
        low.zero_grad()
        loss_of(low(x.bfloat16()).double()).backward()
        for wanted, parameter in zip(expected.parameters(), low.parameters(), strict=True):
            wanted.grad += parameter.grad.float() / 4
    check_gradients(model, expected, atol=2e-5 if reduce_dtype == torch.float32 else 5e-3)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_inputs_keep_their_dtype(mesh4: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    policy = xd.MixedPrecisionPolicy(torch.float64, cast_forward_inputs=False)
    xd.fully_shard(model, mesh=mesh4, mp_policy=policy)
    model(torch.randn(2, 4).double())
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(2, 4))


# --- unshard, reshard, exceptions -----------------------------------------------------------------


def test_unshard_and_reshard(mesh8: DeviceMesh) -> None:
    model = xd.fully_shard(reference(), mesh=mesh8)
    weight = model.out.weight
    for asynchronous in (False, True):
        handle = model.unshard(async_op=asynchronous)
        assert (handle is None) == (not asynchronous)
        if handle is not None:
            handle.wait()
        assert isinstance(model.out.weight, nn.Parameter)
        assert not isinstance(model.out.weight, DTensor)
        assert torch.equal(model.out.weight.cpu(), reference().out.weight)
        model.reshard()
        assert model.out.weight is weight
    model.unshard()
    assert isinstance(model.state_dict()["out.weight"], DTensor)
    assert model.out.weight is weight


@pytest.mark.parametrize("after_backward", [True, False])
def test_unshard_before_forward(mesh8: DeviceMesh, after_backward: bool) -> None:
    model, expected = xd.fully_shard(reference(), mesh=mesh8), reference()
    model.set_reshard_after_backward(after_backward)
    model.unshard()
    loss_of(model(per_device(batches(8), mesh8, ["dp"]))).backward()
    assert isinstance(model.out.weight, DTensor) == after_backward
    model.reshard()
    averaged_gradients(expected, batches(8))
    check_gradients(model, expected)


def test_set_reshard_after_forward(mesh8: DeviceMesh) -> None:
    model = shard_blocks(reference(), mesh=mesh8)

    @xd.compile
    def step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()

    x = per_device(batches(8), mesh8, ["dp"])
    counts = []
    for reshard in (True, False):
        model.set_reshard_after_forward(reshard)
        model.zero_grad()
        step(x)
        counts.append(collectives(step)["all-gather"].total())
    assert counts == [13, 8]
    with pytest.raises(ValueError, match="should be a bool"):
        model.set_reshard_after_forward(2)


@pytest.mark.parametrize("named", [False, True])
def test_a_step_that_sets_it_is_one_program(mesh8: DeviceMesh, named: bool) -> None:
    """torchtitan's chunked loss does, and leaves it on where it was off. Whether the walk has known
    of it, and so has undone it after a trace, hangs on what else the step's code names."""
    model, expected = shard_blocks(reference(), mesh=mesh8), reference()
    model.set_reshard_after_forward(False)

    @xd.compile
    def step(x: torch.Tensor) -> Any:
        loss = loss_of(model(x))
        model.set_reshard_after_forward(False)
        loss.backward()
        model.set_reshard_after_forward(True)
        return [s.reshard_after_forward for s in states_of(model)] if named else None

    for _ in range(3):
        model.zero_grad()
        step(per_device(batches(8), mesh8, ["dp"]))
    averaged_gradients(expected, batches(8))
    check_gradients(model, expected)
    assert step.compilations == 1
    assert {s.reshard_after_forward for s in states_of(model)} == {True}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_that_fails_after_unshard(mesh8: DeviceMesh, compiled: bool) -> None:
    """A trace that fails is taken back: modules hold their shards, and the next forward gathers."""
    model, expected = shard_blocks(reference(), mesh=mesh8), reference()
    fails, seen = [True], list[type]()

    def step(x: torch.Tensor) -> None:
        model.unshard()
        if fails:
            raise ConnectionError("down for a moment")
        seen.append(type(model.out.weight))
        loss_of(model(x)).backward()

    run = xd.compile(step) if compiled else step
    x = per_device(batches(8), mesh8, ["dp"])
    with pytest.raises(ConnectionError):
        run(x)
    if compiled:
        assert isinstance(model.out.weight, xd.XLAShardedTensor)
    fails.clear()
    run(x)
    averaged_gradients(expected, batches(8))
    check_gradients(model, expected)
    assert set(seen) == {xd.XLATensor}


def test_modified_between_forward_and_backward(mesh8: DeviceMesh) -> None:
    model = xd.fully_shard(reference(), mesh=mesh8, reshard_after_forward=True)
    loss = loss_of(model(per_device(batches(8), mesh8, ["dp"])))
    with torch.no_grad():
        model.out.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation since forward"):
        loss.backward()


def test_an_exception_in_forward(mesh8: DeviceMesh) -> None:
    model, expected = shard_blocks(reference(), mesh=mesh8), reference()
    handle = model.blocks[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(2, 4))
    handle.remove()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.set_requires_gradient_sync(False)
    loss_of(model(torch.randn(2, 4))).backward()
    model.reset_iter_state()  # what had accumulated is gone
    model.set_requires_gradient_sync(True)
    loss_of(model(per_device(batches(8), mesh8, ["dp"]))).backward()
    averaged_gradients(expected, batches(8))
    check_gradients(model, expected)
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].reset_iter_state()


def test_other_forward_methods(mesh8: DeviceMesh) -> None:
    class Two(Block):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x)

    torch.manual_seed(0)
    expected = Two(4, 16, 8)
    model = xd.fully_shard(copy.deepcopy(expected), mesh=mesh8)
    register_fsdp_forward_method(model, "encode")
    loss_of(model.encode(per_device(batches(8), mesh8, ["dp"]))).backward()
    for x in batches(8):
        (loss_of(expected.encode(x)) / 8).backward()
    torch.testing.assert_close(full(model.up.weight.grad), expected.up.weight.grad)
    assert model.down.weight.grad is None


# --- activation checkpointing, clipping ---------------------------------------------------------


class Recomputing(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_checkpoint(mesh8: DeviceMesh, blocks: bool, compiled: bool) -> None:
    """Around sharded modules, and inside of one."""
    torch.manual_seed(0)
    model, expected = Recomputing(), reference()
    if blocks:
        shard_blocks(model, mesh=mesh8)
    else:
        xd.fully_shard(model, mesh=mesh8, reshard_after_forward=True)

    def step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()

    run = xd.compile(step) if compiled else step
    run(per_device(batches(8), mesh8, ["dp"]))
    averaged_gradients(expected, batches(8))
    check_gradients(model, expected)


def test_clipping() -> None:
    model, root, dims = sharded("hsdp")
    expected = reference()
    loss_of(model(per_device(batches(8), root, dims))).backward()
    averaged_gradients(expected, batches(8))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(full(norm), nn.utils.clip_grad_norm_(expected.parameters(), 0.01))
    check_gradients(model, expected)


# --- dp_mesh_dims: all parameters are DTensors on the whole mesh ----------------------------------


@pytest.mark.parametrize(
    ("dims", "placements", "shape"),
    [
        (DataParallelMeshDims(shard="dp"), (Replicate(), Shard(0), Replicate()), (2, 2, 2)),
        (
            DataParallelMeshDims(shard="dp", replicate="rep"),
            (Replicate(), Shard(0), Replicate()),
            (2, 2, 2),
        ),
        (DataParallelMeshDims(shard=("rep", "dp")), (Shard(0), Replicate()), (4, 2)),
        (DataParallelMeshDims(replicate="dp"), (Replicate(),) * 3, (2, 2, 2)),
    ],
)
def test_dp_mesh_dims(dims: Any, placements: Any, shape: tuple[int, ...]) -> None:
    mesh = xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("rep", "dp", "tp"))
    expected = nn.Linear(4, 8)
    model = distribute_module(copy.deepcopy(expected), mesh)
    xd.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert model.weight.placements == placements
    assert model.weight.device_mesh.shape == shape
    x = torch.cat(batches(8))
    names = (*dims.shard_names, *dims.replicate_names)
    over = [Shard(0) if name in names else Replicate() for name in ("rep", "dp", "tp")]
    count = 2 ** sum(isinstance(p, Shard) for p in over)
    loss_of(model(distribute_tensor(x, mesh, over))).backward()
    (loss_of(expected(x)) / count).backward()
    check_gradients(model, expected)


def test_dp_mesh_dims_with_tensor_parallelism() -> None:
    mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(8, 16, bias=False)
    expected = copy.deepcopy(model)
    weight = distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)])
    model.weight = nn.Parameter(weight)
    xd.fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert model.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    model.set_gradient_divide_factor(1)
    x = torch.randn(8, 8)
    loss_of(model(distribute_tensor(x, mesh, [Shard(0), Replicate()]))).backward()
    loss_of(expected(x)).backward()
    check_gradients(model, expected)


class ByDevice(nn.Linear):
    """Computes with what each device has, as code with collectives of its own does."""

    def forward(self, x: Any) -> Any:
        local = nn.functional.linear(x.to_local(), self.weight.to_local(), self.bias.to_local())
        return DTensor.from_local(local, x.device_mesh, x.placements)


@pytest.mark.parametrize("mixed", [False, True], ids=["to_local alone", "and as a DTensor"])
def test_dp_mesh_dims_and_to_local(mixed: bool) -> None:
    """What devices contribute through `to_local()` adds up, as under torch, which sums their local
    gradients whatever the placements; also if the parameter is used both ways."""
    mesh = xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("rep", "dp", "tp"))
    expected = nn.Linear(4, 8)
    model = distribute_module(ByDevice(4, 8), mesh)
    model.load_state_dict({k: distribute_tensor(v, mesh) for k, v in expected.state_dict().items()})
    dims = DataParallelMeshDims(shard="dp", replicate="rep")
    xd.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    model.set_gradient_divide_factor(1)
    if mixed:
        model.register_forward_hook(lambda m, _, out: out + m.bias)
    x = torch.cat(batches(8))
    loss_of(model(distribute_tensor(x, mesh, [Shard(0), Shard(0), Replicate()]))).backward()
    loss_of(expected(x) + (expected.bias if mixed else 0)).backward()
    check_gradients(model, expected)


# --- errors, and methods without effect -----------------------------------------------------------


def on(mesh: DeviceMesh, module: nn.Module | None = None, **options: Any) -> Any:
    return lambda: xd.fully_shard(module or nn.Linear(4, 4), mesh=mesh, **options)


def test_errors(mesh8: DeviceMesh, mesh_hsdp_tp: DeviceMesh) -> None:
    dims = DataParallelMeshDims
    mesh = mesh8
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    expert = [nn.Linear(4, 4)]
    for call, error, match in [
        (on(mesh_hsdp_tp), ValueError, "expects a 1D or 2D DeviceMesh"),
        (on(mesh, nn.ModuleList(expert)), ValueError, "containers that do not implement forward"),
        (on(mesh, scalar), ValueError, "doesn't support scalar parameters"),
        (on(mesh, reshard_after_forward=3), ValueError, "should be a factor of 8, not 3"),
        (on(mesh, reshard_after_forward="no"), ValueError, "should be a bool or an int"),
        (on(mesh, shard_placement_fn=lambda p: Shard(2)), ValueError, "Shard dim 2 is invalid"),
        (on(mesh, shard_placement_fn=lambda p: 3), ValueError, "Invalid shard_placement_fn"),
        (on(mesh, dp_mesh_dims=dims(shard="x")), ValueError, "'x' not found"),
        (on(mesh, dp_mesh_dims=dims(shard="dp")), ValueError, "Got plain tensor"),
        (
            on(mesh, dp_mesh_dims=dims(shard="dp"), reshard_after_forward=2),
            NotImplementedError,
            "SPMD mesh",
        ),
    ]:
        with pytest.raises(error, match=match):
            call()
    distributed = distribute_module(nn.Linear(4, 4), mesh_hsdp_tp)
    with pytest.raises(ValueError, match="same mesh passed to fully_shard"):
        xd.fully_shard(distributed, mesh=mesh, dp_mesh_dims=dims(shard="dp"))
    sharded_already = nn.Linear(8, 8, bias=False)
    weight = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    sharded_already.weight = nn.Parameter(weight)
    with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP shard dim 'dp'"):
        xd.fully_shard(sharded_already, mesh=mesh, dp_mesh_dims=dims(shard="dp"))


def test_a_mesh_that_is_not_ours() -> None:
    class CpuMesh:
        device_type = "cpu"

    with pytest.raises(xd.MeshError, match="not an xla mesh"):
        xd.fully_shard(nn.Linear(4, 4), mesh=CpuMesh())


def test_global_and_per_device_inputs_mixed(mesh8: DeviceMesh) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(y).sum() + x.to_local().sum()

    model = xd.fully_shard(Adds(), mesh=mesh8)
    x = distribute_tensor(torch.randn(8, 4), mesh8, [Shard(0)])
    with pytest.raises(xd.XlaDTensorError):
        model(x, per_device(batches(8), mesh8, ["dp"])).backward()


def test_every_method_of_torch(mesh8: DeviceMesh) -> None:
    """Those that only say when to communicate change nothing; those that can't be done raise."""
    model, expected = shard_blocks(reference(), mesh=mesh8), reference()
    blocks = list(model.blocks)
    for name, arguments in {
        "set_allocate_memory_from_process_group_for_comm": (True,),
        "set_force_sum_reduction_for_comms": (True,),
        "set_is_last_backward": (True,),
        "set_modules_to_backward_prefetch": (blocks,),
        "set_modules_to_forward_prefetch": (blocks,),
        "set_post_optim_event": (None,),
        "set_reduce_scatter_max_input_buffers": (2,),
        "set_reduce_scatter_unused_params": (True,),
        "set_separate_reduce_scatter_group": (True,),
        "set_symm_mem_for_comm": (),
        "set_unshard_in_backward": (False,),
        "set_keep_unsharded_storage": (True,),
        "_set_unshard_async_op": (True,),
    }.items():
        getattr(model, name)(*arguments)
    for name in ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(xd.UnsupportedOpError, match=name):
            getattr(model, name)(lambda: None)
    with pytest.raises(ValueError, match="Expects FSDPModule"):
        model.set_modules_to_forward_prefetch([nn.Linear(4, 4)])
    with pytest.raises(ValueError, match="positive int"):
        model.set_reduce_scatter_max_input_buffers(0)
    with pytest.raises(TypeError, match="must be an int"):
        model.set_reduce_scatter_max_input_buffers(True)
    loss_of(model(per_device(batches(8), mesh8, ["dp"]))).backward()
    averaged_gradients(expected, batches(8))
    check_gradients(model, expected)
    # Nothing is left that would run torch's own, which looks for process groups.
    of_torch = {name for name in vars(TorchFSDPModule) if name[:2] != "__"}
    assert of_torch <= set(vars(xd.FSDPModule))
