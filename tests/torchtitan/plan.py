"""How a model is trained, its batches, and what a run gives: the same for all releases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

BATCH = 8
"""Rows of the whole batch, whatever the mesh."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is parallelized and trained, in torchtitan's words.

    Attributes:
        dp_replicate, dp_shard, cp, tp, ep: degrees.
        pp: how many stages there are, on devices of their own.
        backend: ``spmd_backend``; "" for the release's own choice.
        sequence_parallel: ``enable_sequence_parallel``.
        loss: "plain" or "chunked", which are vocab-parallel with ``tp``, or "whole", of 0.2.2.
        checkpointing: of activations: "none", "full" or "selective".
        micro_batches: gradient accumulation steps.
        attention: "sdpa" or "flex"; this one sees documents packed in a row.
        sequence: tokens in a row.
        balancer: how context parallelism deals them out, ``context_parallel_load_balancer``.
        checked: whether ``spmd_types`` checks types while it runs, ``debug.spmd_typechecking``.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    backend: str = ""
    sequence_parallel: bool = True
    loss: str = "plain"
    checkpointing: str = "none"
    micro_batches: int = 1
    attention: str = "sdpa"
    sequence: int = 64
    balancer: str | None = None
    checked: bool = False

    @property
    def ranks(self) -> int:
        """How many have rows of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def devices(self) -> int:
        """The number of devices (of a stage)."""
        return self.ranks * self.cp * self.tp

    @property
    def about_experts(self) -> dict[str, bool]:
        """What ``clip_grad_norm_`` is told."""
        return {"ep_enabled": True} if self.ep > 1 else {}

    @property
    def on_one_device(self) -> Plan:
        """The same training without parallelism."""
        one = dataclasses.replace(self, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1, pp=1)
        return dataclasses.replace(one, backend="", balancer=None)


@dataclasses.dataclass
class Run:
    """What a training run gave: per step its loss and gradient norm; and on a mesh what made it."""

    losses: list[float]
    norms: list[float]
    recompilations: list[str] = dataclasses.field(default_factory=list)
    model: Any = None

    def off(self, other: Run) -> float:
        """The largest difference between the losses of two runs."""
        return max(map(abs, map(float.__sub__, self.losses, other.losses)))


@dataclasses.dataclass
class Batch:
    """Tokens, labels and positions, in rows."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        """How many tokens count."""
        return (self.labels != -100).sum()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of it."""
        return self.tokens, self.labels, self.positions

    def pieces(self, count: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Micro-batches."""
        return zip(*(tensor.chunk(count) for tensor in self.tensors), strict=True)


def batches(count: int, vocabulary: int, plan: Plan) -> list[Batch]:
    """Batches, the same for every plan; some labels are ignored. They come again, so that the loss
    shows what was learned."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(3):
        tokens = torch.randint(vocabulary, (BATCH, plan.sequence + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.1] = -100
        starts = torch.randint(1, plan.sequence, (BATCH, 1), generator=generator)
        at = torch.arange(plan.sequence)
        positions = torch.where(at < starts, at, at - starts)
        if plan.attention != "flex":  # no masks
            positions = at.repeat(BATCH, 1)
        found.append(Batch(tokens[:, :-1], labels, positions))
    return [found[i % 3] for i in range(count)]
