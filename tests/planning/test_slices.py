"""Several slices: what crosses the slow network, by texts as libtpu writes them and by plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from tests.planning.test_links import MB, collective
from tests.planning.tpus import needs_libtpu
from xla_dtensor.mesh.device_order import Extent
from xla_dtensor.planning import Report
from xla_dtensor.planning.collectives import HloCollective, collectives
from xla_dtensor.planning.links import Lane, Slices, Torus, slow_bytes
from xla_dtensor.planning.program_text import HloText
from xla_dtensor.planning.rows import BETWEEN, exposed_per_dim, rows, seconds_per_dim
from xla_dtensor.planning.schedule import schedule
from xla_dtensor.runtime.chips import CHIPS

V5E = CHIPS["v5e"]
# Two slices of four chips.
DEVICES = [
    SimpleNamespace(id=100_000 * s + i, slice_index=s - 1, platform="tpu")
    for s in (1, 2)
    for i in range(4)
]


def text(target: str, kind: str = "ALL_REDUCE", given: str = "f32[64,8]") -> str:
    """A step of one slice: a sum inside, the same across, and a product beside it."""
    told = (
        '_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="x_0",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{kind}"'
    )
    return f"""HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (p: f32[64,8], w: f32[4096,4096]) -> f32[64,8] {{
  %p = f32[64,8] parameter(0)
  %w = f32[4096,4096] parameter(1)
  %after-all = token[] after-all()
  %inside = f32[64,8] all-reduce(%p), channel_id=3, replica_groups={{{{0,1}},{{2,3}}}}, \
use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(f)/nn_backward:layer/dot"}}
  %flat = f32[4,128] bitcast(%inside)
  %send = (f32[4,128], u32[], token[]) send(%flat, %after-all), channel_id=2, \
is_host_transfer=true, frontend_attributes={{{told}}}
  %recv = ({given}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, \
frontend_attributes={{{told}}}
  %product = f32[4096,4096] dot(%w, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = ({given}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %r = {given} get-tuple-element(%recv-done), index=0
}}
"""


def found_in(target: str, **more: str) -> tuple[HloCollective, HloCollective]:
    shape, names = (2, 2, 2), ("slice", "dp", "tp")
    inside, between = collectives(text(target, **more), shape, names, DEVICES)
    return inside, between


def test_a_program_of_one_slice_is_of_all() -> None:
    inside, _ = found_in('"{1,2}x{0:3}"')
    assert (inside.kind, inside.dims, inside.between_slices) == ("all-reduce", ("tp",), False)
    assert inside.groups == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_sum_across() -> None:
    _, between = found_in('"{1,2}x{0:3}"', given="f32[4,128]")
    assert (between.kind, between.dims, between.size) == ("all-reduce", ("slice",), 2)
    assert between.between_slices and between.bytes == 4 * 128 * 4
    assert between.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    (part,) = between.parts  # of the shape and the name in which it was computed
    assert part.shape.dims == (64, 8) and "nn_backward:layer" in part.op_names[0]


@pytest.mark.parametrize(
    ("target", "kind", "ours", "groups", "dims"),
    [
        (
            "{{100000,200000},{100001,200001}}",
            *("ALL_TO_ALL", "all-to-all", ((0, 4), (1, 5)), ("slice",)),
        ),
        (
            "{{100000->200001},{200001->100000}}",
            *("ONE_TO_ONE", "collective-permute", ((0, 5), (5, 0)), ("slice", "tp")),
        ),
        (
            "{{100000,100001,200000,200001}}",
            *("ALL_GATHER", "all-gather", ((0, 1, 4, 5),), ("slice", "tp")),
        ),
        ('"{1:2}x{0,2}"', "REDUCE_SCATTER", "reduce-scatter", ((0, 4), (2, 6)), ("slice",)),
        ('"in a form to come"', "ALL_GATHER", "all-gather", (), ()),
    ],
)
def test_forms_of_targets(target: str, kind: str, ours: str, groups: Any, dims: Any) -> None:
    _, between = found_in(target, kind=kind, given="f32[4,128]")
    assert (between.kind, between.groups, between.dims) == (ours, groups, dims)


def test_what_has_to_come_in() -> None:
    # A host of v5e has two cards of 100 Gb/s for 8 chips.
    assert V5E.network == 200e9 / 8 / 8 and CHIPS["v6e"].network == 4 * 200e9 / 8 / 8
    over = Slices(Torus({"tp": Lane((Extent(4, True),), V5E)}), V5E, [0, 0, 0, 0, 1, 1, 1, 1])
    pairs = ((0, 4), (1, 5), (2, 6), (3, 7))
    one = collective("all-reduce", 8 * MB, pairs, ("slice",))
    between = HloCollective("all-reduce", 1, one.parts, ("slice",), 2, pairs, "r", True)
    for each in (one, between):
        assert slow_bytes(each, over.numbers) == 8 * MB  # half of it twice
        assert over.seconds(each) == pytest.approx(8 * MB / V5E.network)
    # Of a sum over all that the compiler has still to cut the members of a slice share what comes.
    every = collective("all-reduce", 8 * MB, (tuple(range(8)),), ("slice", "tp"), 8)
    assert slow_bytes(every, over.numbers) == 2 * MB
    inside = collective("all-reduce", 8 * MB, ((0, 1, 2, 3), (4, 5, 6, 7)), ("tp",), 4)
    assert slow_bytes(inside, over.numbers) == 0
    assert over.seconds(inside) == over.inside.seconds(inside) > 0


def test_the_network_runs_beside_the_links() -> None:
    program = HloText(text('"{1,2}x{0:3}"', given="f32[4,128]"))
    names = ("slice", "dp", "tp")
    moved = collectives(program, (2, 2, 2), names, DEVICES)
    lanes = {name: Lane((Extent(2, True),), V5E) for name in names[1:]}
    over = Slices(Torus(lanes), V5E, [0] * 4 + [1] * 4)
    inside, between = map(over.seconds, moved)
    made = schedule(program, moved, over, V5E, {})
    assert made.exposed == {"inside": pytest.approx(inside), "recv": 0}  # behind the product
    table = rows(moved, [], over, made.exposed, over.numbers)
    assert [(row.dims, row.between_slices, row.slow_bytes) for row in table] == [
        (("tp",), False, 0),
        (("slice",), True, 2048),
    ]
    assert seconds_per_dim(table) == {"tp": pytest.approx(inside), BETWEEN: pytest.approx(between)}
    assert exposed_per_dim(table)[BETWEEN] == 0


def hsdp(topology: str, shape: tuple[int, int], width: int = 64, rows: int = 16) -> Report:
    """Two layers whose weights each slice has whole: a step of a batch over all devices, so many
    rows on each."""
    with xd.abstract(topology):
        mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
        for layer in model:
            xd.fully_shard(layer, mesh=mesh)
        xd.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        batch = torch.randn(mesh.size() * rows, width)
        return xd.plan(step, xd.distribute_tensor(batch, mesh, [xd.Shard(0)] * 2))


def test_simulated_slices() -> None:
    report = hsdp("cpu:4*2", (2, 4))
    assert report.chips == 8 and report.domains == 2
    shard = 2 * 64 * 64 * 4 // 4  # of the gradients, over the four devices of a slice
    assert shard <= report.slow_bytes <= 1.02 * shard
    assert f"{report.slow_bytes / 1024:.4g} KiB come in at a device" in str(report)
    assert "slow: " in str(report) and not report.notes
    assert Report.from_json(report.as_json()) == report
    alone = hsdp("cpu:8", (2, 4))
    assert alone.domains == 1 and alone.slow_bytes == 0 and "slow" not in str(alone)


def test_activations_across_are_told() -> None:
    with xd.abstract("cpu:4*2"), pytest.warns(UserWarning, match="'tp' lies across"):
        mesh = xd.init_device_mesh("xla", (1, 8), mesh_dim_names=("dp", "tp"))
    with xd.abstract("cpu:4*2"):
        weight = xd.distribute_tensor(torch.empty(4096, 4096), mesh, [xd.Replicate(), xd.Shard(0)])
        x = xd.distribute_tensor(torch.empty(512, 4096), mesh, [xd.Replicate()] * 2)
        whole = [xd.Replicate()] * 2
        report = xd.plan(lambda x: (x @ weight).redistribute(mesh, whole).sin(), x)
    (note,) = report.notes
    assert note.startswith("2 MiB of activations")  # 8 MiB, of which half comes twice, by four
    assert "along tp: give dims along which activations travel no more devices" in note


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "shape", "rows"),
    [
        ("v5e:4x4*2", (2, 16), 16),
        # Where a device has few rows activations are less than weights, and cross no more for that.
        ("v5e:8x8*4", (4, 64), 32),
        ("v5e:16x16*4", (4, 256), 8),
    ],
)
def test_of_the_tpus_compiler(topology: str, shape: tuple[int, int], rows: int) -> None:
    report = hsdp(topology, shape, 2048, rows)
    slices, devices = shape
    least = 2 * 2048 * 2048 * 4 / devices * 2 * (slices - 1) / slices  # of the gradients' shard
    assert least <= report.slow_bytes <= 1.01 * least and not report.notes
    assert report.seconds["network between slices"] == pytest.approx(
        report.slow_bytes / V5E.network
    )
    between = [row for row in report.collectives if row.between_slices]
    assert {(row.kind, row.dims) for row in between} == {("all-reduce", ("replicate",))}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("dim", ["slice", "dp", "tp"])
def test_the_tpus_compiler_numbers_a_slices_devices_in_the_meshs_order(dim: str) -> None:
    with xd.abstract("v5e:4x4*4"):
        names = ("slice", "dp", "tp")
        mesh = xd.init_device_mesh("xla", (4, 2, 8), mesh_dim_names=names)
        assert mesh.mesh.flatten().tolist() != list(range(64))  # it's another one than libtpu's
        over = [xd.Shard(0) if name == dim else xd.Replicate() for name in names]
        x = xd.distribute_tensor(torch.randn(1024, 256), mesh, over)
        report = xd.plan(lambda x: x.sin().redistribute(mesh, [xd.Replicate()] * 3), x)
    (row,) = report.collectives
    assert (row.kind, row.dims, row.between_slices) == ("all-gather", (dim,), dim == "slice")
