"""What a compiled step gives away: whose memory it shares, and its history, as in torch.

Each program runs as it is on the CPU and compiled on a mesh; what it returns, or torch's error,
must be the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.compilation.test_history import Compile, Place, numbers, parameter

PROGRAMS: dict[str, Callable[[Place, Compile], list[Any]]] = {}


def program(function: Callable[[Place, Compile], list[Any]]) -> Callable:
    PROGRAMS[function.__name__] = function
    return function


def leaf(place: Place) -> torch.Tensor:
    return place(numbers(0, 8, 4)).requires_grad_()


# --- results that share memory with each other ----------------------------------------------------


@program
def detached_and_written(place: Place, compile: Compile) -> list[Any]:
    x = leaf(place)
    h, d = compile(lambda x: (lambda h: (h, h.detach()))(x * 2))(x)
    d.zero_()
    h.sum().backward()
    return [h, d, d.requires_grad, x.grad]


@program
def detached_needed_and_written(place: Place, compile: Compile) -> list[Any]:
    x = leaf(place)
    h, d = compile(lambda x: (lambda h: (h, h.detach()))(x.exp()))(x)
    d.zero_()
    h.sum().backward()
    return [x.grad]


@program
def detached_comes_first(place: Place, compile: Compile) -> list[Any]:
    x = leaf(place)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x * 2
        return h.detach(), h.detach()[0], h[1].detach(), h

    results = compile(function)(x)
    h = results[-1]
    h.sum().backward()
    flags = [r.requires_grad for r in results] + [r.is_leaf for r in results]
    results[0].zero_()
    return [*results, *flags, x.grad]


@program
def detached_from_what_is_left_elsewhere(place: Place, compile: Compile) -> list[Any]:
    x = leaf(place)
    holder = SimpleNamespace(loss=None, all=[None], named={"rows": None})

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        holder.loss = (x * 2).sum()
        holder.all[0] = x.exp()
        holder.named["rows"] = x[0] * 3
        return holder.loss.detach(), holder.all[0].detach(), holder.named["rows"].detach()

    step, found = compile(function), []
    for _ in range(3):
        results = step(x)
        found += [*results, *(r.requires_grad for r in results)]
    (holder.loss + holder.all[0].sum() + holder.named["rows"].sum()).backward()
    return [*found, x.grad]


@program
def view_of_a_written_result(place: Place, compile: Compile) -> list[Any]:
    x = leaf(place)
    h, v = compile(lambda x: (lambda h: (h, h.view(-1)))(x * 2))(x)
    h.mul_(3)
    v.square().sum().backward()
    return [h, v, x.grad]


@program
def views_written_in_turn(place: Place, compile: Compile) -> list[Any]:
    w = parameter(place, 1, 4, 4)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x @ w
        return h, h[0], h[:, 1]

    step, found = compile(function), []
    for i in range(3):
        w.grad = None
        h, a, b = step(place(numbers(i, 8, 4)))
        a.mul_(3)
        b.add_(h.sum())
        h.square().sum().backward()
        found += [h, a, b, w.grad]
    return found


@program
def element_and_whole(place: Place, compile: Compile) -> list[Any]:
    x = leaf(place)
    y, first = compile(lambda x: (lambda y: (y, y[0]))(x * 2))(x)
    (y.sum() + first.square().sum()).backward()
    first.data.zero_()
    return [y, first, x.grad]


@program
def only_a_view(place: Place, compile: Compile) -> list[Any]:
    w, found = parameter(place, 1, 4, 4), []
    step = compile(lambda x: (x @ w)[1:3])
    for i in range(2):
        w.grad = None
        y = step(place(numbers(i, 8, 4)))
        y.mul_(2)
        y.sum().backward()
        found += [y, w.grad]
    return found


@program
def chunks(place: Place, compile: Compile) -> list[Any]:
    w = parameter(place, 1, 4, 12)
    q, k, v = compile(lambda x: (x @ w).chunk(3, -1))(place(numbers(0, 8, 4)))
    (q * k * v).sum().backward()
    return [w.grad, q, k, v]


@program
def a_function_that_gives_back_its_input(place: Place, compile: Compile) -> list[Any]:
    x = leaf(place)
    h, r = compile(lambda x: (lambda h: (h, Reversed.apply(h)))(x * 2))(x)
    (h.sum() + 3 * r.sum()).backward()
    return [x.grad]


@program
def the_same_view_twice(place: Place, compile: Compile) -> list[Any]:
    a, b = compile(lambda x: (lambda v: (v, v))((x * 2).view(-1)))(place(numbers(0, 8, 4)))
    return [a is b]


@program
def two_objects(place: Place, compile: Compile) -> list[Any]:
    a, b = compile(lambda x: (lambda v: (v, v.detach()))(x * 2))(place(numbers(0, 8, 4)))
    b.requires_grad_()
    return [a is b, a.requires_grad, b.requires_grad]


@program
def view_that_gets_a_history(place: Place, compile: Compile) -> list[Any]:
    """What is written to a view becomes part of what the whole was computed from."""
    w = parameter(place, 1, 8)
    first, h = compile(lambda x: (lambda h: (h[0], h))(x * 2))(place(numbers(0, 8, 4)))
    first.mul_(w[0])
    h.square().sum().backward()
    return [first, h, w.grad]


@program
def detached_view_that_gets_a_history(place: Place, compile: Compile) -> list[Any]:
    w, v = parameter(place, 1, 4, 4), parameter(place, 2, 8)
    step = compile(lambda x: (lambda h: (h.detach()[0], h))(x @ w))
    first, h = step(place(numbers(0, 8, 4)))
    first.mul_(v[0])
    (h.square().sum() + first.sum()).backward()
    return [first.requires_grad, w.grad, v.grad]


@program
def view_without_history_saved_and_written(place: Place, compile: Compile) -> list[Any]:
    w = parameter(place, 1, 32)
    h, v = compile(lambda x: (lambda h: (h, h.view(-1)))(x * 2))(place(numbers(0, 8, 4)))
    y = (w * v).sum()
    h.mul_(2)
    y.backward()
    return [w.grad]


# --- memory from outside --------------------------------------------------------------------------


@program
def transposed_parameter(place: Place, compile: Compile) -> list[Any]:
    w = parameter(place, 1, 4, 4)
    t = compile(lambda: w.t())()
    with torch.no_grad():
        w.add_(1)
    (t * t).sum().backward()
    return [t, w.grad]


@program
def view_of_a_leaf_written(place: Place, compile: Compile) -> list[Any]:
    w = parameter(place, 1, 4, 4)
    t = compile(lambda: w.t())()
    t.mul_(2)
    return [t]


@program
def view_of_a_leaf_written_without_grad(place: Place, compile: Compile) -> list[Any]:
    w = parameter(place, 1, 4, 4)
    step = compile(lambda: w.t())
    t = step()
    with torch.no_grad():
        t.mul_(2)
    (w * w).sum().backward()
    (step() * 3).sum().backward()
    return [t, w, w.grad]


@program
def view_of_an_argument(place: Place, compile: Compile) -> list[Any]:
    x = leaf(place)
    h = x * 2
    v = compile(lambda x: x.view(-1))(h)
    with torch.no_grad():
        h.add_(1)
    (v * 3).sum().backward()
    return [v, x.grad]


@program
def argument_itself(place: Place, compile: Compile) -> list[Any]:
    x = leaf(place)
    h = x * 2
    v = compile(lambda x: x)(h)
    (v * 3).sum().backward()
    return [v is h, x.grad]


@program
def argument_detached(place: Place, compile: Compile) -> list[Any]:
    h = leaf(place) * 2
    d = compile(lambda h: h.detach())(h)
    d.zero_()
    return [h, d.requires_grad]


@program
def view_of_an_argument_saved_and_written(place: Place, compile: Compile) -> list[Any]:
    w, x = parameter(place, 1, 32), place(numbers(0, 8, 4))
    v = compile(lambda x: x.view(-1))(x)
    y = (w * v).sum()
    x.mul_(2)
    y.backward()
    return [w.grad]


@program
def view_of_a_buffer_saved_and_written(place: Place, compile: Compile) -> list[Any]:
    b, w = place(numbers(2, 4, 4)), parameter(place, 1, 16)
    v = compile(lambda: b.view(-1))()
    y = (w * v).sum()
    b.mul_(2)
    y.backward()
    return [w.grad]


# --- gradients and leaves -------------------------------------------------------------------------


@program
def gradient_returned(place: Place, compile: Compile) -> list[Any]:
    w, found = parameter(place, 1, 4, 4), []

    def function(x: torch.Tensor) -> torch.Tensor | None:
        (x @ w).sum().backward()
        return w.grad

    step = compile(function)
    for i in range(4):
        if i == 2:
            w.grad = None
        grad = step(place(numbers(i, 8, 4)))
        found += [grad.clone(), grad is w.grad]
        if i % 2:
            grad.mul_(0.5)
            found.append(w.grad.clone())
    return found


@program
def view_of_a_gradient_returned(place: Place, compile: Compile) -> list[Any]:
    w, found = parameter(place, 1, 4, 4), []

    def function(x: torch.Tensor) -> torch.Tensor:
        w.grad = None
        (x @ w).sum().backward()
        return w.grad.view(-1)

    step = compile(function)
    for i in range(3):
        grad = step(place(numbers(i, 8, 4)))
        grad.mul_(0.5)
        found += [grad.clone(), w.grad.clone()]
        w.grad.zero_()
        found.append(grad.clone())
    return found


@program
def leaf_of_the_step(place: Place, compile: Compile) -> list[Any]:
    def function(x: torch.Tensor) -> torch.Tensor:
        p = (x * 2).detach().requires_grad_()
        (p * p).sum().backward()
        return p

    p = compile(function)(place(numbers(0, 8, 4)))
    return [p, p.requires_grad, p.is_leaf, p.grad]


@program
def of_a_leaf_of_the_step(place: Place, compile: Compile) -> list[Any]:
    """Nothing from outside requires grad."""

    def function(x: torch.Tensor) -> torch.Tensor:
        p = (x * 2).detach().requires_grad_()
        return (p * p).sum()

    return [compile(function)(place(numbers(0, 8, 4)))]


# --- histories ------------------------------------------------------------------------------------


@program
def loss_in_an_attribute(place: Place, compile: Compile) -> list[Any]:
    """As mixtures of experts keep theirs."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.auxiliary = parameter(place, 1, 4, 4), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x @ self.w
            self.auxiliary = h.square().mean()
            return h.sum()

    model, found = Model(), []
    forward = compile(lambda x: model(x))
    for i in range(3):
        model.w.grad = None
        (forward(place(numbers(i, 8, 4))) + model.auxiliary).backward()
        found += [model.w.grad, model.auxiliary]
    return found


@program
def parts_in_attributes(place: Place, compile: Compile) -> list[Any]:
    w, found = parameter(place, 1, 4, 4), []

    class Model(nn.Module):
        last: Any = None
        parts: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = (x @ w).sum()
            self.last, self.parts = loss.detach(), [loss.detach(), x @ w]
            return loss

    model = Model()
    forward = compile(lambda x: model(x))
    for i in range(3):
        w.grad = None
        loss = forward(place(numbers(i, 8, 4)))
        (loss + model.parts[1].square().sum()).backward()
        found += [model.last.requires_grad, model.parts[1].requires_grad, model.last.clone()]
        loss.data.add_(1)
        found += [model.last, model.parts[0], w.grad]
    return found


@program
def one_of_two_is_overwritten(place: Place, compile: Compile) -> list[Any]:
    a, b, x = parameter(place, 1, 4, 4), parameter(place, 2, 4, 4), leaf(place)
    _, q = compile(lambda x: (x @ a, x @ b))(x)
    with torch.no_grad():
        a.mul_(2)
    q.sum().backward()
    return [x.grad, a.grad, b.grad]


@program
def the_other_of_two_is_overwritten(place: Place, compile: Compile) -> list[Any]:
    a, b, x = parameter(place, 1, 4, 4), parameter(place, 2, 4, 4), leaf(place)
    p, _ = compile(lambda x: (x @ a, x @ b))(x)
    with torch.no_grad():
        a.mul_(2)
    p.sum().backward()
    return [x.grad]


@program
def metric_of_a_training_step(place: Place, compile: Compile) -> list[Any]:
    """With a history that nobody asks for, and that its step has made useless."""
    w, x = parameter(place, 1, 4, 4), leaf(place)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, metric = (x @ w).square().mean(), (x @ w).exp().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), metric

    step, found = compile(function), []
    for _ in range(3):
        found += [t.detach() for t in step(x)]
    return [*found, w]


@program
def metric_of_a_training_step_differentiated(place: Place, compile: Compile) -> list[Any]:
    w, x = parameter(place, 1, 4, 4), leaf(place)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def function(x: torch.Tensor) -> torch.Tensor:
        loss, metric = (x @ w).square().mean(), (x @ w).exp().mean()
        loss.backward()
        optimizer.step()
        return metric

    compile(function)(x).backward()
    return []


@program
def two_steps_of_one_parameter(place: Place, compile: Compile) -> list[Any]:
    """The second is traced while the first one's backward pass waits."""
    w, x = parameter(place, 1, 8, 4), leaf(place)
    first, second = compile(lambda x: x * w), compile(lambda h: (h * w).sum())
    second(first(x)).backward()
    return [w.grad, x.grad]


@program
def statistics_of_two_calls(place: Place, compile: Compile) -> list[Any]:
    """torch's batch norm overwrites them without telling autograd, which doesn't need them."""
    norm = nn.BatchNorm1d(4)
    norm.register_buffer("running_mean", place(torch.zeros(4)))
    norm.register_buffer("running_var", place(torch.ones(4)))
    norm.register_buffer("num_batches_tracked", place(torch.tensor(0).repeat(8)))
    norm.weight, norm.bias = (nn.Parameter(place(torch.ones(4))) for _ in range(2))
    x = leaf(place)
    forward = compile(lambda x: norm(x))
    (forward(x).square().sum() + forward(x * 2).pow(3).sum()).backward()
    return [norm.weight.grad, norm.running_mean]


@program
def number_on_the_host_overwritten(place: Place, compile: Compile) -> list[Any]:
    scale, x = torch.tensor(2.0), leaf(place)
    y = compile(lambda x: (x * scale).sum())(x)
    scale.fill_(5.0)
    y.backward()
    return [x.grad]


@program
def argument_on_the_host_overwritten(place: Place, compile: Compile) -> list[Any]:
    scale, x = torch.tensor(2.0), leaf(place)
    y = compile(lambda x, scale: (x * scale).sum())(x, scale)
    scale.fill_(5.0)
    y.backward()
    return [x.grad]


@program
def computed_on_the_host_and_overwritten(place: Place, compile: Compile) -> list[Any]:
    scale, x = torch.tensor(2.0), leaf(place)
    y = compile(lambda x: (x * (scale + 1)).sum())(x)
    scale.fill_(5.0)
    y.backward()
    return [x.grad]


@program
def states_of_an_lstm(place: Place, compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 4, batch_first=True)
    for name, p in list(lstm.named_parameters()):
        setattr(lstm, name, nn.Parameter(place(p.detach())))
    y, (h, c) = compile(lambda x: lstm(x))(place(numbers(0, 8, 3, 4)))
    (y.sum() + h.square().sum() + c.sum()).backward()
    return [y, h, c, *(p.grad for p in lstm.parameters())]


@program
def adversaries(place: Place, compile: Compile) -> list[Any]:
    """Each trained through the other; one's history waits while the other is overwritten."""
    a, b, found = parameter(place, 0, 4, 4), parameter(place, 1, 4, 4), []
    generate, judge = compile(lambda z: (z @ a).tanh()), compile(lambda x: (x @ b).tanh())
    of_a, of_b = torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1)
    for i in range(3):
        fake = generate(place(numbers(2 + i, 8, 4)))
        of_b.zero_grad()
        (judge(fake.detach()).square().mean() - judge(place(numbers(9, 8, 4))).mean()).backward()
        of_b.step()
        of_a.zero_grad()
        loss = -judge(fake).mean()
        loss.backward()
        of_a.step()
        found.append(loss.detach())
    return [*found, a, b]


@program
def hooks_on_results(place: Place, compile: Compile) -> list[Any]:
    w, seen = parameter(place, 1, 4, 4), []
    a, b = compile(lambda x: (lambda h: (h, h[0]))(x @ w))(place(numbers(0, 8, 4)))
    a.register_hook(lambda grad: seen.append(grad.clone()))
    a.retain_grad()
    b.retain_grad()
    (a.sum() + b.square().sum()).backward()
    return [a.grad, b.grad, w.grad, *seen]


@program
def checkpointed(place: Place, compile: Compile) -> list[Any]:
    w, x, found = parameter(place, 1, 4, 4), leaf(place), []
    step = compile(lambda x: (x @ w).tanh())
    for _ in range(2):
        w.grad = x.grad = None
        checkpoint(step, x, use_reentrant=False).square().sum().backward()
        found += [w.grad, x.grad]
    return found


@program
def hooks_on_saved_tensors(place: Place, compile: Compile) -> list[Any]:
    w, x = parameter(place, 1, 4, 4), leaf(place)
    step = compile(lambda x: (x @ w).tanh())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        y = step(x)
    y.sum().backward()
    return [w.grad, x.grad]


@program
def eager_history_overwritten(place: Place, compile: Compile) -> list[Any]:
    w, x = parameter(place, 1, 4, 4), leaf(place)
    y = x @ w
    with torch.no_grad():
        compile(lambda: w.mul_(2))()
    y.sum().backward()
    return [x.grad]


@program
def leaves_of_an_argument(place: Place, compile: Compile) -> list[Any]:
    """Each call makes others, of the memory that it is given."""

    def made(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            part = x[1:]
        return [x.detach().requires_grad_(), torch.nn.Parameter(x.detach()), part.requires_grad_()]

    step, found = compile(made), []
    for seed in (1, 2, 3):
        x = place(numbers(seed, 8, 4))
        for tensor in step(x):
            (tensor * seed).sum().backward()
            found += [isinstance(tensor, torch.nn.Parameter), tensor.is_leaf, tensor, tensor.grad]
            with torch.no_grad():
                x.mul_(2)
    return found


@program
def a_leaf_with_a_gradient(place: Place, compile: Compile) -> list[Any]:
    def made(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.detach().requires_grad_()
        y.square().sum().backward()
        return y, torch.autograd.grad(y.sin().sum(), y)[0]

    step, found = compile(made), []
    for seed in (1, 2, 3):
        y, grad = step(place(numbers(seed, 8, 4)))
        found += [y, y.grad, grad]
    return found


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


def shown(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def outcome(run: Callable[[Place, Compile], list[Any]], *how: Any) -> Any:
    """What a program returns, or the start of torch's error."""
    try:
        return list(map(shown, run(*how)))
    except RuntimeError as error:
        return str(error)[:70]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("watch", ["auto", "replay"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_torch(mesh_2x4: DeviceMesh, name: str, watch: str) -> None:
    expected = outcome(PROGRAMS[name], lambda t: t.clone(), lambda f: f)
    placed = lambda t: distribute_tensor(t, mesh_2x4, [Shard(0), Replicate()])
    actual = outcome(PROGRAMS[name], placed, functools.partial(xd.compile, watch=watch))
    if isinstance(expected, str) or isinstance(actual, str):
        assert actual == expected
        return
    for ours, right in zip(actual, expected, strict=True):
        if isinstance(right, torch.Tensor):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
        else:
            assert ours is right or ours == right


def test_copies_refuse_writes(mesh_2x4: DeviceMesh) -> None:
    """A function of the user's gives back its input: one memory under torch."""
    x = leaf(lambda t: distribute_tensor(t, mesh_2x4, [Shard(0), Replicate()]))
    h, r = xd.compile(lambda x: (lambda h: (h, Reversed.apply(h)))(x * 2))(x)
    of_argument = xd.compile(lambda x: Reversed.apply(x))(x)
    for copy in (h, r, of_argument):
        with pytest.raises(xd.UnsupportedOpError, match=r"clone\(\)"), torch.no_grad():
            copy.mul_(2)


def test_a_leaf_of_the_step_that_a_result_depends_on(mesh_2x4: DeviceMesh) -> None:
    w = parameter(lambda t: distribute_tensor(t, mesh_2x4, [Shard(0), Replicate()]), 0, 8, 4)

    @xd.compile
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = (x * 2).detach().requires_grad_()
        return p, (p * w).sum()

    with pytest.raises(xd.DataDependentError, match="makes a tensor that requires grad"):
        step(w.detach())


def test_an_argument_with_a_history_is_a_leaf_in_the_step() -> None:
    leaf = torch.ones(2, device="xla", requires_grad=True)
    step = xd.compile(lambda x: (x * 2, x.is_leaf, x.grad_fn is None))
    for x in (leaf, leaf * 1):
        out, *told = step(x)
        out.sum().backward()
        assert told == [True, True]
    assert leaf.grad.tolist() == [4, 4]
