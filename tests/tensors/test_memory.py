"""What torch's storages say of xla tensors, and the libraries that ask them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.errors import UnsupportedOpError


def test_views_share_a_memory(mesh_2x4: DeviceMesh) -> None:
    """Sizes, offsets and who shares with whom are CPU torch's."""
    start = torch.arange(24.0).view(4, 6)
    for x in (start.to("xla"), distribute_tensor(start, mesh_2x4, [Shard(0), Replicate()])):
        for theirs, ours in (
            (start[1:], x[1:]),
            (start.t(), x.t()),
            (start[2, 3:], x[2, 3:]),
            (start.detach(), x.detach()),
            (start.unfold(1, 2, 1), x.unfold(1, 2, 1)),
        ):
            assert ours.data_ptr() - x.data_ptr() == theirs.data_ptr() - start.data_ptr()
            assert ours.untyped_storage() is x.untyped_storage()
            assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
            assert ours._typed_storage()._size() == theirs._typed_storage()._size()
        assert (x + 0).data_ptr() != x.data_ptr()
        assert x.untyped_storage().device.type == "xla"
    assert torch.empty(0, 3, device="xla").data_ptr() == torch.empty(0, 3).data_ptr() == 0


def test_an_identity_stays(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])
    before = x.data_ptr()
    x.add_(1)
    xd.compile(lambda x: x.mul_(2))(x)
    assert x.data_ptr() == before
    assert x.to_local().untyped_storage().data_ptr() == before
    assert x.to_local().untyped_storage().nbytes() == 16  # one device's part
    x.data = torch.zeros_like(x)
    assert x.data_ptr() != before
    known = {torch.ones(3, device="xla").data_ptr() for _ in range(100)}
    assert len(known) == 100


@pytest.mark.parametrize("placed", ["one device", "sharded"])
def test_memory_is_given_back_and_taken_again(placed: str, mesh_2x4: DeviceMesh) -> None:
    """What libraries do that compute values again (torch_geometric's reversible networks)."""
    start = torch.arange(8.0)
    x = start.to("xla")
    if placed == "sharded":
        x = distribute_tensor(start, mesh_2x4, [Shard(0), Replicate()])
    y = x + 1
    view, memory, address = x[2:], x.untyped_storage(), x.data_ptr()
    assert memory.resize_(0) is memory
    assert memory.nbytes() == memory.size() == 0
    assert x.shape == (8,)
    for read in (lambda: x + 1, lambda: view.tolist(), lambda: repr(x), lambda: x.add_(1)):
        with pytest.raises(RuntimeError, match="was given back"):
            read()
    with pytest.raises(RuntimeError, match="was given back"):
        xd.compile(lambda x: x + 1)(x)
    with pytest.raises(UnsupportedOpError, match="only to 0"):
        memory.resize_(8)
    memory.resize_(0)
    assert torch.equal(y.cpu(), start + 1)  # what was made of it stays
    memory.resize_(32)
    assert memory.nbytes() == 32
    assert x.data_ptr() == address
    x.copy_(y)
    assert torch.equal(view.cpu(), start[2:] + 1)
    memory.resize_(32)
    assert torch.equal(x.cpu(), start + 1)


def test_nothing_is_given_back_of_nothing() -> None:
    empty = torch.empty(0, device="xla")
    empty.untyped_storage().resize_(0)
    assert empty.tolist() == []


def test_given_back_before_it_was_computed() -> None:
    """Eager operations are written down, and run later: what waits is dropped with the memory."""
    x = torch.ones(4, device="xla") * 2
    y = x + 1
    x.untyped_storage().resize_(0)
    z = y * 2
    assert z.tolist() == [6.0] * 4
    with pytest.raises(RuntimeError, match="was given back"):
        x.tolist()


def test_given_back_weights_in_a_step_and_in_backward() -> None:
    layer = nn.Linear(3, 3).to("xla")
    step = xd.compile(lambda x: layer(x).sum())
    x = torch.ones(2, 3, device="xla")
    expected = step(x).item()
    kept = layer.weight.detach().clone()
    loss = layer(x).square().sum()
    layer.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was given back"):
        step(x)
    loss.backward()  # which doesn't read the weight, as nothing asks for x's gradient
    assert layer.weight.grad is not None
    layer.weight.untyped_storage().resize_(36)
    assert step(x).item() == pytest.approx(layer.bias.sum().item() * 2)
    with torch.no_grad():
        layer.weight.copy_(kept)
    assert step(x).item() == expected
    with pytest.raises(UnsupportedOpError, match="whose memory is XLA's"):
        xd.compile(lambda x: x.untyped_storage().resize_(0))(x)


def test_not_in_compiled_steps(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])
    step = xd.compile(lambda x: x + (x.data_ptr() & 1))
    with pytest.raises(UnsupportedOpError, match="data_ptr"):
        step(x)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an element": lambda x: x.untyped_storage()[0],
    "bytes": lambda x: bytes(x.untyped_storage()),
    "list": lambda x: x.untyped_storage().tolist(),
    "typed list": lambda x: x.storage().tolist(),
    "typed element": lambda x: x.storage()[0],
    "cpu": lambda x: x.untyped_storage().cpu(),
    "another storage": lambda x: torch.UntypedStorage(x.untyped_storage()),
    "copied to": lambda x: torch.UntypedStorage(24).copy_(x.untyped_storage()),
    "set_": lambda x: torch.empty(0).set_(x.untyped_storage()),
    "pickle": lambda x: pickle.dumps(x.untyped_storage()),
    "deepcopy": lambda x: copy.deepcopy(x.untyped_storage()),
    "shared with processes": lambda x: torch.multiprocessing.reductions.reduce_storage(
        x.untyped_storage()
    ),
    "written": lambda x: x.untyped_storage().fill_(0),
    "an element written": lambda x: x.untyped_storage().__setitem__(0, 1),
    "an element deleted": lambda x: x.untyped_storage().__delitem__(0),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", list(READS))
def test_nothing_is_at_the_address(name: str) -> None:
    x = torch.arange(6.0).to("xla")
    with pytest.raises((UnsupportedOpError, RuntimeError)):
        READS[name](x)
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


class Model(nn.Module):
    """Tied weights, other dtypes, empty and scalar buffers; a dim that doesn't divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.head = nn.Linear(8, 17)
        self.head.weight = self.embedding.weight
        self.small = nn.Linear(8, 8).bfloat16()
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("mask", torch.arange(8) > 3)


def _plain(model: Model, mesh: DeviceMesh) -> Model:
    return model.to("xla")


def _sharded(model: Model, mesh: DeviceMesh) -> Model:
    weight = distribute_tensor(model.head.weight.detach(), mesh, [Shard(0), Shard(1)])
    model.embedding.weight = model.head.weight = nn.Parameter(weight)
    bias = distribute_tensor(model.head.bias.detach(), mesh, [Shard(0), Shard(0)])
    model.head.bias = nn.Parameter(bias)
    model.small.to("xla")
    return model


PLACES = {"plain": _plain, "sharded": _sharded}


@pytest.fixture(params=list(PLACES))
def models(request: pytest.FixtureRequest, mesh_2x4: DeviceMesh) -> tuple[Model, Model]:
    torch.manual_seed(0)
    theirs = Model()
    return theirs, PLACES[request.param](copy.deepcopy(theirs), mesh_2x4)


def test_safetensors(models: tuple[Model, Model], tmp_path: Path) -> None:
    """What it writes, and what it refuses, is what it writes of CPU tensors, bit for bit."""
    theirs, ours = models
    outcomes = []
    for name, model in (("theirs", theirs), ("ours", ours)):
        file = tmp_path / name
        safetensors.torch.save_model(model, str(file))
        refused = []
        weight = model.embedding.weight
        for tensors in (
            model.state_dict(),
            {"a": weight[:5], "b": weight[4:]},
            {"a": weight.t()},
            {"a": weight[:5], "b": weight[5:]},
            {"a": weight[2:]},
        ):
            part = tmp_path / f"{name}_{len(refused)}"
            try:
                safetensors.torch.save_file(tensors, part)
                refused.append(part.read_bytes())
            except (RuntimeError, ValueError) as error:
                refused.append(str(error)[:60])
        with safetensors.safe_open(file, "pt") as opened:
            outcomes.append((file.read_bytes(), opened.metadata(), refused))
    assert outcomes[0] == outcomes[1]
    with torch.no_grad():
        ours.embedding.weight.zero_()
    safetensors.torch.load_model(ours, str(tmp_path / "theirs"))
    assert torch.equal(ours.head.weight.detach().cpu(), theirs.head.weight.detach())
    assert ours.head.weight is ours.embedding.weight


def _contents(file: Path) -> Any:
    """What is in a file, of which names are in any order."""
    if file.suffix == ".json":
        return json.loads(file.read_text())
    with safetensors.safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        parts = {
            n: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist())
            for n, t in tensors.items()
        }
        return parts, opened.metadata()


def test_huggingface_hub(models: tuple[Model, Model], tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="it isn't installed")
    theirs, ours = models
    for name, model in (("theirs", theirs), ("ours", ours)):
        (tmp_path / name / "dict").mkdir(parents=True)
        hub.save_torch_model(model, tmp_path / name, max_shard_size=300)
        hub.save_torch_state_dict(model.state_dict(), tmp_path / name / "dict")
    files = sorted(f.relative_to(tmp_path / "theirs") for f in (tmp_path / "theirs").rglob("*.*"))
    assert len(files) > 3
    for file in files:
        assert _contents(tmp_path / "ours" / file) == _contents(tmp_path / "theirs" / file)
    with torch.no_grad():
        ours.embedding.weight.zero_()
    hub.load_torch_model(ours, tmp_path / "theirs")
    assert torch.equal(ours.head.weight.detach().cpu(), theirs.head.weight.detach())


def test_overlapping_parts_of_sharded_tensors(mesh_2x4: DeviceMesh, tmp_path: Path) -> None:
    """huggingface_hub keeps one of several names; of these none has it all."""
    hub = pytest.importorskip("huggingface_hub", reason="it isn't installed")
    x = distribute_tensor(torch.arange(8.0), mesh_2x4, [Shard(0), Replicate()])
    with pytest.raises(RuntimeError, match="None is covering the entire storage"):
        hub.save_torch_state_dict({"a": x[:4], "b": x[2:6]}, tmp_path)
