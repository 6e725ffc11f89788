"""``xd.abstract``: layouts without data. What a layout is, the same program with data says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import xla_dtensor as xd
from xla_dtensor.errors import DataDependentError, TopologyError
from xla_dtensor.runtime.abstract_array import AbstractArray


@pytest.fixture
def block() -> Iterator[xd.abstract]:
    with xd.abstract("cpu:8") as entered:
        yield entered


def make_mesh() -> Any:
    return xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


def by_hand() -> tuple[nn.Module, torch.Tensor]:
    mesh = make_mesh()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 6))

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            placements = [xd.Replicate(), xd.Shard(0) if name == "0" else xd.Replicate()]
            laid_out = xd.distribute_tensor(p.data, mesh, placements)
            module.register_parameter(key, nn.Parameter(laid_out))

    xd.distribute_module(model, mesh, shard)
    return model, xd.distribute_tensor(torch.randn(8, 16), mesh, [xd.Shard(0), xd.Replicate()])


def fsdp_and_tp() -> tuple[nn.Module, torch.Tensor]:
    mesh = make_mesh()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to("xla")
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    xd.fully_shard(model, mesh=mesh["dp"])
    return model, xd.from_device_values([torch.randn(4, 16) for _ in range(2)], mesh["dp"])


def fully_sharded() -> tuple[nn.Module, torch.Tensor]:
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40)).to("xla")
    xd.fully_shard(model, mesh=mesh)
    tokens = [torch.zeros(4, 3, dtype=torch.int64, device="cpu") for _ in range(8)]
    return model, xd.from_device_values(tokens, mesh)


def described(tensor: Any) -> tuple[Any, ...]:
    return (
        *(tensor.shape, tensor.dtype, tensor.stride(), getattr(tensor, "placements", None)),
        *(tensor._form.array_shape, str(getattr(tensor._form.sharding, "spec", None))),
    )


def train_once(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> list[Any]:
    """A step, eagerly; what comes of it, without the values."""
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    y = model(x)
    y.square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    optimizer.step()
    states = [v for p in model.parameters() for v in optimizer.state[p].values() if v.ndim]
    return list(map(described, [y, *model.parameters(), *grads, *states]))


@pytest.mark.parametrize("make", [by_hand, fsdp_and_tp, fully_sharded])
def test_layouts_are_those_of_the_program_with_data(make: Any) -> None:
    with_data = train_once(make)
    with xd.abstract("cpu:8"):
        assert train_once(make) == with_data


@pytest.mark.usefixtures("block")
def test_nothing_is_allocated() -> None:
    mesh = make_mesh()
    model = nn.Linear(2**18, 2**18)
    xd.distribute_module(model, mesh)
    nn.init.normal_(model.weight)
    for tensor in (model.weight, model.weight.t() * 2, copy.deepcopy(model).weight):
        assert isinstance(tensor.jax_array, AbstractArray)
        assert tensor.jax_array.nbytes == 2**38


@pytest.mark.usefixtures("block")
def test_cpu_tensors_stay_what_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    for tensor in (
        torch.zeros(3, device="cpu"),
        torch.tensor([1.0, 2.0]),
        torch.arange(4),
        torch.randn(3, generator=generator),
    ):
        assert tensor.device.type == "cpu"
    with torch.device("meta"):
        assert torch.zeros(3).device.type == "meta"
    assert torch.zeros(3).device.type == torch.empty(2, 2).device.type == "xla"


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (2.0, 3.0)], ids=["likely", "unlikely"])
def test_truncated_draws_ask_for_no_value(bounds: tuple[float, float]) -> None:
    """torch draws until all values are between the bounds; where there are none it needn't."""
    low, high = bounds
    replicated = [xd.Replicate()] * 2

    def drawn(device: str) -> torch.Tensor:
        return nn.init.trunc_normal_(torch.empty(64, 64, device=device), a=low, b=high)

    with xd.abstract("cpu:8"):
        weight = nn.Parameter(xd.distribute_tensor(torch.empty(8, 8), make_mesh(), replicated))
        with xd.abstract("cpu:8"):
            assert nn.init.trunc_normal_(weight, a=low, b=high) is weight
        assert nn.init.trunc_normal_(weight, a=low, b=high) is weight
        assert isinstance(weight.jax_array, AbstractArray)
        on_cpu = drawn("cpu")
    assert low <= on_cpu.min() and on_cpu.max() <= high
    on_xla = drawn("xla").cpu()
    assert low <= on_xla.min() and on_xla.max() <= high and on_xla.std() > 0


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_of_the_cpus_data_goes_on(shuffle: bool) -> None:
    """It draws a seed, which it reads."""
    rows = torch.arange(32).reshape(16, 2)
    batches = [*DataLoader(TensorDataset(rows), batch_size=4, shuffle=shuffle)]
    assert len(batches) == 4
    assert sorted(torch.cat([x for (x,) in batches]).flatten().tolist()) == [*range(32)]
    assert torch.empty((), dtype=torch.float32).device.type == "xla"
    assert torch.empty((2,), dtype=torch.int64).device.type == "xla"


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "a view": lambda x: x[0].cpu(),
    "numpy": lambda x: x.numpy(),
    "full tensor": lambda x: x.full_tensor().cpu(),
    "shards": lambda x: x.local_shards,
    "nonzero": lambda x: x.nonzero(),
}


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_value_is_refused(read: Callable[[Any], Any]) -> None:
    x = xd.distribute_tensor(torch.randn(8, 16), make_mesh(), [xd.Shard(0), xd.Replicate()])
    with pytest.raises(DataDependentError, match=r"has no value.*device='cpu'"):
        read(x)


@pytest.mark.usefixtures("block")
def test_what_has_no_value_prints_its_shape() -> None:
    x = xd.distribute_tensor(torch.randn(8, 16), make_mesh(), [xd.Shard(0), xd.Replicate()])
    assert "shape=[8, 16], dtype=torch.float32" in str(x)
    assert "shape=[]" in f"{x.sum()}"
    assert x[torch.tensor(1).to("xla")].shape == (16,)  # as in a compiled step


@pytest.mark.usefixtures("block")
def test_a_compiled_step_is_planned_not_called() -> None:
    step = xd.compile(lambda x: x * 2)
    with pytest.raises(DataDependentError, match=r"xd\.plan\(step"):
        step(torch.randn(4))


def test_after_the_block_all_is_as_before() -> None:
    with xd.abstract("cpu:8"):
        abstract_mesh = make_mesh()
        inside = xd.distribute_tensor(torch.ones(8), abstract_mesh, [xd.Shard(0), xd.Replicate()])
    mesh = make_mesh()
    assert mesh != abstract_mesh and abstract_mesh == inside.device_mesh
    x = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0), xd.Replicate()])
    assert (x + 1).full_tensor().tolist() == [2.0] * 8
    assert torch.zeros(2).device.type == "cpu"
    with pytest.raises(DataDependentError):
        inside.full_tensor().cpu()


def test_data_from_outside_is_not_lost() -> None:
    """Nothing is computed in the block, so nothing is written to what has values."""
    mesh = make_mesh()
    outside = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0), xd.Replicate()])
    plain = torch.ones(8, device="xla")
    unplaced = torch.nn.Linear(2, 2).to("xla")
    model = xd.distribute_module(torch.nn.Linear(8, 8), mesh)
    model(outside).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    weight = model.weight.full_tensor().cpu()  # type: ignore[operator]
    for write in (
        lambda: outside.add_(1),
        lambda: outside[0].zero_(),
        lambda: plain.copy_(torch.zeros(8)),
        lambda: xd.replicate(unplaced, mesh=make_mesh()["dp"]),
        optimizer.step,
    ):
        with pytest.raises(DataDependentError, match="has data"), xd.abstract("cpu:8"):
            write()
    assert outside.full_tensor().tolist() == plain.tolist() == [1.0] * 8
    assert torch.equal(model.weight.full_tensor().cpu(), weight)  # type: ignore[operator]


def test_an_exception_leaves_the_block_too() -> None:
    with pytest.raises(KeyError), xd.abstract("cpu:4"), xd.abstract("cpu:8"):
        raise KeyError
    assert torch.zeros(2).device.type == "cpu"
    assert torch.ones(2, device="xla").tolist() == [1.0, 1.0]


def test_a_second_thread_is_refused() -> None:
    """A block is the process's: two that overlap would leave one of their topologies behind."""
    with ThreadPoolExecutor(1, "planner") as pool:
        with xd.abstract("cpu:8"):
            with xd.abstract("cpu:4"):  # blocks of one thread may be in each other
                with pytest.raises(TopologyError, match=r"'planner_0' while .* 'MainThread' is in"):
                    pool.submit(xd.abstract("cpu:8").__enter__).result()
                assert xd.init_device_mesh("xla", (4,)).size() == 4
            assert xd.init_device_mesh("xla", (8,)).size() == 8
        inner = xd.abstract("cpu:8")
        pool.submit(inner.__enter__).result()
        pool.submit(inner.__exit__, None, None, None).result()
    x = xd.distribute_tensor(torch.arange(8.0), xd.init_device_mesh("xla", (8,)), [xd.Shard(0)])
    assert x.full_tensor().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v5x:4x4", "kinds are v5e, v5p"),
        ("4x4", "name a kind and a shape"),
        ("v5e:4x0", "one chip or more"),
        ("cpu:4096", "JAX_NUM_CPU_DEVICES=4096"),
        ("gpu:8", "JAX has no gpu here"),
        ("h100:8x8*2", "of GPUs give all hosts"),
        ("cpu:8*0", "one or more slices"),
    ],
)
def test_a_topology_that_is_none(name: str, says: str) -> None:
    xd.init_device_mesh("xla", (1,))  # before JAX starts there can be as many CPU devices as wanted
    with pytest.raises(TopologyError, match=says):
        xd.abstract(name)


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from xla_dtensor.base import jax_private
    from xla_dtensor.runtime import topologies

    monkeypatch.setattr(jax_private, "get_tpu_library_path", lambda: None)
    with pytest.raises(TopologyError, match="pip install libtpu"):
        topologies.topology.__wrapped__("v5e:4x4")


def test_a_mesh_that_is_too_large() -> None:
    with xd.abstract("cpu:4"), pytest.raises(TopologyError, match="a mesh of 8 devices for cpu:4"):
        make_mesh()
