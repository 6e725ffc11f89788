"""Plans for GPUs that aren't here, by XLA's GPU compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_dtensor as xd
from tests.planning.gpus import needs_cudnn, needs_gpu_compiler
from tests.planning.test_abstract import by_hand, make_mesh
from tests.planning.test_plan import step_of
from tests.planning.tpus import needs_libtpu
from xla_dtensor.errors import TopologyError, UnsupportedOpError
from xla_dtensor.planning import Report
from xla_dtensor.runtime import gpus
from xla_dtensor.runtime.topologies import topology

# --- without the compiler ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h100:8", "hosts and the GPUs of each"),
        ("h100:2x2x2", "hosts and the GPUs of each"),
        ("h100:0x8", "one chip or more"),
        ("h900:1x8", "kinds are v5e"),
    ],
)
def test_names_that_are_none(name: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        topology(name)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "installed", list)
    with pytest.raises(TopologyError, match=r"pip install 'xla_dtensor\[gpu-plan\]'"):
        gpus.devices("h100:1x8", "h100", 1, 8)


# --- with it -------------------------------------------------------------------------------------


@needs_gpu_compiler
@pytest.mark.parametrize("kind", sorted(gpus._PROCESSORS))
def test_every_kind_compiles(kind: str) -> None:
    found = topology(f"{kind}:2x4")
    assert [device.process_index for device in found.devices] == [0] * 4 + [1] * 4
    assert {device.platform for device in found.devices} == {"gpu"}
    with xd.abstract(f"{kind}:2x4"):
        model, x = by_hand()
        report = xd.plan(step_of(model), x)
    assert report.fits and report.memory.arguments is not None
    assert {row.kind for row in report.collectives} >= {"all-reduce"}


@needs_gpu_compiler
def test_the_same_step_as_on_simulated_devices() -> None:
    """Inputs, operations and what is communicated along which dims are the program's, whatever it
    is compiled for."""
    reports: list[Report] = []
    for name in ("cpu:8", "h100:2x4"):
        with xd.abstract(name):
            model, x = by_hand()
            reports.append(xd.plan(step_of(model), x))
    cpu, gpu = reports
    assert gpu.inputs == cpu.inputs and gpu.flops == cpu.flops
    assert {row.dims for row in gpu.collectives} == {row.dims for row in cpu.collectives}
    assert gpu.collective_bytes <= 1.05 * cpu.collective_bytes
    assert gpu.attributed >= 0.9


@needs_gpu_compiler
def test_times_and_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What doesn't fit is compiled by XLA:GPU all the same: it is ours to say."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.75")
    with xd.abstract("h100:2x4"):
        mesh = make_mesh()
        like = [xd.Shard(0), xd.Replicate()]
        x = xd.distribute_tensor(torch.randn(2**15, 2**15), mesh, like)  # 2 GiB on each device
        small = xd.plan(lambda x: (x @ x.mT).sum(), x[:1024])
        large = xd.plan(lambda x: torch.cat([x] * 40).sort(dim=0).values, x)
    assert small.fits and large.fits is False
    assert large.memory.available == int(0.75 * 84_942_979_072)
    assert any("0.75 (XLA_CLIENT_MEM_FRACTION)" in note for note in large.notes)
    assert set(small.seconds) >= {"compute", "memory"}
    # In float32 as it is, not on the tensor cores.
    assert set(small.flops_by_kind) == {"fp32"}
    # The eight devices have a part of it each.
    assert small.seconds["compute"] == pytest.approx(small.flops / 8 / 67e12)


@needs_gpu_compiler
def test_collectives_between_hosts_take_their_network() -> None:
    with xd.abstract("h100:2x4"):
        mesh = make_mesh()  # "dp" is the hosts
        x = xd.distribute_tensor(torch.randn(2**14, 2**10), mesh, [xd.Shard(0), xd.Shard(1)])
        whole = [xd.Replicate(), xd.Shard(1)], [xd.Shard(0), xd.Replicate()]
        across, inside = (
            xd.plan(lambda x, to=to: x.redistribute(placements=to) * 2, x) for to in whole
        )
    (one,), (other,) = across.collectives, inside.collectives
    assert one.dims == ("dp",) and other.dims == ("tp",)
    nbytes = 2**24 * 4
    assert one.seconds == pytest.approx(nbytes / 4 / 2 / 50e9)
    assert other.seconds == pytest.approx(nbytes / 2 * 3 / 4 / 450e9)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(512, 3 * 512, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def of_attention() -> Report:
    with xd.abstract("h100:2x4"):
        mesh = make_mesh()
        model = Attention()
        xd.distribute_module(model, mesh)
        x = torch.randn(8, 512, 512, dtype=torch.bfloat16)
        x = xd.distribute_tensor(x, mesh, [xd.Shard(0), xd.Shard(0)])
        return xd.plan(lambda x: model(x).float().square().mean().backward(), x)


@needs_gpu_compiler
def test_operations_of_attention_are_counted_whoever_computes_it() -> None:
    """Products for query, key and value and of their gradient, and attention: two products forward
    and five backward, of the pairs that a causal mask leaves (or of blocks that have some)."""
    report = of_attention()
    linear = 2 * 2 * 8 * 512 * 512 * 3 * 512
    pairs = 8 * 8 * 512 * 513 // 2
    least = linear + 7 * 2 * pairs * 64
    assert least <= report.flops <= 1.6 * least


@needs_cudnn
@needs_gpu_compiler
def test_attention_is_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    from xla_dtensor.planning import planner

    texts: list[str] = []
    read = planner.HloText

    def keep(text: str) -> Any:
        texts.append(text)
        return read(text)

    monkeypatch.setattr(planner, "HloText", keep)
    report = of_attention()
    assert "__cudnn$fmhaSoftmax" in texts[0] and "__cudnn$fmhaSoftmaxBackward" in texts[0]
    pairs = 8 * 8 * 512 * 513 // 2
    assert report.flops == 2 * 2 * 8 * 512 * 512 * 3 * 512 + 7 * 2 * pairs * 64


@needs_gpu_compiler
def test_what_is_waited_for(tmp_path: Path) -> None:
    with xd.abstract("h100:2x4"):
        model, x = by_hand()
        report = xd.plan(step_of(model), x)
    assert report.scheduled is not None and report.bound is not None and report.stretches
    for dim, waited in report.exposed.items():
        assert 0 <= waited <= report.seconds[f"network {dim}"] * 1.001
    assert report.scheduled >= max(*report.exposed.values(), report.seconds["compute"])
    assert Report.from_json(report.as_json()) == report
    assert "in XLA's order of instructions" in str(report)
    pytest.importorskip("matplotlib")
    report.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 10_000


@needs_libtpu
@needs_gpu_compiler
def test_beside_tpus() -> None:
    for name in ("h100:2x4", "v5e:2x4", "h100:2x4"):
        with xd.abstract(name):
            model, x = by_hand()
            assert xd.plan(step_of(model), x).topology == name


SCRIPT = """
import torch, xla_dtensor as xd
{first}
with xd.abstract("h100:1x8"):
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
    x = xd.distribute_tensor(torch.randn(16, 64), mesh, [xd.Shard(0)])
    report = xd.plan(lambda x: x.sum(), x)
assert report.topology == "h100:1x8" and report.collectives[0].kind == "all-reduce"
y = torch.ones(4, device="xla").sum()  # eager operations compute on the CPU as before
print("computes", y.item())
"""


@needs_gpu_compiler
@pytest.mark.parametrize("first", ["", "import jax; jax.devices()", "torch.ones(2, device='xla')"])
def test_in_a_process_of_its_own(first: str, tmp_path: Path) -> None:
    """Whether JAX has looked for plugins before or not, and without JAX_PLATFORMS."""
    import os

    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(first=first))
    found = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert "computes 4.0" in found.stdout
    if "jax.devices" not in first:  # JAX by itself says that there is no CUDA
        assert "Traceback" not in found.stderr


@needs_gpu_compiler
def test_what_a_loop_keeps_may_be_on_the_host() -> None:
    """Planned for GPUs that aren't here; what is to rest there between programs is refused."""

    def report(offload: bool) -> Any:
        with xd.abstract("h100:1x4"):
            mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))
            layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in "1234"))
            xd.distribute_module(layers, mesh)
            x = xd.distribute_tensor(torch.empty(8192, 256), mesh, [xd.Shard(0)])

            def step(x: Any) -> None:
                xd.scan_layers(layers, offload=offload)(x).square().mean().backward()

            return xd.plan(step, x)

    here, away = report(False), report(True)
    inputs = 4 * 8192 // 4 * 256 * 4
    assert (here.memory.host, away.memory.host) == (0, inputs)
    assert away.memory.temporaries < here.memory.temporaries
    assert away.seconds["the host's memory"] == pytest.approx(2 * inputs / 64e9)
    assert 0 < away.exposed["host"] <= away.seconds["the host's memory"] * 1.001
    with xd.abstract("h100:1x4"):
        mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))
        model = xd.fully_shard(nn.Linear(8, 8), mesh=mesh)
        with pytest.raises(UnsupportedOpError, match="reach no memory of the host"):
            xd.parallel.offload_state(torch.optim.AdamW(model.parameters()))
