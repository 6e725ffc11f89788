"""Whole models on sharded tensors against the same models on CPU torch: outputs, gradients and
parameters after optimizer steps, eagerly and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh

pytestmark = pytest.mark.one_in(2)  # each variant compiles programs of its own


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def complex_rope(x: torch.Tensor) -> torch.Tensor:
    _, seq, _, dim = x.shape
    freqs = 1.0 / (100.0 ** (torch.arange(0, dim, 2, device=x.device).float() / dim))
    angles = torch.outer(torch.arange(seq, device=x.device).float(), freqs)
    rotation = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(3).type_as(x)


def real_rope(x: torch.Tensor) -> torch.Tensor:
    _, seq, _, dim = x.shape
    freqs = 1.0 / (100.0 ** (torch.arange(0, dim, 2, device=x.device).float() / dim))
    angles = torch.outer(torch.arange(seq, device=x.device).float(), freqs)
    cos, sin = (torch.cat([t, t], -1)[:, None] for t in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Llama(nn.Module):
    def __init__(self, rope: Callable[[torch.Tensor], torch.Tensor], sdpa: bool) -> None:
        super().__init__()
        self.rope, self.sdpa = rope, sdpa
        self.embed = nn.Embedding(32, 16)
        self.norm1, self.norm2, self.norm3 = RMSNorm(16), nn.RMSNorm(16), RMSNorm(16)
        self.q, self.k = nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.v, self.o = nn.Linear(16, 8, bias=False), nn.Linear(16, 16, bias=False)
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down, self.head = nn.Linear(24, 16, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        h = self.norm1(x)
        batch, seq, _ = h.shape
        q, k, v = (m(h).view(batch, seq, -1, 4) for m in (self.q, self.k, self.v))
        q, k = self.rope(q), self.rope(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.sdpa:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            mask = torch.full((seq, seq), float("-inf"), device=q.device).triu(1)
            a = torch.softmax(q @ k.transpose(-1, -2) / 2.0 + mask, -1) @ v
        x = x + self.o(a.transpose(1, 2).reshape(batch, seq, -1))
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        logits = self.head(self.norm3(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.down = (
            nn.Conv2d(channels_in, channels, 1, stride, bias=False) if stride > 1 else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.down(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.pool(self.blocks(self.stem(x))).flatten(1)), y)


class LSTMClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(self.embed(tokens))
        return F.cross_entropy(self.head(out[:, -1]), y)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return F.cross_entropy(self.head(self.encoder(x, mask=mask).mean(1)), y)


def token_batch(batch: int = 4, seq: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 32, (batch, seq)), torch.randint(0, 32, (batch, seq))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "llama_real_rope": (lambda: Llama(real_rope, sdpa=False), token_batch),
    "llama_complex_rope": (lambda: Llama(complex_rope, sdpa=True), token_batch),
    "resnet": (ResNet, lambda: (torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)))),
    "lstm": (LSTMClassifier, lambda: (torch.randint(0, 20, (4, 5)), torch.randint(0, 4, (4,)))),
    "encoder": (Encoder, lambda: (torch.randn(4, 6, 16), torch.randint(0, 4, (4,)))),
}


def shard_parameters(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Matrices sharded over the last mesh dim in their first dim, and the first in their last."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        placements: list[Any] = [Replicate()] * mesh.ndim
        placements[-1] = Shard(0)
        if mesh.ndim > 1 and parameter.ndim > 1:
            placements[0] = Shard(1)
        sharded = distribute_tensor(parameter.data, mesh, placements)
        module.register_parameter(key, nn.Parameter(sharded))


def shard_batch(batch: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[torch.Tensor, ...]:
    placements: list[Any] = [Replicate()] * mesh.ndim
    placements[0] = Shard(0)
    return tuple(distribute_tensor(t, mesh, placements) for t in batch)


# A large eps: where a gradient is zero but for rounding (a bias before a norm), Adam would turn the
# rounding error into a full-sized step.
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2, fused=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def check_training(
    case: str, mesh: DeviceMesh, optimizer: str, compiled: bool, steps: int = 3
) -> None:
    make_model, make_batch = CASES[case]
    torch.manual_seed(0)
    reference = make_model()
    model = copy.deepcopy(reference)
    distribute_module(model, mesh, shard_parameters)
    batches = [make_batch() for _ in range(steps)]

    def step_of(model: nn.Module) -> Callable[..., torch.Tensor]:
        opt = OPTIMIZERS[optimizer](model.parameters())

        def step(*batch: torch.Tensor) -> torch.Tensor:
            loss = model(*batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return step

    reference_step, step = step_of(reference), step_of(model)
    if compiled:
        step = xd.compile(step)
    for batch in batches:
        expected = reference_step(*batch)
        loss = step(*shard_batch(batch, mesh))
        torch.testing.assert_close(loss.full_tensor().cpu(), expected, rtol=1e-4, atol=1e-5)
    for (name, expected), actual in zip(
        reference.named_parameters(), model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            actual.detach().cpu(),
            expected.detach(),
            rtol=2e-3,
            atol=2e-4,
            msg=lambda m: f"{name}: {m}",  # noqa: B023
        )
    for expected, actual in zip(reference.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", list(CASES))
def test_training_step_compiled(case: str) -> None:
    check_training(case, make_mesh("2x4"), "adamw", compiled=True)


@pytest.mark.parametrize("case", list(CASES))
def test_training_step_eager(case: str) -> None:
    check_training(case, make_mesh("2x2x2"), "sgd", compiled=False, steps=2)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_optimizers_compiled(optimizer: str) -> None:
    check_training("encoder", make_mesh("4x2"), optimizer, compiled=True)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_optimizers_eager(optimizer: str) -> None:
    check_training("encoder", make_mesh("8"), optimizer, compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh_name", ["2x2x2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("8", "1"))]
)
def test_llama_on_other_meshes(mesh_name: str) -> None:
    check_training("llama_real_rope", make_mesh(mesh_name), "adamw", compiled=True)
