"""``python -m xla_dtensor.tune``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xla_dtensor.planning.command import main as plan
from xla_dtensor.tuning import Trial, Tuned, command
from xla_dtensor.tuning.command import main

SCRIPT = """
import torch, xla_dtensor as xd
mesh = xd.init_device_mesh("xla", (1, 1), mesh_dim_names=("dp", "tp"))
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
plan = {"0": xd.Shard(0), "2": xd.Shard(1)}
def shard(name, module, mesh):
    if name in plan:
        for key in ("weight",):
            p = xd.distribute_tensor(module.weight.detach(), mesh, [xd.Replicate(), plan[name]])
            module.register_parameter(key, torch.nn.Parameter(p))
xd.distribute_module(model, mesh, shard)
x = xd.distribute_tensor(torch.randn(256, 64), mesh, [xd.Shard(0), xd.Replicate()])
@xd.compile
def train(x):
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()
train(x)
raise SystemExit("it went on")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_sizes_of_a_scripts_mesh(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "found.json"
    assert main([str(script), "--topology", "cpu:8", "--save", str(saved)]) == 0
    found = Tuned.from_json(saved.read_text())
    meshes = [t.configuration.mesh for t in found.trials]
    assert sorted(m["dp"] for m in meshes) == [1, 2, 4, 8]
    moved = [t.report.collective_bytes for t in found.trials if t.report is not None]
    # By time, of which moving is the most; two of them move the same but for a hundredth.
    assert len(moved) == 4
    assert all(moved[i] <= 1.01 * moved[i + 1] for i in range(3))
    best = meshes[0]
    assert f"best: --mesh dp={best['dp']},tp={best['tp']}" in capsys.readouterr().out


def test_sizes_that_are_given(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(script), "--topology", "cpu:8", "--mesh", "tp=4"]) == 0
    assert "best: --mesh dp=2,tp=4" in capsys.readouterr().out
    assert main([str(script), "--topology", "cpu:8", "--mesh", "pp=4"]) == 2
    assert "the script's mesh has the dims dp, tp" in capsys.readouterr().err


def test_the_time_is_over(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(script), "--topology", "cpu:8", "--minutes", "0"]) == 0
    assert "3 of 4 meshes were not looked at" in capsys.readouterr().out


def test_no_mesh_is_begun_that_would_take_too_long(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, trial = 0.0, command._trial

    def slow(*given: Any) -> Trial:
        nonlocal now
        now += 200
        return trial(*given)

    monkeypatch.setattr(command, "_trial", slow)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now))
    assert main([str(script), "--topology", "cpu:8", "--minutes", "9"]) == 0
    assert "2 of 4 meshes were not looked at" in capsys.readouterr().out


def test_a_script_without_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace(', mesh_dim_names=("dp", "tp")', ""))
    assert main([str(path), "--topology", "cpu:8"]) == 2
    assert "mesh_dim_names=" in capsys.readouterr().err


def test_a_script_without_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('nothing')")
    assert main([str(path), "--topology", "cpu:8"]) == 2
    assert "has called no compiled step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("raise SystemExit(0)", "has ended by itself (0) and has called no compiled step"),
        ("raise KeyError('mine')", "line 18: KeyError: 'mine'"),
        ("train(x.reshape(3, -1))", "RuntimeError: shape '[3, -1]' is invalid"),
    ],
)
def test_a_script_that_fails_with_each_mesh(
    last: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 is for what doesn't fit, 0 for what does."""
    path, saved = tmp_path / "train.py", tmp_path / "found.json"
    path.write_text(SCRIPT.replace("train(x)\nraise", f"{last}\nraise"))
    assert main([str(path), "--topology", "cpu:8", "--mesh", "tp=8", "--save", str(saved)]) == 2
    assert said in capsys.readouterr().err
    json.loads(saved.read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize("begin", ["def (", "import nothing_of_this_name", "1 / 0"])
def test_a_script_that_fails_at_once(
    begin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{begin}\n{SCRIPT}")
    assert main([str(path), "--topology", "cpu:8"]) == 2
    assert plan([str(path), "--topology", "cpu:8"]) == 2
    assert capsys.readouterr().err.count('train.py", line 1') == 2


@pytest.mark.parametrize("module", ["torch.distributed.device_mesh", "xla_dtensor"])
def test_a_module_that_makes_the_mesh(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is imported by the first of several runs."""
    name = f"meshes_of_{module.replace('.', '_')}"
    (tmp_path / f"{name}.py").write_text(f"from {module} import init_device_mesh as made\n")
    path = tmp_path / "train.py"
    path.write_text(f"import {name}\n" + SCRIPT.replace("xd.init_device_mesh", f"{name}.made"))
    assert main([str(path), "--topology", "cpu:8", "--mesh", "tp=4"]) == 0
    assert "best: --mesh dp=2,tp=4" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, name)


def test_a_script_that_makes_its_mesh_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    made = 'xd.init_device_mesh("xla", (1, 1)'
    other = 'torch.distributed.DeviceMesh("xla", torch.arange(8).view(2, 4)'
    path.write_text(SCRIPT.replace(made, other))
    assert main([str(path), "--topology", "cpu:8"]) == 2
    assert "makes no mesh by init_device_mesh" in capsys.readouterr().err


def test_one_mesh_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("train(x)\n", "[0, 1, 2][mesh.size(0) - 1]\ntrain(x)\n"))
    assert main([str(path), "--topology", "cpu:8"]) == 0
    said = capsys.readouterr().out
    assert said.count("line 18: IndexError") == 2 and "inf" not in said
    assert "best: --mesh dp=2,tp=4" in said or "best: --mesh dp=1,tp=8" in said


def test_what_cannot_be_saved(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was found is said all the same, and the other files are written."""
    saved = [str(tmp_path / name) for name in ("a.png", "no/a.json", "a.txt")]
    command = [str(script), "--topology", "cpu:8", "--mesh", "tp=8"]
    assert main([*command, *(word for path in saved for word in ("--save", path))]) == 2
    said = capsys.readouterr()
    assert "best: --mesh dp=1,tp=8" in said.out and (tmp_path / "a.txt").exists()
    assert "nobody knows how long" in said.err and "No such file" in said.err


def test_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 is for what doesn't fit."""
    assert main([str(tmp_path / "nothing.py"), "--topology", "cpu:8"]) == 2
    assert "there is no such script" in capsys.readouterr().err


def test_the_devices_that_are_here(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(script), "--topology", "here", "--mesh", "tp=8"]) == 0
    said = capsys.readouterr().out
    assert "xd.tune for cpu:8" in said and "best: --mesh dp=1,tp=8" in said


def test_sizes_among_the_scripts_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that makes its mesh, or several, of what it is told, as torchtitan does."""
    path = tmp_path / "train.py"
    known = "assert int(sys.argv[2]) != 4, 'no four'\nmesh = xd.init_device_mesh("
    text = SCRIPT.replace(', mesh_dim_names=("dp", "tp")', "").replace(
        "(1, 1)", "(int(sys.argv[1][5:]), int(sys.argv[2]))"
    )
    path.write_text("import sys" + text.replace("mesh = xd.init_device_mesh(", known))
    command = [str(path), "--topology", "cpu:8", "--mesh", "dp=2"]
    assert main([*command, "--", "--dp={dp}", "{tp}"]) == 2  # the only one is refused
    said = capsys.readouterr()
    assert "AssertionError: no four" in said.out
    command[-1] = "tp=2"
    assert main([*command, "--", "--dp={dp}", "{tp}", "{}"]) == 0
    assert "best: --dp=4 2 '{}'" in capsys.readouterr().out
    command[-1] = "ep=2"
    assert main([*command, "--", "--dp={dp}", "{tp}"]) == 2


def test_steps_of_unequal_batches_are_compared_by_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a script says how many rows each device has, as torchtitan's ``local_batch_size``."""
    rows = "x = xd.distribute_tensor(torch.randn({} * mesh.size(0), 64)"
    path = tmp_path / "train.py"
    path.write_text(
        SCRIPT.replace("x = xd.distribute_tensor(torch.randn(256, 64)", rows.format(4096))
    )
    saved = tmp_path / "found.json"
    assert main([str(path), "--topology", "cpu:8", "--save", str(saved)]) == 0
    assert "different numbers of tokens" in capsys.readouterr().out
    trials = Tuned.from_json(saved.read_text()).trials
    tokens = [t.report.tokens for t in trials if t.report is not None]
    assert tokens == [4096 * dp for dp in (8, 4, 2, 1)]
    assert sorted(trials, key=Trial.rank) == [*reversed(trials)]  # by the step
