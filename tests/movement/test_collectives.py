"""Collectives on per-device tensors: what they compute, and what XLA makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.movement.test_local_view import check
from xla_dtensor.base.torch_private import TORCH_VERSION
from xla_dtensor.planning.collectives import collectives

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.one_in(2),  # each variant compiles programs of its own
]
C = xd.collectives
# Mesh, mesh dim, and the devices of each group.
GROUPS: list[tuple[str, str, list[list[int]]]] = [
    ("8", "x", [list(range(8))]),
    ("2x4", "dp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("2x4", "tp", [[0, 1, 2, 3], [4, 5, 6, 7]]),
]

# ------------------------------------------------------- what is in the compiled program


def communication(step: Any) -> list[tuple[str, int, list[list[int]]]]:
    """Per collective of the newest program its kind, the bytes of its result on one device, and its
    groups of devices (of a permutation: who sends to whom)."""
    text = step.compiled_programs()[-1].as_text()
    return sorted((c.kind, c.bytes, sorted(map(list, c.groups))) for c in collectives(text))


def ring(count: int) -> list[int]:
    return [(i + 1) % count for i in range(count)]


Both = tuple[Callable[..., Any] | None, Callable[..., Any]]


def reduced(op: str) -> Both:
    return lambda x, g: funcol.all_reduce(x, op, g), lambda x, g: C.all_reduce(x, g, op)


def scattered(dim: int, op: str) -> Both:
    # The one that has a gradient takes sums alone on torch 2.11.
    of_torch = (
        funcol.reduce_scatter_tensor_autograd if op == "sum" else funcol.reduce_scatter_tensor
    )
    return (
        lambda x, g: of_torch(x, op, dim, g),
        lambda x, g: C.reduce_scatter(x, g, dim, op),
    )


def gathered(dim: int) -> Both:
    return (
        lambda x, g: funcol.all_gather_tensor_autograd(x, dim, g),
        lambda x, g: C.all_gather(x, g, dim),
    )


EXCHANGE: Both = (
    lambda x, g: funcol.all_to_all_single_autograd(x, None, None, g),
    lambda x, g: C.all_to_all(x, g),
)
PERMUTE: Both = (
    lambda x, g: funcol.permute_tensor(x, ring(g.size()), g),
    lambda x, g: C.permute(x, g, ring(g.size())),
)

# Functions, the collective, its bytes (of one device's tensor of s bytes, of n devices), and the
# gradient's collective and bytes.
Case = tuple[Both, str, Callable[[int, int], int], str | None, Callable[[int, int], int] | None]
same, times, part = (lambda s, n: s), (lambda s, n: s * n), (lambda s, n: s // n)
PROGRAMS: dict[str, Case] = {
    "all_reduce sum": (reduced("sum"), "all-reduce", same, "all-reduce", same),
    "all_reduce avg": (reduced("avg"), "all-reduce", same, None, None),
    "all_reduce max": (reduced("max"), "all-reduce", same, None, None),
    "all_reduce product": (reduced("product"), "all-reduce", same, None, None),
    "all_gather 0": (gathered(0), "all-gather", times, "reduce-scatter", same),
    "all_gather 1": (gathered(1), "all-gather", times, "reduce-scatter", same),
    "reduce_scatter 0": (scattered(0, "sum"), "reduce-scatter", part, "all-gather", same),
    "reduce_scatter 1": (scattered(1, "sum"), "reduce-scatter", part, "all-gather", same),
    "reduce_scatter avg": (scattered(0, "avg"), "reduce-scatter", part, None, None),
    "reduce_scatter max": (scattered(0, "max"), "all-to-all", same, None, None),
    "all_to_all": (EXCHANGE, "all-to-all", same, "all-to-all", same),
    "permute": (PERMUTE, "collective-permute", same, "collective-permute", same),
    "broadcast": (
        (None, lambda x, g: C.broadcast(x, g, 1)),
        "all-reduce",
        same,
        "all-reduce",
        same,
    ),
    "broadcast without gradient": (
        (lambda x, g: funcol.broadcast(x, 1, g), lambda x, g: C.broadcast(x, g, 1)),
        "all-reduce",
        same,
        None,
        None,
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh_name, dim, groups", GROUPS)
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_in_a_compiled_step(mesh_name: str, dim: str, groups: list[list[int]], name: str) -> None:
    """One collective of XLA's, along the mesh dim and of the tensor's size; one more backwards."""
    functions, kind, size, gradient, gradient_size = PROGRAMS[name]
    mesh = make_mesh(mesh_name)
    group, count = mesh.get_group(dim), len(groups[0])
    x = xd.from_device_values([torch.randn(16, 24) for _ in range(8)], mesh)
    nbytes = 16 * 24 * 4
    # Along one mesh dim both ways to call it, along the others one.
    for function in functions if dim == "tp" else functions[:1] if functions[0] else functions[1:]:
        if function is None:
            continue

        def step(x: Any, function: Any = function) -> Any:
            if gradient is None:
                return function(x, group)
            x = x.detach().requires_grad_()
            y = function(x, group)
            weight = xd.collectives.axis_index(mesh, dim).to(y.dtype) + y.detach().sin()
            (grad,) = torch.autograd.grad(y, x, weight)
            return y, grad

        compiled = xd.compile(step)
        compiled(x)
        there = [[g[i], g[(i + 1) % count]] for g in groups for i in range(count)]
        pairs = {"collective-permute": sorted(there)}
        expected = [(kind, size(nbytes, count), pairs.get(kind, groups))]
        if gradient is not None and gradient_size is not None:
            # Its bytes are those of the gradient of x, which has the size of x.
            back = sorted([b, a] for a, b in there) if kind in pairs else groups
            expected.append((gradient, gradient_size(nbytes, count), back))
        assert communication(compiled) == sorted(expected)


def test_several_in_a_compiled_step(mesh_2x4: DeviceMesh) -> None:
    """Coalesced ones, bitwise ones, and what isn't communication."""
    x = xd.from_device_values([torch.arange(48, dtype=torch.int32) + i for i in range(8)], mesh_2x4)
    tp, (groups,) = mesh_2x4["tp"], [GROUPS[2][2]]

    def step(x: Any) -> Any:
        a, b = funcol.all_gather_into_tensor_coalesced([x, x[:8]], tp)
        local = funcol.wait_tensor(a)[: xd.collectives.axis_index(mesh_2x4, "tp").ndim + 4] * 2
        return a, b, local, funcol.all_reduce(x[:4], "bxor", tp)

    compiled = xd.compile(step)
    compiled(x)
    expected = [("all-gather", n * 4 * 4, groups) for n in (4, 8, 48)]
    assert communication(compiled) == sorted(expected)


# ------------------------------------------------------- values, against plain torch on a list


def elementwise(op: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(list(values))
    if op in ("sum", "product"):
        function = torch.sum if op == "sum" else torch.prod
        # torch sums bools to bools.
        return (
            function(stacked.to(torch.int64), 0).to(stacked.dtype)
            if (not stacked.is_floating_point())
            else function(stacked, 0)
        )
    if op == "avg":
        return stacked.mean(0)
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    result = values[0]
    for value in values[1:]:
        result = {"band": result & value, "bor": result | value, "bxor": result ^ value}[op]
    return result


# From the values of a group the results of its devices.
Reference = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def reduced_ref(op: str) -> Reference:
    return lambda v: [elementwise(op, v)] * len(v)


def scattered_ref(dim: int, op: str) -> Reference:
    return lambda v: list(elementwise(op, v).chunk(len(v), dim))


def gathered_ref(dim: int) -> Reference:
    return lambda v: [torch.cat(v, dim)] * len(v)


def exchanged(v: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([x.chunk(len(v))[i] for x in v]) for i in range(len(v))]


def shifted(v: list[torch.Tensor]) -> list[torch.Tensor]:
    return [v[i - 1] for i in range(len(v))]


BROADCAST: Both = (lambda x, g: funcol.broadcast(x, 1, g), lambda x, g: C.broadcast(x, g, 1))
VALUES: dict[str, tuple[Both, Reference]] = {
    "all_gather 0": (gathered(0), gathered_ref(0)),
    "all_gather 1": (gathered(1), gathered_ref(1)),
    "all_to_all": (EXCHANGE, exchanged),
    "permute": (PERMUTE, shifted),
    "broadcast": (BROADCAST, lambda v: [v[1]] * len(v)),
    "all_reduce sum": (reduced("sum"), reduced_ref("sum")),
    "reduce_scatter 1 sum": (scattered(1, "sum"), scattered_ref(1, "sum")),
}
REDUCTIONS = ["sum", "avg", "max", "min", "product", "band", "bor", "bxor"]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def apply(
    reference: Reference, values: Sequence[torch.Tensor], groups: list[list[int]]
) -> list[torch.Tensor]:
    results: list[Any] = [None] * len(values)
    for group in groups:
        for device, result in zip(group, reference([values[i] for i in group]), strict=True):
            results[device] = result
    return results


def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers whose sums and products are exact."""
    if dtype.is_floating_point:
        return torch.randint(-2, 3, shape).to(dtype) / 2
    return torch.randint(0, 2 if dtype == torch.bool else 6, shape).to(dtype)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(mesh_2x4: DeviceMesh, dtype: torch.dtype, op: str) -> None:
    values = [made(dtype, 8, 3) for _ in range(8)]
    x = xd.from_device_values(values, mesh_2x4)
    _, dim, groups = GROUPS[2]
    group = mesh_2x4.get_group(dim)
    fractional = dtype.is_floating_point
    if fractional if op in ("band", "bor", "bxor") else op == "avg" and not fractional:
        with pytest.raises(xd.UnsupportedOpError, match="as in torch, avg is of floating point"):
            C.all_reduce(x, group, op)
        with pytest.raises(xd.UnsupportedOpError, match="as in torch, avg is of floating point"):
            funcol.reduce_scatter_tensor(x, op, 0, group)
        return
    reduced_x = funcol.all_reduce(x, op, group)
    assert reduced_x.varying == ("dp",) and reduced_x.dtype == dtype
    check(reduced_x, apply(reduced_ref(op), values, groups))
    scattered_x = C.reduce_scatter(x, group, op=op)
    assert scattered_x.varying == ("dp", "tp") and scattered_x.dtype == dtype
    check(scattered_x, apply(scattered_ref(0, op), values, groups))
    check(x, values)


@pytest.mark.parametrize("mesh_name, dim, groups", GROUPS)
@pytest.mark.parametrize("name", list(VALUES))
def test_values(mesh_name: str, dim: str, groups: list[list[int]], name: str) -> None:
    (with_funcol, ours), reference = VALUES[name]
    mesh = make_mesh(mesh_name)
    dtypes = [torch.float32] if dim != "dp" else [torch.float32, torch.bfloat16, torch.bool]
    for dtype in dtypes:
        values = [made(dtype, 8, 16) for _ in range(8)]
        x = xd.from_device_values(values, mesh)
        expected = apply(reference, values, groups)
        for function in (with_funcol, ours):
            assert function is not None
            result = function(x, mesh.get_group(dim))
            assert type(result) is xd.XLATensor and result.dtype == dtype
            assert result.shape == expected[0].shape
            check(result, expected)


@pytest.mark.parametrize("vary", [["dp"], ["tp"], []])
def test_of_tensors_that_vary_along_other_dims(mesh_2x4: DeviceMesh, vary: list[str]) -> None:
    distinct = [torch.randn(8, 8) for _ in range(8)]
    pick = {"dp": [0, 0, 0, 0, 4, 4, 4, 4], "tp": [0, 1, 2, 3] * 2}.get("".join(vary), [0] * 8)
    values = [distinct[i] for i in pick]
    x = xd.from_device_values(values, mesh_2x4, vary)
    for _, dim, groups in GROUPS[1:]:
        for (function, _), reference in VALUES.values():
            assert function is not None
            result = function(x, mesh_2x4.get_group(dim))
            check(result, apply(reference, values, groups))
        check(
            C.all_reduce(x, (mesh_2x4, dim), "product"),
            apply(reduced_ref("product"), values, groups),
        )


def test_ways_to_name_a_group(mesh_2x4: DeviceMesh) -> None:
    values = [torch.randn(4, 2) for _ in range(8)]
    x = xd.from_device_values(values, mesh_2x4)
    expected = apply(reduced_ref("sum"), values, GROUPS[2][2])
    group = mesh_2x4.get_group("tp")
    assert (group, group.size()) == (mesh_2x4["tp"].get_group(), 4)
    assert dist.get_world_size(group) == 4
    for name in (mesh_2x4["tp"], (mesh_2x4, 1), (mesh_2x4, "tp"), group, mesh_2x4.get_group(1)):
        check(funcol.all_reduce(x, "sum", name), expected)
        check(C.all_reduce(x, name), expected)
    check(funcol.all_reduce(x, "SUM", str(group)), expected)
    both = mesh_2x4._flatten("dp_tp")
    check(funcol.all_reduce(x, "sum", both), [sum(values)] * 8)  # type: ignore[list-item]
    check(C.permute(x, both, ring(8)), shifted(values))
    tpdp = mesh_2x4["tp", "dp"]._flatten("tp_dp")
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    check(C.all_gather(x, tpdp), [torch.cat([values[i] for i in order])] * 8)


def test_coalesced_and_waited_for(mesh_2x4: DeviceMesh) -> None:
    tp, groups = mesh_2x4["tp"], GROUPS[2][2]
    lists = [[torch.randn(*shape) for _ in range(8)] for shape in ((4, 2), (8,), (4, 4, 3))]
    tensors = [xd.from_device_values(values, mesh_2x4) for values in lists]
    for op in ("sum", "max"):
        for y, values in zip(funcol.all_reduce_coalesced(tensors, op, tp), lists, strict=True):
            check(y, apply(reduced_ref(op), values, groups))
    for y, values in zip(funcol.all_gather_into_tensor_coalesced(tensors, tp), lists, strict=True):
        check(funcol.wait_tensor(y), apply(gathered_ref(0), values, groups))
    scattered_lists = funcol.reduce_scatter_tensor_coalesced([*tensors], "sum", [0, 0, 1], tp)
    for y, values, dim in zip(scattered_lists, lists, (0, 0, 1), strict=True):
        check(y, apply(scattered_ref(dim, "sum"), values, groups))
    # In place and into a given tensor, as torch's own layers call them.
    x, values = tensors[0].clone(), lists[0]
    native = torch.ops._c10d_functional
    assert native.all_reduce_(x, "sum", tp.get_group()) is x
    check(x, apply(reduced_ref("sum"), values, groups))
    x = tensors[0].clone()
    native.broadcast_(x, 2, tp.get_group())
    check(x, [values[2]] * 4 + [values[6]] * 4)
    many = [t.clone() for t in tensors]
    native.all_reduce_coalesced_(many, "sum", tp.get_group())
    for y, values in zip(many, lists, strict=True):
        check(y, apply(reduced_ref("sum"), values, groups))
    out = torch.zeros(16, 2, device="xla")
    native.all_gather_into_tensor_out(tensors[0], 4, tp.get_group(), out=out)
    check(out, apply(gathered_ref(0), lists[0], groups))


def test_bits_are_kept(mesh_2x4: DeviceMesh) -> None:
    """A broadcast is a copy: -0.0, nan and inf too, and of what the others hold nothing remains."""
    odd = torch.tensor([-0.0, 0.0, math.inf, -math.inf, math.nan])
    values = [odd if i % 4 == 1 else torch.full((5,), math.nan) for i in range(8)]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = xd.from_device_values([v.to(dtype) for v in values], mesh_2x4)
        for result in funcol.broadcast(x, 1, mesh_2x4["tp"]).local_values():
            assert torch.equal(result.isnan(), odd.isnan())
            assert torch.equal(result.nan_to_num(), odd.to(dtype).nan_to_num())
            assert torch.equal(result.signbit()[:4], odd.signbit()[:4])


def test_one_device() -> None:
    mesh = make_mesh("1")
    value = torch.randn(4, 2)
    x = xd.from_device_values([value], mesh)
    for (function, ours), reference in VALUES.values():
        if function is BROADCAST[0]:
            continue
        assert function is not None
        check(function(x, mesh.get_group()), reference([value]))
        check(ours(x, mesh.get_group()), reference([value]))


def test_axis_index(mesh_2x4: DeviceMesh) -> None:
    index = xd.collectives.axis_index(mesh_2x4, "tp")
    assert (index.shape, index.dtype, index.varying) == ((), torch.int64, ("tp",))
    check(index, [torch.tensor(i % 4) for i in range(8)])
    check(xd.collectives.axis_index(mesh_2x4, 0), [torch.tensor(i // 4) for i in range(8)])
    check(
        xd.collectives.axis_index(mesh_2x4._flatten("dp_tp")), [torch.tensor(i) for i in range(8)]
    )
    x = torch.arange(8.0).to("xla")
    picked = xd.compile(lambda x: x[xd.collectives.axis_index(mesh_2x4, "tp") + 1] * 2)(x)
    check(picked, [torch.tensor(2.0 * (i % 4 + 1)) for i in range(8)])
    assert repr(index) == (
        "XLATensor(shape=[], dtype=torch.int64, varying along tp, device='xla:0')"
    )


def test_on_the_meta_device(mesh_2x4: DeviceMesh) -> None:
    whole = distribute_tensor(torch.empty(16, 8, device="meta"), mesh_2x4, [Shard(0), Shard(1)])
    y = C.all_gather(whole.to_local(), mesh_2x4["tp"], 1)
    assert (y.shape, y.device.type, y.varying) == ((8, 8), "meta", ("dp",))


# ------------------------------------------------------- gradients

GRADIENTS: dict[str, tuple[Both, Reference]] = {
    name: VALUES[name] for name in VALUES if name != "broadcast"
} | {"broadcast": ((None, BROADCAST[1]), VALUES["broadcast"][1])}


@pytest.mark.parametrize("name", list(GRADIENTS))
def test_gradients(mesh_2x4: DeviceMesh, name: str) -> None:
    """Of the sum of all devices' losses, as torch's formulas have it."""
    functions, reference = GRADIENTS[name]
    for _, dim, groups in GROUPS[1:]:
        for function in functions:
            if function is None:
                continue
            values = [torch.randn(8, 8) for _ in range(8)]
            x = xd.from_device_values(values, mesh_2x4).requires_grad_()
            y = function(x.sin(), mesh_2x4.get_group(dim))
            weights = [torch.randn(*y.shape) for _ in range(8)]
            (y.square() * xd.from_device_values(weights, mesh_2x4)).sum().backward()
            leaves = [v.clone().requires_grad_() for v in values]
            results = apply(reference, [v.sin() for v in leaves], groups)
            sum((r.square() * w).sum() for r, w in zip(results, weights, strict=True)).backward()  # type: ignore[union-attr]
            expected = [
                torch.zeros_like(v) if v.grad is None else v.grad for v in leaves
            ]  # nobody uses what the broadcast drops
            assert x.grad is not None
            check(x.grad, expected)


def test_gradient_of_coalesced_ones(mesh_2x4: DeviceMesh) -> None:
    tp, groups = mesh_2x4["tp"], GROUPS[2][2]
    values = [torch.randn(4, 4) for _ in range(8)]
    x = xd.from_device_values(values, mesh_2x4).requires_grad_()
    a, b = funcol.all_reduce_coalesced([x, x * 2], "sum", tp)
    (c,) = funcol.reduce_scatter_tensor_coalesced([x], "sum", [0], tp)
    (d,) = funcol.all_gather_into_tensor_coalesced([x], tp)
    sum(t.square().sum() for t in (a, b, c, d)).backward()
    leaves = [v.clone().requires_grad_() for v in values]
    loss = sum(
        r.square().sum()
        for reference, scale in (
            (reduced_ref("sum"), 1),
            (reduced_ref("sum"), 2),
            (scattered_ref(0, "sum"), 1),
            (gathered_ref(0), 1),
        )
        for r in apply(reference, [v * scale for v in leaves], groups)
    )
    loss.backward()  # type: ignore[union-attr]
    assert x.grad is not None
    check(x.grad, [v.grad for v in leaves])  # type: ignore[misc]


@pytest.mark.parametrize("op", ["max", "product"])
def test_no_gradient_of_other_reductions(mesh_2x4: DeviceMesh, op: str) -> None:
    """torch's formulas are those of sums, and since 2.15 of maxima and means."""
    x = xd.from_device_values([torch.randn(4) for _ in range(8)], mesh_2x4).requires_grad_()
    if op == "product" or TORCH_VERSION < (2, 15):
        with pytest.raises(RuntimeError, match=f"all_reduce backward only .*, got '{op}'"):
            C.all_reduce(x, mesh_2x4["tp"], op).sum().backward()
    with pytest.raises(RuntimeError, match=f"only supports 'sum' reduction, got '{op}'"):
        funcol.reduce_scatter_tensor(x, op, 0, mesh_2x4["tp"]).sum().backward()


@pytest.mark.skipif(TORCH_VERSION < (2, 15), reason="torch has it since 2.15")
@pytest.mark.parametrize("op", ["max", "min", "avg"])
def test_gradients_of_maxima_and_means(mesh_2x4: DeviceMesh, op: str) -> None:
    """Of a maximum it goes to the device that has it, and in equal parts to all that do."""
    values = [torch.tensor([float(i), 1.0, -i, i // 2]) for i in range(8)]
    x = xd.from_device_values(values, mesh_2x4).requires_grad_()
    weight = xd.collectives.axis_index(mesh_2x4, "tp") + 1.0
    (C.all_reduce(x, mesh_2x4["tp"], op) * weight).sum().backward()
    whole = torch.stack(values).view(2, 4, 4).requires_grad_()
    reduce = {"max": torch.amax, "min": torch.amin, "avg": torch.mean}[op]
    (reduce(whole, 1) * 10).sum().backward()  # the weights' sum
    for own, expected in zip(x.grad.local_values(), whole.grad.flatten(0, 1), strict=True):
        torch.testing.assert_close(own, expected)


# ------------------------------------------------------- errors

Bad = tuple[Callable[[Any, DeviceMesh, Any], Any], type[Exception], str]
U = xd.UnsupportedOpError
ERRORS: dict[str, Bad] = {
    "uneven reduce_scatter": (
        lambda x, m, g: C.reduce_scatter(x[:3], g),
        U,
        r"reduce_scatter of a tensor of shape \[3, 4\] along \['tp'\]: dim 0 must divide by the 4",
    ),
    "uneven all_to_all": (
        lambda x, m, g: funcol.all_to_all_single(x[:3], None, None, g),
        U,
        "dim 0 must divide by the 4 devices; pad it",
    ),
    "uneven splits": (
        lambda x, m, g: funcol.all_to_all_single(x, [1, 1, 1, 5], [2, 2, 2, 2], g),
        U,
        r"sizes \[2, 2, 2, 2\] -> \[1, 1, 1, 5\]: numbers in Python .*xd.row_exchange.send",
    ),
    "all_gather without dims": (
        lambda x, m, g: C.all_gather(x.sum(), g),
        U,
        r"without dims along \['tp'\].*unsqueeze",
    ),
    "reduce_scatter without dims": (
        lambda x, m, g: C.reduce_scatter(x.sum(), g),
        U,
        r"shape \[\] along",
    ),
    "all_to_all without dims": (lambda x, m, g: C.all_to_all(x.sum(), g), U, r"shape \[\] along"),
    "unknown group": (
        lambda x, m, g: funcol.all_reduce(x, "sum", "nobody"),
        U,
        r"with group 'nobody': give an xla mesh of one dim, \(mesh, dim\) or mesh.get_group",
    ),
    "unknown group, xd": (
        lambda x, m, g: C.all_reduce(x, "nobody"),
        U,
        r"along 'nobody': give an xla mesh of one dim, \(mesh, dim\) or mesh.get_group",
    ),
    "several dims": (lambda x, m, g: C.all_reduce(x, m), xd.MeshError, "say which group is meant"),
    "unknown dim": (lambda x, m, g: C.all_reduce(x, (m, "pp")), xd.MeshError, "no mesh dim 'pp'"),
    "unknown op": (
        lambda x, m, g: funcol.all_reduce(x, "median", g),
        U,
        r"all_reduce with reduction 'median' along \['tp'\]: the reductions are sum, avg, max, min",
    ),
    "broadcast from nowhere": (
        lambda x, m, g: funcol.broadcast(x, 4, g),
        U,
        r"broadcast from 4 along \['tp'\]: the source is a coordinate along the mesh dim, from 0 ",
    ),
    "no permutation": (
        lambda x, m, g: funcol.permute_tensor(x, [1, 1, 2, 3], g),
        U,
        r"src_dst \[1, 1, 2, 3\] along \['tp'\]: each of the 4 devices has to receive from one",
    ),
    "sharded tensor": (
        lambda x, m, g: funcol.all_reduce(distribute_tensor(torch.ones(8), m), "sum", g),
        U,
        r"all_reduce of a sharded tensor of shape \[8\].*x.redistribute.*x.to_local\(\)",
    ),
    "CPU tensor": (lambda x, m, g: C.broadcast(torch.ones(8), g), U, r"tensor on cpu.*x.to\('xla'"),
    "CPU tensor, torch": (
        lambda x, m, g: funcol.all_reduce(torch.ones(8), "sum", g),
        RuntimeError,
        "process group registered under the name xla:.*tp",
    ),
    "other devices": (
        lambda x, m, g: C.all_reduce(x, make_mesh("4")),
        xd.MeshMismatchError,
        r"all_reduce: one tensor is on DeviceMesh\(\(dp=2, tp=4\).*or the mesh on .*d0=4",
    ),
    "a mesh cut otherwise": (
        lambda x, m, g: C.all_reduce(x, make_mesh("8")),
        xd.MeshMismatchError,
        r"varies along \['dp', 'tp'\] of Frame\(dp=2, tp=4\), which Frame\(x=8\) cuts differently",
    ),
    "rank": (lambda x, m, g: g.rank(), xd.PerDeviceValueError, r"axis_index\(mesh, dim\)"),
    "get_rank": (lambda x, m, g: m.get_rank(), xd.PerDeviceValueError, r"axis_index\(mesh, dim"),
    "get_local_rank": (
        lambda x, m, g: m.get_local_rank("tp"),
        xd.PerDeviceValueError,
        r"get_local_rank\('tp'\) has a different value on each device.*axis_index\(mesh, dim\)",
    ),
    "get_coordinate": (
        lambda x, m, g: m.get_coordinate(),
        xd.PerDeviceValueError,
        r"get_coordinate\(\) has a different value on each device.*axis_index\(mesh, dim\)",
    ),
    "another operation": (
        lambda x, m, g: dist.reduce(x, 0, group=g),
        xd.UnsupportedOpError,
        "torch.distributed.reduce with group .*use all_reduce",
    ),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_errors(mesh_2x4: DeviceMesh, name: str) -> None:
    function, kind, message = ERRORS[name]
    x = xd.from_device_values([torch.randn(8, 4) for _ in range(8)], mesh_2x4)
    with pytest.raises(kind, match=message):
        function(x, mesh_2x4, mesh_2x4.get_group("tp"))


def test_meshes_made_later() -> None:
    """A mesh that cuts a dim into finer ones: what varies along that dim is of no use with it."""
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("late_dp", "late_tp"))
    value = torch.arange(8.0)
    values = [torch.full((4,), float(i)) for i in range(8)]
    w = distribute_tensor(value, mesh["late_tp"], [Shard(0)])
    x = xd.from_device_values(values, mesh)
    rows = xd.from_device_values([values[i // 4] for i in range(8)], mesh, ["late_dp"])
    before = w.to_local()
    fine = mesh["late_tp"]._unflatten(0, (2, 2), ("outer", "inner"))
    index = xd.collectives.axis_index(fine, "inner")
    check(x + 1, [v + 1 for v in values])
    for call in (
        lambda: x + index,
        lambda: index + x,
        lambda: C.all_reduce(x, fine["inner"]),
        lambda: C.all_reduce(x, mesh["late_tp"]),
        lambda: xd.XLAShardedTensor.from_local(x, mesh, [Shard(0), Shard(0)]),
        lambda: x + distribute_tensor(torch.ones(4), mesh["late_dp"], [Replicate()]),
    ):
        with pytest.raises(xd.MeshMismatchError, match=r"'late_tp'\] of .*make all meshes before"):
            call()
    # Along the other dim nothing has changed, and sharded tensors are what they were.
    check(rows + index, [values[i // 4] + i % 2 for i in range(8)])
    check(C.all_reduce(rows, mesh["late_dp"]), [values[1]] * 8)
    assert w.to_local() is not before
    assert w.to_local().varying == ("outer", "inner")
    check(w.to_local() + index, [value[2 * (i % 4) :][:2] + i % 2 for i in range(8)])
    w.to_local().mul_(2)
    torch.testing.assert_close(w.full_tensor().cpu(), value * 2)
