"""Attention over long sequences, block by block, on layouts, devices and in compiled steps."""

from __future__ import annotations

import gc
import re
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import xla_dtensor as xd
from tests.parallel.harness import full
from tests.planning.tpus import needs_libtpu
from xla_dtensor.integration.operators import flash_attention
from xla_dtensor.lowering.attention import blocked as blocked_attention

R = Replicate()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences are long, and in small blocks."""
    monkeypatch.setattr(flash_attention, "LONG", 1)
    monkeypatch.setattr(blocked_attention, "QUERIES", 4)
    monkeypatch.setattr(blocked_attention, "KEYS", 4)


def torch_says(*inputs: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*inputs, **options)
    grads = torch.autograd.grad(out.square().sum(), [x for x in inputs if x.requires_grad])
    return [out.detach(), *grads]


def inputs_of(heads: int, kv: int, length: int, batch: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    make = lambda h: torch.randn(batch, h, length, 8, dtype=torch.float64, requires_grad=True)
    return [make(heads), make(kv), make(kv)]


LAYOUTS: dict[str, tuple[Any, Any]] = {
    "batch, heads": ([Shard(0), Shard(1)], [Shard(0), Shard(1)]),
    "queries, keys": ([Shard(2), Shard(1)], [Shard(2), Shard(2)]),
    "heads, queries": ([Shard(1), Shard(2)], [Shard(1), R]),
    "both on one dim": ([Shard(2), Shard(2)], [Shard(1), Shard(0)]),
    "features": ([R, Shard(3)], [Shard(3), R]),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "masked"),
    [*((name, False) for name in LAYOUTS), ("batch, heads", True), ("queries, keys", True)],
)
def test_layouts(name: str, masked: bool, short: None, mesh_2x4: Any) -> None:
    values = inputs_of(8, 4, 16)
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": not masked}
    mask = torch.randn(4, 1, 16, 16, dtype=torch.float64, requires_grad=True)
    expected = torch_says(*values, *([mask] if masked else []), **options)
    of_query, of_keys = LAYOUTS[name]
    placements = [of_query, of_keys, of_keys, [R, Shard(2)]]
    laid_out = [
        distribute_tensor(x.detach(), mesh_2x4, p).requires_grad_()
        for x, p in zip([*values, mask][: 3 + masked], placements, strict=False)
    ]
    out = F.scaled_dot_product_attention(*laid_out, **options)
    grads = torch.autograd.grad(out.square().sum(), laid_out)
    for found, wanted in zip([out, *grads], expected, strict=True):
        torch.testing.assert_close(full(found.detach()), wanted, rtol=1e-10, atol=1e-10)


def test_an_uneven_layout(short: None, mesh_2x4: Any) -> None:
    values = inputs_of(3, 3, 13, batch=2)
    expected = torch_says(*values, is_causal=True)
    laid_out = [
        distribute_tensor(x.detach(), mesh_2x4, [Shard(0), Shard(1)]).requires_grad_()
        for x in values
    ]
    out = F.scaled_dot_product_attention(*laid_out, is_causal=True)
    grads = torch.autograd.grad(out.square().sum(), laid_out)
    for found, wanted in zip([out, *grads], expected, strict=True):
        torch.testing.assert_close(full(found.detach()), wanted, rtol=1e-10, atol=1e-10)


def test_what_differs_per_device(short: None, mesh_2x4: Any) -> None:
    of_devices = [inputs_of(2, 2, 8, batch=1) for _ in range(2)]
    for i, values in enumerate(of_devices):
        for x in values:
            x.data.add_(i)
    expected = [torch_says(*values, is_causal=True) for values in of_devices]
    laid_out = [
        xd.from_device_values([v[n].detach() for v in of_devices], mesh_2x4["dp"]).requires_grad_()
        for n in range(3)
    ]
    out = F.scaled_dot_product_attention(*laid_out, is_causal=True)
    grads = torch.autograd.grad(out.square().sum(), laid_out)
    for n, found in enumerate([out, *grads]):
        for device, value in enumerate(found.detach().local_values()):
            wanted = expected[device // 4][n]  # "tp" has the same
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)


def test_a_sharded_tensor_of_a_submesh_that_differs_along_another_dim(
    short: None, mesh_2x4: Any
) -> None:
    of_devices = [[x.detach() + i for x in inputs_of(4, 4, 8, batch=1)] for i in range(2)]
    expected = [torch_says(*(x.requires_grad_() for x in v), is_causal=True) for v in of_devices]
    laid_out = []
    for n in range(3):
        own = xd.from_device_values([v[n].detach() for v in of_devices], mesh_2x4["dp"])
        laid_out.append(distribute_tensor(own, mesh_2x4["tp"], [Shard(1)]).requires_grad_())
    out = F.scaled_dot_product_attention(*laid_out, is_causal=True)
    grads = torch.autograd.grad(out.square().sum(), laid_out)
    for n, found in enumerate([out, *grads]):
        values = found.detach().full_tensor().local_values()
        for device, value in enumerate(values):
            wanted = expected[device * 2 // len(values)][n]
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)


def test_shapes_that_broadcast(short: None) -> None:
    torch.manual_seed(0)
    shapes = {"2-D": [(6, 8)] * 3, "one batch": [(3, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)]}
    for name, of_three in shapes.items():
        values = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in of_three]
        expected = torch_says(*values, is_causal=True)
        own = [x.detach().to("xla").requires_grad_() for x in values]
        out = F.scaled_dot_product_attention(*own, is_causal=True)
        found = [out.detach(), *torch.autograd.grad(out.square().sum(), own)]
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), wanted, msg=lambda m, n=name: f"{n}: {m}")


def test_what_torch_refuses(short: None) -> None:
    x, mask = torch.randn(1, 2, 6, 8).to("xla"), torch.ones(6, 6, dtype=torch.bool).to("xla")
    with pytest.raises(RuntimeError, match="is_causal=True"):
        F.scaled_dot_product_attention(x, x, x, mask, is_causal=True)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(x, x[..., :4], x)


def test_dropout_is_that_of_any_mesh(short: None, mesh_2x4: Any) -> None:
    values = [x.detach() for x in inputs_of(4, 4, 16)]

    def attended(placements: Any) -> torch.Tensor:
        laid_out = [distribute_tensor(x, mesh_2x4, placements) for x in values]
        torch.manual_seed(7)
        return full(F.scaled_dot_product_attention(*laid_out, dropout_p=0.4))

    whole = attended([R, R])
    torch.testing.assert_close(attended([Shard(0), Shard(1)]), whole)
    torch.testing.assert_close(attended([Shard(2), Shard(0)]), whole)
    torch.manual_seed(8)
    assert not torch.equal(whole, attended_plain(values))


def attended_plain(values: list[torch.Tensor]) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(x.to("xla") for x in values), dropout_p=0.4).cpu()


def attention_step(q: Any, k: Any, v: Any) -> Any:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), [q, k, v])


def laid_out(mesh: Any, length: int, heads: int, kv: int, width: int = 16) -> list[Any]:
    make = lambda h: torch.randn(2, h, length, width, dtype=torch.bfloat16)
    return [
        distribute_tensor(make(h), mesh, [Shard(0), Shard(1)]).requires_grad_()
        for h in (heads, kv, kv)
    ]


def largest_square(text: str) -> int:
    """The most elements of a value of a program whose last two dims are both long."""
    sizes = (list(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", text))
    return max((a[-1] * a[-2] for a in sizes if len(a) > 1 and min(a[-2:]) > 256), default=0)


def _up_to(length: int, keys: int, device: Any) -> torch.Tensor:
    return torch.arange(length, device=device)[:, None] >= torch.arange(keys, device=device)


def _in_place(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(16, 16, dtype=torch.bool, device=q.device).tril()
    mask[3, 0] = False
    return mask


# What a step makes of sizes, and which of (mask, is_causal) is left of it.
MADE_IN_THE_STEP: dict[str, tuple[Any, tuple[bool, bool]]] = {
    "keys up to the query": (lambda q, k: _up_to(16, 16, q.device), (False, True)),
    "of each row": (lambda q, k: _up_to(16, 16, q.device).expand(4, 1, 16, 16), (False, True)),
    "tril": (lambda q, k: q.new_ones(16, 16, dtype=torch.bool).tril(), (False, True)),
    "torch.nn's": (
        lambda q, k: torch.nn.Transformer.generate_square_subsequent_mask(16, q.device, q.dtype),
        (False, True),
    ),
    "the lowest number": (
        lambda q, k: q.new_full((16, 16), torch.finfo(q.dtype).min).triu(1),
        (False, True),
    ),
    "all keys": (lambda q, k: torch.ones(1, 16, dtype=torch.bool, device=q.device), (False, False)),
    "zeros": (lambda q, k: torch.zeros(16, 16, dtype=q.dtype, device=q.device), (False, False)),
    "a window": (
        lambda q, k: _up_to(16, 16, q.device) & ~_up_to(16, 16, q.device).tril(-5),
        (True, False),
    ),
    "a penalty": (lambda q, k: q.new_full((16, 16), -50.0).triu(1), (True, False)),
    "later keys": (lambda q, k: _up_to(16, 16, q.device).T, (True, False)),
    "written to": (_in_place, (True, False)),
    "of values": (lambda q, k: _up_to(16, 16, q.device) & (q[0, 0, 0, 0] < 99), (True, False)),
    "a rectangle": (lambda q, k: _up_to(12, 16, q.device), (True, False)),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", MADE_IN_THE_STEP)
def test_masks_that_a_step_makes(
    name: str, cut: bool, short: None, mesh_2x4: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels take none that is a tensor: where it is causal, or hides nothing, there is none."""
    make, left = MADE_IN_THE_STEP[name]
    attend, seen = flash_attention.attend, set()

    def watched(call: flash_attention.Attention) -> Any:
        seen.add((call.attn_mask is not None, call.is_causal))
        return attend(call)

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        out = F.scaled_dot_product_attention(query, key, value, make(query, key))
        return out.detach(), *torch.autograd.grad(out.square().sum(), (query, key, value))

    values = inputs_of(4, 4, 16)
    if name == "a rectangle":
        values[0] = values[0].detach()[:, :, :12].requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        wanted = step(*values)
    monkeypatch.setattr(flash_attention, "attend", watched)
    placed = [
        (
            distribute_tensor(x.detach(), mesh_2x4, [Shard(0), Shard(1)])
            if cut
            else x.detach().to("xla")
        ).requires_grad_()
        for x in values
    ]
    compiled = xd.compile(step)
    for _ in range(2):
        for found, expected in zip(compiled(*placed), wanted, strict=True):
            torch.testing.assert_close(full(found), expected, rtol=1e-10, atol=1e-10)
    assert seen == {left} and compiled.compilations == 1


def _turned_later(q: torch.Tensor) -> torch.Tensor:
    places = torch.arange(256, device=q.device).view(16, 16)
    mask = places % 16 >= places // 16
    places.t_()
    return mask


def _squeezed_later(q: torch.Tensor) -> torch.Tensor:
    places = torch.arange(16, device=q.device)[None]
    places.unsqueeze_(0)
    mask = places.mT >= places
    places.squeeze_(0)
    return mask[0]


def _with_a_gradient(q: torch.Tensor) -> torch.Tensor:
    return torch.zeros(16, 16, dtype=q.dtype, device=q.device, requires_grad=True)


@pytest.mark.parametrize("make", [_turned_later, _squeezed_later, _with_a_gradient])
def test_masks_that_only_look_known(make: Any, short: None) -> None:
    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        mask = make(query)
        out = F.scaled_dot_product_attention(query, key, value, mask)
        wanted = [query, key, value] + [mask] * mask.requires_grad
        return out.detach(), *torch.autograd.grad(out.square().sum(), wanted)

    values = inputs_of(2, 2, 16)
    with sdpa_kernel(SDPBackend.MATH):
        expected = step(*values)
    found = xd.compile(step)(*(x.detach().to("xla").requires_grad_() for x in values))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(15, 15), (0, 16), (3, 1, 16, 16), (16, 15)])
def test_known_masks_of_another_shape(shape: tuple[int, ...], short: None) -> None:
    """As torch refuses them, whatever they say."""
    query, key, value = (x.detach() for x in inputs_of(2, 2, 16, batch=2))

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(shape, dtype=torch.bool, device=inputs[0].device)
        return F.scaled_dot_product_attention(*inputs, mask)

    with pytest.raises(RuntimeError), sdpa_kernel(SDPBackend.MATH):
        step(query, key, value)
    with pytest.raises((RuntimeError, ValueError)):
        xd.compile(step)(*(x.to("xla") for x in (query, key, value)))


def test_a_known_mask_and_no_values(short: None) -> None:
    query, key, value = (x.detach() for x in inputs_of(2, 2, 16))

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs, _up_to(16, 16, inputs[0].device))

    found = xd.compile(step)(*(x.to("xla") for x in (query, key, value[..., :0])))
    assert found.shape == step(query, key, value[..., :0]).shape


@pytest.mark.parametrize("make", ["ones", "arange", "new_full"])
def test_a_plan_knows_them_too(make: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned is what runs, though nothing can be computed on devices that aren't here."""
    masks: dict[str, Any] = {
        "ones": lambda x: torch.ones(256, 256, dtype=torch.bool, device=x.device).tril(),
        "arange": lambda x: _up_to(256, 256, x.device),
        "new_full": lambda x: x.new_full((256, 256), -torch.inf).triu(1),
    }
    attend, seen = flash_attention.attend, []
    monkeypatch.setattr(flash_attention, "attend", lambda c: seen.append(c) or attend(c))
    with xd.abstract("cpu:8"):
        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.randn(4, 4, 256, 8), mesh, [Shard(0), Shard(1)])
        xd.plan(lambda x: F.scaled_dot_product_attention(x, x, x, masks[make](x)), x)
    assert [(call.attn_mask, call.is_causal) for call in seen] == [(None, True)] * len(seen) != []


def test_values_of_masks_go(short: None) -> None:
    """Not with the step's programs, nor with JAX's caches."""
    size = 77

    def step(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        return F.scaled_dot_product_attention(x, x, x, mask)

    xd.compile(step)(torch.randn(1, 1, size, 8).to("xla"))
    gc.collect()
    left = [a for a in jax.live_arrays() if a.shape[-2:] == (size, size)]
    assert not left


def test_masks_of_numbers_that_change(short: None) -> None:
    """A number that is an input of the program is no size."""

    def step(x: torch.Tensor, count: int, penalty: int) -> torch.Tensor:
        hidden = torch.arange(16, device=x.device) >= count
        mask = torch.zeros(16, 16, device=x.device).masked_fill(hidden, -penalty)
        return F.scaled_dot_product_attention(x, x, x, mask.to(x.dtype))

    (x, *_), compiled = inputs_of(2, 2, 16), xd.compile(step)
    x = x.detach()
    for given in [(16, 0), (16, 9), (3, 9), (16, 9), (5, 0), (16, 0), (7, 2)]:
        with sdpa_kernel(SDPBackend.MATH):
            expected = step(x, *given)
        found = compiled(x.to("xla"), *given).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert compiled.compilations == 3  # one number is an input first, then both


def test_no_scores_at_8192(mesh_2x4: Any) -> None:
    inputs = laid_out(mesh_2x4, 8192, 8, 4)
    compiled = xd.compile(attention_step).lower(*inputs).compile()
    assert largest_square(compiled.as_text()) == 0
    # Whole, the scores of one head are 256 MiB in float32; each device has two.
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20


@needs_libtpu
def test_splash_on_tpus() -> None:
    with xd.abstract("v5e:2x4"):
        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        inputs = laid_out(mesh, 8192, 8, 4, 128)
        text = xd.compile(attention_step).lower(*inputs).as_text()
        report = xd.plan(attention_step, *inputs)
    # Forward once, and the two kernels of backward.
    assert text.count("@tpu_custom_call") == 3
    assert report.memory.temporaries < 64 * 2**20
    blocks = 16 * 17 // 2  # of 512, below the diagonal
    assert report.flops == pytest.approx(9 * 2 * 2 * 8 * blocks * 512 * 512 * 128, rel=1e-4)
    # Attention is nearly all of it.
    assert 1 < report.scheduled / report.seconds["compute"] < 1.5


@needs_libtpu
def test_splash_on_parts_of_the_queries() -> None:
    """Two heads are too few for eight chips, so each has some of the queries."""
    with xd.abstract("v5e:2x4"):
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("cp",))
        make = lambda: torch.zeros(1, 2, 32768, 128, dtype=torch.bfloat16)
        inputs = [distribute_tensor(make(), mesh, [Shard(2)]).requires_grad_() for _ in range(3)]
        text = xd.compile(attention_step).lower(*inputs).as_text()
        report = xd.plan(attention_step, *inputs)
    assert text.count("@tpu_custom_call") == 3
    # Scores of a block are nowhere in memory: keys and values, of all, and their gradients are.
    assert report.memory.temporaries < 256 * 2**20
    # The last chip's queries see nearly all, and the others take as long.
    seen = sum(range(57, 65)) / (8 * 64)  # of blocks of 512
    assert report.flops == pytest.approx(9 * 2 * 2 * seen * 32768**2 * 128, rel=1e-3)
