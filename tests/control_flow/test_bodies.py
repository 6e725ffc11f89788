"""What branches and bodies do with what lies around them: gradients, writes, aliases, numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.control_flow.test_loops import COMPILED, PYTHON, TORCH, results


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = ctx.saved_tensors
        return grad * b, grad * a


def by_a_function(by: Any, x: Any, w: Any) -> Any:
    """torch's modes aren't told of `Function.apply`, which is given what is captured."""
    y = by.cond(x.sum() > 0, lambda x: Product.apply(x, w), lambda x: Product.apply(w, w), (x,))
    return by.scan(lambda c, row: (c + Product.apply(row, w[0]), c * 2), y[0], x)


def captured_as_an_operand(by: Any, x: Any, w: Any) -> Any:
    """The inner one is such a function itself."""

    def inner() -> Any:
        return by.cond(x.mean() > 0, lambda x: x * w, lambda x: x.sin(), (x,))

    return by.cond(x.sum() > 0, inner, lambda: by.map(lambda row: row * w[0], x))


def writes_through_a_view(by: Any, x: Any, w: Any) -> Any:
    def body(x: Any) -> Any:
        y = x.clone()
        y[0] = x[1] * w[0]
        y[:, 1].mul_(3)
        return y

    y = by.cond(x.sum() > 0, body, lambda x: body(x) * 2, (x,))
    return by.scan(lambda c, row: (body(c) + row, c.sum()), y, x)


def reads_a_gradient(by: Any, x: Any, w: Any) -> Any:
    leaf = w.detach().clone().requires_grad_()
    (leaf**3).sum().backward()
    return by.cond(x.sum() > 0, lambda x: x * leaf.grad, lambda x: x - leaf.grad, (x,))


def takes_a_gradient(by: Any, x: Any, w: Any) -> Any:
    def body(x: Any) -> Any:
        return x + torch.autograd.grad((x.detach() * w).square().sum(), w)[0]

    return by.cond(x.sum() > 0, body, lambda x: x.sin(), (x,))


def numbers(by: Any, x: Any, w: Any) -> Any:
    y = by.cond(
        x.sum() > 0, lambda x, k, n: x * k + n["a"], lambda x, k, n: x - k, (x, 3, {"a": 0.5})
    )
    return y, by.map(lambda row, k: row * k, x, 2.5)


def checkpointed(by: Any, x: Any, w: Any) -> Any:
    """It is computed again in the backward pass, of what is captured."""

    def body(c: Any, row: Any) -> Any:
        c = checkpoint(lambda c: torch.tanh(c * w[0] + row), c, use_reentrant=False)
        return c, c * 2

    def inner(x: Any) -> Any:
        loss = checkpoint(lambda y: (y * w).sin().sum(), x.detach(), use_reentrant=False)
        return x + torch.autograd.grad(loss, w)[0]

    y = by.cond(x.sum() > 0, inner, lambda x: checkpoint(w.mul, x, use_reentrant=False), (x,))
    return by.scan(body, y[0], y)


def asks_whether_gradients_are_on(by: Any, x: Any, w: Any) -> Any:
    def body(x: Any) -> Any:
        said = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return x * w * (1 + said[0] + 2 * said[1])

    def branch() -> Any:
        return by.cond(x.sum() > 0, body, lambda x: body(x) + 1, (x,))

    with torch.no_grad():
        off = branch(), by.map(lambda row: row * (3 if torch.is_grad_enabled() else 4), x)
    with torch.inference_mode():
        inference = branch()
    return branch(), off, inference.clone()


def of_complex_numbers(by: Any, x: Any, w: Any) -> Any:
    """torch's gradients are the conjugates of JAX's."""
    z = torch.complex(x, w)
    y = by.cond(x.sum() > 0, lambda z: z.sin() * 0.1, lambda z: z * z, (z,))
    last, every = by.scan(lambda c, row: (c * row * 0.3, c.exp()), y[0] * 0.1, z)
    return torch.view_as_real(last), torch.view_as_real(every)


CASES: dict[str, Callable[[Any, Any, Any], Any]] = {
    f.__name__: f
    for f in (
        *(by_a_function, captured_as_an_operand, writes_through_a_view, reads_a_gradient),
        *(takes_a_gradient, numbers, checkpointed, asks_whether_gradients_are_on),
        of_complex_numbers,
    )
}


def check(function: Callable[..., Any], x: torch.Tensor, w: torch.Tensor, compiled: bool) -> None:
    def on_xla(x: Any, w: Any) -> Any:
        return function(TORCH, x, w)

    run = xd.compile(on_xla) if compiled else on_xla
    for sign in (1.0, -1.0):
        given = x + sign * (x.abs().sum() / x.numel() + 0.1)
        want = results(lambda x, w: function(PYTHON, x, w), given.clone(), w.clone())
        got = results(run, given.to("xla"), w.to("xla"))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@COMPILED
@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(case: str, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(4, 4, generator=generator) for _ in range(2))
    check(CASES[case], x, w, compiled)


def program(r: random.Random, depth: int = 0) -> Callable[[Any, Any, Any], Any]:
    """A random function of ``by``, ``x`` of [4, 4] and ``w``, with branches and loops in others."""
    flat = ("sin", "product", "norm", "function")
    kind = r.choice((*flat, "write", "then", *("cond", "scan", "map") * 2) if depth < 3 else flat)
    k = r.uniform(0.2, 0.9)
    if kind in flat or kind == "write":

        def write(by: Any, x: Any, w: Any) -> Any:
            y = x.clone()
            y[0] = x[1] * w[0]
            return y

        return {
            "sin": lambda by, x, w: (x * k).sin(),
            "product": lambda by, x, w: torch.tanh(x @ w),
            "norm": lambda by, x, w: F.layer_norm(x, (4,), w[0], w[1]),
            "function": lambda by, x, w: Product.apply(x, w) * k,
            "write": write,
        }[kind]
    one, other = program(r, depth + 1), program(r, depth + 1)
    if kind == "then":
        return lambda by, x, w: other(by, one(by, x, w), w)
    if kind == "map":
        return lambda by, x, w: by.map(lambda row, x: one(by, row + x, w)[0], x, x * k)
    if kind == "scan":
        reverse, dim = r.random() < 0.5, r.choice((0, 1))

        def scan(by: Any, x: Any, w: Any) -> Any:
            def step(c: Any, row: Any) -> Any:
                c = torch.tanh(one(by, c, w) + row)
                return c, c.sum(0)

            last, every = by.scan(step, x * k, x, dim=dim, reverse=reverse)
            return last + every

        return scan
    if r.random() < 0.5:
        return lambda by, x, w: by.cond(
            x.mean() > 0, lambda: one(by, x, w) * k, lambda: other(by, x, w) * k
        )
    return lambda by, x, w: by.cond(
        x.mean() > 0, lambda x: one(by, x, w) * k, lambda x: other(by, x, w) * k, (x,)
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(4, 4, generator=generator) / 2 for _ in range(2))
    check(program(random.Random(seed)), x, w, True)


@COMPILED
def test_results_are_tensors_of_their_own(compiled: bool) -> None:
    """As torch says of `cond` when it is compiled: a write to one changes nothing else."""

    def step(x: Any, w: Any) -> Any:
        same = torch.cond(x.sum() > 0, lambda x: x, lambda x: x + 1, (x,))
        captured, part = torch.cond(x.sum() > 0, lambda: (w, x[0]), lambda: (x, w[0]))
        one, two = torch.cond(x.sum() > 0, lambda x: (y := x * 2, y), lambda x: (x, x), (x,))
        (unmoved,) = TORCH.while_loop(lambda x: x.sum() > 1e9, lambda x: (x + 1,), (x,))
        for y in (same, captured, part, one, unmoved):
            y.add_(10)
        return x, w, two

    run: Any = xd.compile(step) if compiled else step
    x, w = torch.ones(2, 3, device="xla"), torch.zeros(2, 3, device="xla")
    got = [t.cpu() for t in run(x, w)]
    assert torch.equal(got[0], torch.ones(2, 3)) and torch.equal(got[1], torch.zeros(2, 3))
    assert torch.equal(got[2], torch.full((2, 3), 2.0))
    assert torch.equal(x.cpu(), torch.ones(2, 3))


@COMPILED
def test_results_that_are_no_tensors(compiled: bool) -> None:
    def step(x: Any) -> Any:
        y, none, n = torch.cond(x > 0, lambda x: (x, None, 1), lambda x: (-x, None, 2), (x,))
        _, (z, again) = TORCH.scan(lambda c, row: (c + row, (3, None)), x, y.expand(4))
        return y, none, n, z, again

    run: Any = xd.compile(step) if compiled else step
    for sign in (1, -1):
        y, none, n, z, again = run(torch.full((), 5.0 * sign, device="xla"))
        assert (float(y), none, int(n), again) == (5.0, None, 1 if sign > 0 else 2, None)
        assert z.tolist() == [3] * 4 and z.dtype == torch.int64


def test_doubles_that_are_carried() -> None:
    """Python's number has 64 bits."""

    def step(x: Any) -> Any:
        return TORCH.while_loop(lambda n, x: n < 1, lambda n, x: (n + 0.1, x + n), (0.0, x))

    n, x = xd.compile(step)(torch.zeros((), device="xla", dtype=torch.float64))
    want, total = 0.0, 0.0
    while want < 1:
        want, total = want + 0.1, total + want
    assert (float(n), float(x)) == (want, total)


COUNTS: dict[str, Any] = {"n": 0, "list": []}


def counts(x: Any) -> Any:
    COUNTS["n"] += 1
    return x * COUNTS["n"]


def keeps(x: Any) -> Any:
    COUNTS["list"].append(x * 2)
    return x * 2


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * self.calls


def local_list(x: Any) -> Any:
    seen: list[int] = []

    def body(c: Any, row: Any) -> Any:
        seen.append(1)
        return c + row, c * len(seen)

    return TORCH.scan(body, x[0], x)[1].sum() + len(seen)


LEAF = torch.nn.Parameter(torch.ones(3, device="xla"))


def backward(x: Any) -> Any:
    (own := x.detach().requires_grad_()).mul(LEAF).sum().backward()
    return own.grad


def sets_a_gradient(x: Any) -> Any:
    LEAF.grad = x.detach() * 2
    return x * 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (counts, r"changes .*\['n'\] from 0 to"),
        (keeps, r"changes .*\['list'\]"),
        (Counter(), r"changes .*calls from 0 to"),
        (backward, "reaches a tensor from outside, of shape \\[3\\]"),
        (sets_a_gradient, "writes to a tensor from outside"),
    ],
    ids=["counter", "list", "attribute", "backward", "gradient"],
)
def test_changes_around_a_body_are_refused(body: Any, message: str) -> None:
    """They would happen while it is traced, as often as that takes."""
    step = xd.compile(lambda x: torch.cond(x.sum() > 0, body, lambda x: x.sin(), (x,)))
    with pytest.raises(xd.UnsupportedOpError, match=f"(?s){message}"):
        step(torch.ones(3, device="xla"))
    assert COUNTS == {"n": 0, "list": []} and LEAF.grad is None


def test_changes_of_what_the_step_has_made_are_refused() -> None:
    with pytest.raises(xd.UnsupportedOpError, match=r"changes .*seen"):
        xd.compile(local_list)(torch.ones(3, device="xla"))


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda x: torch.cond(x > 0, torch.sin, torch.cos, (x,)), RuntimeError, "single-element"),
    (lambda x: TORCH.scan(lambda c, r: (c, r), x[0], x[:0]), RuntimeError, "length above 0"),
    (lambda x: TORCH.map(lambda r: r, x[:0]), RuntimeError, "length above 0"),
    (lambda x: TORCH.map(lambda r: r[0] + r[1], (x, x[:2])), RuntimeError, r"\[3\], \[2\]"),
    (lambda x: TORCH.scan(lambda c, r: (c, r), x[0], x, dim=3), IndexError, "out of range"),
    (
        lambda x: TORCH.scan(lambda c, r: (c.double() + r, r), x[0], x),
        xd.UnsupportedOpError,
        r"a carry of float64\[\], and init is float32\[\]",
    ),
    (
        lambda x: TORCH.while_loop(lambda x: x.sum() < 99, lambda x: (x.double(),), (x,)),
        xd.UnsupportedOpError,
        r"body_fn returns \(float64\[3\],\)",
    ),
    (
        lambda x: TORCH.scan(lambda c, r: (c + r, "text"), x[0], x),
        xd.UnsupportedOpError,
        "'text', a str: it must be tensors and numbers",
    ),
]


@COMPILED
@pytest.mark.parametrize(("function", "error", "message"), WRONG)
def test_wrong_arguments(function: Any, error: Any, message: str, compiled: bool) -> None:
    """What CPU torch refuses, too, in both modes."""
    with pytest.raises(error, match=message):
        (xd.compile(function) if compiled else function)(torch.ones(3, device="xla"))


def test_rows_that_a_value_counts_are_refused() -> None:
    mesh = xd.init_device_mesh("xla", (2,), mesh_dim_names=("ep",))
    counts = xd.from_device_values([torch.tensor([1, 2])] * 2, mesh)

    @xd.compile
    def step(x: Any, counts: Any) -> Any:
        part, _ = x.split(counts.tolist())
        return TORCH.scan(lambda c, row: (c + row, c * 1), x[0], part)[0]

    with pytest.raises(xd.DataDependentError, match="a number of rows that is a value"):
        step(xd.from_device_values([torch.ones(3, 2)] * 2, mesh), counts)


OF_SHARDED: dict[str, Callable[[Any], Any]] = {
    "to_local": lambda t: t.to_local(),
    "full_tensor": lambda t: t.full_tensor(),
    "redistribute": lambda t: t.redistribute(placements=[Replicate(), Replicate()]),
}


@pytest.mark.parametrize("name", OF_SHARDED)
def test_methods_of_dtensors_are_refused(name: str, mesh_2x4: Any) -> None:
    """The tensors of a body are whole; that they haven't these can be asked."""
    x = distribute_tensor(torch.ones(4, 4), mesh_2x4, [Shard(0), Shard(1)])
    use = OF_SHARDED[name]

    def on(of: Callable[[Any], Any]) -> Any:
        return xd.compile(
            lambda x: torch.cond(x.sum() > 0, lambda y: of(y).sum(), lambda y: y.sum(), (x,))
        )

    for of, error in ((use, AttributeError), (lambda y: use(x), xd.UnsupportedOpError)):
        with pytest.raises(error, match=f"(?s){name}.*give it the result as an operand"):
            on(of)(x)
    assert on(lambda y: y * 2 if hasattr(y, name) else y * 3)(x).item() == 48
