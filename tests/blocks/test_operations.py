"""Operations have the same bits on any mesh, wherever their operands lie, and are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.errors import UnsupportedOpError

MESHES = ("1", "2", "8", "2x4", "3", "2x2x2")
QUICK = (
    "mixed precision",
    "product",
    "sums of a chain",
    "convolution",
    "attention",
    "loss",
    "transform",
    "written out by XLA",
    "nothing",
)
Function = Callable[..., Any]


def conv_step(x: Tensor, w: Tensor, **how: Any) -> list[Tensor]:
    x, w = x.requires_grad_(), w.requires_grad_()
    y = F.conv2d(x, w, **how)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))]


def attention_step(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    leaves = [t.requires_grad_() for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves, is_causal=True)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


def norm_step(norm: Function) -> Function:
    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        x, w = x.requires_grad_(), w.requires_grad_()
        y = norm(x, w)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))]

    return step


def loss_step(x: Tensor, labels: Tensor) -> list[Tensor]:
    x = x.requires_grad_()
    loss = F.cross_entropy(x, labels)
    return [loss.detach(), *torch.autograd.grad(loss, x)]


def embedding_step(ids: Tensor, table: Tensor) -> list[Tensor]:
    table = table.requires_grad_()
    return [*torch.autograd.grad(F.embedding(ids, table).square().sum(), table)]


def ints(count: int, *shape: int) -> Tensor:
    return torch.randint(count, shape)


CASES: dict[str, tuple[Function, Callable[[], Sequence[Tensor]]]] = {
    "product": (lambda x, w: x @ w, lambda: (torch.randn(64, 48), torch.randn(48, 24))),
    "long sum of products": (lambda x, w: x.t() @ w, lambda: (torch.randn(2048, 8),) * 2),
    "batched": (
        lambda x, w: torch.einsum("bhqd,bhkd->bhqk", x, w),
        lambda: (torch.randn(8, 4, 6, 16), torch.randn(8, 4, 6, 16)),
    ),
    "odd": (lambda x, w: x @ w, lambda: (torch.randn(9, 15), torch.randn(15, 7))),
    "vector": (lambda x, w: x @ w, lambda: (torch.randn(64, 48), torch.randn(48))),
    "sums": (lambda x: [x.sum(), x.sum(0), x.mean(-1)], lambda: (torch.randn(64, 40),)),
    "sums of a chain": (
        lambda x, y: [(x.exp() * y).sum(), (x.tanh() - y).sum(1), x.logsumexp(0)],
        lambda: (torch.randn(64, 30), torch.randn(64, 30)),
    ),
    "variance": (lambda x: [x.var(0), x.std(1), x.norm()], lambda: (torch.randn(64, 40),)),
    "running sums": (lambda x: [x.cumsum(0), x.cumsum(1)], lambda: (torch.randn(64, 24),)),
    "products of numbers": (
        lambda x: [x.prod(0), x.cumprod(1)],
        lambda: (torch.rand(32, 8) + 0.5,),
    ),
    "softmax": (lambda x: [x.softmax(0), x.log_softmax(1)], lambda: (torch.randn(64, 24),)),
    "convolution": (
        lambda x, w: conv_step(x, w, padding=1),
        lambda: (torch.randn(8, 4, 9, 9), torch.randn(8, 4, 3, 3)),
    ),
    "strided convolution": (
        lambda x, w: conv_step(x, w, stride=2),
        lambda: (torch.randn(16, 4, 8, 8), torch.randn(8, 4, 1, 1)),
    ),
    "convolution in groups": (
        lambda x, w: conv_step(x, w, groups=4, padding=1),
        lambda: (torch.randn(8, 8, 6, 6), torch.randn(16, 2, 3, 3)),
    ),
    "attention": (attention_step, lambda: [torch.randn(8, 4, 16, 8) for _ in range(3)]),
    "rms norm": (
        norm_step(lambda x, w: F.rms_norm(x, (48,), w)),
        lambda: (torch.randn(8, 4, 48), torch.randn(48)),
    ),
    "layer norm": (
        norm_step(lambda x, w: F.layer_norm(x, (48,), w)),
        lambda: (torch.randn(8, 4, 48), torch.randn(48)),
    ),
    "batch norm": (
        norm_step(lambda x, w: F.batch_norm(x, None, None, w, training=True)),
        lambda: (torch.randn(16, 8, 5), torch.randn(8)),
    ),
    "loss": (loss_step, lambda: (torch.randn(64, 24), ints(24, 64))),
    "embedding": (embedding_step, lambda: (ints(24, 8, 16), torch.randn(24, 16))),
    "scatter": (
        lambda x, i, y: [x.index_add(0, i, y), x.scatter_add(0, i[:, None].expand(64, 8), y)],
        lambda: (torch.randn(16, 8), ints(16, 64), torch.randn(64, 8)),
    ),
    "experts": (
        lambda x, w: [*(x @ w).softmax(-1).topk(2), ((x @ w).argmax(-1) == 1).float().mean()],
        lambda: (torch.randn(64, 16), torch.randn(16, 8)),
    ),
    "transform": (lambda x: torch.fft.rfft(x).abs(), lambda: (torch.randn(16, 24),)),
    "mixed precision": (
        lambda x, w: ((x.bfloat16() @ w.bfloat16()).float() * 0.3).softmax(-1).sum(0),
        lambda: (torch.randn(64, 48), torch.randn(48, 24)),
    ),
    "written out by XLA": (
        lambda x, y, r: [
            f((x * y).clamp(-3, 3) * 0.2 + r * 0.1).sum(0)
            for f in (torch.lgamma, torch.atanh, torch.asinh, torch.erfinv, torch.atan, torch.erfc)
        ],
        lambda: (torch.randn(24, 40), torch.randn(24, 40), torch.randn(40)),
    ),
    "nothing": (
        lambda x, w: [x @ w, w.t() @ x.t(), x.sum(1), x.exp()],
        lambda: (torch.randn(8, 0), torch.randn(0, 4)),
    ),
    "half": (
        lambda x, w: [(x @ w).sum(0), x.mean()],
        lambda: (torch.randn(64, 48).bfloat16(), torch.randn(48, 24).bfloat16()),
    ),
}


def layouts(mesh: Any, tensors: Sequence[Tensor]) -> list[list[list[Any]]]:
    """Of each tensor its placements: batch, whole, and the last dim over the last mesh dim."""
    whole = [xd.Replicate()] * mesh.ndim
    found = [[[xd.Shard(0), *whole[1:]] for _ in tensors], [whole for _ in tensors]]
    found.append([[*whole[:-1], xd.Shard(t.ndim - 1)] for t in tensors])
    return found


@pytest.fixture(autouse=True)
def across_meshes() -> Any:
    with xd.config.override(reproducible="across meshes"):
        yield


def bits(values: Any) -> list[Tensor]:
    values = [values] if isinstance(values, Tensor) else values
    return [(v.full_tensor() if hasattr(v, "full_tensor") else v).cpu() for v in values]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", QUICK)
def test_the_same_bits_on_one_mesh(case: str) -> None:
    same_bits(case, ("2x4",), [-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str) -> None:
    same_bits(case, MESHES, [0, 1, 2])


def same_bits(case: str, meshes: Sequence[str], ways: Sequence[int]) -> None:
    function, make = CASES[case]
    torch.manual_seed(0)
    given = make()
    expected = bits(xd.compile(function)(*(t.clone().to("xla") for t in given)))
    tolerance = (
        {"rtol": 2e-2, "atol": 2e-2}
        if case in ("half", "mixed precision")
        else {"rtol": 1e-4, "atol": 1e-4}
    )
    correct = function(*(t.clone() for t in given))
    for found, right in zip(expected, bits(correct), strict=True):
        torch.testing.assert_close(found, right, **tolerance)
    step = xd.compile(function)
    for name in meshes:
        mesh = make_mesh(name)
        every = layouts(mesh, given)
        for placements in [every[i] for i in ways]:
            pairs = zip(given, placements, strict=True)
            found = bits(step(*(xd.distribute_tensor(t.clone(), mesh, p) for t, p in pairs)))
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), (name, placements)


def test_sums_are_otherwise_those_of_a_mesh() -> None:
    """Without the switch they aren't the same: the test above can fail."""
    torch.manual_seed(0)
    x = torch.randn(2048, 40)
    with xd.config.override(reproducible="on a mesh"):
        step = xd.compile(lambda x: x.sum())
        found = {
            step(xd.distribute_tensor(x, make_mesh(name), [xd.Shard(0)])).full_tensor().item()
            for name in ("1", "2", "8")
        }
    assert len(found) > 1


def test_what_is_refused() -> None:
    w = torch.ones(4, 4, device="xla", requires_grad=True)
    with pytest.raises(UnsupportedOpError, match="history"):
        xd.compile(lambda x: (x @ w).sum())(torch.ones(2, 4, device="xla"))
    with pytest.raises(ValueError, match="across meshes"):
        xd.compile(lambda x: x, watch="replay")

    with pytest.raises(UnsupportedOpError, match="float16"):
        xd.compile(lambda x: (x.half() * 2).sum())(torch.ones(2, 4, device="xla"))
    with pytest.raises(UnsupportedOpError, match="cholesky"):
        xd.compile(torch.linalg.cholesky)(torch.eye(2, device="xla"))

    @xd.jax_function
    def outside(x: Any) -> Any:
        import jax

        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(UnsupportedOpError, match=r"outside of XLA, pure_callback"):
        xd.compile(outside)(torch.ones(2, 4, device="xla"))
    each = xd.distribute_tensor(torch.ones(4, 4), make_mesh("2"), [xd.Shard(0)])
    with pytest.raises(UnsupportedOpError, match=r"each shard \(per-device tensors.*shard_map"):
        xd.compile(lambda x: x.to_local().sum())(each)


def test_the_switch_is_that_of_compile() -> None:
    """A step stays what it was compiled as."""
    torch.manual_seed(0)
    x = torch.randn(2048, 40)
    across = xd.compile(lambda x: x.sum())
    with xd.config.override(reproducible="on a mesh"):
        found = [
            across(xd.distribute_tensor(x, make_mesh(name), [xd.Shard(0)])) for name in ("2", "8")
        ]
    assert torch.equal(*bits(found))


def test_steps_in_steps() -> None:
    """What the outer one is says what the bits are."""
    torch.manual_seed(0)
    x = torch.randn(2048, 40)
    across = xd.compile(lambda x: x.sum())
    with xd.config.override(reproducible="on a mesh"):
        plain = xd.compile(lambda x: x.sum())
        outside = xd.compile(lambda x: across(x) * 2)
    around = xd.compile(lambda x: plain(x) + across(x))
    found = [
        around(xd.distribute_tensor(x, make_mesh(name), [xd.Shard(0)])) for name in ("1", "2", "8")
    ]
    assert torch.equal(*bits(found[:2])) and torch.equal(*bits(found[1:]))
    with pytest.raises(UnsupportedOpError, match="compile that one with the switch"):
        outside(x.to("xla"))


def test_bfloat16_is_rounded_once() -> None:
    """When all blocks have been added up, and not each of them: a product as JAX writes it, which
    has no float32 in it."""
    torch.manual_seed(0)
    x, y = torch.randn(4096, 16).bfloat16(), torch.randn(4096, 16).bfloat16()
    product = xd.jax_function(lambda x, y: x.T @ y)
    (found,) = bits(xd.compile(lambda x, y: product(x, y))(x.to("xla"), y.to("xla")))
    correct = (x.double().t() @ y.double()).bfloat16()
    assert (found != correct).float().mean() < 0.05  # a sum in float32 rounds a few


def test_random_numbers() -> None:
    """Dropout's mask is that of one device, and so are sums of what is left."""
    x = torch.randn(64, 48)
    step = xd.compile(lambda x: F.dropout(x.exp(), 0.5).sum(0))
    found = []
    for name in (None, "8", "2x4"):
        torch.manual_seed(3)
        if name is None:
            found += bits(step(x.to("xla")))
        else:
            mesh = make_mesh(name)
            placements = [xd.Shard(d) for d in range(mesh.ndim)]
            found += bits(step(xd.distribute_tensor(x, mesh, placements)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
