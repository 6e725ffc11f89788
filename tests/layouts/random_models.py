"""Random small models in random layouts: a compiled step is right, and costs no more than if each
operation chooses for itself, and moves no more than if XLA is told of each value.

    python -m tests.layouts.random_models --first 0 --models 80
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import xla_dtensor as xd
from tests.layouts.language import training_step
from xla_dtensor.layouts import constrain
from xla_dtensor.layouts.prices import WORK_PER_BYTE
from xla_dtensor.planning.collectives import collective_traffic

MESHES = (
    ((8,), ("dp",)),
    ((2, 4), ("dp", "tp")),
    ((4, 2), ("dp", "tp")),
    ((2, 2, 2), ("dp", "fsdp", "tp")),
)
STYLES = ("random", "fsdp", "fsdp-largest", "tp")
STEPS = 2
ALL_ASKED = ""
"""Over the step, and each value is asked for."""
MORE, FEW = 1.05, 4000
"""By how much a step may move more than operation by operation, as a ratio and in bytes."""


class Residual(nn.Module):
    def __init__(self, dim: int, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.inputs = nn.ModuleList([nn.Linear(dim, 3 * dim)] if fused else [])
        self.inputs.extend([] if fused else [nn.Linear(dim, dim) for _ in range(3)])
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        made = [layer(x) for layer in self.inputs]
        parts = made[0].chunk(3, -1) if self.fused else made
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return out


class Gated(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        out: torch.Tensor = self.down(F.silu(gate) * value)
        return out


class Convolution(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(dim, dim, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return out


def drawn_model(rng: random.Random) -> tuple[nn.Module, int]:
    """A model of tokens, and its vocabulary."""
    dim, vocabulary = rng.choice([64, 128]), rng.choice([96, 256])
    layers: list[nn.Module] = [nn.Embedding(vocabulary, dim)]
    for _ in range(rng.randint(1, 3)):
        norm = rng.choice([nn.LayerNorm, nn.RMSNorm, lambda _: nn.Identity()])(dim)
        inner = {
            "mlp": lambda: nn.Sequential(
                nn.Linear(dim, 4 * dim, bias=rng.random() < 0.5), nn.GELU(), nn.Linear(4 * dim, dim)
            ),
            "attention": lambda: Attention(dim, rng.choice([4, 8]), rng.random() < 0.5),
            "gated": lambda: Gated(dim),
            "convolution": lambda: Convolution(dim),
            "linear": lambda: nn.Linear(dim, dim),
        }[rng.choice(["mlp", "attention", "attention", "gated", "convolution", "linear"])]
        layers.append(Residual(dim, norm, inner()))
    return nn.Sequential(*layers, nn.Linear(dim, vocabulary, bias=False)), vocabulary


def drawn_placements(
    rng: random.Random,
    shape: torch.Size,
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    style: str,
) -> list[Any]:
    """Where a parameter lies: even shards."""
    found: list[Any] = []
    devices: dict[int, int] = {}
    for size, name in zip(sizes, names, strict=True):
        dims = [d for d, n in enumerate(shape) if n % (size * devices.get(d, 1)) == 0]
        cuts = {
            "random": rng.random() < 0.6,
            "tp": name == "tp" and len(shape) > 1,
            "fsdp": name != "tp",
            "fsdp-largest": name != "tp",
        }
        largest = max(dims, key=lambda d: shape[d], default=None)
        chosen = {"fsdp": dims[0] if dims else None, "fsdp-largest": largest}
        dim = chosen.get(style, rng.choice(dims or [None])) if cuts[style] else None
        if dim is not None:
            devices[dim] = devices.get(dim, 1) * size
        found.append(xd.Replicate() if dim is None else xd.Shard(dim))
    return found


def check(seed: int) -> tuple[str, int, int]:
    """What was drawn, and the bytes of the results of collectives, on a device and step: operation
    by operation, and over the step.

    Raises:
        AssertionError: losses aren't CPU torch's, or the step moves more than that and what it
            computes less, or more than if all that was chosen is asked for (`constrain.py` leaves
            to Shardy what follows).
    """
    rng = random.Random(seed)
    sizes, names = rng.choice(MESHES)
    torch.manual_seed(seed)
    model, vocabulary = drawn_model(rng)
    batch = rng.choice([(16, 64), (32, 32), (8, 128)])
    tokens, targets = torch.randint(vocabulary, (2, *batch))
    style = rng.choice(STYLES)
    mesh = xd.init_device_mesh("xla", sizes, mesh_dim_names=names)
    where = {
        name: drawn_placements(rng, p.shape, sizes, names, style)
        for name, p in model.named_parameters()
    }
    of_batch = [xd.Replicate() if n == "tp" else xd.Shard(0) for n in names]
    if rng.random() < 0.2:
        of_batch = [xd.Replicate()] * len(names)

    def run(model: nn.Module, given: list[torch.Tensor], compiled: str | None) -> tuple[Any, Any]:
        step = training_step(model, lr=1e-3)
        call = step if compiled is None else xd.compile(step, layouts=compiled or "step")
        with patch.object(constrain, "LOOSE_AXES", 2 if compiled else 0):
            return [call(*given).item() for _ in range(STEPS)], call

    text = f"seed {seed}: {'x'.join(map(str, sizes))}, {style}, batch {of_batch}"
    moved, computed = {}, {}
    placed = {layouts: copy.deepcopy(model) for layouts in ("torch", "step", ALL_ASKED)}
    expected, _ = run(model, [tokens, targets], None)
    for layouts, own in placed.items():
        for prefix, module in list(own.named_modules()):
            for name, p in list(module.named_parameters(recurse=False)):
                full = f"{prefix}.{name}".lstrip(".")
                laid_out = xd.distribute_tensor(p.data, mesh, where[full])
                module.register_parameter(name, nn.Parameter(laid_out))
        given = [xd.distribute_tensor(t, mesh, of_batch) for t in (tokens, targets)]
        losses, call = run(own, given, layouts)
        torch.testing.assert_close(losses, expected, rtol=2e-4, atol=2e-4, msg=f"{text}, {layouts}")
        program = call.compiled_programs()[-1]
        moved[layouts] = collective_traffic(program.as_text()).total_bytes
        computed[layouts] = program.cost_analysis()["flops"] / WORK_PER_BYTE
    before, after, asked = moved["torch"], moved["step"], moved[ALL_ASKED]
    saved = computed["torch"] - computed["step"]  # what devices share costs more to move
    most = MORE * before + FEW + max(saved, 0)
    assert after <= most, f"{text}: {after} bytes, operation by operation {before}"
    assert after <= MORE * asked + FEW, f"{text}: {after} bytes, if all is asked for {asked}"
    return text, before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--models", type=int, default=80)
    options = parser.parse_args()
    ratios, failed = [], 0
    for seed in range(options.first, options.first + options.models):
        try:
            text, before, after = check(seed)
        except AssertionError as error:
            failed += 1
            print(error, flush=True)
            continue
        ratios.append(after / max(before, 1))
        print(f"{text}: {before / 1e6:.2f} MB, {after / 1e6:.2f}", flush=True)
    ratios.sort()
    median = ratios[len(ratios) // 2] if ratios else float("nan")
    print(
        f"{options.models} models, {failed} failed; bytes over operation by operation: {median:.2f}"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    os.environ.setdefault("NPROC", "64")
    main()
