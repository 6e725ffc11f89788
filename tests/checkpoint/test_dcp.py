"""``torch.distributed.checkpoint`` of xla tensors, in one process, with torch's planners."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.checkpoint.layouts import LAYOUTS, bits, laid_out, same, value_of
from tests.conftest import make_mesh

VALUE = torch.arange(60, dtype=torch.float32).reshape(10, 6).sin()


def save(state: dict[str, Any], folder: Path, **kwargs: Any) -> Any:
    return dcp.save(state, checkpoint_id=folder, no_dist=True, **kwargs)


def load(state: dict[str, Any], folder: Path, **kwargs: Any) -> None:
    dcp.load(state, checkpoint_id=folder, no_dist=True, **kwargs)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


# --- layouts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one value in every layout, and of a plain CPU tensor."""
    folder = tmp_path_factory.mktemp("saved")
    state = {name: laid_out(VALUE + i, name) for i, name in enumerate([*LAYOUTS, "xla", "cpu"])}
    save({"model": state}, folder)
    return folder


@pytest.mark.parametrize("target", [*LAYOUTS, "xla", "cpu"])
def test_any_layout_loads_into_any_other(saved: Path, target: str) -> None:
    state = {name: laid_out(torch.zeros(10, 6), target) for name in [*LAYOUTS, "xla", "cpu"]}
    given = dict(state)
    load({"model": state}, saved)
    for i, (name, tensor) in enumerate(state.items()):
        assert tensor is given[name]
        assert same(value_of(tensor), VALUE + i), (name, target)


def test_each_shard_is_written_once(saved: Path) -> None:
    """Replicas count once, and padding doesn't at all."""
    metadata = metadata_of(saved)
    for name in LAYOUTS:
        chunks = metadata.state_dict_metadata[f"model.{name}"].chunks
        assert sum(c.sizes.numel() for c in chunks) == VALUE.numel()
    sizes = {n: len(metadata.state_dict_metadata[f"model.{n}"].chunks) for n in LAYOUTS}
    assert sizes["columns"] == 6 and sizes["replicated"] == 1 and sizes["partly"] == 4
    assert sizes["rows"] == 5  # of two rows each
    files = [path for path in saved.iterdir() if path.name != ".metadata"]
    payload = (len(LAYOUTS) + 2) * VALUE.nbytes
    overhead = 2000 * len(metadata.storage_data)  # an archive for each shard
    assert sum(path.stat().st_size for path in files) < payload + overhead


def test_torch_loads_without_us(saved: Path) -> None:
    """Into nothing, from what the metadata says."""
    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(saved)
    _load_state_dict(state, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    for i, name in enumerate([*LAYOUTS, "xla", "cpu"]):
        assert same(state["model"][name], VALUE + i)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


def test_every_dtype_bit_for_bit(tmp_path: Path) -> None:
    values = {}
    for dtype in DTYPES:
        raw = torch.arange(11 * dtype.itemsize, dtype=torch.uint8) * 37
        values[str(dtype)] = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    state = {name: laid_out(value, "rows") for name, value in values.items()}
    save(state, tmp_path)
    loaded = {name: laid_out(torch.zeros_like(v), "rows") for name, v in values.items()}
    load(loaded, tmp_path)
    plain = {name: torch.zeros_like(value) for name, value in values.items()}
    load(plain, tmp_path)
    for name, value in values.items():
        assert bits(plain[name]) == bits(value), name
        assert bits(value_of(loaded[name])) == bits(value), name


def test_another_dtype_is_converted_as_torch_does(tmp_path: Path) -> None:
    save({"x": laid_out(VALUE, "both")}, tmp_path)
    state = {"x": laid_out(torch.zeros(10, 6, dtype=torch.bfloat16), "columns")}
    load(state, tmp_path)
    assert same(value_of(state["x"]), VALUE.bfloat16())


SHAPES = [(), (1,), (3,), (17,), (8, 0), (0,), (2, 3, 5), (1, 1, 16)]


@pytest.mark.parametrize("mesh", ["8", "2x4"])
def test_shapes(tmp_path: Path, mesh: str) -> None:
    """Few elements, none, no dims: most devices have nothing."""
    on = make_mesh(mesh)
    values = {str(shape): torch.randn(shape) for shape in SHAPES}

    def sharded(value: torch.Tensor, first: bool) -> Any:
        dim = 0 if first else value.ndim - 1
        placed = [Shard(dim) if value.ndim else Replicate(), *[Replicate()] * (on.ndim - 1)]
        return distribute_tensor(value, on, placed)

    save({name: sharded(value, True) for name, value in values.items()}, tmp_path)
    state = {name: sharded(torch.ones_like(value), False) for name, value in values.items()}
    plain = {name: torch.ones_like(value) for name, value in values.items()}
    load(state, tmp_path)
    load(plain, tmp_path)
    for name, value in values.items():
        assert same(value_of(state[name]), value) and same(plain[name], value), name


# --- per-device tensors --------------------------------------------------------------------------


def test_what_varies_is_saved_for_every_device(tmp_path: Path) -> None:
    mesh = make_mesh("2x4")
    values = [torch.randn(3, 2) for _ in range(8)]
    x = xd.from_device_values(values, mesh)
    by_tp = xd.from_device_values(values, mesh, vary=["tp"])
    save({"x": x, "by_tp": by_tp}, tmp_path)
    assert metadata_of(tmp_path).state_dict_metadata["x"].size == (2, 4, 3, 2)
    again = xd.from_device_values([torch.zeros(3, 2)] * 8, mesh)
    some = xd.from_device_values([torch.zeros(3, 2)] * 8, mesh, vary=["tp"])
    load({"x": again, "by_tp": some}, tmp_path)
    assert all(map(torch.equal, again.local_values(), values))
    assert all(map(torch.equal, some.local_values(), values[:4] * 2))
    plain = {"x": torch.zeros(2, 4, 3, 2), "by_tp": torch.zeros(4, 3, 2)}
    load(plain, tmp_path)
    assert torch.equal(plain["x"].reshape(8, 3, 2), torch.stack(values))
    assert torch.equal(plain["by_tp"], torch.stack(values[:4]))


def test_a_shard_of_what_varies(tmp_path: Path) -> None:
    """Sharded over tp, another one for each dp."""
    mesh = make_mesh("2x4")

    def make(values: list[torch.Tensor]) -> Any:
        local = xd.from_device_values(values, mesh)
        return torch.distributed.tensor.DTensor.from_local(local, mesh["tp"], [Shard(0)])

    values = [torch.randn(2, 3) for _ in range(8)]
    x, again = make(values), make([torch.zeros(2, 3)] * 8)
    save({"x": x}, tmp_path)
    load({"x": again}, tmp_path)
    assert all(map(torch.equal, again.to_local().local_values(), values))


def test_another_number_of_devices_is_refused_for_what_varies(tmp_path: Path) -> None:
    save({"x": xd.collectives.axis_index(make_mesh("8"))}, tmp_path)
    with pytest.raises(BaseException, match="Size mismatch between saved"):
        load({"x": xd.collectives.axis_index(make_mesh("5"))}, tmp_path)


# --- what is loaded into -------------------------------------------------------------------------


def test_views_aliases_and_parameters_see_what_is_loaded(tmp_path: Path) -> None:
    save({"x": laid_out(VALUE, "both"), "y": laid_out(VALUE[2:6] * 3, "rows")}, tmp_path)
    weight = torch.nn.Parameter(laid_out(torch.zeros(10, 6), "both"))
    version = weight._version
    alias, column = weight.detach(), weight.data[:, 1]
    loaded = (weight * 2).sum()  # has saved it for its gradient
    base = laid_out(torch.zeros(10, 6), "both")
    load({"x": weight, "y": base[2:6]}, tmp_path)
    assert same(value_of(alias), VALUE) and same(value_of(column), VALUE[:, 1])
    assert weight.requires_grad and weight.is_leaf and weight._version > version
    assert torch.equal(value_of(base)[2:6], VALUE[2:6] * 3)
    assert value_of(base)[:2].abs().sum() == 0
    assert loaded.item() == 0


def test_a_compiled_step_goes_on_with_what_is_loaded(tmp_path: Path) -> None:
    """It donates what was loaded, also what several devices share."""
    for layout in ("both", "replicated"):
        x = laid_out(VALUE, layout)
        step = xd.compile(lambda x=x: x.add_(1))
        save({"x": x}, tmp_path / layout)
        for _ in range(2):
            step()
        load({"x": x}, tmp_path / layout)
        for n in range(1, 3):
            step()
            assert torch.equal(value_of(x), VALUE + 1 if n == 1 else VALUE + 1 + 1)
        assert step.recompilations == []


def test_a_meta_tensor_gets_its_values(tmp_path: Path) -> None:
    save({"x": laid_out(VALUE, "rows")}, tmp_path)
    mesh, placed = make_mesh("2x4"), [Shard(0), Shard(1)]
    meta = distribute_tensor(torch.empty(10, 6, device="meta"), mesh, placed)
    assert meta.is_meta
    model = {"x": torch.nn.Parameter(meta)}
    load(model, tmp_path)
    assert same(value_of(model["x"]), VALUE) and model["x"].requires_grad


def test_nested_state_of_all_kinds(tmp_path: Path) -> None:
    def state(fill: float, n: int) -> dict[str, Any]:
        return {
            "model": {"w": laid_out(torch.full((10, 6), fill), "both"), "names": ["a", n]},
            "optimizer": {"state": {0: {"step": torch.tensor(fill)}}, "groups": [{"lr": fill}]},
            "list": [laid_out(torch.full((4,), fill), "rows"), n, {"deep": (n, "x")}],
            "pair": (laid_out(torch.full((4,), fill), "xla"), torch.full((2,), fill)),
            "number": n,
            "nothing": None,
            "bytes": io.BytesIO(bytes([n])),
            "empty": {},
        }

    save(state(0.5, 3), tmp_path)
    loaded = state(0.0, 0)
    model = loaded["model"]
    load(loaded, tmp_path)
    assert model is loaded["model"] and value_of(model["w"]).unique().tolist() == [0.5]
    assert model["names"] == ["a", 3] and loaded["optimizer"]["groups"] == [{"lr": 0.5}]
    assert loaded["optimizer"]["state"][0]["step"].item() == 0.5
    assert loaded["list"][0].tolist() == [0.5] * 4 and loaded["list"][1] == 3
    assert loaded["list"][2] == {"deep": (3, "x")}
    first, second = loaded["pair"]
    assert first.tolist() == [0.5] * 4 and second.tolist() == [0.5] * 2
    assert isinstance(first, xd.XLATensor)
    assert loaded["number"] == 3 and loaded["nothing"] is None
    assert loaded["bytes"].getvalue() == bytes([3])


def test_stateful_objects(tmp_path: Path) -> None:
    class App:
        def __init__(self, fill: float) -> None:
            self.w, self.step = laid_out(torch.full((10, 6), fill), "both"), int(fill)

        def state_dict(self) -> dict[str, Any]:
            return {"w": self.w, "step": self.step}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    app = App(0)
    save({"app": App(7)}, tmp_path)
    load({"app": app}, tmp_path)
    assert app.loaded["step"] == 7 and app.loaded["w"] is app.w
    assert value_of(app.w).unique().tolist() == [7]


def test_a_planner_of_ones_own(tmp_path: Path) -> None:
    """Subclasses of torch's planners see shards, as under torch."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    class Saver(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            object = super().transform_object(write_item, object)
            return object * 2 if isinstance(object, torch.Tensor) else object

    class Loader(DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            seen.append((read_item.dest_index.fqn, tuple(tensor.shape)))

    save({"x": laid_out(VALUE, "both")}, tmp_path, planner=Saver())
    state = {"x": laid_out(torch.zeros(10, 6), "five devices"), "new": 1}
    load(state, tmp_path, planner=Loader(allow_partial_load=True))
    assert same(value_of(state["x"]), VALUE * 2) and state["new"] == 1
    assert {name for name, _ in seen} == {"x"} and sum(a * b for _, (a, b) in seen) == 60


def test_the_older_name_of_load(tmp_path: Path) -> None:
    save({"x": laid_out(VALUE, "both")}, tmp_path)
    state = {"x": laid_out(torch.zeros(10, 6), "rows")}
    with pytest.warns(FutureWarning):
        dcp.load_state_dict(state, dcp.FileSystemReader(tmp_path), no_dist=True)
    assert same(value_of(state["x"]), VALUE)


def test_the_default_group_of_all_devices(tmp_path: Path) -> None:
    torch.distributed.init_process_group("xla")
    try:
        dcp.save({"x": laid_out(VALUE, "both")}, checkpoint_id=tmp_path)
        state = {"x": laid_out(torch.zeros(10, 6), "rows")}
        dcp.load(state, checkpoint_id=tmp_path)
    finally:
        torch.distributed.destroy_process_group()
    assert same(value_of(state["x"]), VALUE)


# --- async_save ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stager", "writer", "async stager"])
def test_async_save_has_the_values_of_the_call(tmp_path: Path, how: str) -> None:
    x, plain, app = laid_out(VALUE, "both"), VALUE.clone(), {"n": 1}
    kwargs: dict[str, Any] = {"checkpoint_id": tmp_path}
    if how == "writer":
        kwargs = {"storage_writer": dcp.FileSystemWriter(tmp_path)}
    elif how == "async stager":
        options = StagingOptions(False, False, True, False)
        kwargs["async_stager"] = DefaultStager(options)
    future = dcp.async_save({"x": x, "plain": plain, "app": app}, no_dist=True, **kwargs)
    if how == "async stager":
        future.staging_completion.result(60)
    step = xd.compile(lambda: x.zero_())
    step()  # donates the array
    plain.zero_()
    getattr(future, "upload_completion", future).result(60)
    if how == "async stager":
        kwargs["async_stager"].close()
    state = {"x": laid_out(torch.ones(10, 6), "rows"), "plain": torch.ones(10, 6), "app": {"n": 0}}
    load(state, tmp_path)
    assert same(value_of(state["x"]), VALUE) and same(state["plain"], VALUE)
    assert state["app"] == {"n": 1}


def test_async_save_of_tuples_with_tensors_is_refused(tmp_path: Path) -> None:
    state = {"a": [{"pair": (laid_out(VALUE, "rows"), 1)}]}
    with pytest.raises(xd.UnsupportedOpError, match=r"'a\.0\.pair' is a tuple"):
        dcp.async_save(state, checkpoint_id=tmp_path, no_dist=True)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("reduce_op", ["sum", "max"])
def test_partial_is_refused_by_name(tmp_path: Path, reduce_op: str) -> None:
    mesh = make_mesh("2x4")
    placed = [Partial(reduce_op), Shard(0)]
    x = torch.distributed.tensor.DTensor.from_local(torch.ones(2, 2).to("xla"), mesh, placed)
    for call in (save, load, lambda s, p: dcp.async_save(s, checkpoint_id=p, no_dist=True)):
        with pytest.raises(xd.UnsupportedOpError, match=r"'model\.head\.w' .*[Pp]artial") as error:
            call({"model": {"head": {"w": x}}}, tmp_path)
        assert "redistribute" in str(error.value)


def test_saving_in_a_compiled_step_is_refused(tmp_path: Path) -> None:
    x = laid_out(VALUE, "both")
    step = xd.compile(lambda: save({"x": x}, tmp_path))
    with pytest.raises(xd.DataDependentError, match="saving 'x' to a checkpoint"):
        step()


def test_a_failed_load_leaves_tensors_as_they_were(tmp_path: Path) -> None:
    save({"x": laid_out(VALUE, "both"), "y": laid_out(VALUE, "rows")}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    x = laid_out(torch.ones(10, 6), "rows")
    with pytest.raises(xd.CheckpointError, match=f"{file.name}: the file has"):
        load({"x": x}, tmp_path)
    assert value_of(x).unique().tolist() == [1]


def test_a_checkpoint_that_lacks_shards_is_refused(tmp_path: Path) -> None:
    """As one that only one of several processes has saved."""
    save({"x": laid_out(VALUE, "rows")}, tmp_path)
    metadata = metadata_of(tmp_path)
    metadata.state_dict_metadata["x"].chunks.pop()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(xd.CheckpointError, match="of the 60 elements of 'x' the checkpoint has 48"):
        load({"x": laid_out(VALUE, "both")}, tmp_path)


def test_objects_of_classes_want_torchs_planner(tmp_path: Path) -> None:
    x = laid_out(VALUE, "rows")
    save({"x": x, "path": Path("a")}, tmp_path)
    with pytest.raises(xd.CheckpointError, match="'path' in the checkpoint is no tensor and no"):
        load({"x": x, "path": None}, tmp_path)
    state = {"x": x, "path": None}
    load(state, tmp_path, planner=DefaultLoadPlanner())
    assert state["path"] == Path("a")


def test_missing_keys_are_torchs_error(tmp_path: Path) -> None:
    save({"x": laid_out(VALUE, "rows")}, tmp_path)
    with pytest.raises(BaseException, match="Missing key in checkpoint state_dict: y"):
        load({"y": laid_out(VALUE, "rows")}, tmp_path)


def test_plain_torch_is_left_alone(tmp_path: Path) -> None:
    """Also what it unpickles."""
    save({"x": VALUE, "path": Path("a")}, tmp_path)
    state: dict[str, Any] = {"x": torch.zeros(10, 6), "path": None}
    load(state, tmp_path)
    assert same(state["x"], VALUE) and state["path"] == Path("a")
