"""``torch.autocast("xla")`` with CUDA's lists of operations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.integration.operators import autocast

HALF, FULL = torch.bfloat16, torch.float32


def header_list(name: str) -> set[str]:
    """The operations of one of the macros in the installed torch's header."""
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = path.read_text().replace("\\\n", "\n")
    body = re.search(rf"#define {name}\(_\)\s*\n(.*?)\n\s*\n", text, re.DOTALL)
    assert body is not None
    entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body[1])
    return {op + (f".{overload}" if overload else "") for op, overload in entries}


@pytest.mark.parametrize(
    ("ours", "macro"),
    [
        (autocast.LOWER_PRECISION, "AT_FORALL_LOWER_PRECISION_FP"),
        (autocast.FLOAT32, "AT_FORALL_FP32"),
        (autocast.FLOAT32_RESULT, "AT_FORALL_FP32_SET_OPT_DTYPE"),
        (autocast.WIDEST, "AT_FORALL_PROMOTE"),
    ],
)
def test_the_lists_are_torchs(ours: str, macro: str) -> None:
    theirs = header_list(macro)
    assert len(theirs) > 8
    # Lists grow: what this torch doesn't have yet has no kernel.
    assert theirs <= set(ours.split())
    assert all(autocast._overload(n) is None or n in theirs for n in ours.split())


# The operation, and the precision that it computes in: half and full are those of its arguments,
# `result` of its result where that isn't it.
OPS: dict[str, tuple[Callable[..., torch.Tensor], torch.dtype, torch.dtype]] = {
    "matmul": (lambda x, y: x @ y.t(), HALF, HALF),
    "linear": (lambda x, y: F.linear(x, y), HALF, HALF),
    "einsum": (lambda x, y: torch.einsum("ab,cb->ac", x, y), HALF, HALF),
    "conv": (lambda x, y: F.conv1d(x[None], y[:, :, None].expand(4, 6, 3)[:, :4]), HALF, HALF),
    "prelu": (lambda x, y: F.prelu(x, y[0, :1]), HALF, HALF),
    "attention": (
        lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]),
        HALF,
        HALF,
    ),
    "exp": (lambda x, y: x.exp(), FULL, FULL),
    "pow": (lambda x, y: x.abs() ** 1.5, FULL, FULL),
    "layer_norm": (lambda x, y: F.layer_norm(x, (6,)), FULL, FULL),
    "rms_norm": (lambda x, y: F.rms_norm(x, (6,)), FULL, FULL),
    "mse_loss": (lambda x, y: F.mse_loss(x, y), FULL, FULL),
    "smooth_l1": (lambda x, y: F.smooth_l1_loss(x, y), FULL, FULL),
    "logsumexp": (lambda x, y: x.logsumexp(-1), FULL, FULL),
    "softmax": (lambda x, y: x.softmax(-1), FULL, FULL),
    "sum": (lambda x, y: x.sum(), FULL, FULL),
    "cumsum": (lambda x, y: x.cumsum(0), FULL, FULL),
    "vector_norm": (lambda x, y: torch.linalg.vector_norm(x), FULL, FULL),
    "norm": (lambda x, y: x.norm(), FULL, FULL),
    "norm_of_rows": (lambda x, y: x.norm(dim=1, keepdim=True), FULL, FULL),
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("given", [HALF, FULL], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_precision(name: str, given: torch.dtype, mesh_2x4: DeviceMesh) -> None:
    function, inside, result = OPS[name]
    x, y = (torch.randn(4, 6).to(given) for _ in range(2))
    expected = function(x.to(inside), y.to(inside))
    for to in (
        lambda t: t.to("xla"),
        lambda t: distribute_tensor(t, mesh_2x4, [Shard(0), Replicate()]),
    ):
        with torch.autocast("xla"):
            actual = function(to(x), to(y))
        assert actual.dtype == result
        tolerance = 0.05 if inside == HALF else 1e-5
        torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("given", [HALF, FULL], ids=str)
def test_cross_entropy(given: torch.dtype) -> None:
    """torch asks for a log_softmax in the precision of what it is given."""
    x, target = torch.randn(4, 6).to(given), torch.tensor([1, 0, 5, 2])
    expected = F.nll_loss(x.log_softmax(-1).to(FULL), target)
    with torch.autocast("xla"):
        actual = F.cross_entropy(x.to("xla"), target.to("xla"))
    assert actual.dtype == FULL
    tolerance = 0.01 if given == HALF else 1e-5
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_promotion() -> None:
    half, full = torch.ones(3, dtype=HALF, device="xla"), torch.ones(3, device="xla")
    with torch.autocast("xla"):
        assert torch.addcmul(half, half, half).dtype == HALF
        assert torch.addcmul(half, half, full).dtype == FULL
        assert torch.dot(full, half).dtype == FULL
        assert (half + full).dtype == FULL  # by itself, as ever
        assert torch.cat([half, full]).dtype == FULL


def test_what_is_left_alone() -> None:
    x = torch.ones(2, 2, device="xla")
    with torch.autocast("xla"):
        assert (x.double() @ x.double()).dtype == torch.float64
        assert (x.long() * 2).dtype == torch.int64
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FULL  # the CPU's own autocast is off
        assert x.sum(dtype=torch.float64).dtype == torch.float64
        assert (x @ x).softmax(-1, dtype=HALF).dtype == HALF
        with torch.autocast("xla", enabled=False):
            assert (x @ x).dtype == FULL
        with torch.autocast("xla", dtype=torch.float16):
            assert (x @ x).dtype == torch.float16
        assert (x @ x).dtype == HALF
    assert (x @ x).dtype == FULL
    with torch.autocast("cpu"):
        assert (x @ x).dtype == FULL


def test_what_is_unsafe_is_refused() -> None:
    x = torch.full((3,), 0.5, device="xla")
    with torch.autocast("xla"):
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(x, x)
        F.binary_cross_entropy_with_logits(x, x)
        with torch.autocast("xla", enabled=False):
            F.binary_cross_entropy(x, x)


class Half(nn.Module):
    """The same on the CPU, with the casts written out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)
        self.written_out = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.written_out:
            return self.last(torch.tanh(self.norm(self.first(x)))).float()

        def linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
            return F.linear(x.to(HALF), layer.weight.to(HALF), layer.bias.to(HALF))

        h = self.norm(linear(x, self.first).float())
        return linear(torch.tanh(h), self.last).float()


# A scaler decides on the host whether to step: that stays outside of a compiled step.
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("how", "scaled"),
    [
        *((how, False) for how in ("eager", "compiled", "around", "checkpoint", "decorator")),
        *((how, True) for how in ("eager", "checkpoint", "decorator")),
    ],
)
def test_training(mesh_2x4: DeviceMesh, how: str, scaled: bool) -> None:
    reference = Half()
    reference.written_out = True
    model = Half()
    model.load_state_dict(reference.state_dict())
    distribute_module(model, mesh_2x4)
    batches = [torch.randn(8, 6) for _ in range(5)]

    def train(model: nn.Module, optimizer: Any, x: torch.Tensor, context: Any) -> torch.Tensor:
        with context():
            loss = model(x).square().mean()
        if scaled and x.device.type == "xla":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    scaler = torch.amp.GradScaler("xla", init_scale=256.0)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    inside = lambda: torch.autocast("xla")
    function: Any = model
    if how == "checkpoint":
        function = lambda x: checkpoint(model, x, use_reentrant=False)
    elif how == "decorator":
        function, inside = torch.autocast("xla")(model), lambda: torch.autocast("xla", enabled=True)
    step: Callable[[torch.Tensor], torch.Tensor] = lambda x: train(function, ours, x, inside)
    if how == "compiled":
        step = xd.compile(step)
    elif how == "around":
        compiled = xd.compile(
            lambda x: train(function, ours, x, lambda: torch.autocast("xla", enabled=True))
        )

        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("xla"):
                return compiled(x)

    for x in batches:
        expected = train(reference, theirs, x, lambda: torch.autocast("cpu", enabled=False))
        actual = step(distribute_tensor(x, mesh_2x4, [Shard(0), Replicate()]))
        torch.testing.assert_close(actual.cpu(), expected, rtol=0.02, atol=0.02)
    for a, e in zip(model.parameters(), reference.parameters(), strict=True):
        assert a.dtype == FULL
        torch.testing.assert_close(a.detach().cpu(), e.detach(), rtol=0.02, atol=0.02)


def test_custom_functions() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="xla", cast_inputs=FULL)
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return x @ y

        @staticmethod
        @torch.amp.custom_bwd(device_type="xla")
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = ctx.saved_tensors
            return grad @ y.t(), x.t() @ grad

    x = torch.randn(3, 3, device="xla", requires_grad=True)
    with torch.autocast("xla"):
        y = Product.apply(x.to(HALF), x)
    assert y.dtype == FULL
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == FULL


def test_programs_of_a_compiled_step() -> None:
    """One for each setting; changed between calls, and within one."""
    step = xd.compile(lambda x: x @ x)
    x = torch.ones(2, 2, device="xla")
    for _ in range(2):
        assert step(x).dtype == FULL
        with torch.autocast("xla"):
            assert step(x).dtype == HALF
        with torch.autocast("xla", dtype=torch.float16):
            assert step(x).dtype == torch.float16
    assert step.compilations == 3
