"""``.grad`` in a compiled step: read, set and cleared, with or without the leaf's value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd


class Run:
    """Two heads on a body, on one device, with steps that may be compiled."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.compiled = device == "xla"
        self.body, self.a, self.b = (nn.Linear(2, 2).to(device) for _ in range(3))
        modules = (self.body, self.a, self.b)
        self.params = [p for m in modules for p in m.parameters()]
        self.optimizer = torch.optim.SGD(self.params, lr=0.1)
        self.x = torch.ones(2, 2, device=device)

    def compile(self, function: Any) -> Any:
        return xd.compile(function) if self.compiled else function

    def backward(self, i: int) -> None:
        (self.a(self.body(self.x * (i + 1))).square().mean() + self.b(self.x).mean()).backward()

    def grads(self) -> list[Any]:
        return [None if p.grad is None else p.grad.tolist() for p in self.params]

    def sums(self) -> list[float]:
        return [p.abs().sum().item() for p in self.params]


def clipping(run: Run) -> Any:
    clip = run.compile(lambda: nn.utils.clip_grad_norm_(run.params, 0.1))
    for i in range(3):
        run.backward(i)
        yield clip().item(), run.grads()
        run.optimizer.zero_grad()


def norm(run: Run) -> Any:
    total = run.compile(
        lambda: torch.stack([p.grad.norm() for p in run.params if p.grad is not None]).norm()
    )
    for i in range(3):
        run.backward(i)
        yield total().item()
        run.optimizer.zero_grad()


def clearing(run: Run) -> Any:
    clear = run.compile(run.optimizer.zero_grad)
    clear()
    for i in range(2):
        run.backward(i)
        clear()
        yield run.grads()


def clearing_to_zeros(run: Run) -> Any:
    clear = run.compile(lambda: run.optimizer.zero_grad(set_to_none=False))
    for i in range(3):
        clear()
        yield run.grads()
        run.backward(i)


def clearing_a_module(run: Run) -> Any:
    clear = run.compile(run.body.zero_grad)
    for i in range(3):
        run.backward(i)
        clear()
        yield run.grads()


def stepping(run: Run) -> Any:
    step = run.compile(run.optimizer.step)
    step()  # before there is any gradient
    for i in range(3):
        run.backward(i)
        step()
        yield run.sums()


def deleting(run: Run) -> Any:
    def delete() -> None:
        for p in run.params:
            del p.grad

    delete = run.compile(delete)
    for i in range(3):
        run.backward(i)
        delete()
        yield run.grads()


def one_head_or_the_other(run: Run) -> Any:
    @run.compile
    def step(x: Any, head: str) -> Any:
        run.optimizer.zero_grad()
        loss = (run.a if head == "a" else run.b)(run.body(x)).square().mean()
        loss.backward()
        run.optimizer.step()
        return loss.detach()

    for head in "abab":
        yield step(run.x, head).item(), run.grads()


def gradients_from_before_the_step(run: Run) -> Any:
    @run.compile
    def only_a(x: Any) -> None:
        run.a(run.body(x)).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    for i in range(4):
        if i % 2:
            run.b(run.body(run.x * i)).square().mean().backward()
            run.body.zero_grad()
        only_a(run.x * (i + 1))
        yield run.sums(), run.grads()


def frozen_parameters_with_estimates(run: Run) -> Any:
    for p in run.params:
        p.requires_grad_(False)
    step = run.compile(run.optimizer.step)
    for i in range(3):
        for p in run.params:
            p.grad = None if i == 1 else torch.full_like(p, i + 1.0)
        step()
        yield run.sums()


def setting(run: Run) -> Any:
    @run.compile
    def negate(i: int) -> None:
        for p in run.params:
            p.grad = None if p.grad is None else -p.grad
        run.body.weight.grad = torch.full_like(run.body.weight, float(i))

    for i in range(4):
        if i != 2:
            run.backward(i)
        negate(i % 2)
        yield run.grads()
        if i == 1:
            run.optimizer.zero_grad()


def accumulating_outside(run: Run) -> Any:
    @run.compile
    def averaged() -> list[Any]:
        return [p.grad / 2 for p in run.params if p.grad is not None]

    for i in range(3):
        run.backward(i)
        yield [t.tolist() for t in averaged()]


def whether_there_is_one(run: Run) -> Any:
    @run.compile
    def count(x: Any) -> Any:
        n = sum(p.grad is not None for p in run.params)
        run.optimizer.zero_grad()
        return x.sum() * n

    for i in range(4):
        if i % 2:
            run.backward(i)
        yield count(run.x).item(), run.grads()


SCRIPTS = [
    *(clipping, norm, clearing, clearing_to_zeros, clearing_a_module, stepping, deleting, setting),
    *(one_head_or_the_other, gradients_from_before_the_step, frozen_parameters_with_estimates),
    *(accumulating_outside, whether_there_is_one),
]


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif expected is None:
        assert found is None
    else:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_as_torch(script: Any) -> None:
    expected = list(script(Run("cpu")))
    assert_same(list(script(Run("xla"))), expected)


def test_of_an_argument() -> None:
    @xd.compile
    def double(x: Any) -> Any:
        return x.grad * 2

    for i in range(3):
        x = torch.ones(2, device="xla", requires_grad=True)
        (x * i).sum().backward()
        assert double(x).tolist() == [2 * i] * 2


def test_a_step_that_fails_leaves_them() -> None:
    p, q, r = (nn.Parameter(torch.ones(2, device="xla")) for _ in range(3))
    q.grad = before = torch.full_like(q, 3.0)

    @xd.compile
    def step(x: Any) -> Any:
        p.grad = x * 2
        q.grad = None
        (r * x).sum().backward()
        raise ValueError("halfway")

    for _ in range(2):
        with pytest.raises(ValueError, match="halfway"):
            step(torch.ones(2, device="xla"))
        assert p.grad is None and r.grad is None
        assert q.grad is before and q.grad.tolist() == [3, 3]


def test_zero_grad_first_is_one_program() -> None:
    """Gradients of before that nobody has looked at make no difference."""
    run = Run("xla")

    @xd.compile
    def step(x: Any) -> Any:
        run.optimizer.zero_grad()
        loss = run.a(run.body(x)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(run.params, 1.0)
        run.optimizer.step()
        return loss.detach()

    for i in range(4):
        if i == 2:
            run.backward(i)
        step(run.x)
    assert (step.compilations, step.recompilations) == (1, [])


def test_a_gradient_that_is_a_view_of_a_captured_tensor() -> None:
    """It is the tensor's own memory, detached, as `backward` was given it."""
    x = torch.randn(3, device="xla", requires_grad=True)

    @xd.compile
    def step() -> torch.Tensor:
        y = x.view_as(x)
        y.backward(y.detach())
        return x.grad

    torch.testing.assert_close(step().cpu(), x.detach().cpu())
