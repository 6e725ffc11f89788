"""Steps whose layouts are chosen as a whole, against CPU torch, in layouts that users give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.layouts.language import training_step
from xla_dtensor.planning.collectives import collective_traffic

VOCABULARY, WIDTH, HEADS, POSITIONS, BATCH = 48, 32, 4, 16, 8


class Block(nn.Module):
    """A transformer's block, with ``keys`` key heads; fused: one matrix for q, k and v."""

    def __init__(self, keys: int = HEADS, fused: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.keys, self.dropout = keys, dropout
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        own = WIDTH // HEADS * keys
        widths = [WIDTH + 2 * own] if fused else [WIDTH, own, own]
        self.projections = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            self.projections[0](h).chunk(3, -1)
            if len(self.projections) == 1
            else [projection(h) for projection in self.projections]
        )
        q, k, v = (t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout, enable_gqa=self.keys != HEADS
        )
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY, depth: int = 2, **block: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.Sequential(*(Block(**block) for _ in range(depth)))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


ROWS = ("out", "down")


def placements(name: str, parameter: Any, layout: str, names: Any) -> list[Any]:
    """Where a user puts a parameter: the last mesh dim is "tp" where there is more than one."""
    found: list[Any] = [xd.Replicate() for _ in names]
    if parameter.ndim < 2:
        return found
    row = any(f"{own}." in name for own in ROWS)
    embedding = "embedding" in name
    for i in range(len(names)):
        if i < len(names) - 1 or len(names) == 1:
            if "fsdp" in layout:
                found[i] = xd.Shard(0 if row or layout == "fsdp" else 1)
        elif "tp" in layout and not embedding:
            found[i] = xd.Shard(int(row))
    return found


def build(layout: str, mesh_name: str, **model: Any) -> tuple[nn.Module, Callable[..., Any]]:
    """A model laid out on a mesh, and what lays a batch out."""
    mesh = make_mesh(mesh_name)
    torch.manual_seed(0)
    made = Transformer(**model)
    names = list(mesh.mesh_dim_names or ())
    for module in made.modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            (full,) = [name for name, p in made.named_parameters() if p is parameter]
            where = placements(full, parameter, layout, names)
            laid_out = xd.distribute_tensor(parameter.data, mesh, where)
            setattr(module, own, nn.Parameter(laid_out))
    batch = [xd.Shard(0)] * max(len(names) - 1, 1) + [xd.Replicate()] * (len(names) > 1)
    return made, lambda tokens: xd.distribute_tensor(tokens, mesh, batch)


def losses(model: nn.Module, to_mesh: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """The losses of three steps with AdamW; and the compiled step, if there are options for it."""
    step = training_step(model, lr=1e-2)
    run = xd.compile(step, **options) if options else step
    torch.manual_seed(1)
    batches = [torch.randint(VOCABULARY, (2, BATCH, POSITIONS)) for _ in range(3)]
    return [run(*map(to_mesh, batch)).item() for batch in batches], run


class Ran(NamedTuple):
    """What several tests look at of a step. Its programs may be gone between two tests."""

    losses: list[float]
    compilations: int
    moved: int
    """Bytes."""
    report: str


@functools.cache
def on_mesh(layout: str, mesh: str, layouts: str, **model: Any) -> Ran:
    found, step = losses(*build(layout, mesh, **model), layouts=layouts)
    moved = collective_traffic(step.compiled_programs()[-1].as_text()).total_bytes
    return Ran(found, step.compilations, moved, step.layouts() if layouts == "step" else "")


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"keys": 2},
    "fused": {"fused": True},
    "uneven vocabulary": {"vocabulary": VOCABULARY + 3},
}
LAYOUTS = ("dp", "fsdp", "tp", "fsdp tp")


def check(model: str, layout: str, mesh: str, layouts: str = "step", **more: Any) -> None:
    options = MODELS[model] | more
    torch.manual_seed(0)
    expected, _ = losses(Transformer(**options), lambda tokens: tokens)
    found = on_mesh(layout, mesh, layouts, **options)
    torch.testing.assert_close(found.losses, expected, rtol=1e-4, atol=1e-5)
    assert found.compilations == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_on_a_cpu(layout: str) -> None:
    check("plain", layout, "2x4")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "plain"])
def test_models(model: str) -> None:
    check(model, "fsdp tp", "2x4")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", ["plain", "grouped"])
def test_attention_takes_axes_apart(model: str) -> None:
    """Cut by its rule over three axes one by one, where all else takes two of them together."""
    check(model, "fsdp tp", "2x2x2", "torch", depth=1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8", "4x2", "2x2x2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layouts", ["step", "torch"])
def test_everywhere(model: str, layout: str, mesh: str, layouts: str) -> None:
    check(model, layout, mesh, layouts)


def test_less_is_moved_than_operation_by_operation() -> None:
    step, torchs = (on_mesh("fsdp tp", "2x4", layouts) for layouts in ("step", "torch"))
    assert step.moved < 0.8 * torchs.moved


def test_random_numbers_are_those_of_any_layout() -> None:
    """Attention's dropout draws in each device's own shard, whatever that is."""
    found = on_mesh("fsdp tp", "2x4", "step", depth=1, dropout=0.5)
    expected = on_mesh("dp", "2x4", "torch", depth=1, dropout=0.5)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-4, atol=1e-5)


def test_what_the_user_asks_for_binds() -> None:
    mesh = make_mesh("2x4")
    x = xd.distribute_tensor(torch.randn(8, 16), mesh, [xd.Shard(0), xd.Replicate()])
    w = xd.distribute_tensor(torch.randn(16, 12), mesh, [xd.Replicate(), xd.Shard(1)])

    def step(x: Any, w: Any) -> Any:
        y = (x @ w).redistribute(placements=[xd.Shard(1), xd.Replicate()])
        return y, y.placements

    y, inside = xd.compile(step, layouts="step")(x, w)
    assert inside == y.placements == (xd.Shard(1), xd.Replicate())
    torch.testing.assert_close(y.full_tensor().cpu(), x.full_tensor().cpu() @ w.full_tensor().cpu())


def test_the_report() -> None:
    header, *rows, total = on_mesh("fsdp tp", "2x4", "step").report.splitlines()
    assert header.split()[0] == "for" and "collectives of" in total
    # A sum over tp of what a row-wise weight gives, in a line of this file; instead of it more
    # would be moved.
    (row, *_) = [row for row in rows if "sum over tp" in row and "dot_general" in row]
    assert "tests/layouts/" in row and "all-reduce tp" in row
    moved_bytes, second = map(float, row.split()[-2:])
    assert 0 < moved_bytes < second
    plain = xd.compile(lambda x: x + 1)
    with pytest.raises(RuntimeError, match="no layouts were chosen"):
        plain.layouts()
    with pytest.raises(ValueError, match='"step" or "torch"'):
        xd.compile(lambda x: x, layouts="best")  # type: ignore[call-overload]


def attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (6, 3), (5, 5)])
def test_attention_is_cut_as_its_rule_has_it(heads: tuple[int, int]) -> None:
    """A scale that changes is an input beside the tensors; heads that devices don't divide, or of
    which there are fewer for keys, can't be cut as others."""
    mesh = make_mesh("2x4")
    q, k, v = (torch.randn(4, n, 8, 16) for n in (heads[0], heads[1], heads[1]))
    where = [xd.Shard(0), xd.Replicate()]
    weight = torch.randn(16, 16)
    cut = xd.distribute_tensor(weight, mesh, [xd.Replicate(), xd.Shard(0)])

    def step(q: Any, k: Any, v: Any, w: Any, scale: float) -> Any:
        return attention(q, k, v, scale) @ w

    compiled = xd.compile(step, layouts="step")
    on_mesh = [xd.distribute_tensor(t, mesh, where) for t in (q, k, v)]
    for scale in (0.5, 0.25, 0.125):
        found = compiled(*on_mesh, cut, scale).full_tensor().cpu()
        torch.testing.assert_close(found, step(q, k, v, weight, scale), rtol=1e-4, atol=1e-4)
    assert compiled.traces <= 2


def test_each_device_computes_its_part_of_attentions_backward() -> None:
    """Of two heads, by eight devices that have parts of the sequence."""
    mesh = make_mesh("8")
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3)]

    def step(*inputs: Any) -> Any:
        out = F.scaled_dot_product_attention(*inputs)
        return torch.autograd.grad(out.square().sum(), inputs)

    compiled = xd.compile(step, layouts="step")
    laid_out = [xd.distribute_tensor(x.detach(), mesh, [xd.Shard(2)]) for x in inputs]
    found = compiled(*(x.requires_grad_() for x in laid_out))
    for one, wanted in zip(found, step(*inputs), strict=True):
        torch.testing.assert_close(one.full_tensor().cpu(), wanted, rtol=1e-4, atol=1e-5)
    choice = compiled._last[1].executable.layouts
    assert choice is not None
    cut = [
        factors[("x",)].operands
        for node, factors in zip(choice.graph.nodes, choice.factors, strict=True)
        if node.equation is not None and node.equation.primitive.name == "cut"
    ]
    assert [sorted(of.values()) for of in cut] == [[2], [2, 2]]


def test_what_the_rule_does_not_have_stays_as_it_was() -> None:
    """Keys cut along their positions would give each device another softmax."""
    mesh = make_mesh("2x4")
    tensors = [
        xd.distribute_tensor(torch.randn(4, 8, 16, 8), mesh, [xd.Shard(0), xd.Replicate()])
        for _ in range(3)
    ]
    step = xd.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), layouts="step")
    step(*tensors)
    (equation,) = [e for e in step._last[1].jaxpr.eqns if e.primitive.name == "cut"]
    call, whole, heads = equation.params["call"], ((),) * 4, ((), ("tp",), (), ())
    positions = ((), (), ("tp",), ())
    assert call.laid_out([heads] * 3, [heads], [()]) is not call
    assert call.laid_out([positions, whole, whole], [positions], [()]) is not call
    assert call.laid_out([whole, positions, positions], [whole], [()]) is call
    assert call.laid_out([heads] * 3, [whole], [()]) is call


@pytest.mark.parametrize("length", [24, 64])
def test_what_xla_lays_out_is_given_its_operands_as_their_rule_has_it(length: int) -> None:
    """XLA ended the process: its transform of a dim that is cut wants as many positions in each
    piece as there are devices."""
    mesh = make_mesh("8")
    torch.manual_seed(0)
    x = torch.randn(2, 4, length, dtype=torch.float64)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (torch.fft.fft(x, dim=2).abs().square() + x).sum().backward()
        assert x.grad is not None
        return x.grad

    found = xd.compile(step)(xd.distribute_tensor(x, mesh, [xd.Shard(2)]))
    torch.testing.assert_close(found.full_tensor().cpu(), step(x))


def test_transforms_of_several_dims_keep_each_whole() -> None:
    """XLA ended the process: what came after the second transform had its dim cut."""
    mesh = make_mesh("2x4")
    x = torch.arange(48.0).reshape(8, 3, 2).sin()
    index = torch.zeros(8, 2, 1, 2, dtype=torch.int64)

    def step(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        found = torch.view_as_real(torch.fft.rfftn(x, dim=[0, 1], norm="ortho"))
        return found.scatter(2, index, 1.25)

    given = xd.distribute_tensor(x, mesh, [xd.Shard(0), xd.Shard(2)])
    cut = xd.distribute_tensor(index, mesh, [xd.Shard(3), xd.Shard(3)])
    found = xd.compile(step)(given, cut)
    torch.testing.assert_close(found.full_tensor().cpu(), step(x, index))
