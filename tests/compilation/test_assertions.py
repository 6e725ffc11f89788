"""What must hold of values in a compiled step: indices, if asked for, and its own assertions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from tests.dispatch.out_of_range import CALLS, LAYOUTS, OTHER_TEXTS, R, S, X, i, place
from tests.parallel.harness import full
from xla_dtensor.compilation.watch import functions

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_raises_as_the_cpu(name: str, layout: str, mesh_2x4: DeviceMesh) -> None:
    x, wrong, right, call = CALLS[name]
    with pytest.raises((IndexError, RuntimeError)) as theirs:
        call(x, wrong)
    ours, index, good = (place(t, LAYOUTS[layout], mesh_2x4) for t in (x, wrong, right))
    step = xd.compile(call, checks=True)
    text = OTHER_TEXTS.get(name, str(theirs.value).splitlines()[0])
    torch.testing.assert_close(full(step(ours, good)), call(x, right))
    with pytest.raises(theirs.type) as error:
        step(ours, index)
    assert text in str(error.value) and "out_of_range.py" in str(error.value)
    torch.testing.assert_close(full(step(ours, good)), call(x, right))
    assert len(step.compiled_programs()) == 1


def test_the_step_has_happened(mesh_2x4: DeviceMesh) -> None:
    """As a whole, in the first call too: the table has moved, the next call goes on from there."""
    table = torch.nn.Parameter(place(X, [S(0), R], mesh_2x4))
    optimizer = torch.optim.SGD([table], lr=0.1, momentum=0.9)
    calls = torch.zeros((), device="xla")

    def step(index: Any) -> Any:
        calls.add_(1)
        loss = F.embedding(index, table).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = xd.compile(step, checks=True)
    for number, index in enumerate([i(3, 12), i(3, 9), i(-1, 2), i(0, 0)]):
        index = place(index, [R, R], mesh_2x4)
        before = full(table)
        if number % 2 == 0:
            with pytest.raises(IndexError, match="index out of range in self"):
                compiled(index)
        else:
            compiled(index)
        assert calls.item() == number + 1 and not torch.equal(full(table), before)
    assert table.grad is None


def test_a_result_with_a_history() -> None:
    """The forward program looks; a backward pass of its own has nothing to look at."""
    table = X.to("xla").requires_grad_()
    model = xd.compile(lambda index: F.embedding(index, table), checks=True)
    with pytest.raises(IndexError, match="index out of range"):
        model(i(12).to("xla"))
    model(i(3, 3).to("xla")).sum().backward()
    assert table.grad is not None and table.grad.sum().item() == 8


def test_without_checks_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xd.config, "checks", "eager")
    call = lambda x, index: x[index]
    step, checking = xd.compile(call), xd.compile(call, checks=True)
    x = X.to("xla")
    assert torch.equal(step(x, i(12).to("xla")).cpu(), X[9:])
    checking(x, i(1).to("xla"))
    counts = [len(s.compiled_programs()[0].out_tree.children()) for s in (step, checking)]
    assert counts == [1, 2]
    monkeypatch.setattr(xd.config, "checks", "all")
    with pytest.raises(IndexError):
        xd.compile(call)(x, i(12).to("xla"))


def test_the_audit_agrees() -> None:
    step = xd.compile(lambda x, index: x[index], checks=True, audit=1)
    for _ in range(2):
        step(X.to("xla"), i(1).to("xla"))


def test_checkpoint() -> None:
    """What is computed again is looked at, too."""
    table = X.to("xla").requires_grad_()

    def step(index: Any) -> Any:
        block = lambda index: F.embedding(index, table).square()
        torch.utils.checkpoint.checkpoint(block, index, use_reentrant=False).sum().backward()

    compiled = xd.compile(step, checks=True)
    compiled(i(1).to("xla"))
    with pytest.raises(IndexError):
        compiled(i(10).to("xla"))


def test_repeats_of_another_size() -> None:
    step = xd.compile(lambda x, repeats: x.repeat_interleave(repeats, output_size=3), checks=True)
    x = torch.arange(2).to("xla")
    assert step(x, i(1, 2).to("xla")).tolist() == [0, 1, 1]
    with pytest.raises(RuntimeError, match="allocated size does not match required size"):
        step(x, i(1, 1).to("xla"))
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        step(x, i(4, -1).to("xla"))


@pytest.mark.parametrize("weights", [[1.0, float("nan")], [1.0, -1.0], [0.0, 0.0]])
def test_multinomial(weights: list[float]) -> None:
    with pytest.raises(RuntimeError) as theirs:
        torch.multinomial(torch.tensor(weights), 1)
    step = xd.compile(lambda w: torch.multinomial(w, 1), checks=True)
    assert step(torch.tensor([0.0, 1.0]).to("xla")).item() == 1
    with pytest.raises(RuntimeError) as ours:
        step(torch.tensor(weights).to("xla"))
    assert str(theirs.value) in str(ours.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checks", [False, True])
def test_assert_async(checks: bool, layout: str, mesh_2x4: DeviceMesh) -> None:
    """The step's own assertion: raised after the step, or when a value is read next."""

    def call(x: Any) -> Any:
        torch._assert_async((x > 0).all(), "x isn't positive")
        return x.sum()

    step = xd.compile(call, checks=checks)
    good, bad = (place(t, LAYOUTS[layout], mesh_2x4) for t in (X + 1, X))
    assert step(good).item() == (X + 1).sum()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="x isn't positive") as error:
            found = step(bad)
            assert not checks
            found.item()
        assert "test_assertions.py" in str(error.value)
    assert step(good).item() == (X + 1).sum()
    assert len(step.compiled_programs()) == 1


def test_several_assertions() -> None:
    """The first that doesn't hold is raised, those of the step before its indices."""

    def call(x: Any) -> Any:
        torch._assert_async(x.sum() != 1, "one")
        torch._assert_async(x.sum() < 5)
        return x * 2

    step = xd.compile(call, checks=False)
    for value, text in ((1.0, "one"), (7.0, "Expected Tensor with single nonzero value")):
        step(torch.tensor([value]).to("xla"))
        with pytest.raises(RuntimeError, match=text):
            torch.ones(1, device="xla").item()
    assert step(torch.tensor([3.0]).to("xla")).item() == 6


def test_what_pytest_puts_in_place_of_an_assertion_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The code that says why one fails has most of pytest behind it: half a second a trace."""
    seen: set[str] = set()
    users_code = functions._users_code

    def look(walk: Any, function: Any, module: str, path: str) -> None:
        seen.add(module.partition(".")[0])
        users_code(walk, function, module, path)

    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        assert n < 2, f"too many: {n}"
        return x * n

    monkeypatch.setattr(functions, "_users_code", look)
    compiled = xd.compile(step)
    with pytest.raises(AssertionError, match="too many: 2"):
        compiled(torch.ones(2, device="xla"), 2)
    assert compiled(torch.ones(2, device="xla"), 1)[0].item() == 1
    assert "tests" in seen and not seen & {"_pytest", "pluggy"}
