"""A whole program under ``python -m xla_dtensor.compat.torch_xla``, and what isn't about
sharding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor.compat.torch_xla as torch_xla
import xla_dtensor.compat.torch_xla.core.xla_model as xm
import xla_dtensor.compat.torch_xla.debug.profiler as xp
import xla_dtensor.compat.torch_xla.distributed.spmd as xs
import xla_dtensor.compat.torch_xla.runtime as xr
from tests.compat.torch_xla.models import mesh_of
from xla_dtensor.compat.torch_xla import _XLAC, amp
from xla_dtensor.compat.torch_xla.core import steps
from xla_dtensor.compat.torch_xla.distributed import fsdp
from xla_dtensor.compat.torch_xla.experimental.scan import scan
from xla_dtensor.compat.torch_xla.experimental.scan_layers import scan_layers
from xla_dtensor.compat.torch_xla.utils.checkpoint import checkpoint
from xla_dtensor.errors import UnsupportedOpError

PROGRAM = Path(__file__).with_name("programs_spmd.py")
ROOT = PROGRAM.parents[3]


def run(*arguments: str, path: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    own = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")}
    own |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{path}", **env}
    command = [sys.executable, "-m", "xla_dtensor.compat.torch_xla", *arguments]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
def test_a_program_runs_as_it_is() -> None:
    done = run(str(PROGRAM), "--fast", PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()

    torch.manual_seed(0)  # the same on the CPU
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for line in lines[:3]:
        loss = model(torch.ones(16, 16)).square().mean()
        assert float(line.removeprefix("loss ")) == pytest.approx(loss.item(), rel=1e-4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert lines[3:] == ["in place True", "4 CPU True ['--fast']"]


@pytest.mark.slow
def test_it_is_refused_beside_the_real_one(tmp_path: Path) -> None:
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("")
    done = run(str(PROGRAM), path=str(tmp_path))
    assert done.returncode != 0 and "torch_xla itself is installed" in done.stderr
    assert "usage: python -m" in run().stderr


def test_mark_step_warns_once_and_runs_closures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps._state, "told", False)
    seen: list[Any] = []
    xm.add_step_closure(seen.append, args=(1,))
    assert seen == []
    with pytest.warns(UserWarning, match="xla_dtensor.compile"):
        xm.mark_step()
    assert seen == [1]
    torch_xla.sync()  # without another warning
    with torch_xla.step():
        x = torch.ones(3, device="xla") + 1
    assert seen == [1] and x.tolist() == [2, 2, 2]


def test_mark_step_in_a_compiled_step_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps._state, "told", True)

    @torch_xla.compile
    def step(x: Any) -> Any:
        y = x + 1
        xm.mark_step()
        with pytest.raises(RuntimeError, match="no values yet"):
            xm.add_step_closure(print, args=(y,))
        return y * 2

    assert step(torch.ones(2, device="xla")).tolist() == [4, 4] and step.compilations == 1


def test_compile_counts_programs() -> None:
    step = torch_xla.compile(lambda x: x * 2, name="double", num_different_graphs_allowed=1)
    assert step(torch.ones(2, device="xla")).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="double: 2 programs"):
        step(torch.ones(3, device="xla"))

    @torch_xla.compile(full_graph=True)
    def triple(x: Any) -> Any:
        return x * 3

    assert triple(torch.ones(2, device="xla")).tolist() == [3, 3]
    with torch_xla.compile():
        x = torch.ones(2, device="xla") * 5
    assert x.tolist() == [5, 5]


def test_scan_is_a_cumulative_sum() -> None:
    init, xs_ = torch.zeros(2), torch.randn(4, 2)
    on_xla = [t.to("xla").requires_grad_() for t in (init, xs_)]
    xs_.requires_grad_()

    def add(carry: Any, x: Any) -> tuple[Any, Any]:
        return carry + x, {"sum": carry + x}

    last, sums = scan(add, *on_xla)
    torch.testing.assert_close(sums["sum"].cpu(), xs_.cumsum(0))
    torch.testing.assert_close(last.cpu(), xs_.sum(0))
    sums["sum"].square().sum().backward()
    xs_.cumsum(0).square().sum().backward()
    torch.testing.assert_close(on_xla[1].grad.cpu(), xs_.grad)
    for wrong in ((torch.ones(0, 2),), (torch.ones(2), torch.ones(3)), ()):
        with pytest.raises(RuntimeError, match="first dim of one size"):
            scan(add, init, wrong)


def test_scan_layers_of_sharded_layers() -> None:
    mesh = mesh_of((2, 4), ("data", "model"))
    plain = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).to("xla")
    layers.load_state_dict(plain.state_dict())
    for layer in layers:
        xs.mark_sharding(layer.weight, mesh, ("model", None))
    x = torch.randn(4, 8)
    out = scan_layers(layers, xs.mark_sharding(x.to("xla"), mesh, ("data", None)))
    torch.testing.assert_close(out.cpu(), scan_layers(plain, x))
    assert scan_layers([], x) is x


def test_checkpointed_functions() -> None:
    layer, x = nn.Linear(4, 4).to("xla"), torch.ones(2, 4, device="xla")
    checkpoint(lambda x: layer(x).relu(), x).sum().backward()
    grad = layer.weight.grad.cpu()
    layer.zero_grad()
    layer(x).relu().sum().backward()
    torch.testing.assert_close(grad, layer.weight.grad.cpu())


def test_devices() -> None:
    assert torch_xla.device() == xm.xla_device() == torch.device("xla:0")
    assert len(torch_xla.real_devices()) == torch_xla.device_count() == 8
    assert xm.xla_device_hw(torch_xla.device()) == xr.device_type() == "CPU"
    assert xr.global_runtime_device_attributes()[3] == {"name": "CPU:3"}
    assert xr.world_size() == xm.xrt_world_size() == 1 and xm.get_ordinal() == 0
    assert xm.is_master_ordinal() and xr.is_spmd() and xr.get_master_ip() == "localhost"
    found: list[Any] = []
    torch_xla.launch(lambda index, value: found.append((index, value)), args=("a",))
    assert found == [(0, "a")]


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="auto-sharding"):
        xr.use_spmd(auto=True)
    with pytest.raises(UnsupportedOpError, match="global"):
        xr.disable_spmd()
    with pytest.raises(UnsupportedOpError, match="JAX runs already"):
        xr.set_device_type("TPU")
    with pytest.raises(UnsupportedOpError, match="as_text"):
        _XLAC._get_xla_tensors_hlo([])
    with pytest.raises(ImportError, match="SpmdFullyShardedDataParallel"):
        _ = fsdp.XlaFullyShardedDataParallel


def test_saving_and_the_rest(tmp_path: Path) -> None:
    x = xs.mark_sharding(torch.arange(8.0).to("xla"), mesh_of((8,)), (0,))
    xm.save({"x": x, "n": 3}, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt")
    assert loaded["n"] == 3 and torch.equal(loaded["x"], torch.arange(8.0))
    with amp.autocast(torch_xla.device()):
        assert (torch.ones(2, 2, device="xla") @ torch.ones(2, 2, device="xla")).dtype == (
            torch.bfloat16
        )
    with xp.Trace("here"):
        xm.wait_device_ops()
    xm.set_rng_state(7)
    assert xm.get_rng_state() == 7 and xm.rendezvous("here") == [b""]
