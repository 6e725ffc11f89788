"""``flex_attention`` against torch's own formula on the CPU, which autograd records."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_module
from torch._higher_order_ops.flex_attention import math_attention
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

import xla_dtensor as xd
from tests.parallel.harness import full

R, S = Replicate(), Shard
BATCH, HEADS, LENGTH, DIM = 2, 4, 12, 8
Captured = dict[str, Any]

CAPTURED = {
    "bias": torch.randn(HEADS, 2 * LENGTH),
    "slopes": torch.rand(HEADS),
    "embedding": torch.randn(LENGTH, 5),
    "documents": torch.arange(LENGTH) // 5,
    "lengths": torch.tensor([12, 7]),
}


def no_mod(c: Captured) -> None:
    return None


def relative(c: Captured) -> Any:
    return lambda score, b, h, i, j: score + c["bias"][h, i - j + LENGTH]


def alibi(c: Captured) -> Any:
    return lambda score, b, h, i, j: score + c["slopes"][h] * (j - i)


def softcap(c: Captured) -> Any:
    return lambda score, b, h, i, j: 2 * torch.tanh(score / 2)


def embedded(c: Captured) -> Any:
    """Of one position it is a product of vectors: not elementwise."""
    return lambda score, b, h, i, j: score + torch.dot(c["embedding"][i], c["embedding"][j])


def cut(c: Captured) -> Any:
    return lambda score, b, h, i, j: torch.where(j <= i, score, -float("inf"))


def causal(c: Captured) -> Any:
    return lambda b, h, i, j: i >= j


def document(c: Captured) -> Any:
    return lambda b, h, i, j: c["documents"][i] == c["documents"][j]


def padding(c: Captured) -> Any:
    return lambda b, h, i, j: (j < c["lengths"][b]) & (i < c["lengths"][b])


def per_head(c: Captured) -> Any:
    return lambda b, h, i, j: (i - j).abs() <= h


def of_keys(c: Captured) -> Any:
    return lambda b, h, i, j: j < 7


def of_queries(c: Captured) -> Any:
    return lambda b, h, i, j: i < 7


CASES = {
    "plain": (no_mod, None, None, None),
    "relative causal": (relative, causal, None, None),
    "alibi documents": (alibi, document, None, None),
    "softcap": (softcap, None, None, None),
    "embedded per head": (embedded, per_head, None, HEADS),
    "cut, empty rows": (cut, padding, BATCH, None),
}
# Nobody asks for the sums, and no scores are modified.
ALONE = {
    "nothing": (no_mod, None, None, None),
    "causal": (no_mod, causal, None, None),
    "documents": (no_mod, document, None, None),
    "padding, empty rows": (no_mod, padding, BATCH, None),
    "per head": (no_mod, per_head, None, HEADS),
    "of keys": (no_mod, of_keys, None, None),
    "of queries, empty rows": (no_mod, of_queries, None, None),
}
PLACEMENTS = {
    "one device": None,
    "batch and heads": [S(0), S(1)],
    "queries": [R, S(2)],
    "uneven": [S(1), S(3)],
}


def inputs(groups: int = 1, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = [(BATCH, HEADS, LENGTH, DIM), *[(BATCH, HEADS // groups, LENGTH, DIM)] * 2]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def expected(
    tensors: list[torch.Tensor], score_mod: Any, mask: BlockMask | None, scale: float
) -> tuple[torch.Tensor, ...]:
    """Result, logarithm of the sums, highest scores: torch's formula, in natural logarithms."""
    mask = mask or torch_module._create_empty_block_mask(*tensors[:2])
    score_mod = score_mod or torch_module._identity
    out, sums, highest = math_attention(*tensors, score_mod, mask.as_tuple(), scale, {})
    ln2 = torch.tensor(2.0).log()
    return out, sums * ln2, highest * ln2


def placing(where: Any, mesh: DeviceMesh) -> Callable[[torch.Tensor], Any]:
    def place(tensor: torch.Tensor) -> Any:
        if where is None:
            return tensor.to("xla")
        wanted = [p if tensor.ndim == 4 else R for p in where]
        return distribute_tensor(tensor, mesh, wanted)

    return place


@pytest.mark.one_in(8)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("case", [*CASES, *ALONE])
def test_values_and_gradients(
    case: str, where: str, groups: int, compiled: bool, mesh_2x4: DeviceMesh
) -> None:
    make_mod, make_mask, of_batch, of_heads = {**CASES, **ALONE}[case]
    sizes = (of_batch, of_heads, LENGTH, LENGTH)
    weight = torch.randn(BATCH, HEADS, LENGTH, DIM)

    def run(
        attend: Callable[..., Any], place: Callable[[torch.Tensor], Any], device: str, step: Any
    ) -> list[Any]:
        tensors = [place(t.clone()).requires_grad_() for t in plain]
        c = {name: place(t.clone()) for name, t in CAPTURED.items()}
        for name, tensor in c.items():
            # Of vectors that are taken out torch's own formula has no gradient.
            if tensor.is_floating_point() and name != "embedding":
                tensor.requires_grad_()
        factor = place(weight)

        def once() -> Any:
            score_mod = make_mod(c)
            mask = None
            if make_mask is not None:
                mask = create_block_mask(make_mask(c), *sizes, device=device, BLOCK_SIZE=4)
            out, sums, highest = attend(tensors, score_mod, mask)
            sums_left = torch.where(sums > -1e9, sums, 0)
            ((out * factor).sum() + sums_left.sum()).backward()
            return out.detach(), sums.detach(), highest.detach()

        results = step(once)()
        return [*results, *(t.grad for t in (*tensors, *c.values()))]

    def ours(tensors: Any, score_mod: Any, mask: Any) -> Any:
        out, aux = flex_attention(
            *tensors,
            score_mod,
            mask,
            scale=0.3,
            enable_gqa=groups > 1,
            return_aux=AuxRequest(lse=True, max_scores=True),
        )
        return out, aux.lse, aux.max_scores

    plain = inputs(groups)
    theirs = lambda tensors, score_mod, mask: expected(tensors, score_mod, mask, 0.3)
    if case in ALONE:
        theirs = lambda tensors, score_mod, mask: _alone(expected(tensors, score_mod, mask, 0.3)[0])
        ours = lambda tensors, score_mod, mask: _alone(
            flex_attention(*tensors, score_mod, mask, scale=0.3, enable_gqa=groups > 1)
        )
    elif case == "cut, empty rows":
        # torch's formula gives an empty row's logarithm a gradient that isn't a number.
        theirs, ours = _without_sums(theirs), _without_sums(ours)
    wanted = run(theirs, torch.clone, "cpu", lambda step: step)
    place = placing(PLACEMENTS[where], mesh_2x4)
    found = run(ours, place, "xla", xd.compile if compiled else lambda step: step)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(full(mine), other.detach(), rtol=1e-4, atol=1e-5)


def _alone(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return out, out.new_zeros(1), out.new_zeros(1)


def _without_sums(attend: Any) -> Any:
    def attend_(*args: Any) -> Any:
        out, sums, highest = attend(*args)
        return out, sums.detach(), highest

    return attend_


def test_a_mask_alone_keeps_no_scores(mesh_2x4: DeviceMesh) -> None:
    """Of long sequences there is the mask, once for all heads, and no scores."""
    length = 4096
    documents = (torch.arange(length) // 1000).to("xla")
    laid_out = [
        distribute_tensor(torch.randn(2, 4, length, 16), mesh_2x4, [S(0), S(1)]).requires_grad_()
        for _ in range(3)
    ]

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]),
            *(None, None, length, length),
            device="xla",
        )
        out = flex_attention(q, k, v, block_mask=mask)
        out.square().mean().backward()
        return out.detach()

    text = xd.compile(step).lower(*laid_out).compile().as_text()
    dtypes = set(re.findall(rf"\b([a-z]+\d*)\[(?:\d+,)*{length},{length}\]", text))
    assert "pred" in dtypes and not dtypes & {"f32", "f64", "bf16"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """Scores in float32 at least, the result in the query's dtype."""
    plain = inputs(dtype=dtype)
    mask = create_block_mask(causal({}), None, None, LENGTH, LENGTH, device="xla")
    on_cpu = create_block_mask(causal({}), None, None, LENGTH, LENGTH, device="cpu")
    found = flex_attention(*(t.to("xla") for t in plain), softcap({}), mask)
    assert found.dtype == dtype
    wanted = expected(plain, softcap({}), on_cpu, DIM**-0.5)[0]
    torch.testing.assert_close(full(found), wanted)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode: Any, compiled: bool) -> None:
    plain = inputs()
    attend = lambda *tensors: flex_attention(*tensors, softcap({}))
    with mode():
        found = (xd.compile(attend) if compiled else attend)(*(t.to("xla") for t in plain))
    torch.testing.assert_close(full(found), expected(plain, softcap({}), None, DIM**-0.5)[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    plain = inputs()
    tensors = [t.to("xla").requires_grad_() for t in plain]

    def step() -> Any:
        with torch.autocast("xla"):
            out = flex_attention(*tensors, softcap({}))
        out.float().sum().backward()
        return out.detach()

    found = (xd.compile(step) if compiled else step)()
    assert found.dtype == torch.bfloat16
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in tensors)
    halves = [t.bfloat16() for t in plain]
    torch.testing.assert_close(full(found), expected(halves, softcap({}), None, DIM**-0.5)[0])


def test_memory_order_is_the_querys() -> None:
    """``out.transpose(1, 2).view(...)`` works where it does under torch."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2).to("xla") for t in inputs())
    out = flex_attention(q, k, v)
    assert out.stride() == q.stride()
    out.transpose(1, 2).view(BATCH, LENGTH, HEADS * DIM)


@pytest.mark.parametrize("heads", [1, 2, HEADS])
def test_blocks_that_are_left_out(heads: int) -> None:
    """Blocks that a hand-made mask doesn't list aren't seen, those it has in full are whole."""
    rows = LENGTH // 4
    number = torch.tensor([1, 0, 2], dtype=torch.int32).expand(1, heads, rows).contiguous()
    where = torch.tensor([[1, 0, 2], [0, 1, 2], [2, 0, 1]], dtype=torch.int32)
    where = where.expand(1, heads, rows, rows).contiguous()
    full_number = torch.tensor([1, 1, 0], dtype=torch.int32).expand(1, heads, rows).contiguous()
    full_where = torch.tensor([[2, 0, 1], [0, 1, 2], [1, 0, 2]], dtype=torch.int32)
    full_where = full_where.expand(1, heads, rows, rows).contiguous()
    lists = [t.to("xla") for t in (number, where, full_number, full_where)]
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=4, mask_mod=causal({}))
    plain = inputs()
    found = flex_attention(*(t.to("xla") for t in plain), block_mask=mask)
    seen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    lower = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for row, columns in ((0, [1]), (2, [2, 0])):
        for column in columns:
            block = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
            seen[block] = lower[block]
    seen[0:4, 8:12] = True
    seen[4:8, 0:4] = True
    wanted = torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=seen)
    torch.testing.assert_close(full(found), wanted)


def test_what_the_modifiers_capture_may_change() -> None:
    """In a compiled step another tensor's value, and another number, are seen in the next call."""
    table, documents = torch.randn(HEADS), torch.arange(LENGTH) // 3
    ours, ours_documents = table.to("xla"), documents.to("xla")
    plain = inputs()
    tensors = [t.to("xla") for t in plain]
    settings = {"factor": 1.0}

    @xd.compile
    def step() -> Any:
        mask = create_block_mask(
            lambda b, h, i, j: ours_documents[i] == ours_documents[j],
            *(None, None, LENGTH, LENGTH),
            device="xla",
        )
        mod = lambda score, b, h, i, j: score * settings["factor"] + ours[h] * (i - j)
        return flex_attention(*tensors, mod, mask)

    def check() -> None:
        factor = settings["factor"]
        mask = create_block_mask(
            lambda b, h, i, j: documents[i] == documents[j],
            *(None, None, LENGTH, LENGTH),
            device="cpu",
        )
        mod = lambda score, b, h, i, j: score * factor + table[h] * (i - j)
        wanted = expected(plain, mod, mask, DIM**-0.5)[0]
        torch.testing.assert_close(full(step()), wanted)

    check()
    for tensor in (table, ours):
        tensor.mul_(-2)
    check()
    for ids in (documents, ours_documents):
        ids[4:8] = 7
    check()
    settings["factor"] = 0.25
    check()


def test_torchs_own_checks() -> None:
    q, k, v = (t.to("xla") for t in inputs(groups=2))
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k, v)
    longer = create_block_mask(causal({}), None, None, 2 * LENGTH, LENGTH, device="xla")
    with pytest.raises(ValueError, match="block_mask was created for"):
        flex_attention(q, k, v, block_mask=longer, enable_gqa=True)
    on_cpu = create_block_mask(causal({}), None, None, LENGTH, LENGTH, device="cpu")
    with pytest.raises(RuntimeError, match="block_mask to be on the same device"):
        flex_attention(q, k, v, block_mask=on_cpu, enable_gqa=True)


def test_other_devices_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is false for a query on the CPU, and the user's own is heeded."""
    plain = inputs()
    flex_attention(*(t.to("xla") for t in plain))
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    query = plain[0]
    assert not getattr(torch_module, name), query.device
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(query.clone().requires_grad_(), *plain[1:])
    monkeypatch.setattr(torch_module, name, True)
    wanted = flex_attention(*plain)
    torch.testing.assert_close(full(flex_attention(*(t.to("xla") for t in plain))), wanted)
    assert getattr(torch_module, name)


@pytest.mark.parametrize("where", [[R, S(0)], [S(1), S(0)]], ids=str)
def test_a_table_that_is_sharded(where: Any, mesh_2x4: DeviceMesh) -> None:
    """It is looked up across devices, and its gradient lands in its own layout."""
    plain, table = inputs(), CAPTURED["bias"].clone()
    ours = distribute_tensor(table, mesh_2x4, where).requires_grad_()
    table.requires_grad_()
    expected(plain, relative({"bias": table}), None, DIM**-0.5)[0].sum().backward()
    tensors = [distribute_tensor(t, mesh_2x4, [S(0), S(1)]) for t in plain]
    flex_attention(*tensors, relative({"bias": ours})).sum().backward()
    assert ours.grad is not None and ours.grad.placements == tuple(where)
    torch.testing.assert_close(full(ours.grad), table.grad, rtol=1e-4, atol=1e-5)


def test_per_device_values(mesh_2x4: DeviceMesh) -> None:
    each = [torch.randn(1, HEADS, LENGTH, DIM) for _ in range(8)]
    own = xd.from_device_values(each, mesh_2x4)
    found = flex_attention(own, own, own, softcap({})).local_values()
    for one, value in zip(found, each, strict=True):
        wanted = expected([value] * 3, softcap({}), None, DIM**-0.5)[0]
        torch.testing.assert_close(one, wanted)


def test_torch_compile_of_it_is_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models compile it when they are imported; on xla tensors that changes nothing."""
    refused = lambda *args, **kwargs: pytest.fail("torch.compile was asked")
    monkeypatch.setattr(torch._dynamo, "optimize", lambda **_: lambda function: refused)
    compiled = torch.compile(flex_attention, dynamic=False)
    make_mask = torch.compile(create_block_mask)
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    mask = make_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="xla")
    found = compiled(q.to("xla"), k.to("xla"), v.to("xla"), block_mask=mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found.cpu(), expected)
    with pytest.raises(pytest.fail.Exception):
        compiled(q, k, v)
