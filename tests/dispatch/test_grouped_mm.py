"""``F.grouped_mm`` against one product per group on the CPU, with gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.planning.tpus import needs_libtpu
from xla_dtensor.lowering.context import here
from xla_dtensor.lowering.linalg import megablox
from xla_dtensor.lowering.linalg.grouped_mm import grouped_mm

R, S = Replicate(), Shard
ENDS = [4, 4, 10, 16]  # one group is empty
SHAPES = {
    "rows": ((16, 8), (4, 8, 24)),
    "columns": ((4, 24, 8), (8, 16)),
    "contracted": ((8, 16), (16, 24)),
    "batch": ((4, 8, 16), (4, 16, 24)),
}
PLACEMENTS: dict[str, Any] = {
    "one device": None,
    "first": ([S(0), R], [R, S(0)]),
    "both": ([S(0), S(1)], [R, S(1)]),
    "second": ([R, S(1)], [S(1), R]),
    "same": ([S(0), S(0)], [S(0), S(0)]),
    "sum": ([Partial(), R], [R, S(0)]),
}


def by_group(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """One product after another."""
    if a.ndim == b.ndim == 3:
        return torch.stack([x @ y for x, y in zip(a, b, strict=True)])
    parts = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.ndim == 3:
        return torch.cat([a[i:j] @ b[g] for g, (i, j) in enumerate(parts)])
    if a.ndim == 3:
        return torch.cat([a[g] @ b[:, i:j] for g, (i, j) in enumerate(parts)], 1)
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in parts])


@pytest.mark.one_in(17)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("placements", PLACEMENTS)
@pytest.mark.parametrize("kind", SHAPES)
def test_grouped_mm(
    kind: str, placements: str, dtype: torch.dtype, compiled: bool, mesh_2x4: DeviceMesh
) -> None:
    values = [torch.randn(shape).to(dtype) for shape in SHAPES[kind]]
    a, b = (value.clone().float().requires_grad_() for value in values)
    product = by_group(a, b, ENDS)
    weight = torch.randn(product.shape)
    (product * weight).sum().backward()

    def place(t: torch.Tensor, which: int | None = None) -> Any:
        where = PLACEMENTS[placements]
        if where is None:
            return t.to("xla")
        return distribute_tensor(t, mesh_2x4, [R, R] if which is None else where[which])

    ours_a, ours_b = (place(value, i).requires_grad_() for i, value in enumerate(values))
    ours_weight = place(weight.to(dtype))

    def step(ends: Any) -> Any:
        found = torch.nn.functional.grouped_mm(ours_a, ours_b, offs=ends)
        (found * ours_weight).sum().backward()
        return found.detach()

    ends = None if kind == "batch" else place(torch.tensor(ENDS, dtype=torch.int32))
    found = (xd.compile(step) if compiled else step)(ends)
    assert found.dtype == dtype
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    for ours, theirs in [(found, product), (ours_a.grad, a.grad), (ours_b.grad, b.grad)]:
        ours = ours.full_tensor() if isinstance(ours, xd.XLAShardedTensor) else ours
        torch.testing.assert_close(ours.cpu().float(), theirs, **tolerance)


def test_other_groups_need_no_other_program() -> None:
    a, b = torch.randn(16, 8), torch.randn(4, 8, 24)
    step = xd.compile(lambda ends: torch._grouped_mm(a.to("xla"), b.to("xla"), offs=ends))
    for ends in (ENDS, [0, 0, 0, 16], [16, 16, 16, 16], [1, 2, 3, 16]):
        found = step(torch.tensor(ends, dtype=torch.int32).to("xla"))
        torch.testing.assert_close(found.cpu(), by_group(a, b, ends))
    assert len(step.compiled_programs()) == 1


def test_under_per_device_values(mesh_2x4: DeviceMesh) -> None:
    """Each device has its own rows and groups."""
    mesh = mesh_2x4["dp"]
    rows, b = [torch.randn(16, 8) for _ in range(2)], torch.randn(4, 8, 24)
    ends = [ENDS, [1, 2, 3, 16]]
    found = torch._grouped_mm(
        xd.from_device_values(rows, mesh),
        b.to("xla"),
        offs=xd.from_device_values([torch.tensor(e, dtype=torch.int32) for e in ends], mesh),
    )
    for value, a, e in zip(found.local_values()[::4], rows, ends, strict=True):
        torch.testing.assert_close(value, by_group(a, b, e))


@pytest.mark.parametrize("kind", ["rows", "columns", "contracted"])
def test_varying_beside_sharded(kind: str, mesh_2x4: DeviceMesh) -> None:
    """Rows of each dp device, weights sharded over tp: the partitioner and `vmap` at once."""
    a_shape, b_shape = SHAPES[kind]
    values, b = [torch.randn(a_shape) for _ in range(2)], torch.randn(b_shape)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    own = xd.from_device_values([values[i // 4] for i in range(8)], mesh_2x4, vary=["dp"])
    tp = mesh_2x4["tp"]
    sharded = distribute_tensor(b, tp, [S(b.ndim - 1)])
    ours = DTensor.from_local(own, tp, [R], run_check=False)
    found = torch._grouped_mm(ours, sharded, offs=distribute_tensor(ends, tp, [R]))
    local = found.full_tensor()
    for value, a in zip(local.local_values()[::4], values, strict=True):
        torch.testing.assert_close(value, by_group(a, b, ENDS))


F32 = torch.float32
ERRORS: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
    ((16, 8), (4, 8, 24), None, {}, "Have to provide offsets"),
    ((4, 16, 8), (4, 8, 24), torch.int32, {}, "Have to provide offsets"),
    ((16, 8), (4, 8, 24), torch.int64, {}, "Offsets have to be int32"),
    ((16, 8), (4, 9, 24), torch.int32, {}, "contraction dimension"),
    ((16, 8), (3, 8, 24), torch.int32, {}, "matrix batch sizes have to match"),
    ((16, 8), (4, 8, 24), torch.int32, {"dtype": torch.float64}, "Expected mat_a and mat_b"),
    ((16, 8), (4, 8, 24), torch.int32, {"out_dtype": torch.bfloat16}, "must match mat_a dtype"),
]


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_errors(case: int) -> None:
    a, b, dtype, options, message = ERRORS[case]
    ends = None if dtype is None else torch.tensor(ENDS, dtype=dtype)
    of, out_dtype = options.get("dtype", F32), options.get("out_dtype")
    x, y = torch.randn(a, dtype=of), torch.randn(b, dtype=of)
    with pytest.raises(RuntimeError):
        torch._grouped_mm(x, y, offs=ends, out_dtype=out_dtype)
    with pytest.raises(RuntimeError, match=message):
        offs = None if ends is None else ends.to("xla")
        torch._grouped_mm(x.to("xla"), y.to("xla"), offs=offs, out_dtype=out_dtype)


@pytest.mark.parametrize("ends", [[0, 0, 1, 50, 50, 99, 99], [0] * 7, [100] * 7])
def test_groups_of_any_size(ends: list[int]) -> None:
    """Blocks of rows that groups share, groups without rows, rows without a group."""
    a, b, c = torch.randn(100, 8), torch.randn(7, 8, 5), torch.randn(100, 5)
    offs = torch.tensor(ends, dtype=torch.int32).to("xla")
    found = torch._grouped_mm(a.to("xla"), b.to("xla"), offs=offs).cpu()
    torch.testing.assert_close(found[: ends[-1]], by_group(a, b, ends))
    assert not found[ends[-1] :].any()
    sums = torch._grouped_mm(a.t().to("xla"), c.to("xla"), offs=offs).cpu()
    torch.testing.assert_close(sums, by_group(a.t(), c, ends))


@pytest.mark.parametrize("contracted", [False, True], ids=["rows", "contracted"])
def test_a_tpu_gets_xlas_own_operation(contracted: bool) -> None:
    x, ends = jnp.zeros((16, 8)), jnp.zeros(4, jnp.int32)
    given = (x.T, jnp.zeros((16, 24))) if contracted else (x, jnp.zeros((4, 8, 24)))
    traced = jax.jit(lambda x, y, ends: grouped_mm(x, y, ends)).trace(*given, ends)
    assert "chlo.ragged_dot" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "chlo.ragged_dot" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.fixture
def kernels(not_partitionable: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Shards are multiplied by the TPU's kernels, interpreted."""
    used: list[str] = []

    def takes(x: Any, y: Any) -> bool:
        used.append(str(x.dtype))
        return bool(here().axes) and x.dtype in megablox._DTYPES

    monkeypatch.setattr(megablox, "takes", takes)
    jax.clear_caches()  # of what it has traced
    return used


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("placements", ["first", "both", "second", "sum"])
@pytest.mark.parametrize("kind", ["rows", "columns", "contracted"])
def test_the_kernels_of_tpus(
    kind: str, placements: str, dtype: torch.dtype, kernels: list[str], mesh_2x4: DeviceMesh
) -> None:
    values = [torch.randn(shape).to(dtype) for shape in SHAPES[kind]]
    ends = [0, 5, 7, 13]  # an empty group, and rows of no group
    expected = by_group(*(v.float() for v in values), ends)
    given = [
        distribute_tensor(v, mesh_2x4, p)
        for v, p in zip(values, PLACEMENTS[placements], strict=True)
    ]
    offs = distribute_tensor(torch.tensor(ends, dtype=torch.int32), mesh_2x4, [R, R])
    found = torch._grouped_mm(*given, offs=offs).full_tensor().cpu().float()
    assert kernels
    if kind != "contracted":
        dim = 0 if kind == "rows" else 1
        rest = found.narrow(dim, ends[-1], 16 - ends[-1])
        assert not rest.any()
        found = found.narrow(dim, 0, ends[-1])
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(found, expected, **tolerance)


@needs_libtpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outer", [1024, 1022], ids=["even", "uneven"])
def test_many_groups_compile_for_a_tpu(outer: int, dtype: torch.dtype) -> None:
    """Of 64 groups in float32 `ragged_dot` needs more of a core's memory than there is."""
    rows, inner, groups = 4096, 2048, 64
    with xd.abstract("v5e:2x4"):
        mesh = xd.init_device_mesh("xla", (2, 4))
        x = distribute_tensor(torch.empty(rows, inner, dtype=dtype), mesh, [R, R])
        y = torch.empty(groups, inner, outer, dtype=dtype)
        y = distribute_tensor(y, mesh, [R, S(2)]).requires_grad_()
        ends = distribute_tensor(torch.empty(groups, dtype=torch.int32), mesh, [R, R])

        def step(x: Any, y: Any, ends: Any) -> Any:
            loss = torch._grouped_mm(x, y, offs=ends).square().sum()
            loss.backward()
            return loss.detach(), y.grad

        found = xd.plan(step, x, y, ends)
    assert found.memory.needed > 0
    if outer == 1024:
        assert sum(row.bytes for row in found.collectives) <= 4  # the loss
        # Forward and the weight's gradient, each computed by both rows of chips.
        assert found.flops == 2 * 2 * 2 * rows * inner * outer
