"""Compiled programs in files: the same numbers without a compilation, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.planning.gpus import needs_gpu_compiler
from tests.planning.test_plan import step_of
from xla_dtensor.errors import CompiledFileError


def training(
    width: int = 32, mesh: str = "2x4", options: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """A step, and a batch for it."""
    torch.manual_seed(0)
    on = make_mesh(mesh)
    model = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 8))
    xd.distribute_module(model, on)
    batch = xd.distribute_tensor(torch.randn(8, 16), on, [xd.Shard(0), xd.Replicate()])
    return xd.compile(step_of(model), compiler_options=options), batch


def losses(step: Any, batch: Any) -> list[str]:
    return [step(batch).full_tensor().item().hex() for _ in range(3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("saved") / "step.xla"
    step, batch = training()
    step.save_compiled(found, batch)
    assert step.traces == step.compilations == 0  # nothing has run
    return found


def test_the_same_numbers_without_a_compilation(path: Path) -> None:
    expected = losses(*training())
    step, batch = training()
    assert xd.load_compiled(path, step, trusted=True) == 1
    assert losses(step, batch) == expected
    assert (step.traces, step.compilations) == (1, 0)


SCRIPT = """
import sys
import xla_dtensor as xd
from tests.compilation.test_saved import losses, training
step, batch = training()
xd.load_compiled(sys.argv[1], step, trusted=True)
print(*losses(step, batch), step.compilations)
"""


def test_in_another_process(path: Path) -> None:
    expected = losses(*training())
    command = [sys.executable, "-c", SCRIPT, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [*expected, "0"]


def test_another_program_is_compiled(path: Path) -> None:
    """Of another width, or on another mesh: what is in the file isn't taken for it."""
    for changes in ({"width": 64}, {"mesh": "4x2"}):
        expected = losses(*training(**changes))
        step, batch = training(**changes)
        xd.load_compiled(path, step, trusted=True)
        assert losses(step, batch) == expected and step.compilations == 1


def test_what_was_loaded_is_forgotten_with_the_rest(path: Path) -> None:
    step, batch = training()
    xd.load_compiled(path, step, trusted=True)
    step.clear_cache()
    step(batch)
    assert step.compilations == 1


def rewritten(path: Path, tmp_path: Path, **changes: Any) -> Path:
    """The file with other words about it, or with a payload of which a byte is another one."""
    found = tmp_path / "changed.xla"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(found, "w") as new:
        about = json.loads(old.read("about.json"))
        payload = bytearray(old.read("0.bin"))
        if changes.pop("damaged", False):
            payload[len(payload) // 2] ^= 1
        new.writestr("about.json", json.dumps({**about, **changes}))
        new.writestr("0.bin", bytes(payload))
    return found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"jax": "0.1"}, r"compiled with jax '0.1', and here it is"),
        ({"device": "NVIDIA H100 80GB HBM3"}, "compiled with device 'NVIDIA H100"),
        ({"processor": "abacus"}, "compiled with processor 'abacus'"),
        ({"step": "other"}, "compiled with step 'other'"),
        ({"format": 0}, "compiled with format 0"),
        ({"programs": 3}, "no file of compiled programs"),
        ({"damaged": True}, "isn't the one that was written"),
    ],
)
def test_what_is_refused(path: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    step, batch = training()
    with pytest.raises(CompiledFileError, match=words):
        xd.load_compiled(rewritten(path, tmp_path, **changes), step, trusted=True)
    assert losses(step, batch) == losses(*training()) and step.compilations == 1


def test_options_are_part_of_it(path: Path) -> None:
    step, _ = training(options={"xla_cpu_enable_fast_math": False})
    with pytest.raises(CompiledFileError, match=r"compiled with options \{\}"):
        xd.load_compiled(path, step, trusted=True)


def test_who_wrote_it_has_to_be_known(path: Path, tmp_path: Path) -> None:
    step, _ = training()
    with pytest.raises(CompiledFileError, match="trusted=True"):
        xd.load_compiled(path, step)
    cut = tmp_path / "cut.xla"
    cut.write_bytes(path.read_bytes()[:1000])
    for wrong in (cut, tmp_path / "nowhere"):
        with pytest.raises(CompiledFileError, match="no file of compiled programs"):
            xd.load_compiled(wrong, step, trusted=True)
    with pytest.raises(TypeError, match=r"takes what xd\.compile makes"):
        xd.load_compiled(path, lambda x: x, trusted=True)  # type: ignore[arg-type]


@needs_gpu_compiler
def test_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    with xd.abstract("h100:2x4"):
        step, batch = training()
        step.save_compiled(tmp_path / "h100.xla", batch)
    with zipfile.ZipFile(tmp_path / "h100.xla") as file:
        about = json.loads(file.read("about.json"))
    assert about["device"] == "NVIDIA H100 80GB HBM3"
    assert "all-reduce" in about["programs"][0]["layouts"]
    step, _ = training()
    with pytest.raises(CompiledFileError, match="compiled with device 'NVIDIA H100"):
        xd.load_compiled(tmp_path / "h100.xla", step, trusted=True)


def test_an_interrupt_leaves_the_file_that_was_there(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "step.xla"
    there.write_bytes(path.read_bytes())
    write = zipfile.ZipFile.writestr

    def interrupted(self: Any, name: str, data: Any) -> None:
        if name == "0.bin":
            raise KeyboardInterrupt
        write(self, name, data)

    monkeypatch.setattr(zipfile.ZipFile, "writestr", interrupted)
    step, batch = training()
    with pytest.raises(KeyboardInterrupt):
        step.save_compiled(there, batch)
    monkeypatch.undo()
    assert there.read_bytes() == path.read_bytes() and [*tmp_path.iterdir()] == [there]
    assert xd.load_compiled(there, step, trusted=True) == 1
    step(batch)
    assert step.compilations == 0
