"""``torch.compile`` of code for other devices: with this package loaded its graphs stay whole."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.optim import adam
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch's compiler

Q = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
X = Q[0, 0, :4, :4].contiguous()


def attention_with_a_mask() -> torch.Tensor:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    return flex_attention(Q, Q, Q, block_mask=mask)


def clipping() -> torch.Tensor:
    weight = X.clone().requires_grad_()
    weight.grad = X * 100
    return torch.nn.utils.clip_grad_norm_([weight], 1.0)


def while_loop() -> torch.Tensor:
    body = lambda i, a: (i + 1, a * 2)
    return torch._higher_order_ops.while_loop(lambda i, a: i < 3, body, (torch.tensor(0), X))[1]


CASES: dict[str, Callable[[], torch.Tensor]] = {
    "cond": lambda: torch.cond(X.sum() > 0, lambda a: a + 1, lambda a: a - 1, (X,)),
    "while_loop": while_loop,
    "scan": lambda: torch._higher_order_ops.scan(lambda c, a: (c + a, c * a), X[0], X)[1],
    "flex_attention": lambda: flex_attention(Q * 2, Q, Q) + 1,
    "flex_attention_with_a_mask": attention_with_a_mask,
    "clip_grad_norm_": clipping,
    "checkpoint": lambda: checkpoint(torch.tanh, X, use_reentrant=False),
    "sdpa": lambda: F.scaled_dot_product_attention(Q, Q, Q, is_causal=True),
}


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_graph(name: str) -> None:
    expected = CASES[name]()
    counter = CompileCounter()
    found = torch.compile(CASES[name], fullgraph=True, backend=counter)()
    torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizers_step(make: Any, foreach: bool) -> None:
    def weights(compiled: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(X.clone())
        optimizer = make([weight], lr=0.1, foreach=foreach)
        step = torch.compile(optimizer.step, backend=counter) if compiled else optimizer.step
        for k in range(3):
            weight.grad = X * (k + 1)
            step()
        return weight.detach()

    counter = CompileCounter()
    torch.testing.assert_close(weights(True), weights(False))
    # Of Adafactor torch compiles nothing: it asks for values of tensors.
    assert counter.frame_count >= (make is not torch.optim.Adafactor)


def test_what_stands_in_has_the_arguments_of_what_was_there() -> None:
    for function in (adam._single_tensor_adam, torch.cond):
        found = inspect.getfullargspec(function)
        assert found.args and not any("xla" in name for name in found.kwonlyargs)


PROGRAM = """
import sys
import torch
import xla_dtensor

def function(x):
    y = x.sin()
    torch._dynamo.graph_break()
    if y.sum() < 0:
        y = torch.zeros(2, device="xla")
    return y.cos()

found = torch.compile(function, backend="eager")(torch.ones(2))
torch.testing.assert_close(found, torch.ones(2).sin().cos())
assert "jax" not in sys.modules, "loaded for a CPU program"
function(-torch.ones(2))
assert "jax" in sys.modules
"""


def test_a_broken_graph_loads_nothing() -> None:
    """torch asks for the stream of the accelerator when a graph is gone on with."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
