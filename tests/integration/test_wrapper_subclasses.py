"""Users' wrapper subclasses around xla tensors, which compute operations themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import xla_dtensor as xd
from xla_dtensor.base.torch_private import pytree


class Wrapper(torch.Tensor):
    """Does with the tensor that it keeps what is done with it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapper, lambda x: x.inner, (args, kwargs or {}))
        wrap = lambda x: x if isinstance(x, Wrapper) else Wrapper(x)
        return pytree.tree_map_only(torch.Tensor, wrap, func(*args, **kwargs))

    def __repr__(self, **_: Any) -> str:
        return f"Wrapper({self.inner})"


def gradient(w: Any, x: Any) -> Any:
    parameter = torch.nn.Parameter(w.detach())
    F.linear(x, parameter).square().sum().backward()
    return parameter.grad


def step_of_an_optimizer(w: Any, x: Any) -> Any:
    parameter = torch.nn.Parameter(w.detach().clone())
    optimizer = torch.optim.AdamW([parameter])
    F.linear(x, parameter).square().sum().backward()
    optimizer.step()
    return parameter


def heads(x: Any) -> Any:
    return x[None, None]


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "first": lambda w, x: [w + 1, w + x, w @ x.T, w.softmax(-1), w[x[:, 0] > 1], w.view(-1)[1:]],
    "second": lambda w, x: [x + w, x @ w.T, torch.cat([x, w]), x.clone().add_(w)],
    "composites": lambda w, x: [F.linear(x, w), F.linear(w, x), F.layer_norm(w, (3,))],
    "attention": lambda w, x: F.scaled_dot_product_attention(heads(w), heads(x), heads(x)),
    "moved": lambda w, x: [w.cpu(), copy.deepcopy(w), torch.nn.Parameter(w)],
    "gradient": gradient,
    "optimizer": step_of_an_optimizer,
}


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(v) for v in value]
    inner = value.inner if isinstance(value, Wrapper) else value
    return isinstance(value, Wrapper), inner.detach().cpu()


@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(case: str) -> None:
    value = torch.arange(6.0).reshape(2, 3)
    wanted, found = (
        plain(CASES[case](Wrapper(value.to(device).clone()), value.to(device)))
        for device in ("cpu", "xla")
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_in_a_compiled_step() -> None:
    step = xd.compile(lambda x, w: (x * 2 + w).inner)
    for i in range(2):
        x = torch.full((2,), float(i), device="xla")
        assert step(x, Wrapper(x + 1)).tolist() == [3 * i + 1] * 2
