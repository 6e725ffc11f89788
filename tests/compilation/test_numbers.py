"""Numbers among the arguments that are another in every call: one program, with torch's values."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.base.numbers import traced_number
from xla_dtensor.compilation.trace import doubles

VALUES = (0.3, 0.11, 0.22, 0.33, 0.44, 0.17)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
Function = Callable[[torch.Tensor, Any], Any]


def classes(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, 1, 2, 1], device=x.device)


def clip(x: torch.Tensor, limit: float, norm_type: float = 2.0) -> torch.Tensor:
    p = x.detach().requires_grad_()
    (p * p).sum().backward()
    nn.utils.clip_grad_norm_([p], limit, norm_type=norm_type)
    return p.grad * 1


def clip_values(x: torch.Tensor, limit: float) -> torch.Tensor:
    p = x.detach().requires_grad_()
    (p * p).sum().backward()
    nn.utils.clip_grad_value_([p], limit)
    return p.grad * 1


def running(x: torch.Tensor, momentum: float) -> tuple[torch.Tensor, ...]:
    mean, var = torch.zeros(6, device=x.device), torch.ones(6, device=x.device)
    return F.batch_norm(x, mean, var, training=True, momentum=momentum), mean, var


def penalty(x: torch.Tensor, t: float) -> torch.Tensor:
    """The gradient of a gradient, twice."""
    y = (x.abs() + 1) ** t
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return y + first.square() + second.square()


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, t: float) -> torch.Tensor:
        ctx.t = t
        return x * t

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.t, None


class Normalized(Times):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.layer_norm(grad.cumsum(1), (6,), eps=ctx.t), None


# Functions of a tensor and a number; each is differentiated.
FLOATS: dict[str, Function] = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, classes(x), label_smoothing=t),
    "cross_entropy_of_probabilities": lambda x, t: F.cross_entropy(
        x, x.detach().softmax(-1), label_smoothing=t
    ),
    "layer_norm": lambda x, t: F.layer_norm(x, (6,), eps=t),
    "rms_norm": lambda x, t: F.rms_norm(x, (6,), eps=t),
    "group_norm": lambda x, t: F.group_norm(x, 2, eps=t),
    "batch_norm": lambda x, t: F.batch_norm(x, None, None, training=True, eps=t),
    "instance_norm": lambda x, t: F.instance_norm(x.view(2, 2, 6), eps=t),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "celu": F.celu,
    "softplus": lambda x, t: F.softplus(x, beta=t),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x, t: F.threshold(x, t, t * 2),
    "hardtanh": lambda x, t: F.hardtanh(x, -t, t),
    "add_alpha": lambda x, t: torch.add(x, x * 2, alpha=t),
    "sub_alpha": lambda x, t: torch.sub(x, x * 2, alpha=t),
    "addcmul": lambda x, t: torch.addcmul(x, x, x, value=t),
    "addcdiv": lambda x, t: torch.addcdiv(x, x, x.abs() + 1, value=t),
    "lerp": lambda x, t: torch.lerp(x, x * 3, t),
    "addmm": lambda x, t: torch.addmm(x @ x.mT, x, x.mT, beta=t, alpha=t * 2),
    "smooth_l1": lambda x, t: F.smooth_l1_loss(x, x.detach() * 1.2, beta=t),
    "huber": lambda x, t: F.huber_loss(x, x.detach() * 1.2, delta=t),
    "temperature": lambda x, t: F.softmax(x / t, -1).square(),
    "recomputed": lambda x, t: checkpoint(
        lambda x, t: F.layer_norm(x, (6,), eps=t) * t, x, t, use_reentrant=False
    ),
    "a_users_function": lambda x, t: Times.apply(x, t),
    "in_a_users_backward": lambda x, t: Normalized.apply(x, t),
    "attention_scale": lambda x, t: F.scaled_dot_product_attention(
        x[None], x[None], x[None], scale=t
    ),
    "power": lambda x, t: (x.abs() + 1) ** t,
    "penalty_of_a_power": penalty,
    "base_of_a_power": lambda x, t: t**x,
    "clamp": lambda x, t: x.clamp(-t, t),
    "masked_fill": lambda x, t: x.masked_fill(x > 0, t),
    "where": lambda x, t: torch.where(x > 0, x, t),
    "margin_ranking": lambda x, t: F.margin_ranking_loss(x, x * 2, x.sign(), margin=t),
    "triplet_margin": lambda x, t: F.triplet_margin_loss(x, x * 1.1, x * 1.2, margin=t),
    "hinge_embedding": lambda x, t: F.hinge_embedding_loss(x, torch.where(x > 0, 1, -1), margin=t),
    "cosine_embedding": lambda x, t: F.cosine_embedding_loss(
        x, x.flip(0) + x, classes(x) * 0 - 1, margin=t - 0.5
    ),
    "multi_margin": lambda x, t: F.multi_margin_loss(x, classes(x), margin=t),
    "cosine_similarity": lambda x, t: F.cosine_similarity(x * 0.1, x * 0.1 + 0.01, eps=t),
    "pairwise_distance": lambda x, t: F.pairwise_distance(x, x * 1.5, eps=t),
    "normalize": lambda x, t: F.normalize(x * 0.05, eps=t),
    "poisson_nll": lambda x, t: F.poisson_nll_loss(x.abs(), x.abs(), log_input=False, eps=t),
    "quantile": torch.quantile,
}
# The same, without a gradient.
PLAIN: dict[str, Function] = {
    "clip_grad_norm": clip,
    "clip_grad_norm_inf": lambda x, t: clip(x, t, math.inf),
    "clip_grad_value": clip_values,
    "batch_norm_momentum": running,
    "copied": lambda x, t: (
        x * copy.deepcopy([t])[0] * copy.copy(t) * copy.deepcopy({"t": (t,)})["t"][0]
    ),
    "fill": lambda x, t: (x * 1).fill_(t),
    "full_like": torch.full_like,
    "tensor": lambda x, t: x * torch.tensor(t, device=x.device),
    "tensor_of_a_list": lambda x, t: x * torch.tensor([t, 2, 3, 4, t, 6], device=x.device),
    "tensor_of_lists": lambda x, t: torch.tensor(
        [[t, 1], (2, t * 2)], dtype=torch.float64, device=x.device
    ),
    "tensor_of_a_tensor": lambda x, t: torch.as_tensor(x) * torch.as_tensor([1.0]).item() * t,
    "cpu_tensor_of_a_list": lambda x, t: x * torch.tensor([t] * 6),
    "cpu_tensor": lambda x, t: x * torch.tensor(t),
    "cpu_layer_norm": lambda x, t: x * F.layer_norm(torch.arange(6.0), (6,), eps=t),
    "cpu_loss": lambda x, t: x * F.cross_entropy(torch.eye(3), torch.arange(3), label_smoothing=t),
    "logit": lambda x, t: torch.logit(x.sigmoid(), eps=t),
    "nan_to_num": lambda x, t: torch.nan_to_num((x - 1).log(), nan=t, neginf=-t),
    "remainder": lambda x, t: x % t,
    "floor_division": lambda x, t: x // t,
    "renorm": lambda x, t: torch.renorm(x, 2, 0, t),
    "functional_gradient": lambda x, t: torch.func.grad(
        lambda v: F.huber_loss(v, v.detach() * 1.2, delta=t)
    )(x),
    "vmap": lambda x, t: torch.func.vmap(lambda v: F.layer_norm(v, (6,), eps=t))(x),
    "foreach": lambda x, t: tuple(torch._foreach_pow(torch._foreach_mul([x.abs(), x * x], t), t)),
    "numpy": lambda x, t: x * np.sqrt(t) * (1 + np.cos(np.pi * t)) * np.maximum(t, 0.1),
    # In Python.
    "below": lambda x, t: x * t if t < 0.9 else x,
    "between": lambda x, t: x * t if 0 < t <= 0.9 else x,
    "truth": lambda x, t: x * (t or 1.0),
    "is_not_in": lambda x, t: x * t if t not in (None, 0.0) else x,
    "maximum": lambda x, t: x * max(t, 0.01) * min(t, 1.0),
    "power_in_python": lambda x, t: x * (1 - 0.9**t),
    "abs_and_round": lambda x, t: x * abs(t - 1) * round(t, 1) * round(t * 100),
    "floor": lambda x, t: x * math.floor(t * 30) * math.ceil(t * 30),
    "math": lambda x, t: x * math.sqrt(t) * math.exp(t) * math.log(t) * (2 + math.cos(t)),
    "finite": lambda x, t: x * t if math.isfinite(t) and not math.isnan(t) else x,
    "divmod": lambda x, t: x * divmod(t, 0.1)[0] + divmod(t, 0.1)[1],
    "is_a_float": lambda x, t: x * t if isinstance(t, float) else x,
    "returned": lambda x, t: (x * t, t, t * 2 + 1),
}
# From the device's generator: as an eager step draws them.
RANDOM: dict[str, Function] = {
    "dropout": F.dropout,
    "feature_dropout": lambda x, t: F.dropout1d(x[None], t),
    "attention_dropout": lambda x, t: F.scaled_dot_product_attention(
        x[None], x[None], x[None], dropout_p=t, scale=t
    ),
    "bernoulli": lambda x, t: (x * 1).bernoulli_(t),
    "normal": lambda x, t: (x * 1).normal_(t, t * 2),
    "exponential": lambda x, t: (x * 1).exponential_(t),
}
INTS: dict[str, Function] = {
    "divided": lambda x, i: x * (i // 10) + i / 4,
    "rounded": lambda x, i: x * round(i / 4) + math.floor(i / 3),
    "schedule": lambda x, i: x * min(1.0, (i + 1) / 10) * 0.5 * (1 + math.cos(math.pi * i / 100)),
    "ema": lambda x, i: x * min(0.999, (1 + i) / (10 + i)),
    "bias": lambda x, i: x / (1 - 0.9**i) * (2**i),
    "bits": lambda x, i: x * (i & 7) + (i >> 1) - (i ^ 5) + (i | 2),
    "divmod": lambda x, i: x * divmod(i, 10)[0] + divmod(i, 10)[1],
    "sum": lambda x, i: x * sum([i, i, 1]) - abs(i - 20),
    "tensor": lambda x, i: x + torch.tensor(i, device=x.device),
    "index_tensor": lambda x, i: x[torch.tensor([i % 4, 1], device=x.device)] + i,
    "full": lambda x, i: torch.full((4, 6), i, device=x.device) + x.long(),
    "seed": lambda x, i: x + (i * 2654435761) % 97,
}


def differentiated(function: Function) -> Function:
    def both(x: torch.Tensor, t: Any) -> tuple[torch.Tensor, torch.Tensor]:
        p = x.detach().requires_grad_()
        out = function(p, t)
        out.sum().backward()
        return out.detach(), p.grad * 1

    return both


def on_mesh(mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(X, mesh, [Shard(0), Replicate()])


def parts(result: Any) -> Iterator[torch.Tensor]:
    for part in result if isinstance(result, tuple) else (result,):
        whole = part.full_tensor() if hasattr(part, "full_tensor") else part
        yield whole.cpu() if isinstance(whole, torch.Tensor) else torch.tensor(whole)


def assert_one_program(function: Function, mesh: DeviceMesh, values: tuple, eager: Any) -> None:
    """Of all values but the first there is one trace, and the results are those of ``eager``."""
    step, x = xd.compile(function), on_mesh(mesh)
    seen = []
    for i, value in enumerate(values):
        torch.manual_seed(i)
        expected = list(parts(function(eager, value)))
        torch.manual_seed(i)
        actual = list(parts(step(x, value)))
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=1e-5, equal_nan=True)
        seen.append(torch.cat([part.double().flatten() for part in expected]).tolist())
    assert all(seen[i] != seen[0] for i in range(1, len(seen))), "the value doesn't matter"
    assert step.traces == 2, step.recompilations


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", list(FLOATS))
def test_hyperparameters(mesh_2x4: DeviceMesh, name: str) -> None:
    assert_one_program(differentiated(FLOATS[name]), mesh_2x4, VALUES, X)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(PLAIN))
def test_floats(mesh_2x4: DeviceMesh, name: str) -> None:
    assert_one_program(PLAIN[name], mesh_2x4, VALUES, X)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(RANDOM))
def test_random_numbers(mesh_2x4: DeviceMesh, name: str) -> None:
    """A step draws what eager code draws."""
    assert_one_program(RANDOM[name], mesh_2x4, VALUES, on_mesh(mesh_2x4))


@pytest.mark.parametrize("name", list(INTS))
def test_ints(mesh_2x4: DeviceMesh, name: str) -> None:
    assert_one_program(INTS[name], mesh_2x4, (17, 18, 22, 25, 26, 29), X)


def test_a_pickle_has_the_number(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(X, mesh_2x4, [Shard(0), Replicate()])
    step = xd.compile(lambda x, t, i: x * pickle.loads(pickle.dumps((t, [i])))[0])
    for t, i in ((0.5, 1), (0.25, 2), (0.5, 1)):
        torch.testing.assert_close(step(x, t, i).full_tensor().cpu(), X * t)


DECISIONS: dict[str, tuple[int, Function]] = {
    "every_fourth": (2, lambda x, i: x * 2 if i % 4 == 0 else x * 3),
    "odd": (2, lambda x, i: x * 2 if i % 2 else x * 3),
    "warmup": (2, lambda x, i: x * (i / 5) if i < 5 else x),
    "after_and_every_third": (3, lambda x, i: x * 2 if i >= 6 and (i + 1) % 3 == 0 else x),
    "phase": (3, lambda x, i: x * {0: 1, 1: 2}.get(i // 5, 3) if i // 5 < 2 else x * 4),
    "one_of": (2, lambda x, i: x * 2 if i // 4 == 1 else x),
    "bit": (2, lambda x, i: x * 2 if i & 4 else x),
}


@pytest.mark.parametrize("name", list(DECISIONS))
def test_decisions(mesh_2x4: DeviceMesh, name: str) -> None:
    """One program for each outcome of a comparison, and that of the first constant."""
    outcomes, function = DECISIONS[name]
    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for _ in range(2):
        for i in range(1, 13):
            torch.testing.assert_close(step(x, i).full_tensor().cpu(), function(X, i))
    assert step.traces <= 1 + outcomes, step.recompilations


BOUNDARIES: dict[str, tuple[Function, tuple]] = {
    "dropout": (lambda x, p: F.dropout(x, p) != 0, (0.0, 1.0, 0.0, 1.0)),
    "label_smoothing": (
        lambda x, t: F.cross_entropy(x, classes(x), label_smoothing=t),
        (0.1, 0.2, 0.0, 1.0, 0.3),
    ),
    "smooth_l1": (lambda x, t: F.smooth_l1_loss(x, x * 2, beta=t), (0.5, 0.2, 0.0, 0.3)),
    "power": (lambda x, t: x.abs() ** t, (1.5, 2.5, 2.0, 0.5, 0.0, 3, -1.0, 0.7)),
    "eps": (lambda x, t: F.layer_norm(x, (6,), eps=t), (0.1, 0.2, 0.0, 1e-5, 0.3)),
    "beta": (lambda x, t: torch.addmm(x / 0, x, x.new_ones(6, 6), beta=t), (1.0, 2.0, 0.0, 3.0)),
    "clip": (clip, (0.1, 0.2, 0.0, math.inf, 5.0)),
    "nan": (lambda x, t: x * t if t == t else x, (1.0, math.nan, 2.0, math.nan)),
    "zeros": (lambda x, t: x * math.copysign(1.0, t), (1.0, 0.0, -0.0, 0.0)),
    "to_a_float": (lambda x, t: x * 1.0 / float(t), (1.0, -math.inf, math.inf)),
    "int_then_float": (lambda x, n: x.long() * (2**n), (1, 2, 3, -1, 0)),
    "powers_of_ints": (lambda x, n: (x * 3).long() ** n, (1, 2, 3, 0)),
    "power_by_an_int": (lambda x, n: x**n, (1, 2, -1, 5)),
    "ints_as_floats": (lambda x, n: F.layer_norm(x, (6,), eps=n), (1, 2, 3, 0.5)),
    "an_int_in_a_lerp": (lambda x, n: torch.lerp(x, x * 3, n), (1, 2, 3, 0)),
    "large": (lambda x, n: (x > 0) & (n == 2**60 + 1), (1, 2**60, 2**60 + 1, 2**60)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", list(BOUNDARIES))
def test_where_torch_decides(mesh_2x4: DeviceMesh, name: str) -> None:
    function, values = BOUNDARIES[name]
    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for value in values:
        expected = function(X, value)
        torch.testing.assert_close(
            step(x, value).full_tensor().cpu(), expected, rtol=2e-4, atol=1e-5, equal_nan=True
        )


ERRORS: dict[str, tuple[Function, tuple, type[Exception]]] = {
    "division": (lambda x, n: x * (10 // n), (3, 2, 0), ZeroDivisionError),
    "true_division": (lambda x, t: x * (1 / t), (3.0, 2.0, 0.0), ZeroDivisionError),
    "logarithm": (lambda x, t: x * math.log(t), (3.0, 2.0, -1.0), ValueError),
    "dropout": (F.dropout, (0.1, 0.2, 1.5), ValueError),
    "smoothing": (
        lambda x, t: F.cross_entropy(x, classes(x), label_smoothing=t),
        (0.1, 0.2, 1.5),
        RuntimeError,
    ),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_errors_of_python_and_torch(mesh_2x4: DeviceMesh, name: str) -> None:
    """A value that can't be computed with raises what it raises eagerly; others go on."""
    function, (*good, bad), error = ERRORS[name]
    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for value in good:
        step(x, value)
    with pytest.raises(error):
        function(X, bad)
    with pytest.raises(error):
        step(x, bad)
    traces = step.traces
    step(x, good[-1] * 1.01 if isinstance(bad, float) else good[-1])
    assert step.traces == traces


def test_what_is_not_reached_is_not_computed(mesh_2x4: DeviceMesh) -> None:
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * (10 // n) if n != 0 else x

    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for n in (1, 2, 0, 5, 0):
        torch.testing.assert_close(step(x, n).full_tensor().cpu(), function(X, n))
    assert step.traces == 3


def test_items_of_two_tensors_are_two_numbers(mesh_2x4: DeviceMesh) -> None:
    a, b = torch.tensor(1.0), torch.tensor(1.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if a.item() > 0 else 3) * (5 if b.item() > 0 else 7)

    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for first, second in ((1, 1), (-1, 1), (1, -1), (-1, -1), (1, 1)):
        a.fill_(first)
        b.fill_(second)
        torch.testing.assert_close(step(x).full_tensor().cpu(), function(X))


def test_two_numbers_and_a_constant_of_one_value(mesh_2x4: DeviceMesh) -> None:
    """Numbers are told from each other, and from constants, though they are equal in the trace."""

    def function(x: torch.Tensor, p: float, q: float) -> torch.Tensor:
        x = F.layer_norm(x, (6,), eps=p)
        return F.layer_norm(x * 0.1, (6,), eps=q) + F.layer_norm(x, (6,), eps=0.2)

    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for p, q in ((0.1, 0.1), (0.2, 0.2), (0.3, 0.4), (0.5, 0.2)):
        expected = function(X, p, q)
        torch.testing.assert_close(
            step(x, p, q).full_tensor().cpu(), expected, rtol=1e-4, atol=1e-5
        )
    assert step.traces == 2


class Holder:
    def __init__(self) -> None:
        self.last: Any = None
        self.pair: Any = None


def test_numbers_that_the_step_leaves(mesh_2x4: DeviceMesh) -> None:
    """Python's own, and those of this call."""
    holder = Holder()

    def function(x: torch.Tensor, t: float, n: int) -> torch.Tensor:
        holder.last = t * 2
        holder.pair = {"t": (t, n // 2), "x": [x * t]}
        return x * t

    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for t, n in ((0.5, 1), (0.25, 2), (0.125, 7)):
        step(x, t, n)
        assert holder.last == t * 2
        assert type(holder.last) is float
        assert holder.pair["t"] == (t, n // 2)
        assert list(map(type, holder.pair["t"])) == [float, int]
        left = holder.pair["x"][0].full_tensor().cpu()
        torch.testing.assert_close(left, X * t)
    assert step.traces == 2


class Result:
    def __init__(self, number: float) -> None:
        self.number = number


@functools.lru_cache
def doubled(number: float) -> float:
    return number * 2


LEFT: dict[str, Function] = {
    "object": lambda x, t: (x * t, Result(t * 2)),
    "cache": lambda x, t: (x * doubled(t), Result(0.0)),
}


@pytest.mark.parametrize("name", list(LEFT))
def test_numbers_left_where_they_are_not_seen(mesh_2x4: DeviceMesh, name: str) -> None:
    """They are part of the program."""
    function = LEFT[name]
    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for t in (0.5, 0.25, 0.125, 0.25):
        actual, result = step(x, t)
        expected, plain = function(X, t)
        torch.testing.assert_close(actual.full_tensor().cpu(), expected)
        assert type(result.number) is float
        assert result.number == plain.number


def test_a_number_in_a_history(mesh_2x4: DeviceMesh) -> None:
    step, x = xd.compile(Times.apply), on_mesh(mesh_2x4)
    for t in (0.5, 0.25, 0.125):
        p = x.detach().requires_grad_()
        step(p, t).sum().backward()
        torch.testing.assert_close(p.grad.full_tensor().cpu(), torch.full_like(X, t))


@pytest.mark.parametrize("audit", [1, 2])
def test_audits_of_numbers(mesh_2x4: DeviceMesh, audit: int) -> None:
    def function(x: torch.Tensor, t: float, n: int) -> torch.Tensor:
        return F.layer_norm(x, (6,), eps=t) * math.sqrt(n) if n % 2 else x * t

    step, x = xd.compile(function, audit=audit), on_mesh(mesh_2x4)
    for t, n in ((0.5, 1), (0.25, 2), (0.125, 3), (0.5, 4), (0.75, 5)):
        torch.testing.assert_close(step(x, t, n).full_tensor().cpu(), function(X, t, n))
    assert step.traces == 3


def expression(draw: random.Random, depth: int) -> str:
    """A random expression of Python in ``t`` (a float), ``n`` (an int) and constants."""
    if depth == 0 or draw.random() < 0.15:
        return draw.choice(["t", "n", "n", "2", "3", "0.5", "-1", "7"])
    a, b, c = (expression(draw, depth - 1) for _ in range(3))
    forms = [
        *(f"({a} {symbol} {b})" for symbol in ("+", "-", "*", "/", "//", "%")),
        *(f"(-{a})", f"abs({a})", f"round({a})", f"max({a}, {b})", f"min({a}, 5)"),
        *(f"math.floor({a})", f"math.cos({a})", f"math.sqrt(abs({a}))", f"math.tanh({a})"),
        f"({a} if {b} {draw.choice(['<', '<=', '>', '==', '!='])} {c} else {b})",
        f"({a} if n % {draw.randint(2, 4)} == {draw.randint(0, 1)} and {b} else {c})",
        *(f"divmod({a}, 3)[1]", f"(n >> 1 if n & 1 else {a})", f"(abs(n) ** 2 + {a})"),
    ]
    return draw.choice(forms)


def evaluated(function: Function, *args: Any) -> Any:
    """What it returns, or the kind of error it raises."""
    try:
        return function(*args)
    except (ArithmeticError, ValueError) as error:
        return type(error)


SEEDS = [*range(10), *(pytest.param(i, marks=pytest.mark.slow) for i in range(10, 60))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_expressions(mesh_2x4: DeviceMesh, seed: int) -> None:
    """Of floats and ints, zero among them: torch's values, or the error that Python raises."""
    draw = random.Random(seed)
    text = expression(draw, 4)
    function = eval(f"lambda x, t, n: x * ({text})", {"math": math})
    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for _ in range(8):
        t, n = draw.choice([0.0, 0.25, -1.5, 3.0, draw.random()]), draw.randint(-6, 6)
        expected, actual = evaluated(function, X, t, n), evaluated(step, x, t, n)
        if isinstance(expected, type):
            assert actual is expected, (text, t, n)
        else:
            torch.testing.assert_close(
                actual.full_tensor().cpu(), expected, rtol=1e-5, atol=1e-6, msg=f"{text} {t} {n}"
            )


def test_a_double_that_was_rounded_is_noticed() -> None:
    """What C++ makes of a double that stands for a number mustn't become a constant."""
    guarded: list[Any] = []
    number = traced_number.input_number(
        0.25, None, 0, "t", lambda *what: guarded.append(what), None
    )
    stand_ins = doubles.StandIns()
    eps = doubles.Double("eps", 1)
    stand_in = stand_ins.in_place_of(number, eps, ())
    assert stand_in == stand_ins.in_place_of(number, eps, ())
    assert stand_ins.restore([stand_in, 0.25, 0.5])[1:] == [0.25, 0.5]
    assert stand_ins.restore(stand_in).node is number.node
    with pytest.raises(doubles.Rounded):
        stand_ins.restore(float(np.float32(stand_in)))
    assert guarded
    assert all(what == "is" for _, what, _ in guarded)


def test_the_type_of_a_number_is_asked_for(mesh_2x4: DeviceMesh) -> None:
    """An input isn't `float` to ``type()``: such a step has a program per value."""
    step = xd.compile(lambda x, k: x * (3 if type(k) is float else 1))
    x = torch.ones(2, device="xla")
    for k in (0.5, 1.5, 2.5, 3):
        assert step(x, k).tolist() == [3 if type(k) is float else 1] * 2


def test_ints_of_more_than_64_bits(mesh_2x4: DeviceMesh) -> None:
    step = xd.compile(lambda x, n: x * (n % 7))
    x = torch.ones(2, device="xla")
    for n in (5, 6, 2**63, 2**70, 8):
        assert step(x, n).tolist() == [n % 7] * 2


def test_zeros_of_both_signs_are_told_apart_in_lists(mesh_2x4: DeviceMesh) -> None:
    """They are equal, and operations on lists run once for tensors that meet equal numbers."""
    plain = [X[:, :4].abs() + i for i in range(6)]
    lists = [distribute_tensor(x, mesh_2x4, [Shard(0), Shard(1)]) for x in plain]
    numbers = [0.0, -0.0, 0.0, -0.0, 2.0, 0.0]

    def step(*xs: torch.Tensor) -> list[torch.Tensor]:
        each = torch._foreach_div(xs, numbers)
        return [*each, *torch._foreach_mul(xs, 0.0), *torch._foreach_mul(xs, -0.0)]

    for mine, wanted in zip(xd.compile(step)(*lists), step(*plain), strict=True):
        assert torch.equal(mine.full_tensor().cpu().signbit(), wanted.signbit())
        assert torch.equal(mine.full_tensor().cpu(), wanted)
