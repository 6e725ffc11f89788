"""Checkpoints that lie: nothing in them is run, no file elsewhere is read, no memory is taken for
what isn't there."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import xla_dtensor as xd
from tests.checkpoint.layouts import laid_out, same, value_of
from xla_dtensor.checkpoint.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VALUE = torch.arange(60, dtype=torch.float32).reshape(10, 6)


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def saved(folder: Path, **others: Any) -> Path:
    dcp.save({"x": laid_out(VALUE, "rows"), "n": 1} | others, checkpoint_id=folder / "step")
    return folder / "step"


def attempts(folder: Path) -> list[Callable[[], Any]]:
    """Every way in which a checkpoint is read."""
    state = {"x": laid_out(torch.ones(10, 6), "both"), "n": 0}
    cpu = {"x": torch.ones(10, 6), "n": 0}
    reader = xd.checkpoint.FileSystemReader(folder)
    return [
        lambda: dcp.load(state, checkpoint_id=folder),
        lambda: dcp.load(cpu, storage_reader=reader),
        lambda: _raising(["inspect", str(folder)]),
        lambda: _raising(["convert", str(folder), str(folder.parent / "out.pt")]),
    ]


def _raising(arguments: list[str]) -> None:
    if main(arguments):
        raise xd.CheckpointError("the exit status")


def assert_refused(folder: Path, inspected: bool = False) -> None:
    """By all who read it, but perhaps by who only looks at what it says of itself."""
    for number, attempt in enumerate(attempts(folder)):
        if inspected and number == 2:
            attempt()
            continue
        with pytest.raises(BaseException) as error:
            attempt()
        # torch, asked for plain tensors, makes an error of its own of what it met.
        assert isinstance(error.value, xd.CheckpointError) or number == 1
    assert not (folder.parent / "ran").exists()
    assert not (folder.parent / "out.pt").exists()


# --- pickles -------------------------------------------------------------------------------------


def test_metadata_that_runs_something(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for content in (
        Runs(tmp_path / "ran"),
        dataclasses.replace(metadata, planner_data=Runs(tmp_path / "ran")),
    ):
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        assert_refused(folder)


def test_an_entry_that_runs_something(tmp_path: Path) -> None:
    """Of those that are no tensors, only what is asked for is read."""
    folder = saved(tmp_path, evil=Runs(tmp_path / "ran"))
    x = laid_out(torch.zeros(10, 6), "both")
    with pytest.raises(xd.CheckpointError, match="'evil' in the checkpoint is no tensor and no pl"):
        dcp.load({"x": x, "evil": 0}, checkpoint_id=folder)
    assert main(["convert", str(folder), str(tmp_path / "out.pt")]) == 1
    dcp.load({"x": x, "n": 0}, checkpoint_id=folder)
    assert not (tmp_path / "ran").exists() and same(value_of(x), VALUE)


def test_a_tensor_that_runs_something(tmp_path: Path) -> None:
    """What is in a tensor's place is no tensor."""
    folder = saved(tmp_path, evil=Runs(tmp_path / "ran"))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places = metadata.storage_data
    metadata.state_dict_metadata["x"].chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([10, 6]))
    ]
    evil = places.pop(MetadataIndex("evil"))
    metadata.state_dict_metadata.pop("evil")
    for index in [i for i in places if i.fqn == "x"]:
        places.pop(index)
    places[MetadataIndex("x", torch.Size([0, 0]))] = evil
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(folder, inspected=True)


@pytest.mark.parametrize("where", ["cpu", "xla", {"xla": "cpu"}, None])
def test_torch_load_runs_nothing(tmp_path: Path, where: Any) -> None:
    torch.save({"x": laid_out(VALUE, "both"), "evil": Runs(tmp_path / "ran")}, tmp_path / "f.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "f.pt", map_location=where)
    assert main(["inspect", str(tmp_path / "f.pt")]) == 1
    assert not (tmp_path / "ran").exists()


def test_a_manager_runs_nothing(tmp_path: Path) -> None:
    """Whose entries are pickles, with checksums that are right."""
    state = {"w": laid_out(VALUE, "rows")}
    objects = {"s": state}
    with xd.checkpoint.CheckpointManager(tmp_path, objects, asynchronous=False) as manager:
        states = manager._states.captured

        def captured() -> Any:
            content, kinds = states()
            return content | {"xla_dtensor": Runs(tmp_path / "ran")}, kinds

        manager._states.captured = captured  # type: ignore[method-assign]
        manager.save(1)
        manager.wait()
        with pytest.raises(xd.CheckpointError, match="'xla_dtensor' can't be read"):
            manager.restore()

        def pickled() -> Any:
            content, kinds = states()
            return content | {"xla_dtensor": pickle.dumps(Runs(tmp_path / "ran"))}, kinds

        manager._states.captured = pickled  # type: ignore[method-assign]
        manager.save(2)
        with pytest.raises(xd.CheckpointError, match="'xla_dtensor' is no plain data"):
            manager.restore()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "lie", [{"size": [2**50]}, {"dtype": torch.float64}, {"size": "all"}, {"size": [10, 7]}]
)
def test_a_structure_of_tensors_that_are_not_there(tmp_path: Path, lie: Any) -> None:
    """No memory is taken for them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(laid_out(VALUE, "rows"))], momentum=0.9)
    (p,) = optimizer.param_groups[0]["params"]
    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    objects = {"o": optimizer}
    with xd.checkpoint.CheckpointManager(tmp_path, objects, asynchronous=False) as manager:
        states = manager._states.captured

        def captured() -> Any:
            content, kinds = states()
            structure = torch.load(io.BytesIO(content["xla_dtensor"]), weights_only=True)
            structure["o"]["state"][0]["momentum_buffer"]["kind"].update(lie)
            file = io.BytesIO()
            torch.save(structure, file)
            return content | {"xla_dtensor": file.getvalue()}, kinds

        manager._states.captured = captured  # type: ignore[method-assign]
        manager.save(1)
        optimizer.state.clear()
        with pytest.raises(xd.CheckpointError, match="what isn't in it"):
            manager.restore()


# --- sizes and places ----------------------------------------------------------------------------


def chunks_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata["x"].chunks


def place_of(metadata: Any) -> Any:
    return metadata.storage_data[MetadataIndex("x", torch.Size([0, 0]))]


def set_size(metadata: Any, size: Any, sizes: Any = None) -> None:
    """One chunk of a tensor of another size, at the place of the first."""
    info = place_of(metadata)
    entry = metadata.state_dict_metadata["x"]
    entry.size = torch.Size(size)
    entry.chunks = [ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(sizes or size))]
    metadata.storage_data = {
        MetadataIndex("x", torch.Size([0] * len(size))): info,
        MetadataIndex("n"): metadata.storage_data[MetadataIndex("n")],
    }


def set_field(thing: Any, name: str, value: Any) -> None:
    vars(thing)[name] = value


LIES: dict[str, Callable[[Any], Any]] = {
    "a tensor larger than its file": lambda m: set_size(m, [2**40, 2**20]),
    "a tensor of more elements than are stored": lambda m: set_size(m, [10, 6]),
    "a chunk beyond its tensor": lambda m: setattr(chunks_of(m)[0], "offsets", torch.Size([9, 6])),
    "a chunk of another rank": lambda m: setattr(chunks_of(m)[0], "sizes", torch.Size([2])),
    "a chunk before its tensor": lambda m: set_field(chunks_of(m)[0], "offsets", (-1, 0)),
    "a chunk of text": lambda m: set_field(chunks_of(m)[0], "sizes", ("a", "b")),
    "a dtype that is none": lambda m: setattr(
        m.state_dict_metadata["x"].properties, "dtype", "torch.float32"
    ),
    "a dtype that is larger": lambda m: setattr(
        m.state_dict_metadata["x"].properties, "dtype", torch.complex128
    ),
    "an offset beyond the file": lambda m: setattr(place_of(m), "offset", 2**50),
    "an offset before it": lambda m: setattr(place_of(m), "offset", -8),
    "a length beyond it": lambda m: setattr(place_of(m), "length", 2**50),
    "a length that is no number": lambda m: setattr(place_of(m), "length", 3.5),
    "a file elsewhere": lambda m: setattr(place_of(m), "relative_path", "../secret"),
    "an absolute file": lambda m: setattr(place_of(m), "relative_path", "/etc/hostname"),
    "a file of Windows": lambda m: setattr(place_of(m), "relative_path", "C:\\secret"),
    "a file without a name": lambda m: setattr(place_of(m), "relative_path", ""),
    "the folder": lambda m: setattr(place_of(m), "relative_path", "."),
    "a path that is a number": lambda m: setattr(place_of(m), "relative_path", 3),
    "a link that leaves the folder": lambda m: setattr(place_of(m), "relative_path", "link"),
    "one place for all": lambda m: [
        vars(info).update(offset=place_of(m).offset, length=place_of(m).length)
        for info in m.storage_data.values()
    ],
    "no place": lambda m: m.storage_data.pop(MetadataIndex("x", torch.Size([0, 0]))),
    "places that are none": lambda m: setattr(m, "storage_data", [1]),
    "entries that are none": lambda m: setattr(m, "state_dict_metadata", {"x": 3}),
    "a name that is none": lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()}),
    "a list of a billion": lambda m: setattr(m, "planner_data", {"x": ("x", 2**30, "y")}),
    "a path that is none": lambda m: setattr(m, "planner_data", {"x": 7}),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies(tmp_path: Path, lie: str) -> None:
    folder = saved(tmp_path)
    (tmp_path / "secret").write_bytes(bytes(10_000))
    (folder / "link").symlink_to(tmp_path / "secret")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    LIES[lie](metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    # The archive around a small tensor would have room for these.
    inspected = lie in ("a tensor of more elements than are stored", "a dtype that is larger")
    assert_refused(folder, inspected)


def test_a_tensor_that_is_larger_than_its_chunks_say_what(tmp_path: Path) -> None:
    """A record whose own header contradicts the metadata."""
    folder = saved(tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    properties = TensorProperties(dtype=torch.float32)
    first, second = torch.Size([0, 0]), torch.Size([2, 0])
    places = metadata.storage_data
    index, other = MetadataIndex("x", first), MetadataIndex("x", second)
    places[index], places[other] = places[other], places[index]  # both of 2 x 6: fine
    chunk = ChunkStorageMetadata(first, torch.Size([1, 12]))
    metadata.state_dict_metadata["y"] = TensorStorageMetadata(
        properties, torch.Size([1, 12]), [chunk]
    )
    places[MetadataIndex("y", first)] = places.pop(index)
    metadata.state_dict_metadata["x"].chunks.pop(0)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    y = laid_out(torch.zeros(1, 12), "columns")
    with pytest.raises(xd.CheckpointError, match="a tensor of sizes"):
        dcp.load({"y": y}, checkpoint_id=folder)
