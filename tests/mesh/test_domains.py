"""Meshes of several slices, or of several hosts of GPUs: which dims lie across."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.experimental import mesh_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import xla_dtensor as xd
from tests.mesh.test_device_order import chips
from xla_dtensor.mesh import device_order
from xla_dtensor.mesh.domains import across, domains, inside


def slices(count: int, *shape: int) -> list[Any]:
    """So many slices of v5e, numbered as JAX has them."""
    return [
        dataclasses.replace(chip, id=100_000 * (i + 1) + chip.id, slice_index=i)
        for i in range(count)
        for chip in chips("v5e", *shape)
    ]


def gpus(hosts: int, each: int, kind: str = "NVIDIA H100 80GB HBM3") -> list[Any]:
    return [
        SimpleNamespace(platform="gpu", device_kind=kind, process_index=i // each)
        for i in range(hosts * each)
    ]


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [
        ((4, 16, 16), 4, (4, 1, 1)),
        ((64, 16), 4, (4, 1)),
        ((2, 2, 256), 4, (2, 2, 1)),
        ((2, 6), 4, (2, 2)),
        ((6, 4), 4, (2, 2)),
        ((1, 8), 2, (1, 2)),
        ((3, 8), 6, (3, 2)),
        ((8,), 1, (1,)),
    ],
)
def test_the_outermost_dims_lie_across(shape: Any, count: int, expected: Any) -> None:
    numbers = np.repeat(np.arange(count), int(np.prod(shape)) // count)
    assert across(shape, numbers) == expected


def test_of_unequal_domains_none_lies_across() -> None:
    assert across((2, 4), [0, 0, 0, 1, 1, 1, 1, 1]) == (1, 1)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [((1, 4, 4), (2, 1, 1)), ((4, 4), (2, 1)), ((1, 16), (2, 2)), ((2, 8), (4, 1)), ((16,), (4,))],
)
def test_as_jax_lays_out_hybrid_meshes(inner: Any, outer: Any) -> None:
    devices = slices(int(np.prod(outer)), 4, 4)
    expected = mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, allow_split_physical_axes=True
    )
    order = device_order.near(tuple(np.multiply(inner, outer)), devices)
    assert [devices[i].id for i in order] == [d.id for d in expected.flat]


def test_neighbours_in_a_slice_are_as_near_as_in_one() -> None:
    devices = slices(4, 16, 16)
    order = device_order.near((4, 32, 8), devices)
    mesh = np.array([devices[i] for i in order]).reshape(4, 32, 8)
    alone = chips("v5e", 16, 16)
    own = np.array([alone[i] for i in device_order.near((32, 8), alone)]).reshape(32, 8)
    assert device_order.mean_hops(mesh) == (0.0, *device_order.mean_hops(own))
    assert device_order.extents(mesh) == ((), *device_order.extents(own))
    assert inside(np.array(domains(list(mesh.flat))).reshape(mesh.shape)) == (1, 32, 8)


def test_hosts_of_gpus_are_domains_and_so_are_racks() -> None:
    assert domains(gpus(2, 4)) == [0] * 4 + [1] * 4
    assert domains(gpus(36, 4, "NVIDIA GB200")) == [0] * 72 + [1] * 72
    assert domains(gpus(2, 2, "of another kind")) == [0, 0, 1, 1]
    # By number a row of the mesh would be parts of two hosts.
    order = device_order.near((6, 4), gpus(4, 6))
    assert inside(np.array([i // 6 for i in order]).reshape(6, 4)) == (3, 2)
    assert {order[4 * i + j] // 6 for i in range(3) for j in range(2)} == {0}
    assert device_order.near((4, 6), gpus(4, 6)) == list(range(24))


def test_gpus_that_are_here_say_what_is_linked() -> None:
    """A process for each: its number is no host's."""
    here = [
        SimpleNamespace(
            platform="gpu", device_kind="NVIDIA H200", process_index=i, slice_index=i // 2
        )
        for i in range(4)
    ]
    for device in here:
        device.client = jax.devices()[0].client
    assert domains(here) == [0, 0, 1, 1]
    for device in here:
        device.client = None
    assert domains(here) == [0, 1, 2, 3]


def test_simulated_slices_keep_their_order_and_a_given_one_is_obeyed() -> None:
    with xd.abstract("cpu:4*2"):
        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        turned = torch.arange(8).reshape(4, 2).t()
        assert torch.equal(DeviceMesh("xla", turned).mesh, turned.int())
    assert domains([object.__new__(_Cpu)] * 3) == [0, 0, 0]


class _Cpu:
    platform = "cpu"


def test_tensor_parallelism_across_slices_is_told() -> None:
    with xd.abstract("cpu:4*2"):
        with pytest.warns(UserWarning, match=r"its 'tp' lies across them.*dims of data paral") as w:
            xd.init_device_mesh("xla", (1, 8), mesh_dim_names=("dp", "tp"))
        assert w[0].filename == __file__
        turned = torch.arange(8).reshape(2, 4).t()
        with pytest.warns(UserWarning, match="'tp'"):  # in an order that is given, too
            DeviceMesh("xla", turned, mesh_dim_names=("dp", "tp"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xd.init_device_mesh("xla", (1, 8), mesh_dim_names=("dp", "tp"))
        with xd.abstract("cpu:4*2"):
            xd.init_device_mesh("xla", (1, 8), mesh_dim_names=("replicate", "shard"))
            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            assert mesh["tp"].size() == 4  # what is cut from it isn't told of


@pytest.mark.parametrize("names", [None, ("rows", "x")])
def test_parallelize_module_across_slices_is_told_once(names: tuple[str, ...] | None) -> None:
    with xd.abstract("cpu:4*2"):
        whole = DeviceMesh("xla", torch.arange(8))
        inside = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("rows", "x"))["x"]
        mesh = whole if names is None else DeviceMesh("xla", torch.arange(8), mesh_dim_names=("x",))
        told = f"its '{'dim 0' if names is None else 'x'}' lies across them"
        for on, expected in ((inside, 0), (mesh, 1)):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("default")
                layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
                for layer in layers:
                    parallelize_module(layer, on, ColwiseParallel())
            lines = [(w.filename, told in str(w.message)) for w in found]
            assert lines == [(__file__, True)] * expected
