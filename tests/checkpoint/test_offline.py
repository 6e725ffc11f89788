"""``python -m xla_dtensor.checkpoint``: what is in checkpoints, and one made of another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import xla_dtensor as xd
from tests.checkpoint.layouts import laid_out, same, value_of
from xla_dtensor.checkpoint import save_safetensors
from xla_dtensor.checkpoint.__main__ import main

VALUE = torch.arange(60, dtype=torch.float32).reshape(10, 6).sin()


def tensors() -> dict[str, Any]:
    return {
        "a": laid_out(VALUE, "both"),
        "b": {"c": laid_out(VALUE.bfloat16(), "rows"), "d": torch.arange(3)},
        "e": [laid_out(torch.tensor(2.5), "xla"), {"f": torch.ones(0, 3)}],
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One state, in every format."""
    folder = tmp_path_factory.mktemp("sources")
    state = tensors() | {"step": 3, "names": ["x", 1]}
    with xd.checkpoint.CheckpointManager(folder / "run", {"state": state}) as manager:
        manager.save(12)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=folder / "dcp")
    torch.save(state, folder / "state.pt")
    flat = {"a": state["a"], "b.c": state["b"]["c"], "b.d": state["b"]["d"], "e.0": state["e"][0]}
    save_safetensors(flat | {"e.1.f": state["e"][1]["f"]}, folder / "safe", max_shard_size=200)
    return {name: folder / name for name in ("run", "dcp", "state.pt", "safe")}


def run(*arguments: Any, capsys: Any, status: int = 0) -> str:
    assert main(list(map(str, arguments))) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def described(path: Path, capsys: Any) -> dict[str, Any]:
    return json.loads(run("inspect", "--json", path, capsys=capsys))


NAMES = {"a": "float32", "b.c": "bfloat16", "b.d": "int64", "e.0": "float32", "e.1.f": "float32"}


@pytest.mark.parametrize("source", ["run", "dcp", "state.pt", "safe"])
def test_inspect(sources: dict[str, Path], source: str, capsys: Any) -> None:
    found = described(sources[source], capsys)
    prefix = "state." if source == "run" else ""
    assert {n.removeprefix(prefix): t["dtype"] for n, t in found["tensors"].items()} == NAMES
    a = found["tensors"][f"{prefix}a"]
    assert a["shape"] == [10, 6] and a["bytes"] == 240
    if source == "run":
        assert found["step"] == 12 and a["layout"] == "[Shard(0), Shard(1)] on 2x4"
        assert all(f["crc32"] for f in found["files"].values())
    table = run("inspect", sources[source], capsys=capsys)
    assert "5 tensors, 388 bytes" in table and "[10, 6]" in table
    assert all(name in table for name in found["files"])


@pytest.mark.parametrize("source", ["run", "dcp", "state.pt", "safe"])
def test_verify(sources: dict[str, Path], source: str, tmp_path: Path, capsys: Any) -> None:
    assert run("verify", sources[source], capsys=capsys)
    path = sources["run"] / "step-00000012" if source == "run" else sources[source]
    copied = tmp_path / path.name
    if path.is_dir():
        copied.mkdir()
        for file in path.iterdir():
            (copied / file.name).write_bytes(file.read_bytes())
    else:
        copied.write_bytes(path.read_bytes())
    pattern = "*.safetensors" if source == "safe" else "*.distcp"
    file = sorted(copied.glob(pattern))[0] if copied.is_dir() else copied
    data = bytearray(file.read_bytes())
    if source == "safe":
        data = data[:-1]  # it has no checksums
    else:
        at = data.index(VALUE[0, 1:2].numpy().tobytes())
        data[at] ^= 1
    file.write_bytes(data)
    assert str(file) in run("verify", copied, capsys=capsys, status=1)


CONVERSIONS = [
    (source, to)
    for source in ("run", "dcp", "state.pt", "safe")
    for to in ("dcp", "safetensors", "torch")
]


@pytest.mark.parametrize(("source", "to"), CONVERSIONS)
def test_convert(
    sources: dict[str, Path], source: str, to: str, tmp_path: Path, capsys: Any
) -> None:
    target = tmp_path / ("out.pt" if to == "torch" else "out")
    chosen = [] if to == "torch" else ["--to", to]
    only = ["--only", "state."] if source == "run" else []
    told = run("convert", sources[source], target, *chosen, *only, capsys=capsys)
    assert [p.name for p in tmp_path.iterdir()] == [target.name]
    assert ("left out" in told) == (source != "safe" and (to == "safetensors" or source == "run"))
    found = described(target, capsys)
    assert {name: t["dtype"] for name, t in found["tensors"].items()} == NAMES
    run("verify", target, capsys=capsys)
    expected = {
        "a": VALUE,
        "b.c": VALUE.bfloat16(),
        "b.d": torch.arange(3),
        "e.0": torch.tensor(2.5),
        "e.1.f": torch.ones(0, 3),
    }
    if to == "torch":
        loaded = torch.load(target)
        nested = source in ("dcp", "state.pt")
        assert set(loaded) == ({"a", "b", "e", "step", "names"} if nested else set(NAMES))
        if nested:
            assert loaded["step"] == 3 and loaded["names"] == ["x", 1]
            b, e = loaded["b"], loaded["e"]
            loaded = {
                "a": loaded["a"],
                "b.c": b["c"],
                "b.d": b["d"],
                "e.0": e[0],
                "e.1.f": e[1]["f"],
            }
    elif to == "dcp":
        loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.load(loaded, checkpoint_id=target)
    else:
        loaded = {}
        model = torch.nn.Module()
        for name, value in expected.items():
            model.register_buffer(name.replace(".", "_"), torch.zeros_like(value))
        xd.checkpoint.load_safetensors(model, target, rename=lambda n: n.replace(".", "_"))
        loaded = {name: model.get_buffer(name.replace(".", "_")) for name in expected}
    for name, value in expected.items():
        assert same(loaded[name], value), name


def test_torch_agrees_on_what_a_checkpoint_is(
    sources: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    run("convert", sources["dcp"], tmp_path / "ours.pt", capsys=capsys)
    dcp_to_torch_save(sources["dcp"], tmp_path / "torchs.pt")
    ours, torchs = torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "torchs.pt")
    assert same(ours["b"]["c"], torchs["b"]["c"]) and ours["step"] == torchs["step"]
    assert ours.keys() == torchs.keys() and same(ours["e"][0], torchs["e"][0])


def test_names_and_sizes(sources: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    options = ["--to", "safetensors", "--only", "b.", "--add", "new.", "--max-shard-size", "100"]
    run("convert", sources["dcp"], tmp_path / "out", *options, capsys=capsys)
    found = described(tmp_path / "out", capsys)
    assert set(found["tensors"]) == {"new.c", "new.d"} and len(found["files"]) == 2


def test_what_can_not_be_done(sources: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    def fails(*arguments: Any) -> str:
        return run(*arguments, capsys=capsys, status=1)

    assert "no checkpoint" in fails("inspect", tmp_path / "none")
    assert "no checkpoint" in fails("inspect", tmp_path)
    there = sources["state.pt"]
    assert "something already" in fails("convert", sources["dcp"], there)
    assert "say of which format" in fails("convert", there, tmp_path / "out")
    assert "begins with 'z'" in fails("convert", there, tmp_path / "out.pt", "--only", "z")
    (tmp_path / "text.pt").write_text("hello")
    assert "torch.load(weights_only=True)" in fails("inspect", tmp_path / "text.pt")
    torch.save({"c": torch.ones(2, dtype=torch.complex128)}, tmp_path / "c.pt")
    assert "complex128" in fails(
        "convert", tmp_path / "c.pt", tmp_path / "o", "--to", "safetensors"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pt", "text.pt"]


@pytest.mark.slow
def test_no_devices_are_started(sources: dict[str, Path], tmp_path: Path) -> None:
    """Not even where there are none."""
    commands = [
        ["inspect", sources["run"]],
        ["verify", sources["run"]],
        ["convert", sources["state.pt"], tmp_path / "out", "--to", "dcp"],
    ]
    code = "import sys, json; from xla_dtensor.checkpoint.__main__ import main; "
    code += "sys.exit(sum(map(main, json.loads(sys.argv[1]))))"
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands, default=str)],
        env=os.environ | {"JAX_PLATFORMS": "none_such"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    value = value_of(torch.zeros(3, device="xla"))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load({"b": {"d": value}}, checkpoint_id=tmp_path / "out")
