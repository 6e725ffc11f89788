"""`from_jax`, `to_jax` and DLPack: values, layouts, and whose memory it is."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd

PLACEMENTS = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Replicate(),) * 2, (Shard(0),) * 2]
DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool", "complex64"]


def pointers(array: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (), (0, 3)], ids=str)
def test_there_and_back(shape: Any, placements: Any, mesh_2x4: Any) -> None:
    if not shape:
        placements = (Replicate(),) * 2
    if len(shape) == 1:
        placements = (Shard(0), Replicate())
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    x = xd.from_jax(jnp.asarray(value), mesh_2x4, placements)
    assert (tuple(x.shape), x.placements, x.device_mesh) == (shape, placements, mesh_2x4)
    assert not x.requires_grad and x.is_leaf
    assert np.array_equal(x.numpy(), value)
    back = xd.to_jax(x)
    assert isinstance(back, jax.Array) and back.shape == shape
    assert np.array_equal(np.asarray(back), value)
    assert np.array_equal((x + 1).numpy(), value + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, mesh_2x4: Any) -> None:
    array = jnp.ones((8, 4), dtype)
    for x in (xd.from_jax(array), xd.from_jax(array, mesh_2x4, [Shard(0), Replicate()])):
        assert str(x.dtype) == f"torch.{dtype}"
        assert xd.to_jax(x).dtype == array.dtype
        assert (x == 1).all().item()


def test_weakly_typed_arrays_are_tensors(mesh_2x4: Any) -> None:
    """JAX has arrays that stand for Python numbers: bfloat16 plus such a float32 is bfloat16. As
    tensors they are what their dtype says."""
    number = 1.001234
    weak = jnp.broadcast_to(jnp.asarray(number), (8,))
    assert weak.weak_type
    other = torch.tensor([1.0, 3.0] * 4).bfloat16()
    wanted = torch.full((8,), number) + other
    xla, add = other.to("xla"), xd.compile(lambda x, y: x + y)
    placed = distribute_tensor(other, mesh_2x4, [Shard(0), Replicate()])
    made = xd.jax_function(lambda x: jnp.where(x > 9, 2.0, number))
    raw = jnp.asarray(other.float().numpy(), jnp.bfloat16)
    sharded = xd.from_jax(weak, mesh_2x4, [Shard(0), Replicate()])
    results = {
        "from_jax": xd.from_jax(weak) + xla,
        "on a mesh": (sharded + placed).full_tensor(),
        "view": xd.jax.view(weak) + xla,
        "compiled": add(xd.jax.view(weak), xla),
        "of a JAX function": made(xla).float() * 0 + made(xla) + xla,
        "call": xd.jax.view(jax.jit(lambda x, y: xd.jax.call(torch.add, x, y))(weak, raw)),
        "viewed in call": xd.jax.view(xd.jax.call(lambda y: xd.jax.view(weak) + y, raw)),
    }
    for name, result in results.items():
        assert result.dtype == torch.float32, name
        torch.testing.assert_close(result.cpu(), wanted, rtol=1e-7, atol=0, msg=name)


def test_an_array_that_lies_so_already_is_not_copied(mesh_2x4: Any) -> None:
    given = distribute_tensor(torch.randn(8, 4), mesh_2x4, [Shard(0), Shard(1)])
    array = xd.to_jax(given)
    assert array is given.jax_array
    x = xd.from_jax(array, mesh_2x4, [Shard(0), Shard(1)])
    assert pointers(xd.to_jax(x)) == pointers(array)
    moved = xd.from_jax(array, mesh_2x4, [Shard(1), Shard(0)])
    assert torch.equal(moved.full_tensor().cpu(), given.full_tensor().cpu())
    x.mul_(2)  # the tensor gets another array
    assert np.array_equal(np.asarray(array), given.numpy())


def test_an_array_of_jax_programs(mesh_2x4: Any) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    array = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, PartitionSpec("a")))
    x = xd.from_jax(array, mesh_2x4, [Shard(0), Replicate()])
    y = distribute_tensor(torch.ones(8, 4), mesh_2x4, [Shard(0), Shard(1)])
    assert np.array_equal((x + y).numpy(), np.asarray(array) + 1)


def test_without_a_mesh_it_computes_with_everything(mesh_2x4: Any) -> None:
    for device in (jax.devices()[0], jax.devices()[3]):
        array = jax.device_put(jnp.arange(4.0), device)
        x = xd.from_jax(array)
        assert type(x) is xd.XLATensor and x.device == torch.device("xla:0")
        sharded = distribute_tensor(torch.ones(8, 4), mesh_2x4, [Shard(0), Shard(1)])
        assert (x + sharded).sum().item() == 80
        assert (x + torch.ones(4, device="xla")).tolist() == [1, 2, 3, 4]


def test_a_pending_sum_is_reduced(mesh_2x4: Any) -> None:
    x = torch.distributed.tensor.DTensor.from_local(
        torch.ones(3, device="xla"), mesh_2x4, [Replicate(), Partial()]
    )
    assert np.asarray(xd.to_jax(x)).tolist() == [4, 4, 4]


def test_a_compiled_step_that_overwrites_the_tensor_deletes_the_array(mesh_2x4: Any) -> None:
    array = jax.device_put(jnp.ones((8, 4)))
    x = xd.from_jax(array, mesh_2x4, [Shard(0), Replicate()])
    kept = xd.from_jax(xd.to_jax(x), mesh_2x4, [Shard(0), Replicate()]).clone()
    xd.compile(lambda: x.mul_(2))()
    assert x.full_tensor().sum().item() == 64 and kept.full_tensor().sum().item() == 32
    gc.collect()
    assert not array.is_deleted()  # it was moved


def test_gradients_flow_from_it() -> None:
    x = xd.from_jax(jnp.arange(3.0)).requires_grad_()
    x.pow(2).sum().backward()
    assert x.grad.tolist() == [0, 2, 4]
    with pytest.raises(RuntimeError, match=r"requires grad: use tensor\.detach\(\)"):
        xd.to_jax(x)
    assert xd.to_jax(x.detach()).tolist() == [0, 1, 2]


MISTAKES = {
    "no array": (lambda m: xd.from_jax(np.ones(3)), TypeError, "got ndarray"),
    "no xla tensor": (lambda m: xd.to_jax(torch.ones(3)), TypeError, "got one on cpu"),
    "varying": (
        lambda m: xd.to_jax(
            distribute_tensor(torch.ones(8), m, [Shard(0), Replicate()]).to_local()
        ),
        xd.PerDeviceValueError,
        "its one jax.Array",
    ),
    "partial": (
        lambda m: xd.from_jax(jnp.ones(3), m, [Partial(), Replicate()]),
        xd.UnsupportedOpError,
        "give Replicate",
    ),
    "compiled from": (
        lambda m: xd.compile(lambda x: x + xd.from_jax(jnp.ones(3)))(torch.ones(3, device="xla")),
        xd.UnsupportedOpError,
        "constant of the program",
    ),
    "compiled to": (
        lambda m: xd.compile(lambda x: xd.to_jax(x))(torch.ones(3, device="xla")),
        xd.DataDependentError,
        "jax_function",
    ),
    "too many placements": (
        lambda m: xd.from_jax(jnp.ones(3), m, [Shard(0)]),
        xd.PlacementError,
        "from_jax",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, mesh_2x4: Any) -> None:
    make, error, text = MISTAKES[name]
    with pytest.raises(error, match=text):
        make(mesh_2x4)


def test_dlpack(mesh_2x4: Any) -> None:
    x = torch.arange(6.0, device="xla").reshape(2, 3)
    assert torch.from_dlpack(x).tolist() == [[0, 1, 2], [3, 4, 5]]
    for capsule in (torch.to_dlpack(x), torch.utils.dlpack.to_dlpack(x)):
        assert torch.from_dlpack(capsule).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.from_dlpack(torch.to_dlpack(torch.ones(2))).tolist() == [1, 1]
    assert np.from_dlpack(x).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert jnp.from_dlpack(x).tolist() == [[0, 1, 2], [3, 4, 5]]
    replicated = distribute_tensor(torch.ones(3), mesh_2x4, [Replicate(), Replicate()])
    assert torch.from_dlpack(replicated).tolist() == [1, 1, 1]
    sharded = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])
    for function in (torch.from_dlpack, torch.to_dlpack):
        with pytest.raises(BufferError, match=r"full_tensor\(\)"):
            function(sharded)
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.from_dlpack(x.clone().requires_grad_())
