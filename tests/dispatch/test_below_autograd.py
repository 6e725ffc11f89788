"""Composites where autograd's kernels aren't asked: in inference mode, and in custom operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

R = Replicate()
attend = F.scaled_dot_product_attention


@torch.library.custom_op("xla_dtensor_tests::one_hot_and_norm", mutates_args=())
def one_hot_and_norm(x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    normed = F.batch_norm(x, mean, var, training=True)
    picked = F.one_hot(classes, 6).to(x.dtype) @ normed[:6]
    return picked + torch.linalg.norm(normed) + mean


@one_hot_and_norm.register_fake
def _(x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return x.new_empty(classes.shape[0], x.shape[1])


def _long(q: torch.Tensor) -> torch.Tensor:
    q = q.repeat(1, 1, 40, 1)
    return attend(q, q, q, is_causal=True)


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one_hot": lambda q, c: F.one_hot(c),
    "attention": lambda q, c: attend(q, q, q),
    "grouped": lambda q, c: attend(q, q[:, :2], q[:, 2:], enable_gqa=True),
    "other value heads": lambda q, c: attend(q, q[:, :2], q[:, :1], enable_gqa=True),
    "no heads": lambda q, c: attend(q[0, 0], q[0, 1], q[0, 2]),
    "masked": lambda q, c: attend(q, q, q, attn_mask=q[0, 0, :, :1] > 0),
    "long": lambda q, c: _long(q),
    "split": lambda q, c: q.tensor_split(c[:2].sort()[0], 2)[1],
    "batch_norm": lambda q, c: F.batch_norm(q, q[0, :, 0, 0].clone(), q[0, :, 0, 1].abs()),
    "norm": lambda q, c: torch.linalg.norm(q[0, 0]),
    "custom": lambda q, c: one_hot_and_norm(q[:, 0].flatten(0, 1), c),
}


# These read a value that decides a shape, which a step doesn't.
EAGER = ("one_hot", "split")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name, how",
    [*((name, "eager") for name in CALLS), *((n, "compiled") for n in CALLS if n not in EAGER)],
)
def test_as_on_the_cpu(name: str, how: str, mesh_2x4: DeviceMesh) -> None:
    torch.manual_seed(0)
    q, classes = torch.randn(2, 4, 8, 8), torch.tensor([1, 5, 2])
    ours = distribute_tensor(q, mesh_2x4, [Shard(0), Shard(1)])
    of_mesh = distribute_tensor(classes, mesh_2x4, [R, R])
    call = xd.compile(CALLS[name]) if how == "compiled" else CALLS[name]
    with torch.inference_mode():
        expected = CALLS[name](q, classes)
        actual = call(ours, of_mesh)
    torch.testing.assert_close(actual.full_tensor().cpu(), expected, rtol=1e-4, atol=1e-4)


def test_dropout_drops_out(mesh_2x4: DeviceMesh) -> None:
    ones = distribute_tensor(torch.ones(2, 4, 8, 8), mesh_2x4, [Shard(0), Shard(1)])
    with torch.inference_mode():
        for apart in (attend, lambda *x, **o: torch._scaled_dot_product_attention_math(*x, **o)[0]):
            out = apart(ones, ones, ones, dropout_p=0.5).full_tensor().cpu()
            assert out.min() >= 0 and out.max() > 1 and abs(out.mean() - 1) < 0.3


def test_long_attention_keeps_no_scores(mesh_2x4: DeviceMesh) -> None:
    q = distribute_tensor(torch.randn(2, 4, 512, 8), mesh_2x4, [Shard(0), Shard(1)])
    step = xd.compile(lambda q: attend(q, q, q))
    with torch.inference_mode():
        text = step.lower(q).compile().as_text()
    assert "512,512" not in text and "512x512" not in text


@pytest.mark.parametrize("made", ["inside", "outside"])
def test_statistics_are_written(made: str, mesh_2x4: DeviceMesh) -> None:
    x = torch.randn(16, 3, 4)

    def run(to: Any) -> list[torch.Tensor]:
        module = torch.nn.BatchNorm1d(3)
        with torch.inference_mode() if made == "inside" else contextlib.nullcontext():
            mean, var = (to(b.clone()) for b in (module.running_mean, module.running_var))
            given = to(x)
        with torch.inference_mode():
            out = F.batch_norm(given, mean, var, training=True)
        return [out, mean, var]

    to_mesh = lambda t: distribute_tensor(t, mesh_2x4, [Shard(0), R])
    for actual, expected in zip(run(to_mesh), run(torch.clone), strict=True):
        torch.testing.assert_close(actual.full_tensor().cpu(), expected)


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "classes below zero": (lambda t: F.one_hot(t(torch.tensor([1, -2]))), "non-negative"),
    "too few classes": (lambda t: F.one_hot(t(torch.tensor([1, 2])), 2), "smaller than num_cl"),
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", BAD)
def test_what_torch_refuses(name: str, mode: Any) -> None:
    call, text = BAD[name]
    for to in (torch.clone, lambda x: x.to("xla")):
        with mode(), pytest.raises(RuntimeError, match=text):
            call(to)
