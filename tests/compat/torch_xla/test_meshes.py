"""Tensors that were marked on different meshes over the same devices, in one operation: as under
torch_xla, they meet. Expected values are CPU torch's."""

from __future__ import annotations

import copy
import itertools
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
import xla_dtensor.compat.torch_xla as torch_xla
import xla_dtensor.compat.torch_xla.distributed.spmd as xs
from tests.compat.torch_xla.models import mesh_of
from xla_dtensor.errors import MeshMismatchError

BACKWARDS = list(reversed(range(8)))
MESHES = {
    "column": ((8, 1), None),
    "row": ((1, 8), None),
    "line": ((8,), None),
    "wide": ((2, 4), None),
    "tall": ((4, 2), None),
    "deep": ((2, 2, 2), None),
    "backwards": ((2, 4), BACKWARDS),
}
PAIRS = {  # and the number of rows, of which 13 are uneven
    ("column", "wide"): 16,
    ("wide", "tall"): 13,
    ("row", "column"): 16,
    ("line", "deep"): 13,
    ("backwards", "wide"): 16,
    ("line", "backwards"): 13,
}


def mesh(name: str) -> xs.Mesh:
    shape, ids = MESHES[name]
    return mesh_of(shape, ids=ids)


def marked(value: torch.Tensor, name: str, spec: tuple) -> torch.Tensor:
    return xs.mark_sharding(value.to("xla"), mesh(name), spec)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("of_x", "of_w"), PAIRS)
def test_an_operation_and_its_gradients(of_x: str, of_w: str) -> None:
    rows = PAIRS[of_x, of_w]
    x, w = torch.randn(rows, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    a = marked(x.detach(), of_x, (0, None)).requires_grad_()
    b = marked(w.detach(), of_w, (mesh(of_w).ndim - 1, 0)).requires_grad_()
    expected, found = nn.functional.linear(x, w).relu(), nn.functional.linear(a, b).relu()
    torch.testing.assert_close(found.full_tensor().detach().cpu(), expected.detach())
    expected.square().sum().backward()
    found.square().sum().backward()
    for ours, theirs, name in ((a, x, of_x), (b, w, of_w)):
        torch.testing.assert_close(ours.grad.full_tensor().cpu(), theirs.grad)
        assert ours.grad.device_mesh == ours.device_mesh == mesh(name)
        assert ours.grad.placements == ours.placements


def test_the_result_is_where_the_fewest_values_move() -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    fine = marked(x, "wide", (0, 1))
    coarse = marked(y, "column", (0, None))  # on the finer mesh: rows over both dims
    total = fine + coarse
    assert total.device_mesh == (coarse + fine).device_mesh == mesh("wide")
    torch.testing.assert_close(total.full_tensor().cpu(), x + y)
    # What (4, 2) says of fine can't be said by (2, 4), nor the other way round.
    big, small = marked(x, "tall", (0, 1)), marked(y[:1], "wide", (None, 1))
    for result in (big * small, small * big):
        assert result.device_mesh == mesh("tall")
        torch.testing.assert_close(result.full_tensor().cpu(), x * y[:1])


def test_layouts_that_say_the_same_need_no_communication() -> None:
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    a, b = marked(x, "column", (0, None)), marked(y, "wide", ((0, 1), None))
    step = torch_xla.compile(lambda a, b: a * b)
    torch.testing.assert_close(step(a, b).full_tensor().cpu(), x * y)
    text = step.lower(a, b).compile().as_text()
    assert not re.search(r"all-(reduce|gather|to-all)|collective-permute|reduce-scatter", text)


def test_a_write_stays_on_the_mesh_of_what_is_written() -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    a, b = marked(x, "tall", (0, 1)), marked(y, "wide", (0, None))
    before = a.placements
    a.add_(b)
    a[2:4] = b[:2]
    expected = x + y
    expected[2:4] = y[:2]
    torch.testing.assert_close(a.full_tensor().cpu(), expected)
    assert (a.device_mesh, a.placements) == (mesh("tall"), before)
    out = marked(torch.empty(8, 8), "line", (0, None))
    torch.mul(a, b, out=out)
    torch.testing.assert_close(out.full_tensor().cpu(), expected * y)
    assert out.device_mesh == mesh("line")


def test_sums_that_are_pending_are_made_first() -> None:
    x, y = torch.randn(8, 8), torch.randn(8)
    pending = marked(x, "wide", (0, 1)).sum(0)
    assert any(placement.is_partial() for placement in pending.placements)
    together = pending * marked(y, "tall", (0,))
    torch.testing.assert_close(together.full_tensor().cpu(), x.sum(0) * y)


def _written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[:4].copy_(b[:4])
    torch._foreach_add_([a, b], [b * 1, a * 1])
    return a + b


def _twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad((a * b * b).sum(), b, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), a)[0]


def _computed_again(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found = checkpoint(lambda x: (x * b).sin(), a, use_reentrant=False)
    return torch.autograd.grad(found.sum(), b)[0]


OPERATIONS = {
    "embedding": (F.embedding, [torch.arange(16).reshape(8, 2) % 8, (8, 4)]),
    "index": (lambda a, i: a[i], [(8, 4), torch.arange(16) % 8]),
    "index_put": (lambda a, i, v: a.index_put((i,), v), [(16, 4), torch.arange(8) * 2, (8, 4)]),
    "nonzero": (lambda a, b: a[b > 0], [(8, 4), (8, 4)]),
    "attention": (F.scaled_dot_product_attention, [(8, 2, 16, 8)] * 3),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(16, 8), (8,), (8,)]),
    "conv": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(8, 8, 16), (8, 8, 3), (8,)]),
    "cross_entropy": (F.cross_entropy, [(16, 8), torch.arange(16) % 8]),
    "norms": (lambda a, b: torch.stack(torch._foreach_norm([a, b])).norm(), [(8, 4), (13,)]),
    "writes": (_written, [(8, 4), (8, 4)]),
    "second derivative": (_twice, [(8, 4), (8, 4)]),
    "checkpoint": (_computed_again, [(8, 4), (8, 4)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str) -> None:
    function, arguments = OPERATIONS[name]
    plain, ours = [], []
    for argument, place in zip(arguments, itertools.cycle(["column", "wide", "tall"])):
        value = torch.randn(argument) if isinstance(argument, tuple) else argument
        needs = name in {"second derivative", "checkpoint"}
        plain.append(value.clone().requires_grad_(needs))
        rows = 0 if place != "wide" else 1
        ours.append(marked(value, place, (rows, *[None] * (value.ndim - 1))).requires_grad_(needs))
    expected, found = function(*plain), function(*ours)
    torch.testing.assert_close(found.cpu(), expected.detach(), atol=1e-5, rtol=1e-4)


def test_many_meshes_in_one_call() -> None:
    values = [torch.randn(8, 3) for _ in MESHES]
    tensors = [marked(v, name, (0, None)) for v, name in zip(values, MESHES, strict=True)]
    torch.testing.assert_close(torch.cat(tensors).full_tensor().cpu(), torch.cat(values))
    found = torch.where(tensors[0] > 0, tensors[3], tensors[4])
    expected = torch.where(values[0] > 0, values[3], values[4])
    torch.testing.assert_close(found.full_tensor().cpu(), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training(compiled: bool) -> None:
    """Inputs on one mesh, layers on two others: what torch_xla's users have who change a mesh in
    one place."""
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    model = copy.deepcopy(plain).to("xla")
    xs.mark_sharding(model[0].weight, mesh("wide"), (1, 0))
    xs.mark_sharding(model[2].weight, mesh("line"), (0,))
    xs.mark_sharding(model[3].weight, mesh("tall"), (0, 1))
    places = {name: p.device_mesh for name, p in model.named_parameters() if "weight" in name}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss.detach(), norm])

    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, model)]
    step = torch_xla.compile(train) if compiled else train
    for _ in range(3):
        x = torch.randn(12, 8)
        expected = train(plain, optimizers[0], x)
        found = step(model, optimizers[1], marked(x, "column", (0, None)))
        torch.testing.assert_close(found.full_tensor().cpu(), expected)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), atol=1e-5, rtol=1e-4)
        assert places.get(name) in (None, getattr(ours, "device_mesh", None))


def test_another_order_of_the_devices_in_a_compiled_step() -> None:
    a, b = marked(torch.ones(8, 8), "wide", (0, 1)), marked(torch.ones(8, 8), "backwards", (0, 1))
    assert (a + b).full_tensor().cpu().eq(2).all()
    with pytest.raises(MeshMismatchError, match=r"one (order|set) of devices"):
        torch_xla.compile(lambda a, b: a + b)(a, b)


def test_torchs_meshes_stay_apart() -> None:
    one = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("torchs", "own"))
    a = distribute_tensor(torch.ones(8, 8), one, [Shard(0), Replicate()])
    with pytest.raises(MeshMismatchError, match="redistribute"):
        a + marked(torch.ones(8, 8), "line", (0, None))
