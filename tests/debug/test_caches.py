"""``xd.debug.caches()``: what is kept, and clearing it."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable

import jax
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor import dispatch
from xla_dtensor.base.tables.cache import Table
from xla_dtensor.forms.form import Form, device_form, sharded_form
from xla_dtensor.mesh import frame_of
from xla_dtensor.mesh.group import MeshGroup, group_of

KNOWN = {
    "batches": 256,
    "batches in pieces": 1024,
    "batches run one by one": 1024,
    "calls of JAX functions": None,
    "computations of plans": 2048,
    "checks in batches": 512,
    "classes of managed modules": None,
    "conversions between forms": 2048,
    "copies of weights": 1024,
    "factories": 512,
    "forms": None,
    "frames": None,
    "groups": None,
    "overloads": None,
    "pieces of batches": 2048,
    "plans": 2048,
    "readers of logical values": 512,
    "readers of views": 1024,
    "torch's core decompositions": 2,
    "views in batches": 1024,
}


def import_everything() -> None:
    for module in pkgutil.walk_packages(xd.__path__, "xla_dtensor."):
        if not module.name.endswith(
            ("__main__", "xla_dtensor.plan", "xla_dtensor.tune")
        ):  # commands
            importlib.import_module(module.name)


@pytest.mark.usefixtures("strict_eager")
def test_the_table(mesh_2x4: DeviceMesh) -> None:
    import_everything()
    x = distribute_tensor(torch.ones(4, 2), mesh_2x4, [Shard(0), Replicate()])
    x + 1
    table = xd.debug.caches()
    limits = {record.name: record.limit for record in table}
    assert {name: limits[name] for name in KNOWN} == KNOWN
    hits = table["plans"].hits
    x + 1
    assert xd.debug.caches()["plans"].hits == hits + 1
    lines = str(table).splitlines()
    assert lines[0].split() == ["cache", "entries", "limit", "code", "hits", "misses", "note"]
    (plans,) = [line for line in lines if line.startswith("plans ")]
    assert plans.split()[1:3] == [str(table["plans"].entries), "2048"]
    assert lines[-1].startswith(f"XLA programs in this process: {table.programs}")
    assert table.programs > 0 and len(table) >= len(KNOWN)
    with pytest.raises(KeyError):
        table["nothing"]


def test_no_dict_of_a_module_grows(mesh_2x4: DeviceMesh) -> None:
    """What is filled by calls is one of the listed kinds."""
    import_everything()

    def sizes() -> dict[str, int]:
        return {
            f"{name}.{key}": len(value)
            for name, module in sys.modules.items()
            if name.split(".")[0] == "xla_dtensor"
            for key, value in vars(module).items()
            if isinstance(value, dict | list | set)
            and not isinstance(value, Table)
            and not key.startswith("__")
        }

    xd.debug.clear_caches()
    before = sizes()
    x = distribute_tensor(torch.randn(8, 12), mesh_2x4, [Shard(0), Shard(1)])
    y = distribute_tensor(torch.randn(8, 12), mesh_2x4, [Partial(), Shard(1)])
    with dispatch.batched():
        (x + y)[1:].relu_().sum()
    x.to_local().sum(), y.cpu(), y.local_shards, x.full_tensor()
    x.redistribute(placements=[Replicate(), Replicate()])
    torch.distributed.tensor.rand(5, 3, device_mesh=mesh_2x4)
    xd.jax_function(lambda a: a * 2)(x)
    xd.fully_shard(torch.nn.Linear(4, 4), mesh=xd.init_device_mesh("xla", (2,)))
    assert sizes() == before


def test_clearing(mesh_2x4: DeviceMesh) -> None:
    import_everything()
    x = distribute_tensor(torch.ones(4, 2), mesh_2x4, [Shard(0), Replicate()])
    y = x[1:] * 2
    xd.debug.clear_caches("plans")
    assert xd.debug.caches()["plans"].entries == 0
    xd.debug.caches().clear()
    for name, limit in KNOWN.items():
        if limit is not None:
            assert xd.debug.caches()[name].entries == 0
    assert (x[1:] * 2 - y).abs().sum().item() == 0
    with pytest.raises(ValueError, match=r"no cache is called 'plan'; there are \['batches', "):
        xd.debug.clear_caches("plan")


@pytest.mark.slow
@pytest.mark.usefixtures("strict_eager")
def test_clearing_frees_the_programs(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(4, 2), mesh_2x4, [Shard(0), Replicate()])
    xd.debug.clear_caches()
    jax.clear_caches()
    gc.collect()
    before = xd.debug.caches().programs
    for i in range(10):
        x.sum(0).view(1, 2).expand(i + 2, 2) + 1
    assert xd.debug.caches().programs >= before + 10
    xd.debug.clear_caches()
    gc.collect()
    assert xd.debug.caches().programs <= before + 2


def test_what_is_in_use_stays_the_same(mesh_2x4: DeviceMesh) -> None:
    placements = (Shard(0), Replicate())
    make: list[Callable[[], object]] = [
        lambda: sharded_form(mesh_2x4, placements, (33, 5)),
        lambda: device_form(frame_of(mesh_2x4), (33, 5)),
        lambda: frame_of(mesh_2x4),
        lambda: group_of(mesh_2x4, "dp"),
    ]
    kept = [one() for one in make]
    xd.debug.clear_caches()
    gc.collect()
    assert all(one() is known for one, known in zip(make, kept, strict=True))


@pytest.mark.slow
def test_forms_that_nobody_uses_go() -> None:
    xd.debug.clear_caches()
    gc.collect()
    before = xd.debug.caches()["forms"].entries
    for i in range(5000):
        device_form(None, (i, 7))
    assert xd.debug.caches()["forms"].entries <= before + 2048


def test_interning_in_threads(mesh_2x4: DeviceMesh) -> None:
    """Equal forms, frames and groups are the same object, whichever thread asks first."""
    found: list[list[object]] = [[] for _ in range(8)]
    errors: list[BaseException] = []
    start = threading.Barrier(8)
    mesh = xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("first_seen", "here"))

    def work(index: int) -> None:
        start.wait()
        try:
            for i in range(200):
                found[index].append(sharded_form(mesh, (Shard(0), Replicate()), (4, i, 3)))
                found[index].append(device_form(frame_of(mesh), (i, 11)))
                group = group_of(mesh, i % 2)
                assert group.mesh is not None and group.size() == 2
                found[index].append(group)
                found[index].append(frame_of(mesh))
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    for same in zip(*found, strict=True):
        assert len(set(map(id, same))) == 1
    assert isinstance(found[0][2], MeshGroup)


def test_refining_a_frame_while_forms_are_made() -> None:
    """A form and its frame fit together."""
    for attempt in range(5):
        root = xd.init_device_mesh("xla", (8,), mesh_dim_names=(f"root{attempt}",))
        start = threading.Barrier(2)
        forms: list[Form] = []

        def make(root: DeviceMesh, start: threading.Barrier, forms: list[Form]) -> None:
            start.wait()
            forms.extend(sharded_form(root, (Shard(0),), (16, i)) for i in range(100))

        thread = threading.Thread(target=make, args=(root, start, forms))
        thread.start()
        start.wait()
        fine = root._unflatten(0, (2, 4), ("a", "b"))
        sharded_form(fine, (Shard(0), Replicate()), (16, 3))
        thread.join()
        for form in forms:
            assert form.frame is not None
            assert {n for names in form.dim_axes for n in names} <= set(form.frame.sizes)
