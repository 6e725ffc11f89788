"""The behaviour that torch_xla's public ``test/spmd/test_xla_sharding.py`` asks for, test by test.

Written from what those tests check, with values of CPU torch. `docs/torch_xla.md` has the list, and
which of them have no meaning here.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import xla_dtensor as xd
import xla_dtensor.compat.torch_xla as torch_xla
import xla_dtensor.compat.torch_xla.core.xla_model as xm
import xla_dtensor.compat.torch_xla.debug.metrics as met
import xla_dtensor.compat.torch_xla.distributed.spmd as xs
import xla_dtensor.compat.torch_xla.runtime as xr
from tests.compat.torch_xla.models import DEVICES, TwoLayers, mesh_of, tiled
from xla_dtensor.compat.torch_xla import _XLAC
from xla_dtensor.compat.torch_xla.distributed.spmd.xla_sharding import EinsumLinear
from xla_dtensor.errors import PerDeviceValueError, UnsupportedOpError

spec_of = _XLAC._get_xla_sharding_spec
LINE = (0, 1, 2, 3, 4, 5, 6, 7)


@pytest.fixture(autouse=True)
def _no_global_mesh() -> Any:
    yield
    xs.set_global_mesh(None)


def on_xla(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor on the CPU, and the same on the devices."""
    value = torch.randn(*shape)
    return value, value.to(xm.xla_device())


# --- what mark_sharding makes of a tensor ---------------------------------------------------------


def test_the_result_is_a_sharded_tensor_and_the_tensor_itself() -> None:
    value, x = on_xla(1, 8)
    marked = xs.mark_sharding(x, mesh_of((1, 8)), (0, 1))
    assert marked is x and isinstance(x, xs.XLAShardedTensor)
    assert torch.equal(x.cpu(), value)


def test_repr() -> None:
    model = TwoLayers().to(xm.xla_device())
    x = torch.randn(8, 16).to(xm.xla_device())
    assert "XLAShardedTensor" not in str(model(x))
    xs.mark_sharding(x, mesh_of((8, 1)), (0, 1))
    assert "XLAShardedTensor" in str(x) and "XLAShardedTensor" in str(model(x))


def test_shards() -> None:
    t = torch.arange(8.0)
    x = xs.mark_sharding(t.to("xla"), mesh_of((8,)), (0,))
    assert len(x.local_shards) == DEVICES
    for i, shard in enumerate(x.local_shards):
        assert shard.data.device.type == "cpu" and shard.data.tolist() == [i]
        assert shard.indices[0] == slice(i, i + 1, 1) and torch.equal(shard.data, t[shard.indices])
        assert shard.replica_id == 0 and shard.shard_device == f"xla:{i}"


def test_shards_of_a_dim_that_does_not_divide() -> None:
    t = torch.arange(9.0)
    x = xs.mark_sharding(t.to("xla"), mesh_of((8,)), (0,))
    assert len(x.local_shards) == DEVICES
    for i, shard in enumerate(x.local_shards):
        start, stop = min(2 * i, 9), min(2 * (i + 1), 9)
        assert shard.unpadded_data.tolist() == list(range(start, stop))
        assert torch.equal(shard.unpadded_data, t[shard.indices]) and shard.replica_id == 0


def test_shards_of_a_replicated_tensor() -> None:
    t = torch.arange(8.0)
    x = xs.mark_sharding(t.to("xla"), mesh_of((8,)), (None,))
    assert [shard.replica_id for shard in x.local_shards] == list(range(8))
    assert all(torch.equal(shard.data, t) for shard in x.local_shards)
    assert all(torch.equal(t[shard.indices], t) for shard in x.local_shards)


def test_shards_of_a_partially_replicated_tensor() -> None:
    t = torch.arange(64.0).reshape(8, 8)
    x = xs.mark_sharding(t.to("xla"), mesh_of((4, 2)), (None, 1))
    for i, shard in enumerate(x.local_shards):
        assert shard.data.shape == (8, 4)
        start = 4 * (i % 2)
        assert shard.indices == (slice(0, 8, 1), slice(start, start + 4, 1))
        assert torch.equal(shard.data, t[shard.indices])
        assert shard.replica_id == i // 2


def test_load_local_shards() -> None:
    t = torch.arange(8.0) + 1
    x = xs.mark_sharding(t.to("xla"), mesh_of((8,)), (0,))
    shards = x.local_shards
    for shard in shards:
        shard.data *= -1
    x.load_local_shards_(shards)
    assert torch.equal(x.cpu(), -t) and x.partition_spec == (0,)
    with pytest.raises(RuntimeError, match="one of each"):
        x.load_local_shards_(shards[:-1])
    for shard in shards:
        shard.data = torch.randn(2)
    with pytest.raises(RuntimeError, match="gets one of"):
        x.load_local_shards_(shards)
    assert torch.equal(x.cpu(), -t)  # nothing was written
    replicated = xs.mark_sharding(t.to("xla"), mesh_of((8,)), (None,))
    with pytest.raises(RuntimeError, match="whole on every device"):
        replicated.load_local_shards_(replicated.local_shards)


def test_sharding_type() -> None:
    t = torch.randn(8, 16).to("xla")
    mesh = mesh_of((2, 4))
    assert _XLAC._get_xla_sharding_type(t) is None
    assert xs.mark_sharding(t, mesh, (0, 1)).sharding_type == xs.ShardingType.TILED
    xs.clear_sharding(t)
    assert xs.mark_sharding(t, mesh, (None, None)).sharding_type == xs.ShardingType.REPLICATED
    xs.clear_sharding(t)
    assert xs.mark_sharding(t, mesh, (None, 1)).sharding_type == xs.ShardingType.PARTIAL


# --- partition specs ------------------------------------------------------------------------------

SPECS: list[tuple[tuple[int, ...], tuple[int, ...], Any, str, tuple[int, ...]]] = [
    # mesh, tensor, spec, what XLA calls it, the shape of a shard
    ((1, 8), (1, 16), (0, 1), tiled([1, 8]), (1, 2)),
    ((1, 1, 2, 4), (2, 4, 8, 16), (0, 1, 2, 3), tiled([1, 1, 2, 4]), (2, 4, 4, 4)),
    ((1, 8), (8, 16), (1, 0), tiled([8, 1]), (1, 16)),
    ((2, 1, 4), (4, 8, 16), (1, 2, 0), tiled([1, 4, 2], [0, 4, 1, 5, 2, 6, 3, 7]), (4, 2, 8)),
    (
        (2, 1, 1, 4),
        (8, 2, 3, 4),
        (3, 1, 2, 0),
        tiled([4, 1, 1, 2], [0, 4, 1, 5, 2, 6, 3, 7]),
        (2, 2, 3, 2),
    ),
    ((2, 4), (4, 4), (0, None), tiled([2, 1], copies=4), (2, 4)),
    ((2, 1, 4), (4, 3, 4), (1, None, 0), tiled([1, 1, 2], copies=4), (4, 3, 2)),
    ((2, 4), (16,), ((0, 1),), tiled([8]), (2,)),
    ((2, 4), (4, 4, 8), (None, 0, 1), tiled([1, 2, 4]), (4, 2, 2)),
    (
        (2, 4, 1),
        (8, 8),
        (2, 1),
        tiled([1, 4], [0, 4, 1, 5, 2, 6, 3, 7], copies=2),
        (8, 2),
    ),
]


@pytest.mark.parametrize(("mesh", "shape", "spec", "text", "piece"), SPECS)
def test_partition_specs(
    mesh: tuple[int, ...], shape: tuple[int, ...], spec: Any, text: str, piece: tuple[int, ...]
) -> None:
    value, x = on_xla(*shape)
    other_value, other = on_xla(*shape)
    xs.mark_sharding(x, mesh_of(mesh), spec)
    assert spec_of(x) == text == x.sharding_spec
    assert all(shard.data.shape == piece for shard in x.local_shards)
    torch.testing.assert_close((x + other).cpu(), value + other_value)


def test_named_and_tupled_specs() -> None:
    mesh = mesh_of((1, 2, 4), ("r", "b", "m"))
    ids = mesh.get_logical_mesh()
    specs: dict[Any, str] = {
        (("r", "b"), None): tiled([2, 1], copies=4),
        (None, ("b", "m")): tiled([1, 8]),
        (None, ("r", "m")): tiled([1, 4], ids.transpose(0, 2, 1), copies=2),
        (None, ("m", "b")): tiled([1, 8], ids.transpose(2, 1, 0)),
    }
    for spec, text in specs.items():
        value, x = on_xla(16, 16)
        assert spec_of(xs.mark_sharding(x, mesh, spec)) == text
        assert torch.equal(x.cpu(), value)


def test_several_tuples_in_a_spec() -> None:
    mesh = mesh_of((1, 2, 4, 1), ("a", "b", "c", "d"))
    x = xs.mark_sharding(torch.randn(2, 4).to("xla"), mesh, (("a", "b"), ("c", "d")))
    assert spec_of(x) == tiled([2, 4])


def test_named_spec() -> None:
    x = torch.arange(64).reshape(8, 8).to("xla")
    xs.mark_sharding(x, mesh_of((1, 8), ("data", "model")), ("model", "data"))
    assert "devices=[8,1]" in spec_of(x)


def test_devices_in_another_order() -> None:
    mesh = mesh_of((1, 8), ids=np.flip(np.arange(8)))
    value, x = on_xla(8, 16)
    xs.mark_sharding(x, mesh, (0, 1))
    assert spec_of(x) == tiled([1, 8], LINE[::-1])
    by_device = {shard.device: shard.data for shard in x.local_shards}
    assert torch.equal(by_device[7], value[:, :2])


def test_scalar() -> None:
    x = torch.tensor(1.0).to("xla")
    marked = xs.mark_sharding(x, mesh_of((1, 8)), ())
    assert marked == x and marked.sharding_spec == "{replicated}"
    assert marked.sharding_type == xs.ShardingType.REPLICATED
    assert [shard.data.item() for shard in marked.local_shards] == [1.0] * 8
    assert [shard.replica_id for shard in marked.local_shards] == list(range(8))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ((0,), "Partition spec length"),
        ((0, 2), "axes 0 to 1"),
        ((0, -1), "axes 0 to 1"),
        ((0, 0), "can shard one dim"),
        (((0, 1), 1), "can shard one dim"),
        (("x", None), "is not defined"),
        ((1.5, None), "is not supported"),
    ],
)
def test_specs_that_do_not_fit(spec: Any, said: str) -> None:
    value, x = on_xla(4, 8)
    with pytest.raises(AssertionError, match=said):
        xs.mark_sharding(x, mesh_of((2, 4)), spec)
    assert not isinstance(x, xs.XLAShardedTensor) and torch.equal(x.cpu(), value)


def test_a_cpu_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="bring it to the devices"):
        xs.mark_sharding(torch.ones(8), mesh_of((8,)), (0,))


# --- clearing, marking again, copies --------------------------------------------------------------


def test_clear_sharding() -> None:
    value, x = on_xla(2, 4, 8)
    xs.mark_sharding(x, mesh_of((1, 1, 8)), (0, 1, 2))
    assert spec_of(x) != ""
    assert xs.clear_sharding(x) is x
    assert spec_of(x) == "" and torch.equal(x.cpu(), value)
    assert not isinstance(x, xs.XLAShardedTensor)


def test_marking_a_replicated_tensor_again() -> None:
    value, x = on_xla(2, 8)
    mesh = mesh_of((1, 8))
    xs.mark_sharding(x, mesh, (None, None))
    assert spec_of(x) == "{replicated}"
    xs.mark_sharding(x, mesh, (0, 1))
    assert spec_of(x) == tiled([1, 8]) and torch.equal(x.cpu(), value)


def test_marking_a_sharded_tensor_differently() -> None:
    value, x = on_xla(8, 8)
    xs.mark_sharding(x, mesh_of((8, 1)), (0, 1))
    xs.mark_sharding(x, mesh_of((2, 4)), (None, 1))
    assert spec_of(x) == tiled([1, 4], [0, 4, 1, 5, 2, 6, 3, 7], copies=2)
    assert torch.equal(x.cpu(), value)


def test_deep_copy_and_clone() -> None:
    value, x = on_xla(4, 8)
    xs.mark_sharding(x, mesh_of((1, 8)), (0, 1))
    for other in (copy.deepcopy(x), x.clone()):
        assert spec_of(other) == spec_of(x) == tiled([1, 8])
        other += 1
    assert torch.equal(x.cpu(), value)


def test_marks_survive_mark_step() -> None:
    x = torch.ones(2, 8).to("xla")
    xs.mark_sharding(x, mesh_of((1, 8)), (0, 1))
    with warnings.catch_warnings(action="ignore"):
        xm.mark_step()
        torch_xla.sync(wait=True)
    assert spec_of(x) == tiled([1, 8])


def test_in_place_operations_keep_the_mark() -> None:
    x = torch.ones(2, 8).to("xla")
    xs.mark_sharding(x, mesh_of((1, 8)), (0, 1))
    x.add_(1)
    x += 2
    assert spec_of(x) == tiled([1, 8]) and x.cpu().eq(4).all()


def test_integers_and_the_way_to_the_host() -> None:
    t = torch.arange(64).reshape(8, 8)
    x = xs.mark_sharding(t.clone().to("xla"), mesh_of((8, 1)), (0, 1))
    assert torch.equal(x.cpu(), t) and torch.equal(x.to("cpu"), t) and x.tolist() == t.tolist()


def test_sending_to_the_devices_with_a_sharding() -> None:
    t = torch.arange(16.0).reshape(1, 16)
    mesh = mesh_of((1, 8))
    spec = xs.ShardingSpec(mesh, (0, 1))
    assert spec.can_apply(t) and not spec.can_apply(t[0])
    (sent,) = xm.send_cpu_data_to_device([t], xm.xla_device(), input_sharding=spec)
    explicit = xs.mark_sharding(t.to("xla"), mesh, (0, 1))
    assert spec_of(sent) == spec_of(explicit) and torch.equal(sent.cpu(), t)
    in_place = t.to("xla")
    spec.apply(in_place)
    assert spec_of(in_place) == spec_of(explicit)


# --- operations -----------------------------------------------------------------------------------


def test_a_product_of_a_partially_replicated_tensor() -> None:
    (a, x), (b, y) = on_xla(4, 4), on_xla(4, 4)
    xs.mark_sharding(x, mesh_of((2, 4)), (0, None))
    shards = x.local_shards
    assert torch.equal(shards[0].data, shards[1].data)
    torch.testing.assert_close((x @ y).cpu(), a @ b)


def test_addmm() -> None:
    (a, x), (b, w), (c, bias) = on_xla(4, 16), on_xla(16, 8), on_xla(4, 8)
    mesh = mesh_of((2, 4))
    xs.mark_sharding(x, mesh, (0, None))
    xs.mark_sharding(w, mesh, (None, 1))
    torch.testing.assert_close((x @ w + bias).cpu(), a @ b + c)


def test_unsharded_tensors_compute_as_ever() -> None:
    x = torch.tensor([[1.0, 2, 3, 4]], device=xm.xla_device())
    y = torch.tensor([[8.0, 7, 6, 5]], device=xm.xla_device())
    assert (x + y).tolist() == [[9, 9, 9, 9]] and spec_of(x + y) == ""


def test_several_operations() -> None:
    mesh = mesh_of((1, 8))
    (a, x), (b, y), (c, z) = on_xla(2, 8), on_xla(2, 8), on_xla(2, 8)
    xs.mark_sharding(x, mesh, (0, 1))
    torch.testing.assert_close((x + y).cpu(), a + b)
    xs.mark_sharding(z, mesh, (0, 1))
    torch.testing.assert_close((x * z + y).cpu(), a * c + b)


def test_marking_a_result() -> None:
    (a, x), (b, y) = on_xla(1, 16), on_xla(1, 16)
    total = xs.mark_sharding(x + y, mesh_of((1, 8)), (0, 1))
    assert spec_of(total) == tiled([1, 8])
    total += 0
    torch.testing.assert_close(total.cpu(), a + b)


def test_marking_one_of_two_results() -> None:
    value, x = on_xla(8, 8)
    largest, where = torch.max(x, 1)
    xs.mark_sharding(largest, mesh_of((8,)), (0,))
    assert spec_of(largest) != "" and spec_of(where) == ""
    assert torch.equal(where.cpu(), value.max(1).indices)


def test_marking_what_something_was_computed_from() -> None:
    value, x = on_xla(8, 16)
    y = x * 5
    xs.mark_sharding(x, mesh_of((1, 8)), (1, 0))
    assert spec_of(x) == tiled([8, 1])
    torch.testing.assert_close(y.cpu(), value * 5)
    torch.testing.assert_close(x.cpu(), value)


def test_equal_values_in_two_shardings() -> None:
    x, y = torch.ones(2, 8).to("xla"), torch.ones(2, 8).to("xla")
    xs.mark_sharding(x, mesh_of((1, 8)), (0, 1))
    assert torch.equal((x + 0).cpu(), (y + 0).cpu())
    assert (x + 0)._form != (y + 0)._form  # and so no program of one serves the other


def test_an_activation_keeps_its_history() -> None:
    (a, x), (b, w) = on_xla(4, 8), on_xla(8, 16)
    b.requires_grad_()
    w.requires_grad_()
    plain, hidden = a @ b, x @ w
    node = hidden.grad_fn
    xs.mark_sharding(hidden, mesh_of((8,)), (None, 0))
    assert hidden.grad_fn is node and hidden.requires_grad and spec_of(hidden) == tiled([1, 8])
    hidden.square().sum().backward()
    plain.square().sum().backward()
    torch.testing.assert_close(w.grad.cpu(), b.grad)


def test_marking_after_a_forward_pass_has_used_it() -> None:
    (a, x), (b, w) = on_xla(4, 8), on_xla(8, 8)
    b.requires_grad_()
    w.requires_grad_()
    loss, expected = (x @ w).square().sum(), (a @ b).square().sum()
    xs.mark_sharding(w, mesh_of((8,)), (None, 0))
    loss.backward()
    expected.backward()
    torch.testing.assert_close(w.grad.cpu(), b.grad)
    assert w.grad.placements == w.placements


# --- models ---------------------------------------------------------------------------------------


def trained(model: nn.Module, data: torch.Tensor, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_with_one_sharded_weight() -> None:
    plain = TwoLayers()
    model = copy.deepcopy(plain).to(xm.xla_device())
    data = torch.randn(8, 16)
    expected = trained(plain, data)
    weight = model.fc1.weight
    xs.mark_sharding(weight, mesh_of((1, 8)), (0, 1))
    assert model.fc1.weight is weight and isinstance(weight, nn.Parameter)
    actual = trained(model, data.to("xla"))
    assert spec_of(model.fc1.weight) == tiled([1, 8]) and spec_of(model.fc2.weight) == ""
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(model.fc1.weight.cpu(), plain.fc1.weight)
    torch.testing.assert_close(model.fc2.weight.cpu(), plain.fc2.weight)


def test_an_optimizer_made_before_the_mark_trains_the_sharded_weight() -> None:
    plain = nn.Linear(8, 8)
    model = copy.deepcopy(plain).to("xla")
    data = torch.randn(4, 8)
    losses = []
    for layer, x in ((plain, data), (model, data.to("xla"))):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        layer(x).square().mean().backward()
        optimizer.step()  # it has a state, and the weight a gradient, when it is marked
        if layer is model:
            xs.mark_sharding(layer.weight, mesh_of((8,)), (0, None))
        layer(x).square().mean().backward()  # adds to the first gradient
        optimizer.step()
        losses.append(layer(x).square().mean().item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    torch.testing.assert_close(model.weight.cpu(), plain.weight, rtol=1e-4, atol=1e-5)


def test_hooks_and_attributes_of_a_parameter_stay() -> None:
    layer = nn.Linear(8, 8).to("xla")
    seen = []
    layer.weight.mine = "a mark"
    handle = layer.weight.register_hook(lambda grad: seen.append(grad.shape))
    xs.mark_sharding(layer.weight, mesh_of((8,)), (0, None))
    layer(torch.ones(2, 8, device="xla")).sum().backward()
    assert seen == [(8, 8)] and layer.weight.mine == "a mark"
    handle.remove()
    layer(torch.ones(2, 8, device="xla")).sum().backward()
    assert len(seen) == 1


def test_state_dict_and_module_to_the_cpu() -> None:
    plain = TwoLayers()
    model = copy.deepcopy(plain).to("xla")
    xs.mark_sharding(model.fc1.weight, mesh_of((8,)), (0, None))
    loaded = TwoLayers()
    loaded.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    assert torch.equal(loaded.fc1.weight, plain.fc1.weight)
    model.load_state_dict(TwoLayers().state_dict())
    assert spec_of(model.fc1.weight) == tiled([8, 1])
    assert not torch.equal(model.fc1.weight.cpu(), plain.fc1.weight)
    model.cpu()
    assert type(model.fc1.weight) is nn.Parameter and model.fc1.weight.device.type == "cpu"


def test_patched_linear() -> None:
    plain = TwoLayers()
    model = xs.apply_xla_patch_to_nn_linear(copy.deepcopy(plain).to("xla"))
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(model(x.to("xla")).cpu(), plain(x))
    patched = xs.xla_patched_nn_linear_forward(model.fc1, x.to("xla"))
    torch.testing.assert_close(patched.cpu(), plain.fc1(x))
    x.requires_grad_()
    given = x.detach().to("xla").requires_grad_()
    direct = xs.XLAPatchedLinear.apply(given, model.fc1.weight, model.fc1.bias)
    torch.testing.assert_close(direct.detach().cpu(), plain.fc1(x).detach())
    direct.sum().backward()
    plain.fc1(x).sum().backward()
    pairs = ((given, x), (model.fc1.weight, plain.fc1.weight), (model.fc1.bias, plain.fc1.bias))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
    assert isinstance(model.fc1, EinsumLinear)


def test_optimization_barrier_changes_nothing() -> None:
    plain = TwoLayers()
    model = copy.deepcopy(plain).to("xla")
    xs.apply_backward_optimization_barrier(model.fc2)
    x = torch.randn(2, 16)
    model(x.to("xla")).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(model.fc2.weight.grad.cpu(), plain.fc2.weight.grad)


# --- meshes ---------------------------------------------------------------------------------------


def test_global_mesh() -> None:
    mesh = mesh_of((1, 8))
    assert xs.get_global_mesh() is None
    xs.set_global_mesh(mesh)
    assert xs.get_global_mesh() is mesh


def test_1d_mesh() -> None:
    mesh = xs.get_1d_mesh("data")
    x = xs.mark_sharding(torch.randn(8, 8).to("xla"), mesh, ("data", None))
    assert len(x.local_shards) == DEVICES
    assert mesh.mesh_shape == (xr.global_runtime_device_count(),) and mesh.axis_names == ("data",)
    unnamed = xs.get_1d_mesh()
    assert unnamed.mesh_shape == (DEVICES,) and unnamed.axis_names is None


def test_what_a_mesh_says() -> None:
    mesh = mesh_of((2, 4), ("x", "y"))
    assert mesh.size() == 8 and list(mesh.shape().items()) == [("x", 2), ("y", 4)]
    assert list(mesh_of((2, 4)).shape().items()) == [(0, 2), (1, 4)]
    assert mesh.get_logical_mesh().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.get_axis_name_idx("y") == 1 and mesh.get_axis_name_idx("z") is None
    assert mesh.device_ids.tolist() == list(range(8))
    assert (mesh.mesh_shape, mesh.axis_names) == ((2, 4), ("x", "y"))
    assert mesh_of((2, 4)).axis_names is None


@pytest.mark.parametrize(
    ("ids", "shape", "names"),
    [
        (range(8), (2, 2), None),  # not as many devices as the shape has
        (range(8), (4, 4), None),
        ([0, 1, 2, 3, 4, 5, 6, 6], (8,), None),  # one twice
        ([1, 2, 3, 4, 5, 6, 7, 8], (8,), None),  # one that there isn't
        ([-1, 1, 2, 3, 4, 5, 6, 7], (8,), None),
        (range(8), (2, 4), ("x",)),  # not a name for each axis
        (range(8), (2, 4), ("x", "y", "z")),
        (range(8), (2, 4), ("x", "x")),  # one name twice
    ],
)
def test_meshes_that_can_not_be(ids: Any, shape: tuple[int, ...], names: Any) -> None:
    with pytest.raises(AssertionError):
        xs.Mesh(ids, shape, names)


def test_a_mesh_of_a_part_of_the_devices() -> None:
    mesh_of((8,))  # torch_xla wants all of them
    value, x = on_xla(8, 4)
    xs.mark_sharding(x, xs.Mesh(range(4), (4, 1)), (0, None))
    assert len(x.local_shards) == 4 and torch.equal((x * 2).cpu(), value * 2)


def test_hybrid_mesh_of_one_slice() -> None:
    hybrid = xs.HybridMesh(ici_mesh_shape=(1, 8))
    assert hybrid.get_logical_mesh().shape == mesh_of((1, 8)).get_logical_mesh().shape
    with pytest.raises(ValueError, match="Invalid dcn_mesh_shape"):
        xs.HybridMesh(ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 1))


def test_hybrid_mesh_of_two_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slices of 2x2 chips, as a TPU v4-8 tells of them, in no order."""
    where = {2: (0, 0, 0), 1: (1, 0, 0), 0: (0, 1, 0), 3: (1, 1, 0)}
    where |= {4: (0, 0, 0), 7: (1, 0, 0), 6: (0, 1, 0), 5: (1, 1, 0)}
    attributes = [
        {
            "coords": list(coords),
            "core_on_chip": 0,
            "slice_index": number // 4,
            "name": f"TPU:{number}",
        }
        for number, coords in where.items()
    ]
    monkeypatch.setattr(xr, "global_runtime_device_attributes", lambda: attributes)
    hybrid = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1))
    assert hybrid.get_logical_mesh().tolist() == [[2, 1], [0, 3], [4, 7], [6, 5]]
    with pytest.raises(ValueError, match="Provide dcn_mesh_shape"):
        xs.HybridMesh(ici_mesh_shape=(2, 4))


# --- from shards ----------------------------------------------------------------------------------


def test_from_replicated_shards() -> None:
    sharding = mesh_of((8,)).get_op_sharding((None,))
    shards = [torch.arange(4)] * DEVICES
    for shape in ((), (shards[0].shape,)):
        made = _XLAC._global_tensor_from_cpu_shards(shards, sharding, *shape)
        assert torch.equal(made.cpu(), shards[0])
    for wrong in ((5,), (3,), (2, 2)):
        with pytest.raises(RuntimeError):
            _XLAC._global_tensor_from_cpu_shards(shards, sharding, torch.Size(wrong))


def test_from_tiled_shards() -> None:
    sharding = mesh_of((8,)).get_op_sharding((0,))
    shards = [torch.tensor([i]) for i in range(DEVICES)]
    made = _XLAC._global_tensor_from_cpu_shards(shards, sharding)
    assert torch.equal(made.cpu(), torch.arange(8)) and made.partition_spec == (0,)
    with pytest.raises(RuntimeError):
        _XLAC._global_tensor_from_cpu_shards(shards[:-1], sharding)
    for wrong in ((16,), (1, 8)):
        with pytest.raises(RuntimeError):
            _XLAC._global_tensor_from_cpu_shards(shards, sharding, torch.Size(wrong))
    short = _XLAC._global_tensor_from_cpu_shards(shards, sharding, torch.Size((1,)))
    assert short.cpu().tolist() == [0]


def test_from_2d_shards() -> None:
    mesh = mesh_of((4, 2))
    shards = [torch.tensor([[i]]) for i in range(DEVICES)]
    made = _XLAC._global_tensor_from_cpu_shards(shards, mesh.get_op_sharding((0, 1)))
    assert torch.equal(made.cpu(), torch.arange(8).reshape(4, 2))
    columns = [torch.tensor([[i % 2]]) for i in range(DEVICES)]
    made = _XLAC._global_tensor_from_cpu_shards(columns, mesh.get_op_sharding((None, 1)))
    assert made.cpu().tolist() == [[0, 1]]


def test_from_shards_with_padding() -> None:
    sharding = mesh_of((8,)).get_op_sharding((0,))
    shards = list(torch.arange(64).reshape(8, 8))
    assert torch.equal(
        _XLAC._global_tensor_from_cpu_shards(shards, sharding).cpu(), torch.arange(64)
    )
    for missing in (1, 5, 7):
        size = torch.Size((64 - missing,))
        made = _XLAC._global_tensor_from_cpu_shards(shards, sharding, size)
        assert torch.equal(made.cpu(), torch.arange(64 - missing))
    for wrong in (65, 56, 1):
        with pytest.raises(RuntimeError):
            _XLAC._global_tensor_from_cpu_shards(shards, sharding, torch.Size((wrong,)))


# --- manual sharding ------------------------------------------------------------------------------


def test_full_to_shard_shape() -> None:
    x = torch.zeros(8, 8).to("xla")
    with pytest.raises(RuntimeError, match="isn't sharded"):
        _XLAC._spmd_full_to_shard_shape(x)
    xs.mark_sharding(x, mesh_of((1, 8)), (0, 1))
    piece = _XLAC._spmd_full_to_shard_shape(x.global_tensor)
    assert piece.shape == (8, 1) and piece.sharding_spec == "{manual}"
    assert piece.sharding_type == xs.ShardingType.MANUAL
    whole = xs.mark_sharding(torch.zeros(8, 4).to("xla"), mesh_of((8, 1)), (None, None))
    assert _XLAC._spmd_full_to_shard_shape(whole).shape == (8, 4)


def test_shard_to_full_shape() -> None:
    mesh = mesh_of((1, 8))
    x = xs.mark_sharding(torch.zeros(8, 8).to("xla"), mesh, (0, 1))
    sharding = mesh.get_op_sharding((0, 1))
    with pytest.raises(RuntimeError, match="of a sharded tensor"):
        _XLAC._spmd_shard_to_full_shape(x, sharding, x.shape, x.dtype)
    piece = _XLAC._spmd_full_to_shard_shape(x)
    back = _XLAC._spmd_shard_to_full_shape(piece + 1, sharding, x.shape, x.dtype)
    assert back.shape == (8, 8) and back.cpu().eq(1).all() and spec_of(back) == spec_of(x)


def test_manual_sharding_from_end_to_end() -> None:
    xs.set_global_mesh(mesh_of((1, 8)))
    value, x = on_xla(8, 8)
    piece = xs.enable_manual_sharding(x, (0, 1))
    assert piece.shape == (8, 1)
    back = xs.disable_manual_sharding(piece + 1, (0, 1), x.shape)
    torch.testing.assert_close(back.cpu(), value + 1)
    assert spec_of(x) == ""  # it stays what it was


def test_manual_sharding_has_a_gradient() -> None:
    mesh = mesh_of((2, 4), ("data", "model"))
    value, x = on_xla(4, 8)
    value.requires_grad_()
    x.requires_grad_()
    piece = xs.enable_manual_sharding(x, ("data", "model"), mesh=mesh)
    back = xs.disable_manual_sharding(piece.square(), ("data", "model"), x.shape, mesh=mesh)
    back.sum().backward()
    value.square().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), value.grad)


@pytest.mark.parametrize(("dim", "shape"), [(0, (1, 8)), (-1, (8, 1))])
def test_manual_reduce_scatter(dim: int, shape: tuple[int, int]) -> None:
    mesh = mesh_of((1, 8))
    xs.set_global_mesh(mesh)
    piece = xs.enable_manual_sharding(torch.ones(8, 8).to("xla"), (None, None)).global_tensor
    part = xd.collectives.reduce_scatter(piece, (mesh, 1), dim=dim)
    assert part.shape == shape and all(value.eq(8).all() for value in part.local_values())


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_manual_all_reduce(scale: float) -> None:
    xs.set_global_mesh(mesh_of((2, 4)))
    piece = xs.enable_manual_sharding(torch.ones(8, 8).to("xla"), (None, None)).global_tensor
    for groups in (None, [list(range(8))]):
        total = xm.all_reduce(xm.REDUCE_SUM, piece, scale, groups)
        back = xs.disable_manual_sharding(total, (None, None), total.shape)
        assert back.cpu().eq(8 * scale).all()
    rows = xm.all_reduce(xm.REDUCE_SUM, piece, groups=[[0, 1, 2, 3], [4, 5, 6, 7]])
    assert rows.cpu().eq(4).all()
    with pytest.raises(RuntimeError, match="lines along one of its axes"):
        xm.all_reduce(xm.REDUCE_SUM, piece, groups=[[0, 5], [1, 4], [2, 3], [6, 7]])


def test_a_tensor_that_differs_between_devices_is_no_one_value() -> None:
    mesh = mesh_of((8,))
    piece = xs.enable_manual_sharding(torch.arange(8.0).to("xla"), (0,), mesh=mesh)
    with pytest.raises(PerDeviceValueError, match="a value of its own"):
        xs.mark_sharding(piece, mesh, (0,))


# --- other ways to shard --------------------------------------------------------------------------


def test_mark_sharding_with_gradients() -> None:
    mesh = xs.get_1d_mesh("x")
    value, x = on_xla(8, 8)
    value.requires_grad_()
    x.requires_grad_()
    arrived: list[Any] = []
    hidden = x * 2
    y = xs.mark_sharding_with_gradients(hidden, mesh, ("x", None))
    assert spec_of(y) == tiled([8, 1]) and spec_of(hidden) == ""
    (y * y).register_hook(lambda grad: None)
    hidden.register_hook(lambda grad: arrived.append(grad))
    y.square().sum().backward()
    (value * 2).square().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), value.grad)
    assert arrived[0].shape == (8, 8)
    leaf = torch.arange(8.0, device="xla").requires_grad_()
    marked = xs.mark_sharding_with_gradients(leaf, mesh, (0,))
    marked.retain_grad()
    marked.sum().backward()
    assert spec_of(marked) == spec_of(marked.grad) == tiled([8])
    assert spec_of(leaf) == spec_of(leaf.grad) == "" and leaf.grad.tolist() == [1.0] * 8


def test_annotate_custom_sharding() -> None:
    """torch_xla's ``mark_sharding`` refuses a tensor that has been marked, and this is for those;
    here both do it."""
    value, x = on_xla(2, 4, 8, 8)
    xs.mark_sharding(x, mesh_of((1, 1, 4, 2)), (0, 1, 2, 3))
    xs.annotate_custom_sharding(x, mesh_of((1, 1, 1, 8)), (0, 1, 2, 3))
    assert spec_of(x) == tiled([1, 1, 1, 8])
    assert torch.equal((x + 1).cpu(), value + 1) and spec_of(x + 1) == spec_of(x)


def test_an_operation_that_torch_xla_takes_to_the_host() -> None:
    def table(device: Any) -> torch.Tensor:
        steps = torch.arange(0, 16, 2, device=device)[:8].float()
        angles = torch.outer(torch.arange(64, device=device), 1.0 / (10000.0 ** (steps / 16)))
        return torch.polar(torch.ones_like(angles), angles.float())

    found = table(xm.xla_device())
    assert found.device.type == "xla" and spec_of(found) == ""
    torch.testing.assert_close(found.cpu(), table("cpu"))


def test_shard_as() -> None:
    mesh = xs.get_1d_mesh("x")
    (a, x), (b, y) = on_xla(8, 8), on_xla(8, 8)
    xs.mark_sharding(x, mesh, ("x", None))
    one, other = xs.shard_as({"w": x, "none": None}, {"w": y, "none": None})
    assert spec_of(one["w"]) == spec_of(other["w"]) == tiled([8, 1])
    assert torch.equal(other["w"].cpu(), b) and torch.equal(one["w"].cpu(), a)
    with pytest.raises(AssertionError, match="other structures"):
        xs.shard_as([x], [x, y])
    with pytest.raises(AssertionError, match="other structures"):
        xs.shard_as([x], [None])


# --- counts ---------------------------------------------------------------------------------------


def test_metrics_count_programs() -> None:
    met.clear_all()
    assert met.counter_value("UncachedCompile") is None
    step = torch_xla.compile(lambda x: x + 2)
    x = xs.mark_sharding(torch.ones(2, 8).to("xla"), mesh_of((1, 8)), (0, 1))
    for _ in range(3):
        step(x)
    assert met.counter_value("UncachedCompile") == 1
    assert "UncachedCompile" in met.counter_names()
    assert "Counter: UncachedCompile\n  Value: 1" in met.metrics_report()
    assert met.metric_data("CompileTime") is None


def test_a_step_that_nobody_has_is_gone_and_stays_counted() -> None:
    met.clear_all()
    step = torch_xla.compile(lambda x: x + 3)
    step(torch.ones(3, device="xla"))
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None
    assert met.counter_value("UncachedCompile") == met.counter_value("Traces") == 1


def test_a_compiled_step_writes_to_the_memory_that_it_is_given() -> None:
    x = xs.mark_sharding(torch.ones(2, 8).to("xla"), mesh_of((1, 8)), (0, 1))
    step = torch_xla.compile(lambda: x.add_(1))
    step()
    array = x._storage_.array
    step()
    assert array.is_deleted() and x.cpu().eq(3).all()  # the program took it over


# --- inside of a compiled step --------------------------------------------------------------------


def test_marks_in_a_compiled_step() -> None:
    mesh = mesh_of((2, 4), ("data", "model"))
    plain = TwoLayers()
    model = copy.deepcopy(plain).to("xla")
    xs.mark_sharding(model.fc1.weight, mesh, ("model", None))
    data = torch.randn(8, 16)

    @torch_xla.compile
    def step(x: Any) -> Any:
        hidden = model.fc1(x)
        xs.mark_sharding(hidden, mesh, ("data", "model"))
        assert hidden.partition_spec == (0, 1)
        loss = model.fc2(torch.relu(hidden)).square().mean()
        loss.backward()
        return loss.detach()

    x = xs.mark_sharding(data.to("xla"), mesh, ("data", None))
    loss = plain(data).square().mean()
    loss.backward()
    for _ in range(2):
        model.zero_grad()
        torch.testing.assert_close(step(x).cpu(), loss.detach())
        torch.testing.assert_close(model.fc1.weight.grad.cpu(), plain.fc1.weight.grad)
    assert step.compilations == 1


def test_a_tensor_from_outside_is_not_marked_in_a_compiled_step() -> None:
    mesh = mesh_of((8,))
    x = torch.ones(8, 8).to("xla")
    with pytest.raises(UnsupportedOpError, match="before the step"):
        torch_xla.compile(lambda: xs.mark_sharding(x, mesh, (0, None)))()
    assert spec_of(x) == ""
    step = torch_xla.compile(lambda: xs.mark_sharding_with_gradients(x, mesh, (0, None)) * 2)
    assert spec_of(step()) == tiled([8, 1])


# --- views ----------------------------------------------------------------------------------------


def test_what_shared_memory_may_not_be_written_afterwards() -> None:
    value, x = on_xla(8, 8)
    view = x[0]
    xs.mark_sharding(x, mesh_of((8,)), (0, None))
    assert torch.equal(view.cpu(), value[0]) and torch.equal(x.cpu(), value)
    with pytest.raises(UnsupportedOpError, match="clone"):
        x.add_(1)
    with pytest.raises(UnsupportedOpError, match="clone"):
        view.add_(1)
    copied = x.clone()
    copied.add_(1)
    torch.testing.assert_close(copied.cpu(), value + 1)


def test_an_output_that_is_a_view_can_be_marked() -> None:
    value, x = on_xla(2, 4, 8)
    flat = x.view(8, 8)
    xs.mark_sharding(flat, mesh_of((8,)), (0, None))
    assert spec_of(flat) == tiled([8, 1])
    torch.testing.assert_close((flat * 2).cpu(), value.view(8, 8) * 2)
