"""Weights in Hugging Face's files."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import xla_dtensor as xd
from tests.checkpoint.layouts import LAYOUTS, bits, laid_out, same, value_of
from tests.checkpoint.test_dcp import DTYPES
from tests.conftest import make_mesh
from xla_dtensor.checkpoint import load_safetensors, save_safetensors
from xla_dtensor.checkpoint.files.records import StoredBox, StoredTensor, read_parts

VALUE = torch.arange(60, dtype=torch.float32).reshape(10, 6).sin()


@pytest.fixture
def package() -> Any:
    """The `safetensors` package, which says what the format is."""
    return pytest.importorskip("safetensors.torch", reason="pip install safetensors")


class Tensors(nn.Module):
    """A model of given tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_buffer(name.replace(" ", "_"), value)


def model_of(layout: str, fill: float = 0.0) -> nn.Module:
    torch.manual_seed(int(fill))
    model: Any = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10))
    if layout == "cpu":
        return model
    for module in model:
        for name, p in list(module.named_parameters()):
            if p.ndim == 2:
                setattr(module, name, nn.Parameter(laid_out(p.data, layout)))
    return model.to("xla")


# --- both ways -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS, "xla", "cpu"])
def test_any_layout_to_any_other(tmp_path: Path, layout: str) -> None:
    state = {
        f"of_{name.replace(' ', '_')}": laid_out(VALUE, name) for name in [*LAYOUTS, "xla", "cpu"]
    }
    save_safetensors(state, tmp_path)
    loaded = Tensors({name: laid_out(torch.zeros(10, 6), layout) for name in state})
    before = dict(loaded.named_buffers())
    assert load_safetensors(loaded, tmp_path) == ([], [])
    for name, value in loaded.named_buffers():
        assert value is before[name] and same(value_of(value), VALUE), name


def test_the_package_reads_what_is_written(tmp_path: Path, package: Any) -> None:
    values = {}
    for dtype in DTYPES:
        raw = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) * 37
        values[str(dtype)] = ((raw % 2).bool() if dtype is torch.bool else raw.view(dtype))[:11]
    values |= {"matrix": VALUE, "number": torch.tensor(3.5), "nothing": torch.zeros(0, 4)}
    state = {
        name: v.to("xla") if v.ndim == 0 else laid_out(v, "rows") for name, v in values.items()
    }
    (file,) = save_safetensors(state, tmp_path, metadata={"who": "me"})
    found = package.load_file(file)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert bits(found[name]) == bits(value), name
    with package.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "who": "me"}


def test_what_the_package_writes_is_read(tmp_path: Path, package: Any) -> None:
    values = {str(dtype): torch.ones(10, 6).to(dtype) for dtype in DTYPES} | {"matrix": VALUE}
    package.save_file(values, tmp_path / "a.safetensors", {"format": "pt"})
    model = Tensors(
        {k.replace(".", "_"): laid_out(torch.zeros_like(v), "both") for k, v in values.items()}
    )
    load_safetensors(model, tmp_path / "a.safetensors", rename=lambda n: n.replace(".", "_"))
    for name, value in values.items():
        assert bits(value_of(model.get_buffer(name.replace(".", "_")))) == bits(value)


def test_in_several_files_with_an_index(tmp_path: Path) -> None:
    model = model_of("both", 1)
    files = save_safetensors(model, tmp_path, max_shard_size=250)
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in model.state_dict().values())
    for source in (tmp_path, tmp_path / "model.safetensors.index.json", files):
        other = model_of("columns", 2)
        load_safetensors(other, source)
        for name, value in model.state_dict().items():
            assert same(value_of(other.state_dict()[name]), value_of(value)), name


def test_files_of_an_earlier_save_go(tmp_path: Path) -> None:
    """``from_pretrained`` prefers one file to an index, we an index to one file."""
    (tmp_path / "config.json").write_text("{}")
    for size, fill in ((100, 1), (10**6, 2), (200, 3), (100, 4)):
        state = {"x": VALUE + fill, "y": VALUE - fill}
        files = save_safetensors(state, tmp_path, max_shard_size=size)
        model = Tensors({"x": torch.zeros(10, 6), "y": torch.zeros(10, 6)})
        load_safetensors(model, tmp_path)
        assert same(model.x, VALUE + fill) and same(model.y, VALUE - fill)
        there = {path.name for path in tmp_path.iterdir()} - {"config.json"}
        index = {"model.safetensors.index.json"} if len(files) > 1 else set()
        assert there == {path.name for path in files} | index


def test_transformers_loads_it(tmp_path: Path, package: Any) -> None:
    """A sharded model with tied weights, in several files, by ``from_pretrained``; and back."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = make_mesh("2x4")
    model.to("xla")
    for module in model.model.layers:
        xd.fully_shard(module, mesh=mesh["dp"])
    xd.fully_shard(model, mesh=mesh["dp"])
    save_safetensors(model, tmp_path, max_shard_size="4KB")
    config.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in expected.items():
        assert same(again.state_dict()[name], value), name
    assert again.lm_head.weight is again.model.embed_tokens.weight
    again.save_pretrained(tmp_path / "hf", max_shard_size="4KB")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert load_safetensors(model, tmp_path / "hf") == ([], [])
    for name, value in expected.items():
        assert same(value_of(model.state_dict()[name]), value), name


def test_torchs_writer_of_these_files(tmp_path: Path, package: Any) -> None:
    """It keeps one shard of each name: it is given whole tensors."""
    state = {"x": laid_out(VALUE, "both"), "y": laid_out(VALUE + 1, "rows")}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path)))
    (file,) = tmp_path.glob("*.safetensors")
    found = package.load_file(file)
    assert same(found["x"], VALUE) and same(found["y"], VALUE + 1)
    loaded = {name: laid_out(torch.zeros(10, 6), "columns") for name in "xy"}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert same(value_of(loaded["x"]), VALUE) and same(value_of(loaded["y"]), VALUE + 1)


# --- names, dtypes, meta -------------------------------------------------------------------------


def test_names(tmp_path: Path) -> None:
    save_safetensors({"a.weight": VALUE, "b": VALUE[0], "rest": VALUE[1]}, tmp_path)
    for rename in (
        {"a.weight": "w", "b": "c", "rest": "other"},
        lambda name: {"a.weight": "w", "b": "c"}.get(name),
    ):
        model = Tensors({"w": laid_out(torch.zeros(10, 6), "both"), "c": torch.zeros(6)})
        missing, unexpected = load_safetensors(model, tmp_path, rename=rename, strict=False)
        assert (missing, unexpected) == ([], ["rest"] if isinstance(rename, dict) else [])
        assert same(value_of(model.w), VALUE) and same(model.c, VALUE[0])
    model = Tensors({"b": torch.zeros(6), "mine": torch.ones(2)})
    with pytest.raises(xd.CheckpointError, match=r"don't have \['mine'\], .* not \['a.weight', 'r"):
        load_safetensors(model, tmp_path)
    assert model.b.abs().sum() == 0
    assert load_safetensors(model, tmp_path, strict=False) == (["mine"], ["a.weight", "rest"])
    assert same(model.b, VALUE[0])
    with pytest.raises(xd.CheckpointError, match="another tensor for 'b'"):
        same_shape = {"b": "b", "rest": "b"}
        load_safetensors(model, tmp_path, rename=same_shape.get, strict=False)
    files = save_safetensors({"x": VALUE, "y": VALUE}, tmp_path / "renamed", rename={"x": "new"})
    assert "new" in files[0].read_bytes().decode("latin1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_on_the_way(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"x": laid_out(VALUE, "both"), "n": torch.arange(3)}
    save_safetensors(state, tmp_path)
    model = Tensors({"x": laid_out(torch.zeros(10, 6, dtype=dtype), "rows"), "n": torch.zeros(3)})
    load_safetensors(model, tmp_path)
    assert same(value_of(model.x), VALUE.to(dtype)) and model.n.tolist() == [0, 1, 2]
    save_safetensors(state, tmp_path / "as", dtype=dtype)
    model = Tensors({"x": laid_out(torch.zeros(10, 6, dtype=dtype), "rows"), "n": torch.zeros(3)})
    load_safetensors(model, tmp_path / "as")
    assert same(value_of(model.x), VALUE.to(dtype)) and model.n.tolist() == [0, 1, 2]


def test_onto_the_meta_device(tmp_path: Path) -> None:
    """A sharded model without values gets them, parameters staying parameters."""
    model = model_of("cpu", 1)
    save_safetensors(model, tmp_path)
    with torch.device("meta"):
        empty: Any = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10))
    mesh = make_mesh("2x4")
    for module in empty:
        for name, p in list(module.named_parameters()):
            sharded = distribute_tensor(p.data, mesh, [Shard(0), Shard(p.ndim - 1)])
            setattr(module, name, nn.Parameter(sharded, requires_grad=name == "weight"))
        for name, b in list(module.named_buffers()):
            setattr(module, name, distribute_tensor(b, mesh, None))
    load_safetensors(empty, tmp_path)
    for name, value in model.state_dict().items():
        found = empty.state_dict()[name]
        assert isinstance(found, DTensor) and same(value_of(found), value), name
    assert isinstance(empty[0].weight, nn.Parameter) and empty[0].weight.requires_grad
    assert not empty[0].bias.requires_grad
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10))
    with pytest.raises(xd.UnsupportedOpError, match="nothing says where it is to be"):
        load_safetensors(plain, tmp_path)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)).to("xla")
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    (file,) = save_safetensors(model, tmp_path)
    assert file.stat().st_size < 2 * 240
    assert load_safetensors(other, tmp_path) == ([], [])
    assert same(value_of(other[1].weight), value_of(model[0].weight))


# --- what is refused -----------------------------------------------------------------------------


def test_what_files_can_not_hold(tmp_path: Path) -> None:
    mesh = make_mesh("8")
    partial = DTensor.from_local(torch.ones(2).to("xla"), mesh, [Partial()])
    for state, error, told in [
        ({"p": partial}, xd.UnsupportedOpError, "'p'.*Partial"),
        (
            {"v": xd.collectives.axis_index(mesh)},
            xd.UnsupportedOpError,
            "'v' has another value on each",
        ),
        ({"n": 3}, TypeError, "'n' is a int"),
        ({"c": torch.ones(2, dtype=torch.complex128)}, TypeError, "'c' is of torch.complex128"),
        ({"m": torch.ones(2, device="meta")}, xd.UnsupportedOpError, "'m' is on the meta"),
    ]:
        with pytest.raises(error, match=told):
            save_safetensors(state, tmp_path)  # type: ignore[arg-type]
    for size in ("5 apples", 0, "0GB"):
        with pytest.raises(ValueError, match="max_shard_size"):
            save_safetensors({}, tmp_path, max_shard_size=size)
    with pytest.raises(ValueError, match="two tensors would be named 'z'"):
        save_safetensors({"x": VALUE, "y": VALUE + 1}, tmp_path, rename=lambda _: "z")
    assert list(tmp_path.iterdir()) == []
    save_safetensors({"x": VALUE}, tmp_path)
    for model, told in [
        (Tensors({"x": torch.zeros(6, 10)}), r"shape \[10, 6\], and the model's 'x' of \[6, 10\]"),
        (Tensors({"x": xd.from_device_values([VALUE] * 8, mesh)}), "another value on each device"),
        (Tensors({"x": laid_out(VALUE, "both"), "y": partial}), "don't have"),
    ]:
        with pytest.raises((xd.CheckpointError, xd.UnsupportedOpError), match=told):
            load_safetensors(model, tmp_path)
    with pytest.raises(xd.CheckpointError, match=r"no model\.safetensors\.index\.json and"):
        load_safetensors(nn.Linear(2, 2), tmp_path / "..")
    with pytest.raises(xd.CheckpointError, match="No such file"):
        load_safetensors(nn.Linear(2, 2), tmp_path / "none.safetensors")


def header(content: Any, values: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + values


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
MALICIOUS = {
    "nothing": b"",
    "a header longer than the file": struct.pack("<Q", 2**60) + b"{}",
    "no JSON": header(b"{{{{"),
    "a list": header([1]),
    "a dtype that is none": header({"x": F32 | {"dtype": "PICKLE"}}, bytes(8)),
    "a size that is negative": header({"x": F32 | {"shape": [-2]}}, bytes(8)),
    "a size of a number too large": header({"x": F32 | {"shape": [2**62]}}, bytes(8)),
    "places outside": header({"x": F32 | {"data_offsets": [8, 16]}}, bytes(8)),
    "places before": header({"x": F32 | {"data_offsets": [-8, 0]}}, bytes(8)),
    "too few values": header({"x": F32}, bytes(7)),
    "too many values": header({"x": F32}, bytes(9)),
    "two in one place": header({"x": F32, "y": F32}, bytes(8)),
    "a name twice": header(
        b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":1}', bytes(8)
    ),
    "a size that is true": header({"x": F32 | {"shape": [True, 2]}}, bytes(8)),
    "metadata that isn't text": header({"x": F32, "__metadata__": {"a": [1]}}, bytes(8)),
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_files_that_lie(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(MALICIOUS[kind])
    model = Tensors({"x": laid_out(torch.ones(2), "rows")})
    with pytest.raises(xd.CheckpointError, match=str(file)):
        load_safetensors(model, tmp_path)
    assert value_of(model.x).tolist() == [1, 1]


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/../../b", "", "..", "C:\\x", "a\0b", 3]
)
def test_an_index_that_leaves_its_folder(tmp_path: Path, name: Any) -> None:
    save_safetensors({"x": VALUE}, tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(xd.CheckpointError, match="which isn't in this folder"):
        load_safetensors(Tensors({"x": torch.zeros(10, 6)}), folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"x": []}}']
)
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(xd.CheckpointError, match="no index of safetensors files"):
        load_safetensors(Tensors({"x": torch.zeros(2)}), tmp_path)


def test_links_of_a_hub_cache(tmp_path: Path) -> None:
    (file,) = save_safetensors({"x": VALUE}, tmp_path / "blobs")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "m.safetensors").symlink_to(file)
    index = {"weight_map": {"x": "m.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = Tensors({"x": laid_out(torch.zeros(10, 6), "both")})
    load_safetensors(model, folder)
    assert same(value_of(model.x), VALUE)


# --- only the bytes that are wanted --------------------------------------------------------------


class Counted:
    """A file that counts what is read."""

    def __init__(self, file: Any) -> None:
        self._file, self.bytes, self.reads = file, 0, 0

    def seek(self, *args: Any) -> int:
        return self._file.seek(*args)

    def readinto(self, view: Any) -> int:
        count = self._file.readinto(view)
        self.bytes, self.reads = self.bytes + count, self.reads + 1
        return count


SIZES = (64, 512, 32)  # of float32: 64 KiB a row, 4 MiB
BOXES = {
    "all": ((0, 0, 0), SIZES),
    "rows": ((10, 0, 0), (5, 512, 32)),
    "a block of columns": ((0, 256, 0), (64, 128, 32)),
    "single elements": ((0, 0, 3), (64, 512, 1)),
    "one": ((63, 511, 31), (1, 1, 1)),
    "none": ((0, 0, 0), (0, 512, 32)),
}
# Of what share of the file may be read for each: stretches of a few bytes aren't worth a read each.
SHARES = {
    "all": 1,
    "rows": 5 / 64,
    "a block of columns": 1 / 4,
    "single elements": 1,
    "one": 1 / 64,
    "none": 0,
}


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_boxes_of_a_stored_tensor(tmp_path: Path, box: str, dtype: Any, order: Any) -> None:
    value = torch.randn(SIZES)
    stored_value = value.permute(order)
    (tmp_path / "raw").write_bytes(b"ab" + value.numpy().tobytes())
    stored = StoredTensor(2, torch.float32, tuple(stored_value.shape), stored_value.stride())
    offsets, sizes = ([numbers[d] for d in order] for numbers in BOXES[box])
    target = torch.zeros(sizes, dtype=dtype)
    with (tmp_path / "raw").open("rb", buffering=0) as file:
        counted = Counted(file)
        read_parts(counted, stored, [StoredBox(tuple(offsets), target)])  # type: ignore[arg-type]
    index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    assert same(target, stored_value[index].to(dtype))
    assert counted.bytes <= value.nbytes * SHARES[box]


def test_boxes_for_several_devices_are_read_once(tmp_path: Path) -> None:
    """Columns for each of eight devices: each byte of the file is read once."""
    value = torch.randn(256, 64)
    (tmp_path / "raw").write_bytes(value.numpy().tobytes())
    stored = StoredTensor(0, torch.float32, (256, 64), (64, 1))
    parts = [StoredBox((0, 8 * i), torch.zeros(256, 8)) for i in range(8)]
    with (tmp_path / "raw").open("rb", buffering=0) as file:
        counted = Counted(file)
        read_parts(counted, stored, parts)  # type: ignore[arg-type]
    assert counted.bytes == value.nbytes and counted.reads == 1
    assert torch.equal(torch.cat([part.target for part in parts], 1), value)


def test_rows_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xla_dtensor.checkpoint.files.records.BLOCK", 1000)
    for shape in ((3, 50, 40), (2, 3000), (7000,)):
        value = torch.randn(shape)
        (tmp_path / "raw").write_bytes(value.numpy().tobytes())
        strides = value.stride()
        stored = StoredTensor(0, torch.float32, shape, strides)
        offsets = [n // 3 for n in shape]
        index = tuple(slice(o, n) for o, n in zip(offsets, shape, strict=True))
        for dtype in (torch.float32, torch.float64):
            target = torch.zeros(value[index].shape, dtype=dtype)
            with (tmp_path / "raw").open("rb", buffering=0) as file:
                read_parts(file, stored, [StoredBox(tuple(offsets), target)])  # type: ignore[arg-type]
            assert same(target, value[index].to(dtype)), shape


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    save_safetensors({"x": laid_out(VALUE, "both")}, tmp_path)
    model = Tensors({"x": torch.zeros(10, 6)})
    load_safetensors(model, tmp_path)
    assert same(model.x, VALUE)
