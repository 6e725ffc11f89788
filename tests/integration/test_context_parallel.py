"""torch's ``context_parallel``: attention over a sequence that devices share, against CPU torch's
over all of it, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.tensor.experimental._context_parallel._attention as internal
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.experimental._context_parallel import _load_balancer
from torch.nn.attention.flex_attention import flex_attention

import xla_dtensor as xd
from tests.conftest import make_mesh


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = internal._cp_options.enable_load_balance
    yield
    internal._cp_options.enable_load_balance = before
    internal._disable_context_parallel_dispatcher()


def inputs(heads: int, key_heads: int, length: int) -> list[torch.Tensor]:
    sizes = (heads, key_heads, key_heads, heads)
    return [torch.randn(2, n, length, 4) for n in sizes]


def expected(tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    *leaves, weight = (t.clone() for t in tensors)
    for leaf in leaves:
        leaf.requires_grad_()
    out = F.scaled_dot_product_attention(*leaves, **options)
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def found(tensors: list[torch.Tensor], mesh: Any, step: Any) -> list[torch.Tensor]:
    """The result and the gradients of `step`, brought together as torch says."""
    buffers = [t.clone().to("xla") for t in tensors]
    whole = [tuple(t.shape) for t in buffers]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        leaves = [t.detach().requires_grad_() for t in buffers[:3]]
        out = step(*leaves, buffers[3])
        grads = [leaf.grad for leaf in leaves]
        assert out.shape[2] == whole[0][2] // mesh.size()
        results = context_parallel_unshard(mesh, [out.detach(), *grads], [2] * 4)
    for buffer, tensor in zip(buffers, tensors, strict=True):  # as they were
        assert torch.equal(buffer.cpu(), tensor)
    return [t.cpu() for t in results]


def attend(**options: Any) -> Any:
    def step(query: Any, key: Any, value: Any, weight: Any) -> Any:
        out = F.scaled_dot_product_attention(query, key, value, **options)
        (out * weight).sum().backward()
        return out

    return step


@pytest.mark.one_in(3)
@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "devices,heads,length",
    [
        ("4", (2, 2), 16),
        ("2x4", (4, 2), 24),  # grouped heads, along one dim of a mesh of two
        pytest.param("8", (2, 2), 24, marks=pytest.mark.slow),  # in no halves: torch doesn't deal
    ],
)
def test_attention(
    devices: str, heads: tuple[int, int], length: int, causal: bool, balance: bool
) -> None:
    internal._cp_options.enable_load_balance = balance
    mesh = make_mesh(devices)
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    options = {"is_causal": causal, "enable_gqa": heads[0] != heads[1], "scale": 0.3}
    tensors = inputs(*heads, length)
    wanted = expected(tensors, **options)
    torch.testing.assert_close(found(tensors, mesh, attend(**options)), wanted)


def test_a_compiled_step_sees_the_context() -> None:
    """One step inside with load balancing, inside without, and outside."""
    mesh = make_mesh("4")
    step = xd.compile(attend(is_causal=True))
    tensors = inputs(2, 2, 16)
    wanted = expected(tensors, is_causal=True)
    for balance in (True, False, True):
        internal._cp_options.enable_load_balance = balance
        torch.testing.assert_close(found(tensors, mesh, step), wanted)
    leaves = [distribute_tensor(t, mesh, [Shard(2)]) for t in tensors]
    for leaf in leaves[:3]:
        leaf.requires_grad_()
    out = step(*leaves)
    results = [out.detach(), *(leaf.grad for leaf in leaves[:3])]
    torch.testing.assert_close([t.full_tensor().cpu() for t in results], wanted)
    assert step.compilations == 3


@pytest.mark.parametrize("length", [16, 512], ids=["short", "long"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_causal_without_gradients(mode: Any, length: int) -> None:
    """In inference mode each device's positions were taken for the first ones."""
    mesh = make_mesh("4")
    (query, *_) = inputs(2, 2, length)
    wanted = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with mode():
        dealt_out = query.clone().to("xla")
        with context_parallel(mesh, buffers=[dealt_out], buffer_seq_dims=[2]):
            out = F.scaled_dot_product_attention(dealt_out, dealt_out, dealt_out, is_causal=True)
            (result,) = context_parallel_unshard(mesh, [out], [2])
    torch.testing.assert_close(result.cpu(), wanted)


class Attention(nn.Module):
    def forward(self, query: Any, key: Any, value: Any) -> Any:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["head and tail", "by document", "none"])
def test_balancers_of_the_newer_functions(name: str) -> None:
    """Modules with torch's hooks; whoever deals the positions out, causal means by their number."""
    mesh = make_mesh("4")
    length = 32
    balancer = {
        "head and tail": lambda: _load_balancer._HeadTailLoadBalancer(length, 4, "cpu"),
        "by document": lambda: _load_balancer._PerDocumentHeadTailLoadBalancer(
            [[8, 24], [16, 16]], 4, "cpu"
        ),
        "none": lambda: None,
    }[name]()
    tensors = inputs(2, 2, length)
    wanted = expected(tensors, is_causal=True)
    module = Attention()
    style = internal._ContextParallel(2, internal._ContextParallel.AttentionType.SDPA)
    style._apply(module, mesh)
    buffers = [t.to("xla") for t in tensors]
    if balancer is not None:
        balancer.device = "xla"
    own = internal._context_parallel_shard(mesh, buffers, [2] * 4, balancer)
    internal._enable_context_parallel_dispatcher()
    leaves = [t.detach().requires_grad_() for t in own[:3]]
    out = module(*leaves)
    (out * own[3]).sum().backward()
    results = [out.detach(), *(leaf.grad for leaf in leaves)]
    together = context_parallel_unshard(mesh, results, [2] * 4, balancer)
    torch.testing.assert_close([t.cpu() for t in together], wanted)


@pytest.mark.parametrize(
    "case,message",
    [
        ("mask", "attn_mask has its columns in the order of the sequence"),
        ("lengths", "as many keys as queries, got 16 queries and 8 keys"),
        ("another length", "a sequence of 12 on 4 devices isn't what the load balancer has dealt"),
    ],
)
def test_what_load_balancing_can_not_know_is_refused(case: str, message: str) -> None:
    mesh = make_mesh("4")
    query = torch.randn(1, 1, 16, 4).to("xla")
    with context_parallel(mesh, buffers=[query], buffer_seq_dims=[2]):
        key, options = query, {"is_causal": True}
        if case == "mask":
            options["attn_mask"] = query.new_ones(1, 1, 4, 16) > 0
        elif case == "lengths":
            key = query[:, :, :2]
        else:
            key = query = query[:, :, :3]
        with pytest.raises(xd.UnsupportedOpError, match=message):
            F.scaled_dot_product_attention(query, key, key, **options)


def test_flex_attention_of_own_queries() -> None:
    """torch's operator that gathers keys and values, and its mask of each device's queries, with
    gradients; another batch along the other dim."""
    internal._cp_options.enable_load_balance = False
    mesh = make_mesh("2x4")
    length = 4 * 128
    tensors = [torch.randn(2, 1, length, 4) for _ in range(3)]
    starts = torch.randint(1, length, ())

    def document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & ((q < starts.to(q.device)) == (k < starts.to(q.device)))

    mask = internal._create_cp_block_mask(document, 1, 1, length, length, mesh["tp"])
    own = [
        xd.from_device_values(
            [t[i : i + 1, :, 128 * j : 128 * (j + 1)] for i in range(2) for j in range(4)], mesh
        ).requires_grad_()
        for t in tensors
    ]
    group = torch.distributed._get_process_group_name(mesh.get_group("tp"))
    keys, values = internal.flex_cp_allgather(own[1], own[2], 2, group)
    out = flex_attention(own[0], keys, values, block_mask=mask)
    out.square().sum().backward()
    leaves = [t.clone().requires_grad_() for t in tensors]
    at = torch.arange(length)
    allowed = document(0, 0, at[:, None], at[None])
    whole = F.scaled_dot_product_attention(*leaves, attn_mask=allowed)
    whole.square().sum().backward()
    for device in (0, 3, 6):
        i, j = divmod(device, 4)
        part = slice(128 * j, 128 * (j + 1))
        for mine, theirs in (
            (out, whole),
            *((a.grad, b.grad) for a, b in zip(own, leaves, strict=True)),
        ):
            found = mine.local_values()[device]
            torch.testing.assert_close(found, theirs[i : i + 1, :, part], rtol=1e-4, atol=1e-5)
