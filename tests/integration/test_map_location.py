"""``torch.load(map_location=...)``: to xla devices, and away from them."""

import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import xla_dtensor as xd


def saved(thing, **how):
    file = io.BytesIO()
    torch.save(thing, file, **how)
    file.seek(0)
    return file


TO_XLA = ["xla", "xla:0", torch.device("xla"), {"cpu": "xla"}, b"xla"]
TO_CPU = ["cpu", torch.device("cpu"), {"xla:0": "cpu"}, {"xla": "cpu"}, lambda s, location: s]


@pytest.mark.parametrize("where", TO_XLA, ids=str)
@pytest.mark.parametrize("weights_only", [True, False])
def test_to_xla(where, weights_only):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = {"model": model.state_dict(), "step": 3, "empty": torch.zeros(0, 2)}
    loaded = torch.load(saved(state), map_location=where, weights_only=weights_only)
    assert loaded["step"] == 3 and loaded["empty"].shape == (0, 2)
    for name, value in model.state_dict().items():
        found = loaded["model"][name]
        assert found.device == torch.device("xla:0") and found.dtype == value.dtype
        assert torch.equal(found.cpu(), value) and found.stride() == value.stride()
    model.to("xla").load_state_dict(loaded["model"])


def test_a_whole_module_to_xla():
    model = nn.Linear(3, 3)
    loaded = torch.load(saved(model), map_location="xla", weights_only=False)
    assert isinstance(loaded.weight, nn.Parameter) and loaded.weight.requires_grad
    loaded(torch.ones(2, 3, device="xla")).sum().backward()
    assert loaded.weight.grad.tolist() == [[2.0] * 3] * 3


VIEWS = {
    "the same": lambda x: x,
    "a row": lambda x: x[1],
    "a column": lambda x: x[:, 2],
    "transposed": lambda x: x.t(),
    "flat": lambda x: x.view(-1),
    "every other": lambda x: x[::2, ::3],
    "expanded": lambda x: x[0, :1].expand(4),
}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", VIEWS)
def test_what_shares_memory_still_does(name, order):
    base = torch.arange(12.0).reshape(3, 4)
    view = VIEWS[name](base)
    pair = [("base", base), ("view", view)][::order]
    loaded = torch.load(saved(dict(pair)), map_location="xla")
    assert torch.equal(loaded["view"].cpu(), view) and loaded["view"].stride() == view.stride()
    loaded["base"].mul_(10)
    assert torch.equal(loaded["base"].cpu(), base * 10)
    assert torch.equal(loaded["view"].cpu(), view * 10)
    if name != "expanded":
        loaded["view"].add_(1)
        base.mul_(10)
        view.add_(1)
        assert torch.equal(loaded["base"].cpu(), base)


@pytest.mark.parametrize("where", TO_CPU, ids=lambda where: str(where)[:20])
@pytest.mark.parametrize("weights_only", [True, False])
def test_to_the_cpu(where, weights_only, mesh_2x4):
    value = torch.randn(8, 4)
    layouts = {
        "device": value.to("xla"),
        "sharded": xd.distribute_tensor(value, mesh_2x4, [xd.Shard(0), xd.Shard(1)]),
        "parameter": nn.Parameter(xd.distribute_tensor(value, mesh_2x4["tp"], [xd.Shard(1)])),
        "plain": value,
    }
    loaded = torch.load(saved(layouts), map_location=where, weights_only=weights_only)
    for name, found in loaded.items():
        assert type(found) is (nn.Parameter if name == "parameter" else torch.Tensor), name
        assert found.device.type == "cpu" and torch.equal(found, value), name
    assert loaded["parameter"].requires_grad


def test_what_was_sharded_stays_sharded_on_xla(mesh_2x4):
    x = xd.distribute_tensor(torch.randn(8, 4), mesh_2x4, [xd.Shard(0), xd.Shard(1)])
    for where in [None, *TO_XLA]:
        loaded = torch.load(saved({"x": x}), map_location=where)["x"]
        assert loaded.placements == x.placements and loaded.device_mesh == mesh_2x4
        assert torch.equal(loaded.full_tensor().cpu(), x.full_tensor().cpu())


@pytest.mark.slow
def test_a_file_of_more_devices_loads_on_the_cpu(mesh_2x4, tmp_path):
    x = xd.distribute_tensor(torch.ones(8, 4), mesh_2x4, [xd.Shard(0), xd.Shard(1)])
    path = str(tmp_path / "x.pt")
    torch.save({"x": x}, path)
    code = (
        "import jax, torch, xla_dtensor as xd\n"
        "jax.config.update('jax_num_cpu_devices', 1)\n"
        "assert len(jax.devices()) == 1\n"
        f"x = torch.load({path!r}, map_location='cpu')['x']\n"
        "assert type(x) is torch.Tensor and x.sum().item() == 32\n"
        f"try: torch.load({path!r})\n"
        "except xd.DeviceCountError: print('refused')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "refused\n", run.stderr


def test_to_meta(mesh_2x4):
    x = xd.distribute_tensor(torch.ones(8, 4), mesh_2x4, [xd.Shard(0), xd.Shard(1)])
    loaded = torch.load(saved({"x": x, "y": torch.ones(3)}), map_location="meta")
    assert loaded["x"].device.type == loaded["y"].device.type == "meta"
    assert loaded["x"].shape == (8, 4)


def test_it_ends_with_the_file(mesh_2x4):
    x = xd.distribute_tensor(torch.ones(8, 4), mesh_2x4, [xd.Shard(0), xd.Shard(1)])
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(b"nothing to read"), map_location="cpu", weights_only=False)
    assert torch.load(saved(x)).placements == x.placements
    assert torch.load(saved(torch.ones(2)), map_location="xla").device.type == "xla"
    assert torch.load(saved(torch.ones(2))).device.type == "cpu"


def test_a_file_inside_a_file():
    class Nested:
        def __reduce__(self):
            return load_bytes, (saved(torch.ones(2)).getvalue(),)

    loaded = torch.load(
        saved([torch.ones(1), Nested(), torch.ones(3)]), map_location="xla", weights_only=False
    )
    assert [each.device.type for each in loaded] == ["xla", "cpu", "xla"]


def load_bytes(data):
    return torch.load(io.BytesIO(data))


def test_what_is_refused():
    with pytest.raises(xd.UnsupportedOpError, match="there is no device xla:4"):
        torch.load(saved(torch.ones(2)), map_location="xla:4")


@pytest.mark.parametrize("where", [None, "xla", "cpu", {"cpu": "xla"}, {"xla": "cpu"}])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_file_of_the_old_format(device, where):
    """Its values come behind all tensors."""
    x = torch.arange(6.0, device=device).view(2, 3)
    module = torch.nn.Linear(2, 2).to(device)
    content = {"x": x, "row": x[1], "n": 3, "module": module, "half": torch.ones(2).bfloat16()}
    for new in (False, True):
        file = saved(content, _use_new_zipfile_serialization=new)
        loaded = torch.load(file, map_location=where, weights_only=False)
        if where is None:
            expected = device
        elif isinstance(where, dict):
            expected = where.get(device, device)
        else:
            expected = where
        assert loaded["n"] == 3
        found = {t.device.type for t in (loaded["x"], *loaded["module"].parameters())}
        assert found == {expected}
        assert torch.equal(loaded["x"].cpu(), x.cpu())
        assert torch.equal(loaded["module"].weight.cpu(), module.weight.cpu())
        assert loaded["half"].tolist() == [1, 1]
        assert loaded["row"].tolist() == [3, 4, 5]


def test_a_sharded_tensor_in_a_file_of_the_old_format(mesh_2x4):
    x = xd.distribute_tensor(torch.arange(32.0).view(8, 4), mesh_2x4, [xd.Shard(0), xd.Shard(1)])
    loaded = torch.load(saved([x], _use_new_zipfile_serialization=False), weights_only=False)[0]
    assert loaded.placements == x.placements
    assert torch.equal(loaded.full_tensor().cpu(), torch.arange(32.0).view(8, 4))


def test_a_file_of_the_old_format_to_the_cpu(mesh_2x4):
    x = xd.distribute_tensor(torch.ones(8, 4), mesh_2x4, [xd.Shard(0), xd.Shard(1)])
    old = saved({"x": x, "y": torch.ones(2)}, _use_new_zipfile_serialization=False)
    loaded = torch.load(old, map_location="cpu")
    assert loaded["x"].device.type == loaded["y"].device.type == "cpu"
