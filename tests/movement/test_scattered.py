"""Sums of which each device keeps some columns: programs for TPUs ask for them by rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.planning.tpus import needs_libtpu
from xla_dtensor.lowering.workarounds import Workaround
from xla_dtensor.movement import scattered
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

TOKENS, ROWS = 16, 24
HERE = Workaround("as for a TPU, here", ("cpu",))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices that add up are as many as those that XLA has no ring for."""
    monkeypatch.setattr(scattered, "RING", 1)


def forms(mesh: Any, columns: int, dtype: torch.dtype, target: list[Any]) -> tuple[Any, Any]:
    """Those of a weight's gradient: a sum over dp, and the weight's own."""
    x = distribute_tensor(torch.ones(TOKENS, columns), mesh, [Shard(0), Replicate()])
    grad = distribute_tensor(torch.ones(TOKENS, ROWS), mesh, [Shard(0), Shard(1)])
    product = (grad.t() @ x).to(dtype)
    assert isinstance(product, XLAShardedTensor)
    assert product.placements == (Partial(), Shard(0))
    return product._form, product.redistribute(placements=target)._form


def text(mesh: Any, columns: int, platform: str, target: list[Any], *dtypes: Any) -> str:
    """The program of a cast from one dtype to another, and the move."""
    own, cast = dtypes
    source, target_form = forms(mesh, columns, torch.float32, target)
    whole = source.frame.replicated
    value = jax.ShapeDtypeStruct((ROWS, columns), own, sharding=whole)
    move = jax.jit(lambda x: scattered.scattered(x.astype(cast), source, target_form))
    return str(move.trace(value).lower(lowering_platforms=(platform,)).as_text())


COLUMNS = [Shard(1), Shard(0)]  # of dp and tp
NARROW = np.dtype(jax.numpy.bfloat16)


@pytest.mark.parametrize(
    ("dtypes", "columns", "target", "swaps"),
    [
        ((NARROW, np.float32), 256, COLUMNS, True),  # computed narrow, and cast
        ((NARROW, NARROW), 256, COLUMNS, True),
        ((np.float16, np.float32), 256, COLUMNS, True),
        ((np.float32, np.float32), 256, COLUMNS, False),
        ((NARROW, np.float32), 512, COLUMNS, False),
        ((NARROW, np.float32), 255, COLUMNS, False),
        ((NARROW, np.float32), 256, [Shard(0), Shard(1)], False),
        ((NARROW, np.float32), 256, [Replicate(), Shard(1)], False),
        ((NARROW, np.float32), 1024, [Shard(1), Shard(1)], True),
    ],
    ids=str,
)
def test_what_is_asked_for_by_rows(
    mesh_2x4: Any, few: None, dtypes: Any, columns: int, target: list[Any], swaps: bool
) -> None:
    found = text(mesh_2x4, columns, "tpu", target, *dtypes)
    assert found.count("transpose") == (2 if swaps else 0)
    assert found.count("sharding_constraint") == (1 if swaps else 0)
    assert "transpose" not in text(mesh_2x4, columns, "cpu", target, *dtypes)


def test_few_devices_that_add_up_have_a_ring(mesh_2x4: Any) -> None:
    assert "transpose" not in text(mesh_2x4, 256, "tpu", COLUMNS, NARROW, np.float32)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("rows", [24, 21])
def test_values(
    mesh_2x4: Any,
    few: None,
    monkeypatch: pytest.MonkeyPatch,
    lowered: list[str],
    compiled: bool,
    dims: int,
    rows: int,
) -> None:
    """As for a TPU, here: also of uneven rows, and in batches."""
    monkeypatch.setattr(scattered, "SCATTERED_COLUMNS", HERE)
    batch = (3,) * (dims - 2)
    a = torch.randint(-4, 4, (*batch, rows, TOKENS)).bfloat16()
    b = torch.randint(-4, 4, (*batch, TOKENS, 256)).bfloat16()

    def step(a: Any, b: Any) -> Any:
        product = a @ b
        assert product.placements == (Partial(), Shard(dims - 2))
        return product.float().redistribute(placements=[Shard(dims - 1), Shard(dims - 2)])

    before = len(lowered)
    call = xd.compile(step) if compiled else step
    found = call(
        distribute_tensor(a, mesh_2x4, [Shard(dims - 1), Shard(dims - 2)]),
        distribute_tensor(b, mesh_2x4, [Shard(dims - 2), Replicate()]),
    )
    assert torch.equal(found.full_tensor().cpu(), (a.double() @ b.double()).float())
    if compiled:
        assert any("stablehlo.transpose" in program for program in lowered[before:])


def test_a_sum_that_varies(
    mesh_2x4: Any, few: None, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    """Over dp, and another on each device along tp: the array has one more dim in front."""
    monkeypatch.setattr(scattered, "SCATTERED_COLUMNS", HERE)
    dp, tp = mesh_2x4["dp"], mesh_2x4["tp"]
    own = [torch.randint(-4, 4, (ROWS, TOKENS)).bfloat16() for _ in range(4)]
    b = torch.randint(-4, 4, (TOKENS, 256)).bfloat16()
    varying = xd.from_device_values(own, tp)

    @xd.compile
    def step(a: Any, b: Any) -> Any:
        a = distribute_tensor(a, dp, [Shard(1)], src_data_rank=None)
        product = a @ distribute_tensor(b, dp, [Shard(0)], src_data_rank=None)
        assert product.placements == (Partial(),)
        return product.float().redistribute(placements=[Shard(1)]).full_tensor()

    before = len(lowered)
    found = step(varying, b.to("xla"))
    for value, a in zip(found.local_values(), own * 2, strict=True):  # of dp and tp
        assert torch.equal(value, (a.double() @ b.double()).float())
    assert any("stablehlo.transpose" in program for program in lowered[before:])


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float32], ids=str)
def test_the_tpus_compiler_makes_a_reduce_scatter(computed: torch.dtype) -> None:
    """Of the gradient of a weight whose columns lie over dp, 128 on each device."""
    with xd.abstract("v5e:8x16"):
        mesh = xd.init_device_mesh("xla", (64, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.randn(2048, 64 * 128)
        weight = torch.nn.Parameter(distribute_tensor(whole, mesh, COLUMNS))
        x = distribute_tensor(torch.randn(64, 32, 64 * 128), mesh, [Shard(0), Replicate()])

        def step(x: Any) -> Any:
            loss = F.linear(x.to(computed), weight.to(computed)).square().mean()
            loss.backward()
            return loss.detach()

        found = xd.plan(step, x)
    whole_gradient = whole.numel() // 2 * computed.itemsize
    (row,) = [row for row in found.collectives if row.kind == "reduce-scatter"]
    assert row.dims == ("dp",) and row.bytes < whole_gradient / 32  # (64, and what is padded)
    sums = [row.bytes for row in found.collectives if row.kind == "all-reduce"]
    assert max(sums, default=0) < whole_gradient / 32
