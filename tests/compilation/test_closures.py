"""Functions among a step's arguments that were made for the call: they are what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

import xla_dtensor as xd
from tests.conftest import make_mesh

Function = Callable[[torch.Tensor], torch.Tensor]


def adds(tensor: torch.Tensor, times: float = 1.0) -> Function:
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + tensor * times

    return add


def twice(function: Function) -> Function:
    return lambda x: function(function(x))


def apply(function: Function, x: torch.Tensor) -> torch.Tensor:
    return function(x)


def test_another_tensor_is_an_input() -> None:
    """A closure of the same code around another tensor has the same program, and that tensor's
    result; so has one around a closure."""
    step = xd.compile(apply)
    x = torch.arange(3.0)
    for make in (adds, lambda t: twice(adds(t))):
        for value in (1.0, 2.0, 3.0):
            kept = torch.full((3,), value)
            found = step(make(kept.to("xla")), x.to("xla"))
            assert found.tolist() == make(kept)(x).tolist()
    assert len(step.recompilations) == 1  # the other code


def test_what_it_keeps_is_looked_at() -> None:
    """Other numbers, forms, and tensors that were written to."""
    step = xd.compile(apply)
    x, kept = torch.zeros(2, device="xla"), torch.ones(2, device="xla")
    assert step(adds(kept, 2.0), x).tolist() == [2, 2]
    assert step(adds(kept, 5.0), x).tolist() == [5, 5]
    assert step(adds(torch.ones((), device="xla"), 5.0), x).tolist() == [5, 5]
    kept.fill_(7)
    assert step(adds(kept, 5.0), x).tolist() == [35, 35]


def test_a_kept_tensor_gets_its_gradient() -> None:
    def backward(function: Function, x: torch.Tensor) -> None:
        function(x).sum().backward()

    step = xd.compile(backward)
    for value in (1.0, 2.0):
        kept = torch.full((2,), value, device="xla", requires_grad=True)
        step(adds(kept, 3.0), torch.zeros(2, device="xla"))
        assert kept.grad is not None and kept.grad.tolist() == [3, 3]


def test_a_tensor_given_twice_is_one() -> None:
    """Kept by a closure and an argument of its own: what is written to one is seen in the other."""

    def write(function: Function, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return function(x)

    step = xd.compile(write)
    for _ in range(2):
        x = torch.zeros(2, device="xla")
        assert step(adds(x), x).tolist() == [2, 2]
        assert step(adds(torch.zeros(2, device="xla")), x).tolist() == [2, 2]


def test_one_that_counts_is_itself() -> None:
    """A closure that writes to what it keeps isn't as good as another."""

    def counter() -> Any:
        count = 0

        def call(x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return x + 1

        return call

    step = xd.compile(apply)
    x = torch.zeros(2, device="xla")
    first, second = counter(), counter()
    for function in (first, second):
        assert step(function, x).tolist() == [1, 1]
    assert [f.__closure__[0].cell_contents for f in (first, second)] == [1, 1]


def test_a_block_mask_of_each_batch() -> None:
    """flex_attention's masks of packed documents, made outside of the step for each batch."""
    mesh = make_mesh("2x4")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 4) for _ in range(3))

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def documents(starts: torch.Tensor) -> Any:
        of = torch.cumsum(starts.int(), 0)
        return and_masks(causal, lambda b, h, q, k: of[q] == of[k])

    def mask_of(starts: torch.Tensor) -> Any:
        return create_block_mask(documents(starts), None, None, 16, 16, device=starts.device.type)

    @xd.compile
    def step(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    inputs = [xd.from_device_values([t] * 2, mesh["dp"]) for t in (q, k, v)]
    for seed in range(3):
        starts = torch.rand(16, generator=torch.Generator().manual_seed(seed)) < 0.3
        found = step(*inputs, mask_of(starts.to("xla")))
        of = torch.cumsum(starts.int(), 0)
        allowed = (of[:, None] == of[None]).tril()
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        torch.testing.assert_close(found.local_values()[0], expected)
    assert step.recompilations == []
