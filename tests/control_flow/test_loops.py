"""`torch.cond`, `while_loop`, `scan`, `map` in both modes, as Python does it on the CPU."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.base import torch_private
from xla_dtensor.base.torch_private import pytree

COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def _while(cond_fn: Any, body_fn: Any, carried: Any) -> Any:
    while cond_fn(*carried):
        carried = body_fn(*carried)
    return carried


def _scan(combine_fn: Any, init: Any, xs: Any, dim: int = 0, reverse: bool = False) -> Any:
    flat, tree = pytree.tree_flatten(xs)
    rows = list(zip(*(x.unbind(dim) for x in flat), strict=True))
    carry, ys = init, []
    for row in reversed(rows) if reverse else rows:
        carry, y = combine_fn(carry, pytree.tree_unflatten(row, tree))
        ys.append(y)
    ys = ys[::-1] if reverse else ys
    stacked = pytree.tree_map(lambda *each: torch.stack(each), *ys)
    return carry, pytree.tree_map(lambda y: y.movedim(0, dim) if dim < y.ndim else y, stacked)


# torch's functions, and what they mean: those of the CPU take seconds to be compiled.
TORCH = SimpleNamespace(
    cond=torch.cond,
    while_loop=torch_private.while_loop,
    scan=torch_private.scan,
    map=torch_private.map_along,
)
PYTHON = SimpleNamespace(
    cond=lambda pred, yes, no, operands=(): (yes if pred else no)(*operands),
    while_loop=_while,
    scan=_scan,
    map=lambda f, xs, *args: _scan(lambda c, x: (c, f(x, *args)), None, xs)[1],
)


def branch(by: Any, x: Any, w: Any) -> Any:
    return by.cond(x.sum() > 0, lambda x: x @ w, lambda x: (x * 2).sin() @ w, (x,))


def branch_of_structures(by: Any, x: Any, w: Any) -> Any:
    def one(given: Any) -> Any:
        return {"a": given["x"] * 2, "b": (given["x"].sum(), w.t())}

    def other(given: Any) -> Any:
        return {"a": given["x"] - 1, "b": (given["x"].mean(), w + 0)}

    return by.cond((x.sum() > 0).reshape(1), one, other, ({"x": x},))


def branch_without_operands(by: Any, x: Any, w: Any) -> Any:
    return by.cond(x.sum() > 0, lambda: x.exp(), lambda: w.cos())


def branch_in_branch(by: Any, x: Any, w: Any) -> Any:
    def inner(x: Any) -> Any:
        return by.cond(x[0, 0] > 0, lambda x: x * w, lambda x: x - w, (x,))

    return by.cond(x.sum() > 0, inner, lambda x: x.clone(), (x,))


def loop(by: Any, x: Any, w: Any) -> Any:
    x, w = x.detach(), w.detach()
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    return by.while_loop(
        lambda n, x: (n < 20) & (x.abs().max() < 10), lambda n, x: (n + 1, x @ w + x), (count, x)
    )


def loop_that_does_not_run(by: Any, x: Any, w: Any) -> Any:
    return by.while_loop(lambda x: x.sum() > 1e9, lambda x: (x + 1,), (x.detach(),))


def loop_over_doubles(by: Any, x: Any, w: Any) -> Any:
    wide = x.detach().double()
    big = torch.full((), 2**40, dtype=torch.int64, device=x.device)
    return by.while_loop(lambda a, n: n < 2**40 + 5, lambda a, n: (a / 3, n + 1), (wide, big))


def recurrence(by: Any, x: Any, w: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        h = torch.tanh(h @ w + row)
        return h, (h * 2, h.sum())

    return by.scan(step, torch.zeros_like(x[0]), x)


def recurrence_from_behind(by: Any, x: Any, w: Any) -> Any:
    def step(state: Any, given: Any) -> Any:
        state = {"h": state["h"] * 0.5 + given[0] * given[1]}
        return state, state["h"].cos()

    return by.scan(step, {"h": w[0]}, (x, x + 1), dim=1, reverse=True)


def branch_in_recurrence(by: Any, x: Any, w: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        h = by.cond(row.sum() > 0, lambda h: h @ w + row, lambda h: h * 0.5, (h,))
        return h, h.clone()

    return by.scan(step, x[0] * 0, x)


def each(by: Any, x: Any, w: Any) -> Any:
    return by.map(lambda row, k: {"y": row @ w * k, "n": row.argmax()}, x, x.sum())


CASES: dict[str, Callable[[Any, Any, Any], Any]] = {
    f.__name__: f
    for f in (
        *(branch, branch_of_structures, branch_without_operands, branch_in_branch, loop),
        *(loop_that_does_not_run, loop_over_doubles, recurrence, recurrence_from_behind),
        *(branch_in_recurrence, each),
    )
}


def leaves(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


def results(function: Callable[..., Any], x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """What it gives, and the gradients."""
    x, w = x.requires_grad_(), w.requires_grad_()
    outs = leaves(function(x, w))
    loss = sum(out.sum() for out in outs if out.requires_grad)
    grads = torch.autograd.grad(loss, (x, w), materialize_grads=True) if loss else ()
    return [t.detach().cpu() for t in (*outs, *grads)]


def inputs(seed: int, sign: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 4, generator=generator)
    return x + sign * (x.abs().sum() / 16 + 0.1), torch.randn(4, 4, generator=generator) / 2


@COMPILED
@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(case: str, compiled: bool) -> None:
    function = CASES[case]

    def on_xla(x: Any, w: Any) -> Any:
        return function(TORCH, x, w)

    run: Any = xd.compile(on_xla) if compiled else on_xla
    for seed in range(2):
        for sign in (1.0, -1.0):
            x, w = inputs(seed, sign)
            want = results(lambda x, w: function(PYTHON, x, w), x.clone(), w.clone())
            got = results(run, x.to("xla"), w.to("xla"))
            assert len(got) == len(want)
            for a, b in zip(got, want, strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not compiled or run.traces == 1  # the values decide, not the trace


@pytest.mark.parametrize("case", ["branch", "recurrence", "each"])
def test_torch_says_the_same(case: str) -> None:
    x, w = inputs(0)
    got, want = (leaves(CASES[case](by, x, w)) for by in (TORCH, PYTHON))
    torch.testing.assert_close(got, want)


AFTER_A_STEP = """
import torch
from torch._higher_order_ops import scan
import xla_dtensor as xd

x = torch.arange(6.0).view(3, 2)
xd.compile(lambda x: x + 1)(x.to("xla"))
carry, (ys, sums) = scan(lambda c, row: (c + row, (c * row, row.sum())), x[0], x)
print(carry.tolist(), ys.tolist(), sums.tolist())
"""


@pytest.mark.slow
def test_torch_compiles_loops_on_the_cpu_after_a_step() -> None:
    """torch._dynamo was imported by the first trace, and noted wrong things of torch."""
    found = subprocess.run(
        [sys.executable, "-c", AFTER_A_STEP], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    x = torch.arange(6.0).view(3, 2)
    carry, (ys, sums) = _scan(lambda c, row: (c + row, (c * row, row.sum())), x[0], x)
    assert found.stdout.split("\n")[-2] == f"{carry.tolist()} {ys.tolist()} {sums.tolist()}"


class Layer(nn.Module):
    """What it has is captured, not handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.way = nn.Linear(8, 8)
        self.other = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Any) -> Any:
        h = torch.cond(x.mean() > 0, self.way, self.other, (x,))
        return TORCH.scan(lambda c, row: (c + self.way(row), self.way(c)), h[0], h)[1]


class Layers(nn.Module):
    """The lambdas mean other layers when the backward pass comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for i, layer in enumerate(self.layers):
            x = torch.cond(x.mean() > 0, lambda x: layer(x) * i, lambda x: -layer(x), (x,))  # noqa: B023
        return x


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "checkpoint":
        forward = model.forward
        model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("how", ["", "checkpoint"])
def test_what_python_says_later_is_not_asked(how: str) -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 8) + 0.2
    ours = wrapped(copy.deepcopy(model).to("xla"), how)

    @xd.compile
    def step(x: Any) -> Any:
        ours(x).square().sum().backward()

    step(x.to("xla"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cond", PYTHON.cond)
        model(x).square().sum().backward()
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-5, atol=1e-5)


def test_what_changes_between_calls() -> None:
    """What a branch reads is read as it is at each call, after a failure, too."""
    torch.manual_seed(0)
    layer, said = nn.Linear(4, 4), {"factor": 2.0, "fails": False}
    ours = copy.deepcopy(layer).to("xla")

    def gradient(layer: nn.Module, x: Any, by: Any) -> Any:
        def one(x: Any) -> Any:
            if said["fails"]:
                raise KeyError("the user's")
            return layer(x) * said["factor"]

        y = by.cond(x.sum() > 0, one, lambda x: layer(x) - 1, (x,))
        return y.detach(), torch.autograd.grad(y.square().sum(), layer.weight)[0]

    step = xd.compile(lambda x: gradient(ours, x, TORCH))

    def check() -> None:
        for x in (torch.randn(3, 4) + 1, torch.randn(3, 4) - 1):
            for a, b in zip(step(x.to("xla")), gradient(layer, x, PYTHON), strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)

    check()
    said["factor"] = 3.0
    check()
    with torch.no_grad():
        layer.weight.mul_(0.5)
        ours.weight.mul_(0.5)
    check()
    said["fails"] = True
    with pytest.raises(KeyError, match="the user's"):
        step(torch.ones(3, 4, device="xla"))
    said["fails"] = False
    layer.weight = nn.Parameter(torch.randn(4, 4))
    ours.weight = nn.Parameter(layer.weight.detach().to("xla"))
    check()


def test_autocast_holds_in_a_body() -> None:
    @xd.compile
    def step(x: Any) -> Any:
        with torch.autocast("xla", dtype=torch.bfloat16):
            return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x * 2, (x,))

    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = x @ x if x.sum() > 0 else x @ x * 2
    got = step(x.to("xla")).cpu()
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["plain", "batch", "both", "fully_shard"])
def test_a_module_trains(layout: str) -> None:
    """Parameters that branches and bodies have captured get their gradients, in one step."""
    torch.manual_seed(0)
    model = Layer()
    batches = [torch.randn(8, 8) + sign for sign in (0.3, -0.3, 0.3)]

    def trained(model: Any, placed: Callable[[torch.Tensor], Any], compiled: bool) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Any) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = xd.compile(step) if compiled else step
        return [float(run(placed(x))) for x in batches]

    ours = Layer()
    ours.load_state_dict(model.state_dict())
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    if layout == "plain":
        ours.to("xla")
        placed: Callable[[torch.Tensor], Any] = lambda x: x.to("xla")
    elif layout == "fully_shard":
        flat = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        fully_shard(ours, mesh=flat)
        placed = lambda x: xd.distribute_tensor(x, flat, [xd.Shard(0)])
    else:
        rows = [xd.Shard(0), xd.Replicate()]
        weights = [xd.Replicate(), xd.Shard(0)] if layout == "both" else [xd.Replicate()] * 2

        def lay_out(name: str, part: nn.Module, mesh: Any) -> None:
            for key, value in list(part.named_parameters(recurse=False)):
                part.register_parameter(
                    key, nn.Parameter(xd.distribute_tensor(value.detach(), mesh, weights))
                )

        xd.distribute_module(ours, mesh, lay_out)
        placed = lambda x: xd.distribute_tensor(x, mesh, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cond", PYTHON.cond)
        patch.setattr(TORCH, "scan", PYTHON.scan)
        want = trained(model, lambda x: x, False)
    got = trained(ours, placed, True)
    assert got == pytest.approx(want, rel=1e-5)


def test_devices_decide_each_by_themselves() -> None:
    mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("ep",))
    values = [torch.full((3,), float(i)) - 1.5 for i in range(4)]

    @xd.compile
    def step(x: Any) -> Any:
        y = torch.cond(x.sum() > 0, lambda x: x * 10, lambda x: x - 1, (x,))
        count = torch.zeros((), dtype=torch.int64, device=x.device)
        return y, TORCH.while_loop(
            lambda n, y: y.sum() < 20, lambda n, y: (n + 1, y + 1), (count, y)
        )

    y, (count, z) = step(xd.from_device_values(values, mesh))
    for i, x in enumerate(values):
        want = x * 10 if x.sum() > 0 else x - 1
        assert torch.equal(y.local_values()[i], want)
        n, last = _while(lambda n, y: y.sum() < 20, lambda n, y: (n + 1, y + 1), (0, want))
        assert (count.local_values()[i].item(), last.tolist()) == (n, z.local_values()[i].tolist())


def test_a_program_does_not_grow_with_the_steps() -> None:
    def lines(steps: int) -> int:
        step = xd.compile(lambda x, w: recurrence(TORCH, x, w)[0].sum())
        x, w = torch.randn(steps, 4, device="xla"), torch.randn(4, 4, device="xla")
        return len(step.lower(x, w).as_text().splitlines())

    assert lines(4) == lines(400)


def test_random_numbers_differ_from_run_to_run() -> None:
    def step(x: Any) -> Any:
        return TORCH.scan(lambda c, row: (c, torch.rand_like(row)), x[0] * 0, x)[1]

    run = xd.compile(step)
    x = torch.zeros(16, 4, device="xla")
    torch.manual_seed(0)
    first, second = run(x).cpu(), run(x).cpu()
    torch.manual_seed(0)
    assert torch.equal(run(x).cpu(), first)
    rows = torch.cat([first, second])
    assert rows.unique().numel() == rows.numel() and 0.3 < rows.mean() < 0.7


def test_numbers_that_are_carried() -> None:
    def step(x: Any) -> Any:
        return TORCH.while_loop(
            lambda i, x: 2 * i < x.shape[0], lambda i, x: (i + 1, x + i), (0, x)
        )

    i, y = xd.compile(step)(torch.zeros(5, device="xla"))
    assert int(i) == 3 and y.tolist() == [3.0] * 5
    assert step(torch.zeros(5, device="xla"))[0] == 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.cond(x.sum() > 0, lambda x: x.add_(1), lambda x: x + 1, (x,)), "argument"),
        (lambda x: torch.cond(x.sum() > 0, lambda: x.add_(1), lambda: x + 1), "from outside"),
        (
            lambda x: TORCH.while_loop(
                lambda x: x.sum() < 9, lambda x: (x * 2,), (x.clone().requires_grad_(),)
            ),
            r"use scan.*detach\(\)",
        ),
        (
            lambda x: torch.autograd.grad(
                torch.cond(x.sum() > 0, lambda x: x**3, lambda x: x, (x.requires_grad_(),)).sum(),
                x,
                create_graph=True,
            ),
            "create_graph=True.*outside of the step",
        ),
        (
            lambda x: torch.cond(x.sum() > 0, lambda x: x[:1], lambda x: {"a": x}, (x,)),
            r"one branch returns float32\[1\], the other {a: float32\[3\]}",
        ),
        (
            lambda x: TORCH.while_loop(lambda x: x.sum() < 9, lambda x: (x.double(),), (x,)),
            r"body_fn returns \(float64\[3\],\), and what is carried is \(float32\[3\],\)",
        ),
        (
            lambda x: TORCH.scan(lambda c, row: (row.long(), row), x[0], x),
            r"a carry of int64\[\], and init is float32\[\]",
        ),
    ],
    ids=[
        *("write to an argument", "write to what is captured", "gradient of while_loop"),
        *("gradient of a gradient", "branches", "what is carried", "carry"),
    ],
)
def test_refused(function: Any, message: str) -> None:
    with pytest.raises(xd.UnsupportedOpError, match=f"(?s){message}"):
        xd.compile(function)(torch.ones(3, device="xla"))
