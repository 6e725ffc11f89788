"""Compiled programs in files: the same numbers without a compilation, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
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
        payload = changes.pop("payload", payload)
        seal = changes.pop("seal", True)
        words = json.dumps({**about, **changes})
        new.writestr("about.json", words)
        new.writestr("about.sha256", sha256(words.encode()) if seal else old.read("about.sha256"))
        new.writestr("0.bin", bytes(payload))
    return found


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"jax": "0.1"}, r"compiled with jax '0.1', and here it is"),
        ({"device": "NVIDIA H100 80GB HBM3"}, "compiled with device 'NVIDIA H100"),
        ({"processor": "abacus"}, "compiled with processor 'abacus'"),
        ({"step": "other"}, "compiled with step 'other'"),
        ({"format": 0}, "compiled with format 0"),
        ({"flags": ["--xla_cpu_enable_fast_math=true"]}, "compiled with flags .*fast_math"),
        ({"device": "TPU v5 lite", "seal": False}, "what it says of itself isn't what was written"),
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


def test_what_is_compiled_without_data_is_what_runs(tmp_path: Path) -> None:
    """`xd.abstract` lowers the same text, or nothing that was compiled for other devices would be
    found on them: with the optimizer's state, several tensors for a parameter, in one order."""
    expected = losses(*training())
    with xd.abstract("cpu:8"):
        step, batch = training()
        step.save_compiled(tmp_path / "step.xla", batch)
    step, batch = training()
    xd.load_compiled(tmp_path / "step.xla", step, trusted=True)
    assert losses(step, batch) == expected and step.compilations == 0


def replicated(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return xd.distribute_tensor(torch.ones(*shape, dtype=dtype), make_mesh("8"), [xd.Replicate()])


def test_arguments_are_padded_as_in_a_call(tmp_path: Path) -> None:
    def made() -> Any:
        return xd.compile(lambda x: (x * 2).sum(1), buckets={"x": {0: (8, 16)}})

    made().save_compiled(tmp_path / "step.xla", replicated(5, 6))
    step = made()
    xd.load_compiled(tmp_path / "step.xla", step, trusted=True)
    for rows in (5, 7):
        assert step(replicated(rows, 6)).full_tensor().tolist() == [12.0] * rows
    assert step.compilations == 0


def test_inputs_that_nothing_uses(tmp_path: Path) -> None:
    """The program's text doesn't have them, and JAX refuses others than it was compiled for."""

    def made() -> Any:
        def step(unused: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            unused.cos()
            return x * 2

        return xd.compile(step)

    made().save_compiled(tmp_path / "step.xla", replicated(8), replicated(3))
    others = [(replicated(8), 0), (replicated(16), 1), (replicated(8, dtype=torch.bfloat16), 1)]
    for unused, compilations in others:
        step = made()
        xd.load_compiled(tmp_path / "step.xla", step, trusted=True)
        assert step(unused, replicated(3)).full_tensor().tolist() == [2.0] * 3
        assert step.compilations == compilations


def test_flags_of_xla(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that change programs have to be the same."""
    step, _ = training()
    flags = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_dump_to=/tmp/nowhere")
    assert xd.load_compiled(path, step, trusted=True) == 1
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_cpu_enable_fast_math=true")
    with pytest.raises(CompiledFileError, match=r"compiled with flags .*fast_math=true"):
        xd.load_compiled(path, step, trusted=True)


def test_bytes_that_are_others(path: Path, tmp_path: Path) -> None:
    """A file with another byte, or without its end, is refused, or says the same (a date of zip's
    is another one)."""
    good, rng, bad = path.read_bytes(), random.Random(0), tmp_path / "bad.xla"
    step, _ = training()
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
        ends = [info.header_offset for info in file.infolist()] + [file.start_dir]
    around = [at + i for at in ends for i in range(40)]
    flipped = []
    for at in around + rng.sample(range(len(good)), 300):
        data = bytearray(good)
        data[at % len(good)] ^= 1 << rng.randrange(8)
        flipped.append(bytes(data))
    refused = 0
    for data in flipped + [good[: rng.randrange(len(good))] for _ in range(60)]:
        bad.write_bytes(data)
        try:
            xd.load_compiled(bad, step, trusted=True)
        except CompiledFileError as error:
            refused += str(bad) in str(error)
        else:
            with zipfile.ZipFile(bad) as file:
                assert {name: file.read(name) for name in parts} == parts
    assert refused > 300


def test_a_payload_that_jax_cannot_read(path: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        (program,) = json.loads(file.read("about.json"))["programs"]
    wrong = b"no pickle"
    programs = [{**program, "sha256": sha256(wrong)}]
    step, batch = training()
    found = rewritten(path, tmp_path, programs=programs, payload=wrong)
    assert xd.load_compiled(found, step, trusted=True) == 1
    with pytest.raises(CompiledFileError, match="JAX can't load the program"):
        step(batch)
    step.clear_cache()
    assert losses(step, batch) == losses(*training())


def test_devices_that_are_not_here(path: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        (program,) = json.loads(file.read("about.json"))["programs"]
    programs = [{**program, "topology": [*program["topology"][:7], [2048]]}]
    step, _ = training()
    with pytest.raises(CompiledFileError, match="JAX's device 2048 isn't among the 8 of 1 here"):
        xd.load_compiled(rewritten(path, tmp_path, programs=programs), step, trusted=True)


def test_places_that_cannot_be_written_to(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused before anything is compiled; a disk that is full later leaves the file."""
    step, batch = training()
    for where in (tmp_path, tmp_path / "nowhere" / "step.xla"):
        with monkeypatch.context() as without, pytest.raises(CompiledFileError, match="is "):
            without.setattr("xla_dtensor.compilation.program.executable.compile_somehow", None)
            step.save_compiled(where, batch)
    there = tmp_path / "step.xla"
    there.write_bytes(path.read_bytes())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(CompiledFileError, match=r"can't be written .*No space left"):
        step.save_compiled(there, batch)
    assert there.read_bytes() == path.read_bytes() and [*tmp_path.iterdir()] == [there]


def test_what_a_killed_process_has_left_goes(tmp_path: Path) -> None:
    old, new, other = (tmp_path / f".{name}.unfinished" for name in ("a.1-1", "a.2-2", "b.1-1"))
    for left in (old, new, other):
        left.write_bytes(b"")
    for left in (old, other):
        os.utime(left, (time.time() - 7200,) * 2)
    xd.compile(lambda x: x * 2).save_compiled(tmp_path / "a", torch.ones(4, device="xla"))
    assert {*tmp_path.iterdir()} == {tmp_path / "a", new, other}


def test_threads_save_while_the_step_runs(tmp_path: Path) -> None:
    step, batch = training()
    expected = [step(batch).full_tensor().item() for _ in range(8)]
    step, batch = training()
    failed: list[BaseException] = []

    def save(number: int) -> None:
        try:
            step.save_compiled(tmp_path / "step.xla", batch)
            xd.load_compiled(tmp_path / "step.xla", step, trusted=True)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    found = [step(batch).full_tensor().item() for _ in range(8)]
    for thread in threads:
        thread.join()
    assert not failed and found == expected
    assert [*tmp_path.iterdir()] == [tmp_path / "step.xla"]
