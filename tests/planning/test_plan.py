"""`xd.plan` on simulated devices: figures counted by hand, or those of the program that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from tests.planning.test_abstract import by_hand, fsdp_and_tp, make_mesh
from tests.planning.tpus import needs_libtpu
from xla_dtensor.errors import DataDependentError, TopologyError
from xla_dtensor.planning import Report, command
from xla_dtensor.planning.text import compared


def step_of(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


@pytest.fixture(scope="module")
def report() -> Report:
    with xd.abstract("cpu:8"):
        model, x = by_hand()
        return xd.plan(step_of(model), x)


@pytest.mark.parametrize(("dtype", "count"), [(torch.int64, 2 * 4 * 3), (torch.float32, 2 * 4)])
def test_each_devices_tokens_count(dtype: torch.dtype, count: int) -> None:
    """The batch of a rank, as ranks load it, is one of several."""
    with xd.abstract("cpu:8"):
        mesh = make_mesh()
        batch = [torch.zeros(4, 3, dtype=dtype, device="cpu") for _ in range(2)]
        report = xd.plan(lambda x: x * 2, xd.from_device_values(batch, mesh["dp"]))
        assert report.tokens == count
        on_one = xd.distribute_tensor(torch.zeros(8, 3, dtype=dtype), mesh, [xd.Shard(0)] * 2)
        assert xd.plan(lambda x: x * 2, on_one).tokens == count


def test_memory_is_that_of_the_inputs(report: Report) -> None:
    """Per device: a quarter of the first layer, the whole of the second, each three times."""
    parameters = (16 * 32 + 32) // 4 + 32 * 6 + 6
    batch, step = 4 * 16, 1
    assert sum(one.bytes for one in report.inputs) == 4 * (3 * parameters + batch + step)
    assert report.memory.arguments >= 4 * (3 * parameters + batch + step)
    assert report.memory.aliased >= 4 * 3 * parameters
    assert report.fits is None  # nobody knows what a CPU has


def test_inputs_have_names(report: Report) -> None:
    names = {one.name: one.kind for one in report.inputs}
    assert names["model.0.weight"] == "parameter" and names["argument 0"] == "argument"
    assert names["model.2.bias exp_avg"] == "state"
    assert "?" not in names


def test_operations_are_those_of_the_products(report: Report) -> None:
    """Forward, and for the weights; for the activations only behind the first layer."""
    first, second = 2 * 8 * 16 * 32, 2 * 8 * 32 * 6
    assert report.flops == 2 * first + 3 * second


def test_collectives_are_of_modules(report: Report) -> None:
    assert report.attributed >= 0.95
    backward = {row.module for row in report.collectives if row.part == "backward"}
    assert {"0", "2"} <= backward
    gradients = [row for row in report.collectives if row.part == "backward"]
    # Each is summed along "dp"; devices along "tp" may have made a part each.
    summed = sum(row.bytes for row in gradients if row.dims == ("dp",))
    assert summed >= 4 * (16 * 32 + 32 + 32 * 6 + 6) // 4


def test_what_is_replicated_is_said(report: Report) -> None:
    found = {one.name for one in report.replicated}
    assert "model.2.weight" in found and "model.0.weight" not in found


def test_the_step_that_runs_has_the_same_program(report: Report) -> None:
    model, x = by_hand()
    step = xd.compile(step_of(model))
    step(x)
    step(x)
    compiled = step.compiled_programs()[-1].memory_analysis()
    assert report.memory.arguments == compiled.argument_size_in_bytes
    assert report.memory.outputs == compiled.output_size_in_bytes
    again = xd.plan(step, x)  # of what is there
    assert again.collective_bytes == report.collective_bytes
    assert again.memory == report.memory


def test_a_plan_changes_nothing() -> None:
    model, x = by_hand()
    before = [p.detach().full_tensor().cpu().clone() for p in model.parameters()]
    step = xd.compile(step_of(model))
    xd.plan(step, x)
    assert step.traces == 0 and all(p.grad is None for p in model.parameters())
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach().full_tensor().cpu(), value)


def test_fsdp_gathers_and_reduces() -> None:
    with xd.abstract("cpu:8"):
        model, x = fsdp_and_tp()
        found = xd.plan(step_of(model), x)
    kinds = {(row.kind, row.dims) for row in found.collectives}
    assert ("all-gather", ("dp",)) in kinds
    # Sharded over all eight devices, but for what doesn't divide.
    weights = [one for one in found.inputs if one.name.endswith(".weight")]
    assert [one.bytes for one in weights] == [4 * 16 * 32 // 8] * 2


def test_activations_along_the_batch_are_marked() -> None:
    """Features that each device has a part of, where the batch is sharded, too: whole, they are
    gathered over the devices that have the batch's parts."""
    with xd.abstract("cpu:8"):
        mesh = make_mesh()
        x = xd.distribute_tensor(torch.randn(64, 24), mesh, [xd.Shard(0), xd.Replicate()])

        def step(x: Any) -> Any:
            whole = x.sin().redistribute(placements=[xd.Replicate(), xd.Replicate()])
            return (whole * whole.flip(0)).sum()

        found = xd.plan(step, x)
    rows = [row for row in found.collectives if row.kind == "all-gather"]
    assert rows and all(row.activations and row.dims == ("dp",) for row in rows)


def test_json_is_the_whole_report(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    report.save(path)
    assert Report.from_json(path.read_text()) == report
    assert json.loads(path.read_text())["memory"]["fits"] is None
    with pytest.raises(ValueError, match="no report"):
        Report.from_json("{}")
    with pytest.raises(ValueError, match=r"\.json, \.png, \.svg or \.txt"):
        report.save(tmp_path / "a.pdf")


def test_picture(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_table_has_it_all(report: Report) -> None:
    text = str(report)
    for words in ("dp=2, tp=4", "arguments", "needed", "all-reduce dp", "model.2.weight", "100 %"):
        assert words in text
    assert compared(report, report).count("1.000") >= 5


def test_a_step_that_reads_a_value() -> None:
    with xd.abstract("cpu:8"):
        model, x = by_hand()
        seen: list[float] = []
        reports = [
            xd.plan(lambda x: seen.append(model(x).sum().item()), x),
            xd.plan(lambda x: model(x).sum(), x),
        ]
        assert reports[0].collective_bytes == reports[1].collective_bytes and not seen
        with pytest.raises(DataDependentError, match=r"item\(\)"):
            xd.plan(lambda x: 1 if model(x).sum().item() > 0 else 2, x)


def test_a_step_on_no_mesh_is_one_devices() -> None:
    x = torch.randn(64, 64).to("xla")
    report = xd.plan(lambda x: x @ x, x)
    assert report.mesh == {} and report.chips == 1 and report.flops == 2 * 64**3
    assert report.memory.arguments == 64 * 64 * 4 and not report.collectives
    assert "no mesh" in str(report) and "as a whole" not in str(report)
    mesh = xd.init_device_mesh("xla", (8,))
    with pytest.raises(TopologyError, match="on no mesh"):
        xd.plan(lambda x: x @ x, x, mesh=mesh)


def test_a_mesh_that_does_not_fill_the_topology() -> None:
    with xd.abstract("cpu:8"):
        mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))
        x = xd.distribute_tensor(torch.randn(8), mesh, [xd.Shard(0)])
        with pytest.raises(TopologyError, match="has 4 devices, and cpu:8 8"):
            xd.plan(lambda x: x.sum(), x)
        with pytest.raises(TopologyError, match="on no mesh"):
            xd.plan(lambda x: x.sum(), torch.randn(8))
        with pytest.raises(TopologyError, match="that of cpu:8"):
            xd.plan(lambda x: x.sum(), x, topology="cpu:4")


SCRIPT = """
import sys, torch, xla_dtensor as xd
from torch.distributed.device_mesh import init_device_mesh

width = int(sys.argv[1])
mesh = init_device_mesh("xla", (2, 2), mesh_dim_names=("dp", "tp"))
model = torch.nn.Linear(width, width, bias=False)
xd.distribute_module(model, mesh)
x = xd.distribute_tensor(torch.randn(16, width), mesh, [xd.Shard(0), xd.Replicate()])

@xd.compile
def train_step(x):
    model(x).sum().backward()

train_step(x)
raise SystemExit("not reached")
"""


def test_attention_counts() -> None:
    """It is called on shards when it is lowered: two products forward, five backward, where a block
    of the scores is computed again; here without a mask, on as many devices as cut it."""
    with xd.abstract("cpu:8"):
        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        q, k, v = (
            xd.distribute_tensor(torch.randn(4, 8, 64, 16), mesh, [xd.Shard(0), xd.Shard(1)])
            for _ in range(3)
        )
        q.requires_grad_()
        attend = torch.nn.functional.scaled_dot_product_attention

        def step(q: torch.Tensor) -> torch.Tensor:
            attend(q, k, v).sum().backward()
            return q.grad

        product = 2 * 4 * 8 * 64 * 64 * 16
        assert xd.plan(lambda q: attend(q, k, v), q.detach()).flops == 2 * product
        assert 5 * product <= xd.plan(step, q).flops <= 7 * product


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_is_planned(script: str, tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "report.json")
    where = ["--topology", "cpu:8", "--mesh", "dp=4,tp=2", "--save", out]
    assert command.main([script, *where, "--", "24"]) == 0
    assert "train_step on cpu:8 (8 chips), dp=4, tp=2" in capsys.readouterr().out
    found = Report.from_json(Path(out).read_text())
    assert found.flops == 2 * 16 * 24 * 24  # for the weight; nothing needs forward's result
    assert command.main(["--compare", out, out]) == 0
    assert "1.000" in capsys.readouterr().out
    import torch.distributed.device_mesh as torchs

    assert xd.init_device_mesh is torchs.init_device_mesh
    assert torchs.init_device_mesh.__module__ == "torch.distributed.device_mesh"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "dp=4,pp=2"], "the script's mesh has the dims dp, tp"),
        (["--mesh", "dp=4,tp=4"], "a mesh of 16 devices for cpu:8"),
        (["--mesh", "dp=2,tp=2"], "has 4 devices, and cpu:8 8"),
        (["--mesh", "dp4"], "NAME=SIZE"),
    ],
)
def test_a_script_with_a_wrong_mesh(
    script: str, arguments: list[str], says: str, capsys: Any
) -> None:
    assert command.main([script, "--topology", "cpu:8", *arguments, "--", "8"]) == 2
    assert says in capsys.readouterr().err


def test_a_script_for_a_topology_that_is_none(script: str, capsys: Any) -> None:
    assert command.main([script, "--topology", "v9:4x4"]) == 2
    assert "kinds are v5e, v5p" in capsys.readouterr().err


def test_a_script_without_a_step(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "empty.py"
    path.write_text("x = 1\n")
    assert command.main([str(path), "--topology", "cpu:8"]) == 2
    assert "no compiled step" in capsys.readouterr().err


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_on_the_tpus_compiler(topology: str) -> None:
    with xd.abstract(topology):
        model, x = fsdp_and_tp()
        found = xd.plan(step_of(model), x)
    assert found.fits
    assert found.was_read and found.attributed >= 0.95
    assert found.mfu is not None and 0 < found.mfu < 1
    assert found.seconds.keys() >= {"compute", "memory", "network dp", "network tp"}
    assert {row.kind for row in found.collectives} & {"all-gather", "reduce-scatter"}


@needs_libtpu
@pytest.mark.slow
def test_what_does_not_fit_is_a_report() -> None:
    with xd.abstract("v5e:2x4"):
        mesh = make_mesh()
        x = xd.distribute_tensor(torch.randn(2**15, 2**18), mesh, [xd.Replicate(), xd.Replicate()])
        found = xd.plan(lambda x: x * 2, x)
    assert found.fits is False and "too much" in str(found)
    assert found.memory.needed == 2 * 2**35
