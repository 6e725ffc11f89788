"""``torch.distributed`` with xla tensors: its collectives in place, the default group, refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import all_reduce as imported_before  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.integration.patching import callers

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

# Mesh, group, and the devices of each group.
GROUPS: list[tuple[str, str | None, list[list[int]]]] = [
    ("8", "x", [list(range(8))]),
    ("2x4", "dp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("2x4", "tp", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("2x4", "dptp", [list(range(8))]),
    ("2x4", None, [list(range(8))]),
]


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("xla")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def group_of(mesh: DeviceMesh, dim: str | None) -> Any:
    if dim == "dptp":
        mesh["dp", "tp"]._flatten("dptp")
    return None if dim is None else mesh.get_group(dim)


def own_values(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 5, shape, generator=generator).to(dtype) for _ in range(8)]


def per_device(values: list[torch.Tensor], mesh: DeviceMesh) -> Any:
    return xd.from_device_values(values, mesh)


def check(tensor: Any, expected: Callable[[int, list[int]], Any], groups: list[list[int]]) -> None:
    """``expected`` gives a device's value from its place in its group, and the group."""
    wanted = {g[i]: expected(i, g) for g in groups for i in range(len(g))}
    found = tensor.local_values()
    for device in range(8):
        own = found[device] if len(found) > 1 else found[0]
        torch.testing.assert_close(own, wanted[device])


@pytest.mark.parametrize(("mesh_name", "dim", "groups"), GROUPS)
@pytest.mark.usefixtures("default_group")
class TestCollectives:
    @pytest.mark.parametrize("op", ["SUM", "MAX", "PRODUCT", "AVG"])
    def test_all_reduce(
        self, mesh_name: str, dim: str | None, groups: list[list[int]], op: str
    ) -> None:
        mesh = make_mesh(mesh_name)
        values = own_values(3)
        x = per_device(values, mesh)
        before = x._version
        assert dist.all_reduce(x, getattr(dist.ReduceOp, op), group=group_of(mesh, dim)) is None
        reductions: dict[str, Callable[..., Any]] = {
            "SUM": lambda parts: parts.sum(0),
            "MAX": lambda parts: parts.amax(0),
            "PRODUCT": lambda parts: parts.prod(0),
            "AVG": lambda parts: parts.mean(0),
        }
        check(x, lambda i, g: reductions[op](torch.stack([values[d] for d in g])), groups)
        assert x._version > before
        assert not {"dp": {"dp"}, "tp": {"tp"}}.get(str(dim), {"x", "dp", "tp"}) & set(x.varying)

    def test_all_gather_into_tensor(
        self, mesh_name: str, dim: str | None, groups: list[list[int]]
    ) -> None:
        mesh, n = make_mesh(mesh_name), len(groups[0])
        values = own_values(2, 3)
        joined, stacked = torch.empty(2 * n, 3, device="xla"), torch.empty(n, 2, 3, device="xla")
        for output in (joined, stacked):
            dist.all_gather_into_tensor(output, per_device(values, mesh), group_of(mesh, dim))
        check(joined, lambda i, g: torch.cat([values[d] for d in g]), groups)
        check(stacked, lambda i, g: torch.stack([values[d] for d in g]), groups)

    def test_all_gather(self, mesh_name: str, dim: str | None, groups: list[list[int]]) -> None:
        mesh, n = make_mesh(mesh_name), len(groups[0])
        values = own_values(dtype=torch.int64)
        outputs = [torch.zeros((), dtype=torch.int64, device="xla") for _ in range(n)]
        dist.all_gather(outputs, per_device(values, mesh), group=group_of(mesh, dim))
        for i, output in enumerate(outputs):
            check(output, lambda _, g, i=i: values[g[i]], groups)

    def test_broadcast(self, mesh_name: str, dim: str | None, groups: list[list[int]]) -> None:
        mesh = make_mesh(mesh_name)
        values = own_values(3)
        x = per_device(values, mesh)
        work = dist.broadcast(x, group=group_of(mesh, dim), group_src=1, async_op=True)
        assert isinstance(work, dist.Work) and work.wait() and work.is_completed()
        assert work.get_future().wait()[0] is x
        check(x, lambda i, g: values[g[1]], groups)

    def test_reduce_scatter(self, mesh_name: str, dim: str | None, groups: list[list[int]]) -> None:
        mesh, n = make_mesh(mesh_name), len(groups[0])
        values = own_values(2 * n, 3)
        group = group_of(mesh, dim)
        pieces = [torch.empty(2, 3, device="xla") for _ in range(3)]
        dist.reduce_scatter_tensor(pieces[0], per_device(values, mesh), group=group)
        stacked = per_device([v.reshape(n, 2, 3) for v in values], mesh)
        dist.reduce_scatter_tensor(pieces[1], stacked, group=group)
        dist.reduce_scatter(pieces[2], list(per_device(values, mesh).chunk(n)), group=group)
        for piece in pieces:
            check(piece, lambda i, g: sum(values[d].chunk(n)[i] for d in g), groups)

    def test_all_to_all(self, mesh_name: str, dim: str | None, groups: list[list[int]]) -> None:
        mesh, n = make_mesh(mesh_name), len(groups[0])
        values = own_values(2 * n, 3)
        group = group_of(mesh, dim)
        x = per_device(values, mesh)
        output, sized = torch.empty_like(x), torch.empty_like(x)
        dist.all_to_all_single(output, x, group=group)
        dist.all_to_all_single(sized, x, [2] * n, [2] * n, group=group)
        listed = [torch.empty(2, 3, device="xla") for _ in range(n)]
        dist.all_to_all(listed, list(x.chunk(n)), group=group)
        for found in (output, sized, torch.cat(listed)):
            check(found, lambda i, g: torch.cat([values[d].chunk(n)[i] for d in g]), groups)


def test_the_default_group() -> None:
    assert not dist.is_initialized()
    dist.init_process_group("XLA", world_size=8, rank=0)
    assert dist.is_initialized() and dist.get_world_size() == 8 and dist.get_backend() == "xla"
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(8))
    with pytest.raises(xd.PerDeviceValueError, match="axis_index"):
        dist.get_rank()
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("xla")
    dist.barrier()
    assert dist.barrier(async_op=True).wait()
    objects: list[Any] = [None] * 8
    dist.all_gather_object(objects, {"a": [1]})
    assert objects == [{"a": [1]}] * 8 and objects[0] is not objects[1]
    dist.broadcast_object_list(objects, src=3)
    total = funcol.all_reduce(torch.ones(2, device="xla"), "sum", dist.group.WORLD).wait()
    assert total.tolist() == [8, 8]
    dist.destroy_process_group()
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.get_world_size()
    dist.init_process_group(device_id=torch.device("xla"))
    assert dist.is_initialized()
    dist.destroy_process_group(dist.group.WORLD)
    assert not dist.is_initialized()


class Stream(torch.utils.data.IterDataPipe):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.usefixtures("default_group")
def test_what_torch_shares_between_processes_stays_whole() -> None:
    """A DataLoader gives all batches, as without a group; a sampler that wants a rank raises."""
    assert dist.is_initialized()
    data = torch.utils.data.TensorDataset(torch.arange(6))
    found = [batch.tolist() for (batch,) in torch.utils.data.DataLoader(data, batch_size=2)]
    assert found == [[0, 1], [2, 3], [4, 5]]
    assert list(torch.utils.data.DataLoader(Stream(), batch_size=None)) == [0, 1, 2]
    with pytest.raises(xd.PerDeviceValueError, match="axis_index"):
        torch.utils.data.DistributedSampler(data)  # type: ignore[arg-type]


def of_module(name: str, body: str) -> Any:
    """A function ``f`` of a module of this name."""
    namespace: dict[str, Any] = {"__name__": name, "dist": dist}
    exec(f"def f(group=None):\n    return {body}", namespace)
    return namespace["f"]


@pytest.mark.usefixtures("default_group")
def test_what_a_rank_is_asked_for() -> None:
    """Code that is known to compute with its rank gets a tensor; code that is known to ask which
    process it is gets its number; nobody else gets either."""
    group = make_mesh("2x4").get_group("tp")
    callers.rank_may_be_a_tensor("some.model")
    callers.rank_means_process("some.")
    ask = "dist.get_rank(group) * 2 if group else dist.get_rank()"
    twice = of_module("some.model", ask)(group)
    assert [v.item() for v in twice.local_values()] == [0, 2, 4, 6] * 2
    assert of_module("some.trainer", ask)() == of_module("some.model", ask)() == 0
    for name, given in (("some.trainer", group), ("other.model", group), ("other.model", None)):
        with pytest.raises(xd.PerDeviceValueError, match="axis_index"):
            of_module(name, ask)(given)


def test_names_and_backends() -> None:
    """As custom operators and launchers ask for them."""
    group = make_mesh("2x4").get_group("tp")
    assert dist.distributed_c10d._get_process_group_name(group) == str(group)
    assert dist.get_default_backend_for_device("xla") == "xla"


def test_questions_about_a_mesh_dim() -> None:
    """They need no default group."""
    mesh = make_mesh("2x4")
    group = mesh.get_group("tp")
    assert dist.get_world_size(group) == 4 and dist.get_backend(group) == "xla"
    dist.barrier(group)
    with pytest.raises(xd.PerDeviceValueError, match="axis_index"):
        dist.get_rank(group)
    with pytest.raises(xd.PerDeviceValueError, match="several groups"):
        dist.get_process_group_ranks(group)
    dist.destroy_process_group(group)
    x = per_device(own_values(), mesh)
    dist.all_reduce(x, group=group)
    assert x.varying == ("dp",)


def test_devices_in_another_order() -> None:
    mesh = xd.DeviceMesh("xla", [[3, 1], [0, 2]], mesh_dim_names=("a", "b"))
    mesh["b", "a"]._flatten("ba")
    assert dist.get_process_group_ranks(mesh.get_group("ba")) == [3, 0, 1, 2]
    values = [torch.tensor(float(d)) for d in (3, 1, 0, 2)]  # in the order of the mesh
    x = xd.from_device_values(values, mesh)
    dist.broadcast(x, src=2, group=mesh.get_group("ba"))
    assert x.item() == 2
    output = torch.empty(4, device="xla")
    dist.all_gather_into_tensor(
        output, xd.from_device_values(values, mesh).reshape(1), group=mesh.get_group("ba")
    )
    assert output.tolist() == [3, 0, 1, 2]
    dist.init_process_group("xla")
    try:
        with pytest.raises(xd.MeshError, match=r"group=mesh.get_group\(dim\)"):
            dist.all_reduce(x := xd.from_device_values(values, mesh))
    finally:
        dist.destroy_process_group()


def test_a_flattened_dim_is_found_from_any_submesh() -> None:
    mesh = make_mesh("2x2x2")
    flat = mesh["dp", "tp"]._flatten("dptp")
    group = mesh.get_group("dptp")
    assert group is flat.get_group() is mesh["dp"].get_group("dptp")
    assert group.size() == 4
    x = per_device(own_values(), mesh)
    dist.all_reduce(x, group=group)
    assert x.varying == ("pp",)
    with pytest.raises(xd.MeshDimError, match=r"flattened ones \('dptp',\)"):
        mesh.get_group("sp")


def test_what_shares_memory_sees_the_result() -> None:
    mesh = make_mesh("8")
    values = own_values(4)
    x = per_device(values, mesh)
    view, sharded = x[1:3], xd.XLAShardedTensor.from_local(x, mesh, [Shard(0)])
    dist.all_reduce(x, group=mesh.get_group("x"))
    total = torch.stack(values).sum(0)
    torch.testing.assert_close(view.local_values()[5], total[1:3])
    torch.testing.assert_close(sharded.full_tensor().cpu(), total.repeat(8))
    dist.all_reduce(view, group=mesh.get_group("x"))
    total[1:3] *= 8
    torch.testing.assert_close(x.local_values()[2], total)


def test_a_leaf_is_written_and_others_have_the_gradient_of_functional_collectives() -> None:
    mesh = make_mesh("8")
    group = mesh.get_group("x")
    values = own_values(2)
    leaf = per_device(values, mesh).requires_grad_()
    dist.broadcast(leaf, group_src=2, group=group)
    assert leaf.is_leaf and leaf.requires_grad
    torch.testing.assert_close(leaf.local_values()[0], values[2])
    weight = per_device(values, mesh)
    y, z = leaf * weight, leaf * weight
    dist.all_reduce(y, group=group)
    (y * weight).sum().backward()
    own, leaf.grad = leaf.grad, None
    (funcol.all_reduce(z, "sum", group) * weight).sum().backward()
    torch.testing.assert_close(own.local_values(), leaf.grad.local_values())


def test_what_autograd_has_saved_is_not_overwritten_unseen() -> None:
    mesh = make_mesh("8")
    leaf = per_device(own_values(2), mesh).requires_grad_()
    y = leaf * 2
    z = y.square()
    with torch.no_grad():
        dist.all_reduce(y, group=mesh.get_group("x"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_in_a_compiled_step() -> None:
    """State that is reduced in place, in several calls."""
    mesh = make_mesh("2x4")
    total = torch.zeros(2, device="xla")

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=mesh.get_group("dp"))
        mean = x.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG, mesh.get_group("tp"))
        total.add_(mean)
        return x * 2

    for _ in range(3):
        values = own_values(2)
        x = per_device(values, mesh)
        result = step(x)
        check(x, lambda i, g, own=values: sum(own[d] for d in g), GROUPS[1][2])
        assert x.varying == result.varying == ("tp",)
    torch.testing.assert_close(total.cpu(), 3 * torch.stack(values).sum(0) / 4)


def test_refusals() -> None:
    mesh = make_mesh("2x4")
    group = mesh.get_group("dp")
    x = per_device(own_values(4), mesh)
    with pytest.raises(xd.UnsupportedOpError, match=r"init_process_group\('xla'\)"):
        dist.all_reduce(x)
    with pytest.raises(xd.UnsupportedOpError, match=r"per-device tensors.*x.to\('xla'\)"):
        dist.all_reduce(torch.ones(4), group=group)
    with pytest.raises(xd.UnsupportedOpError, match="sharded tensor"):
        dist.all_reduce(distribute_tensor(torch.ones(8), mesh["dp"], [Shard(0)]), group=group)
    with pytest.raises(xd.PerDeviceValueError, match="group_src="):
        dist.broadcast(x, src=0, group=group)
    with pytest.raises(ValueError, match="one of src and group_src"):
        dist.broadcast(x, group=group)
    with pytest.raises(xd.UnsupportedOpError, match="permute"):
        dist.send(x, 1, group=group)
    with pytest.raises(xd.UnsupportedOpError, match="permute"):
        dist.P2POp(dist.isend, x, 1, group)
    with pytest.raises(xd.UnsupportedOpError, match="times the elements"):
        dist.all_gather_into_tensor(torch.empty(4, device="xla"), x, group=group)
    with pytest.raises(xd.UnsupportedOpError, match="both have one dtype"):
        dist.all_gather_into_tensor(torch.empty(8, device="xla").long(), x, group=group)
    with pytest.raises(xd.UnsupportedOpError, match="one for each of the 2 devices"):
        dist.all_gather([x.clone()], x, group=group)
    with pytest.raises(xd.UnsupportedOpError, match="numbers in Python are the same"):
        dist.all_to_all_single(x.clone(), x, [1, 3], [1, 3], group=group)
    dist.init_process_group("xla")
    try:
        with pytest.raises(xd.UnsupportedOpError, match="_flatten"):
            dist.new_group([0, 1])
    finally:
        dist.destroy_process_group()


def test_a_failed_call_has_written_nothing() -> None:
    mesh = make_mesh("8")
    values = own_values(2)
    outputs = [torch.zeros(2, device="xla") for _ in range(7)] + [torch.zeros(3, device="xla")]
    with pytest.raises(xd.UnsupportedOpError, match="shape"):
        dist.all_gather(outputs, per_device(values, mesh), group=mesh.get_group("x"))
    assert not any(output.any() for output in outputs)


_OTHERS = """
from torch.distributed import all_reduce, get_rank, get_world_size, init_process_group
import torch, torch.distributed as dist
import xla_dtensor as xd

init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
all_reduce(x)
dist.barrier()
assert x.tolist() == [1, 1, 1] and (get_rank(), get_world_size()) == (0, 1)
mesh = xd.init_device_mesh("xla", (8,))
y = xd.collectives.axis_index(mesh).clone()
all_reduce(y, group=mesh.get_group())
assert y.item() == 28
try:
    all_reduce(y)
except xd.UnsupportedOpError as error:
    assert "mesh.get_group(dim)" in str(error)
else:
    raise AssertionError
dist.destroy_process_group()
assert not dist.is_initialized()
"""


@pytest.mark.slow
def test_other_devices_keep_their_process_groups() -> None:
    """Also names that were imported before the package."""
    subprocess.run([sys.executable, "-c", _OTHERS], check=True)


@pytest.mark.parametrize("given", [{"rank": 1}, {"rank": 2, "world_size": 4}])
def test_a_rank_that_nobody_has_launched_is_refused(given: dict[str, int]) -> None:
    """Several processes: `tests/runtime`."""
    with pytest.raises(xd.UnsupportedOpError, match=r"process 0 of 1.*torchrun, mpirun"):
        dist.init_process_group("xla", **given)
    assert not dist.is_initialized()
