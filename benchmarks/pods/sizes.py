"""What the benchmarks of pods train: sizes, and how it is laid out and computed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of Llama 3 8B; and how both sides lay it out and compute it.

    With ``experts``, each feed-forward is that many, of which a token goes to ``taken``. With
    ``hsdp`` the mesh is (replicas, shards), and the batch lies over both: ``"shards"`` has weights
    sharded over the second dim, as `fully_shard` lays them out, ``"whole"`` has none sharded. With
    ``wide_embedding`` JAX adds up the embedding's gradient in float32, as ours does on GPUs.
    """

    dim: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    layers: int = 32
    seq: int = 8192
    batch: int = 1
    experts: int = 0
    taken: int = 2
    sequence_parallel: bool = False
    loop: bool = False
    fully_shard: bool = False
    barrier: bool = True
    keep: bool = False
    hsdp: str = ""
    wide_embedding: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    head = property(lambda self: self.dim // self.heads)

    def rows(self, mesh: dict[str, int]) -> int:
        """The sequences of all devices: over dp, or over both dims."""
        return self.batch * (math.prod(mesh.values()) if self.over_both else mesh["dp"])

    @property
    def over_both(self) -> bool:
        """Whether the batch lies over both dims of the mesh."""
        return bool(self.experts or self.hsdp)

    @property
    def capacity(self) -> int:
        """The tokens of a sequence that an expert takes: a quarter more than its share."""
        return math.ceil(1.25 * self.taken * self.seq / self.experts)


MODELS: dict[str, dict[str, Any]] = {
    "8b": {},
    "70b": {"dim": 8192, "hidden": 28672, "heads": 64, "layers": 80},
    "mixtral": {"vocab": 32000, "experts": 8, "seq": 4096},
    "1b": {"dim": 2048, "hidden": 8192, "heads": 16, "vocab": 32768, "layers": 12, "seq": 4096},
    "tiny": {"dim": 512, "hidden": 1024, "heads": 4, "kv_heads": 4, "vocab": 1024, "layers": 3},
}
MODELS["tiny-experts"] = MODELS["tiny"] | {"dim": 64, "layers": 4, "seq": 256, "experts": 4}


def rope_angles(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = np.arange(0, sizes.head, 2, dtype=np.float32) / sizes.head
    angles = np.outer(np.arange(sizes.seq, dtype=np.float32), 500_000.0**-exponents)
    return torch.tensor(np.cos(angles)).bfloat16(), torch.tensor(np.sin(angles)).bfloat16()
