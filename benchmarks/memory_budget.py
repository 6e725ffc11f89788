"""What a memory budget of activation checkpointing does to a step's temporaries and operations.

    python benchmarks/memory_budget.py            # a table; --model, --budgets 1 0 --pod v5e:2x4

`torch._functorch.config.activation_memory_budget` around the trace of three steps: the Llama of
`examples/train_llama` with 8 layers, FSDP x TP on a 2x4 mesh; a GPT with dropout and the residual
network of `steps/resnet.py`, data parallel. Forward, backward and the optimizer, on 8 simulated CPU
devices, whose XLA is told to schedule for memory. Losses of three steps have to be those of CPU
torch (of the GPT, whose dropout differs, those without a budget). With `--pod` nothing runs: XLA's
TPU compiler says what each chip needs (`xd.plan`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_enable_concurrency_optimized_scheduler=false")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "train_llama"))

import torch
import torch._functorch.config as functorch
from model import Llama, ModelConfig
from steps import llama, resnet
from steps.case import Batch, Case
from torch import Tensor, nn

import xla_dtensor as xd
from xla_dtensor.planning.flops import flops

LLAMA = dataclasses.replace(llama.CONFIG, layers=8)
# Its activations don't fit into a TPU's VMEM, as those of the small ones do.
LARGE = ModelConfig(dim=1024, layers=6, heads=16, kv_heads=8, max_seq=1024)
WIDTH, LAYERS, VOCAB, BATCH, SEQ = 128, 6, 256, 16, 128


class GPT(nn.Module):
    """torch's own layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.positions = nn.Parameter(torch.randn(SEQ, WIDTH) / 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                *(WIDTH, 4, 4 * WIDTH, 0.1, "gelu"), batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(SEQ, device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def _gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT()


def _llama(config: ModelConfig, batch: int) -> Case:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return Llama(config)

    def make_batches(count: int) -> list[Batch]:
        return llama.batches_of_text(count, batch, config)

    return dataclasses.replace(llama.CASE, make_model=make_model, make_batches=make_batches)


CASES: dict[str, Case] = {
    "llama": _llama(LLAMA, llama.BATCH),
    "gpt": dataclasses.replace(
        resnet.CASE,
        make_model=_gpt,
        make_batches=lambda count: llama.batches_of_text(count, BATCH, llama.CONFIG),
        loss=llama.loss,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    ),
    "resnet": resnet.CASE,
    "large": _llama(LARGE, BATCH),
}


def losses_on_cpu(case: Case, steps: int) -> list[float]:
    step = case.make_step(case.make_model())
    return [step(*batch).item() for batch in case.make_batches(steps)]


def measured(case: Case, budget: float, steps: int) -> tuple[list[float], dict[str, float]]:
    """The losses, and what the step's program takes."""
    mesh = xd.init_device_mesh("xla", case.mesh_shape, mesh_dim_names=case.mesh_names)
    model = case.shard_model(case.make_model(), mesh)
    step = xd.compile(case.make_step(model))
    torch.manual_seed(1)
    losses, jaxprs = [], list[Any]()
    with functorch.patch(activation_memory_budget=budget):
        for batch in case.make_batches(steps):
            given = tuple(case.shard_batch(each, mesh) for each in batch)
            losses.append(step(*given).item())
        step.looked_at(given, {}, lambda program: jaxprs.append(program.executable.jaxpr))
    found = step.compiled_programs()[-1]
    return losses, {
        "MB": found.memory_analysis().temp_size_in_bytes / 1e6,
        "GFLOP": sum(flops(jaxprs[0], "cpu").values()) / 1e9,
    }


def planned(case: Case, budget: float, pod: str) -> dict[str, float]:
    with xd.abstract(pod), functorch.patch(activation_memory_budget=budget):
        mesh = xd.init_device_mesh("xla", case.mesh_shape, mesh_dim_names=case.mesh_names)
        model = case.shard_model(case.make_model(), mesh)
        batch = [case.shard_batch(each, mesh) for each in case.make_batches(1)[0]]
        plan = xd.plan(xd.compile(case.make_step(model)), *batch)
    return {"MB": (plan.memory.temporaries or 0) / 1e6, "GFLOP": plan.flops / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=[*CASES][:3], choices=[*CASES])
    parser.add_argument("--budgets", type=float, nargs="+", default=[1, 0.75, 0.5, 0.25, 0.1, 0])
    parser.add_argument("--pod")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print("| model | budget | temporaries, MB | GFLOP |", "|---|---|---|---|", sep="\n")
    for name in options.model:
        case = CASES[name]
        whole: list[float] = []
        for budget in options.budgets:
            if options.pod:
                found = planned(case, budget, options.pod)
            else:
                losses, found = measured(case, budget, options.steps)
                whole = whole or (losses if name == "gpt" else losses_on_cpu(case, options.steps))
                torch.testing.assert_close(losses, whole, rtol=1e-4, atol=0)
            print(f"| {name} | {budget:g} | {found['MB']:.1f} | {found['GFLOP']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
