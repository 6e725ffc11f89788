"""A Llama training step under fully_shard x tensor parallelism, in torch's API alone.

The same lines run in each process of a `torchrun` launch and in the one process of an "xla" mesh;
what the two name differently is an argument. `model` is examples/train_llama's: the caller has that
folder on its path.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from model import Block, Llama, ModelConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

LR = 3e-3
MAX_NORM = 1.0


def _gather_sequence(*others: None) -> PrepareModuleInput:
    """The first of the module's inputs whole; the others aren't `DTensor`s."""
    return PrepareModuleInput(
        input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
    )


def _parallelize_block(block: Block, tp: DeviceMesh) -> None:
    parallelize_module(
        block,
        tp,
        {
            "attention_norm": SequenceParallel(),
            "attention": _gather_sequence(None, None),  # cos, sin
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": _gather_sequence(),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        },
    )


def parallelize(model: Llama, mesh: DeviceMesh, fully_shard: Callable[..., Any]) -> None:
    """torchtitan's plan, in its order: tensor and sequence parallel over "tp", the logits left
    sharded for `loss_parallel`; then FSDP over "dp", block by block."""
    parallelize_module(
        model,
        mesh["tp"],
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    blocks: Iterable[Any] = model.layers
    for block in blocks:
        _parallelize_block(block, mesh["tp"])
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def make_step(
    config: ModelConfig, mesh: DeviceMesh, fully_shard: Callable[..., Any]
) -> Callable[[Tensor, Tensor], Tensor]:
    """The step of a model with the same initial weights on every call, on the mesh's devices.

    It takes the device's own tokens and targets, both int64 [batch, sequence], and returns the
    device's own loss.
    """
    torch.manual_seed(0)
    model = Llama(config).to(mesh.device_type)
    parallelize(model, mesh, fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().to_local()

    return step
