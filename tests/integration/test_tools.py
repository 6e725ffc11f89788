"""torch's tools for tensors on a mesh: ``visualize_sharding``, ``manual_seed``."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._random import manual_seed
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import visualize_sharding

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.debug.sharding import rectangles


@pytest.mark.parametrize("shape", [(8,), (8, 16), (16, 8), (18,), (5, 7)])
def test_the_parts_are_torchs(mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
    coordinates = {int(mesh.mesh[at]): at for at in itertools.product(*map(range, mesh.shape))}
    choices = [Replicate(), *map(Shard, range(len(shape)))]
    for placements in itertools.product(choices, repeat=mesh.ndim):
        x = distribute_tensor(torch.ones(shape), mesh, placements)
        wanted = []
        for number, at in coordinates.items():
            sizes, starts = _compute_local_shape_and_global_offset(
                x.shape, tuple(mesh.shape), list(at), placements
            )
            parts = [(a, a + n - 1) if n else None for n, a in zip(sizes, starts, strict=True)]
            wanted.append((*parts, *[(0, 0)] * (2 - len(shape)), number))
        # Where an empty part is doesn't matter.
        found = [
            (*(part if part[0] <= part[1] else None for part in parts), number)
            for *parts, number in rectangles(x)
        ]
        assert sorted(found, key=str) == sorted(wanted, key=str), placements


def printed(tensor: DTensor, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    visualize_sharding(tensor)
    return capsys.readouterr().out


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """As the package tabulate writes them, which torch prints them with."""
    mesh = make_mesh("2x4")
    x = distribute_tensor(torch.ones(8, 12), mesh, [Shard(0), Shard(1)])
    assert printed(x, capsys) == (
        "         Col 0-2    Col 3-5    Col 6-8    Col 9-11\n"
        "-------  ---------  ---------  ---------  ----------\n"
        "Row 0-3  xla:0      xla:1      xla:2      xla:3\n"
        "Row 4-7  xla:4      xla:5      xla:6      xla:7\n"
    )
    uneven = distribute_tensor(torch.ones(3), mesh["tp"], [Shard(0)])
    assert printed(uneven, capsys) == (
        "         Col 0-0\n"
        "-------  ---------\n"
        "Row 0-0  xla:0,4\n"
        "Row 1-1  xla:1,5\n"
        "Row 2-2  xla:2,6\n"
        "Row 3-2  xla:3,7\n"
    )
    pending = x.sum(0)
    assert pending.placements == (Partial(), Shard(0))
    assert "Row 3-5   xla:1,5" in printed(pending, capsys)
    cube = make_mesh("2x2x2")
    y = distribute_tensor(torch.ones(4, 6, 8), cube, [Shard(0), Shard(2), Shard(1)])
    assert printed(y, capsys) == (
        "Dim 0: 0-1\n"
        "         Col 0-3    Col 4-7\n"
        "-------  ---------  ---------\n"
        "Row 0-2  xla:0      xla:2\n"
        "Row 3-5  xla:1      xla:3\n"
        "\n"
        "Dim 0: 2-3\n"
        "         Col 0-3    Col 4-7\n"
        "-------  ---------  ---------\n"
        "Row 0-2  xla:4      xla:6\n"
        "Row 3-5  xla:5      xla:7\n"
    )
    assert printed(distribute_tensor(torch.ones(0, 4), mesh, [Shard(1)] * 2), capsys) == ""
    for other in (torch.ones(()), torch.ones(2, 2, 2, 2)):
        with pytest.raises(RuntimeError, match="one to 3 dims"):
            visualize_sharding(distribute_tensor(other, mesh))


def test_where_the_values_are(mesh: DeviceMesh) -> None:
    """Shards that don't divide, too: the table says what devices hold."""
    value = torch.arange(30.0).reshape(5, 6)
    for placements in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=mesh.ndim):
        x = distribute_tensor(value, mesh, placements)
        assert all(torch.equal(shard.data, value[shard.index]) for shard in x.local_shards)
        wanted = [
            (*((s.start, s.stop - 1) for s in shard.index), shard.device)
            for shard in x.local_shards
        ]
        assert rectangles(x) == wanted


@pytest.mark.slow
def test_names_are_taken_over_when_they_are_imported() -> None:
    """The module is loaded after the first mesh, or before."""
    program = (
        "import sys, torch, xla_dtensor as xd\n"
        "mesh = xd.init_device_mesh('xla', (2,))\n"
        "x = xd.distribute_tensor(torch.ones(2), mesh, [xd.Shard(0)])\n"
        "assert 'torch.distributed.tensor.debug' not in sys.modules\n"
        "from torch.distributed.tensor.debug import visualize_sharding\n"
        "visualize_sharding(x)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert b"Row 1-1  xla:1" in done.stdout


def test_manual_seed() -> None:
    mesh = make_mesh("2x4")
    found = []
    for seed in (lambda: manual_seed(7, mesh), lambda: manual_seed(7, mesh["tp"])):
        seed()
        found.append(torch.rand(4, device="xla").cpu())
    torch.manual_seed(7)
    found.append(torch.rand(4, device="xla").cpu())
    manual_seed(seed=8, device_mesh=mesh)
    other = xd.XLAShardedTensor.from_local(torch.rand(4, device="xla"), mesh["dp"], [Replicate()])
    for values in found[1:]:
        torch.testing.assert_close(values, found[0])
    assert (other.full_tensor().cpu() != found[0]).any()


def test_assert_close_says_what_differs(mesh_2x4: DeviceMesh) -> None:
    value = torch.arange(16.0).reshape(4, 4)
    other = value.clone()
    other[2, 3] += 1
    a, b = (distribute_tensor(v, mesh_2x4, [Shard(0), Shard(1)]) for v in (value, other))
    torch.testing.assert_close(a, a.clone())
    torch.testing.assert_close(a.to_local(), a.clone().to_local())
    pairs = [(a, b), (a.full_tensor(), b.full_tensor()), ({"x": a}, {"x": b})]
    for one, two in pairs:
        with pytest.raises(AssertionError, match=r"1 / 16 .*\n.* at index \(2, 3\)"):
            torch.testing.assert_close(one, two)
    with pytest.raises(AssertionError, match=r"1 / 16 .*\n.* at index \(7, 0, 0\)"):
        torch.testing.assert_close(a.to_local(), b.to_local())
    with pytest.raises(AssertionError, match="placements do not match"):
        torch.testing.assert_close(a, a.redistribute(placements=[Shard(1), Replicate()]))
    with pytest.raises(AssertionError, match="'device' do not match"):
        torch.testing.assert_close(a.full_tensor(), value)
    with pytest.raises(TypeError, match="ambiguous"):
        torch.testing.assert_close(a, value)


def test_torch_export() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.randn(5, 3)
    expected = model(x)
    model.to("xla")
    exported = torch.export.export(model, (x.to("xla"),))
    assert [node.target for node in exported.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.linear.default,
        torch.ops.aten.relu.default,
        torch.ops.aten.linear.default,
    ]
    torch.testing.assert_close(exported.module()(x.to("xla")).cpu(), expected)


def test_torch_export_of_a_sharded_module_says_what_to_do(mesh_2x4: DeviceMesh) -> None:
    layer = xd.distribute_module(torch.nn.Linear(4, 4), mesh_2x4)
    x = distribute_tensor(torch.ones(2, 4), mesh_2x4, [Replicate(), Replicate()])
    with pytest.raises(NotImplementedError, match=r"xla_dtensor\.compile.*module\.cpu\(\)"):
        torch.export.export(layer, (x,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("sharded", [False, True])
def test_torch_compile_says_what_to_use(mesh_2x4: DeviceMesh, sharded: bool) -> None:
    layer = nn.Linear(4, 4)
    layer = xd.distribute_module(layer, mesh_2x4) if sharded else layer.to("xla")
    x = torch.ones(2, 4, device="xla")
    for compiled in (torch.compile(layer), torch.compile(lambda x: layer(x))):
        with pytest.raises(RuntimeError, match=r"torch\.compile of .* xla_dtensor\.compile"):
            compiled(x)
    torch._dynamo.reset()
    assert torch.compile(torch.sin, backend="eager")(torch.zeros(2)).tolist() == [0, 0]
