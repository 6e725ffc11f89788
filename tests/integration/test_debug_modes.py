"""torch's modes that watch DTensors: what they count, show and forbid on xla meshes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._debug_mode import DebugMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import xla_dtensor as xd
from tests.integration.comm_scenarios import counts
from tests.parallel.harness import Model, batches, loss_of, per_device, reference
from xla_dtensor.base import events

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]
C = torch.ops.c10d_functional


@pytest.fixture(autouse=True)
def _nobody_is_left_watching() -> Any:
    before = events.observer
    yield
    assert events.observer is before


# --- CommDebugMode -------------------------------------------------------------------------------

# From shards to other shards. torch gathers and cuts on the CPU, and says so in a warning.
ALL_TO_ALL = ("s0-s1", "s1-s0", "add")


@pytest.mark.slow
def test_counts_are_torchs() -> None:
    """Those that a torch process counts on a CPU mesh of eight."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integration.comm_scenarios"],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
    )
    expected = json.loads(done.stdout)
    for name in ALL_TO_ALL:
        assert expected[name] == {"c10d_functional.all_gather_into_tensor": 1}
        expected[name] = {"c10d_functional.all_to_all_single": 1}
    assert counts("xla") == expected


def column_then_row(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to("xla")
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def test_modules_and_operations_are_listed(mesh_2x4: DeviceMesh) -> None:
    model = column_then_row(mesh_2x4["tp"])
    x = torch.ones(4, 8, device="xla", requires_grad=True)
    mode = CommDebugMode()
    for _ in range(2):  # the counts begin anew
        with mode:
            model(x).sum().backward()
        assert mode.get_comm_counts() == {C.all_reduce: 2}
    table = mode.generate_comm_debug_tracing_table(noise_level=2)
    row = table[table.index("Sequential.2") :]
    assert "*c10d_functional.all_reduce: 1" in row
    assert "aten.linear" in table and "sharding: [(Shard(dim=0),)" in table


def test_data_parallelism(mesh_2x4: DeviceMesh) -> None:
    """As for torch's: a gathering for each group of parameters in forward, a reduction of each."""
    model: Model = xd.fully_shard(reference(), mesh=mesh_2x4["dp"], reshard_after_forward=False)
    x = per_device(batches(2), mesh_2x4, ["dp"])
    number = len(list(model.parameters()))
    with CommDebugMode() as mode:
        loss = loss_of(model(x))
        assert mode.get_comm_counts() == {C.all_gather_into_tensor: number}
        loss.backward()
    found = mode.get_comm_counts()
    assert found == {C.all_gather_into_tensor: number, C.reduce_scatter_tensor: number}


def test_compiled_steps(mesh_2x4: DeviceMesh) -> None:
    """What XLA has compiled, in every call, and in a backward pass outside of the step."""
    x = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(0), Replicate()])
    w = distribute_tensor(torch.ones(16, 8), mesh_2x4, [Replicate(), Shard(0)]).requires_grad_()
    step = xd.compile(lambda x: (x @ w).redistribute(placements=[Shard(0), Replicate()]).sum())
    for _ in range(2):
        with CommDebugMode() as mode:
            loss = step(x)
            forward = Counter(mode.get_comm_counts())
            loss.backward()
    (program,) = step.compiled_programs()
    text = program.as_text()
    for packet, kind in (
        (C.all_reduce, "all-reduce"),
        (C.all_gather_into_tensor, "all-gather"),
        (C.reduce_scatter_tensor, "reduce-scatter"),
    ):
        assert forward[packet] == text.count(f" {kind}(") + text.count(f" {kind}-start(")
    assert forward[C.all_reduce] >= 1
    assert mode.get_total_counts() > sum(forward.values())


def test_what_the_compiler_chooses(mesh_2x4: DeviceMesh) -> None:
    """An operation without a rule: XLA's program of it is read."""
    x = distribute_tensor(torch.randn(8, 8), mesh_2x4["tp"], [Shard(0)])
    with CommDebugMode() as mode:
        torch.linalg.qr(x)
        first = dict(mode.get_comm_counts())
        torch.linalg.qr(x)
    assert sum(first.values()) >= 1
    assert mode.get_total_counts() == 2 * sum(first.values())


def test_collectives_in_place_and_other_threads(mesh_2x4: DeviceMesh) -> None:
    x = xd.collectives.axis_index(mesh_2x4, "dp").reshape(1).clone()
    sharded = distribute_tensor(torch.ones(8), mesh_2x4["dp"], [Shard(0)])
    with CommDebugMode() as outer:
        dist.all_reduce(x, group=mesh_2x4.get_group("dp"))
        with CommDebugMode() as inner:
            xd.collectives.permute(
                xd.collectives.axis_index(mesh_2x4, "tp"), mesh_2x4["tp"], [1, 2, 3, 0]
            )
            thread = threading.Thread(target=sharded.full_tensor)
            thread.start()
            thread.join()
    assert inner.get_comm_counts() == {C.all_to_all_single: 1}
    assert outer.get_comm_counts() == {C.all_reduce: 1, C.all_to_all_single: 1}


def test_an_exception_ends_it(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4["dp"], [Shard(0)])
    with pytest.raises(ZeroDivisionError), CommDebugMode() as mode:
        x.full_tensor()
        _ = 1 / 0
    x.full_tensor()
    assert mode.get_total_counts() == 1
    assert events.observer is None


def test_other_devices_are_counted_by_torch() -> None:
    with CommDebugMode() as mode:
        torch.ones(3) + 1
        torch.ones(3, device="xla") + 1
    assert mode.get_total_counts() == 0
    operations = mode.comm_module_operation_counts["Global"]["operations_list"]
    assert [str(op["name"]) for op in operations].count("aten.add.Tensor") == 2


# --- DebugMode -----------------------------------------------------------------------------------


def test_debug_mode(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(0), Replicate()])
    w = distribute_tensor(torch.ones(16, 4), mesh_2x4, [Replicate(), Shard(0)])
    own = xd.collectives.axis_index(mesh_2x4, "dp").float()
    with DebugMode() as mode:
        y = x @ w
        own + 1
        y.redistribute(placements=[Replicate(), Replicate()])
    text = mode.debug_string()
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0].startswith("aten::mm(dt: f32[8, 16]| S(0)R, dt: f32[16, 4]| RS(0))")
    assert lines[1].startswith("redistribute_input") and lines[1].endswith("(0, S(0)R -> S(0)S(1))")
    assert lines[2].startswith("aten::add.Tensor(t: f32[], 1)")
    assert lines[-1].endswith("S(0)P(sum) -> RR)")


# --- ExplicitRedistributionContext ---------------------------------------------------------------


def test_implicit_redistribution_is_forbidden(
    mesh_2x4: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    x = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(0), Replicate()])
    y = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(1), Replicate()])
    w = distribute_tensor(torch.ones(16, 4), mesh_2x4, [Replicate(), Shard(0)])
    message = "Implicit redistribution occurred for aten::add.Tensor.*all-to-all over dp.*before it"
    with ExplicitRedistributionContext():
        with pytest.raises(RuntimeError, match=message):
            x + y
        with pytest.raises(RuntimeError, match="add_"):
            x.add_(y)
        x + y.redistribute(placements=[Shard(0), Replicate()])
        x @ w  # cuts x where it is, which moves nothing
        x.full_tensor()
        with ExplicitRedistributionContext(enable=False):
            x + y
        with pytest.raises(RuntimeError, match="Implicit"):
            x + y
        xd.compile(lambda: x + x)()
    assert (x.full_tensor().cpu() == 1).all()
    with (
        ExplicitRedistributionContext(strict=True),
        pytest.raises(RuntimeError, match=r"mm.*cut over tp"),
    ):
        x @ w
    with (
        ExplicitRedistributionContext(mode="warn"),
        caplog.at_level(logging.WARNING, logger="torch.distributed.tensor._utils"),
    ):
        x + y
    x + y


def test_it_is_forbidden_in_one_thread(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(0), Replicate()])
    y = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(1), Replicate()])
    found: list[Any] = []
    with ExplicitRedistributionContext():
        thread = threading.Thread(target=lambda: found.append(x + y))
        thread.start()
        thread.join()
    assert len(found) == 1


def test_it_is_forbidden_in_a_step_that_is_traced(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(0), Replicate()])
    y = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(1), Replicate()])
    step = xd.compile(lambda: x + y)
    with ExplicitRedistributionContext(), pytest.raises(RuntimeError, match="Implicit"):
        step()
    assert (step().full_tensor().cpu() == 2).all()


# --- other modes ---------------------------------------------------------------------------------


def test_composites_are_seen_by_modes() -> None:
    """``linear`` and attention, which reach XLA whole: FlopCounterMode's numbers are the CPU's, and
    those of torch's formulas for fused attention, which it doesn't count on the CPU."""
    x, w = torch.randn(4, 8), torch.randn(16, 8)
    q = torch.randn(2, 4, 8, 16)
    flops, results = [], []
    for device in ("cpu", "xla"):
        own = [t.detach().clone().to(device).requires_grad_() for t in (x, w)]
        with FlopCounterMode(display=False) as mode:
            F.linear(*own).square().sum().backward()
        flops.append(mode.get_total_flops())
        results.append([t.grad.cpu() for t in own if t.grad is not None])
    assert flops[0] == flops[1] > 0
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    with FlopCounterMode(display=False) as mode:
        on_xla = q.to("xla").requires_grad_()
        F.scaled_dot_product_attention(on_xla, on_xla, on_xla).sum().backward()
    shape = tuple(q.shape)
    expected = sdpa_flop_count(shape, shape, shape)
    expected += sdpa_backward_flop_count(shape, shape, shape, shape)
    assert mode.get_total_flops() == expected
    with DebugMode() as shown:
        F.linear(x.to("xla"), w.to("xla"))
    assert "aten::linear(t: f32[4, 8], t: f32[16, 8]" in shown.debug_string()
