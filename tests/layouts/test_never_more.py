"""Small programs, of which a tester found that chosen layouts moved 2 to 500 times what each
operation by itself does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.planning.collectives import collective_traffic

R, S = xd.Replicate(), xd.Shard


def set_row(a: Tensor) -> Tensor:
    a = a.clone()
    a[1:2] = a[-2:-1] * 2
    return a


def set_column(a: Tensor) -> Tensor:
    a = a.clone()
    a[:, 0] = a[:, -1] * 2
    return a


def uneven_batch(a: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    w = w.detach().requires_grad_()
    return torch.autograd.grad((a @ w).square().sum(), w)


INDEX = torch.arange(160).flip(0)
CASES: dict[str, tuple[str, Callable[..., Any], list[tuple[tuple[int, ...], list[Any]]]]] = {
    "exchanged": ("8", torch.add, [((512, 512), [S(0)]), ((512, 512), [S(1)])]),
    "exchanged twice": (
        "2x4",
        torch.add,
        [((512, 512), [S(0), S(1)]), ((512, 512), [S(1), S(0)])],
    ),
    "uneven variance": ("8", lambda a: a.var(1), [((1023, 513), [S(0)])]),
    "uneven batch": ("8", uneven_batch, [((1021, 71), [S(0)]), ((71, 16), [R])]),
    "a row": ("8", set_row, [((1024, 512), [S(0)])]),
    "a column": ("8", set_column, [((512, 1024), [S(1)])]),
    "rolled": (
        "2x4",
        lambda a: a.roll(1, 0) * a.flip(0) * a.roll(2, 1),
        [((512, 512), [S(0), S(1)])],
    ),
    "index_add": (
        "8",
        lambda a, b: a.index_add(0, INDEX.to(a.device), b),
        [((1200, 800), [S(1)]), ((160, 800), [S(0)])],
    ),
    "padded": ("8", lambda a: F.pad(a, (0, 0, 4, 4)).sin(), [((1024, 128), [S(0)])]),
    "strided": ("2x4", lambda a: a[:, ::2] * 2, [((64, 1024), [R, S(1)])]),
    "flipped": ("8", lambda a: a.flip(0) * a, [((512, 128), [S(0)])]),
    "running sums": (
        "8",
        lambda a: a.cumsum(0) + a.cummax(0).values + a.logcumsumexp(0),
        [((512, 128), [S(0)])],
    ),
    "median": ("8", lambda a: a.median(1).values, [((960, 80), [S(1)])]),
}


def moved(function: Callable[..., Any], layouts: Any, *given: Any) -> tuple[int, Any]:
    step = xd.compile(function, layouts=layouts)
    result = step(*given)
    return collective_traffic(step.compiled_programs()[-1].as_text()).total_bytes, result


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(CASES))
def test_no_more_than_operation_by_operation(name: str) -> None:
    mesh_name, function, inputs = CASES[name]
    mesh = make_mesh(mesh_name)
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape, _ in inputs]
    given = [xd.distribute_tensor(v, mesh, w) for v, (_, w) in zip(values, inputs, strict=True)]
    before, _ = moved(function, "torch", *given)
    after, results = moved(function, "step", *given)
    assert after <= 1.05 * before + 1000
    expected = function(*values)
    for found, wanted in zip(
        *(x if isinstance(x, tuple) else (x,) for x in (results, expected)), strict=True
    ):
        torch.testing.assert_close(found.full_tensor().cpu(), wanted, rtol=1e-4, atol=1e-3)


def attended(*given: Tensor) -> Tensor:
    q, k, v = (x * 2 for x in given)
    return F.scaled_dot_product_attention(q, k, v) * 2


@pytest.mark.parametrize("batch, heads", [(5, 8), (4, 6)])
def test_attention_is_not_cut_unevenly(batch: int, heads: int) -> None:
    """It isn't called on uneven shards: cut so, all of its operands were gathered for it."""
    mesh = make_mesh("2x4")
    torch.manual_seed(0)
    values = [torch.randn(batch, heads, 24, 8) for _ in range(3)]
    given = [xd.distribute_tensor(x, mesh, [S(0), S(1)]) for x in values]
    before, _ = moved(attended, "torch", *given)
    after, found = moved(attended, "step", *given)
    torch.testing.assert_close(found.full_tensor().cpu(), attended(*values))
    assert after <= 1.05 * before


def test_two_meshes() -> None:
    """What lies on another mesh of the same devices is left where it is."""
    one, two = make_mesh("2x4"), make_mesh("8")
    a, b, c, d = (torch.randn(256, 128), torch.randn(128, 256)) * 2
    given = [
        xd.distribute_tensor(a, one, [S(0), R]),
        xd.distribute_tensor(b, one, [R, S(1)]),
        xd.distribute_tensor(c, two, [S(0)]),
        xd.distribute_tensor(d, two, [R]),
    ]
    nbytes, found = moved(lambda a, b, c, d: (a @ b, c @ d), "step", *given)
    assert nbytes == 0
    for got, wanted in zip(found, (a @ b, c @ d), strict=True):
        torch.testing.assert_close(got.full_tensor().cpu(), wanted, rtol=1e-4, atol=1e-3)


def test_a_backward_pass_outside_has_its_rules_layouts() -> None:
    """Seed 7990 of the fuzzer: a residual that lay along an image's width, of which XLA computes a
    weight's gradient wrongly."""
    mesh = make_mesh("2x2x2")
    torch.manual_seed(0)
    x, weight = torch.randn(3, 3, 1, 2), torch.randn(1, 3, 2, 1)
    convolve = lambda x, w: F.conv2d(x, w, stride=2, padding=1).sum()
    expected = weight.clone().requires_grad_()
    convolve(x, expected).backward()
    placed = xd.distribute_tensor(weight, mesh, [R, R, R]).requires_grad_()
    xd.compile(convolve)(xd.distribute_tensor(x, mesh, [R, S(0), S(3)]), placed).backward()
    torch.testing.assert_close(placed.grad.full_tensor().cpu(), expected.grad)
