"""What a model of the benchmark consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jax import Array
from jax.sharding import PartitionSpec
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from steps.jax_training import Optimizer

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, its data and its layouts, for torch and for JAX.

    Args:
        mesh_shape: of the mesh of both sides.
        mesh_names: its dims.
        make_model: the torch model, with the same weights in every call.
        make_batches: so many batches, the same in every call.
        loss: of the torch model and a batch.
        shard_model: replaces the model's tensors by sharded ones.
        shard_batch: the batch on the mesh.
        make_optimizer: torch's, of the model's parameters.
        jax_loss: of parameters, buffers (both keyed as in the torch model) and a batch: the loss,
            and the buffers that have changed.
        jax_optimizer: the same formulas in JAX.
        param_spec: where a parameter of this name lies; buffers are replicated.
        batch_spec: where each array of a batch lies, by its first dim.
        max_norm: of the gradients, which both sides clip; None where they don't.
        tolerance: how far a loss may be from CPU torch's.
    """

    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    make_model: Callable[[], nn.Module]
    make_batches: Callable[[int], list[Batch]]
    loss: Callable[..., Tensor]
    shard_model: Callable[[nn.Module, DeviceMesh], nn.Module]
    shard_batch: Callable[[Tensor, DeviceMesh], Tensor]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    jax_loss: Callable[..., tuple[Array, dict[str, Array]]]
    jax_optimizer: Optimizer
    param_spec: Callable[[str], PartitionSpec]
    batch_spec: PartitionSpec
    max_norm: float | None
    tolerance: float = 1e-4

    def make_step(self, model: nn.Module) -> Callable[..., Tensor]:
        """torch's training step of the model, as a user writes it."""
        optimizer = self.make_optimizer(model)

        def train_step(*batch: Any) -> Tensor:
            loss = self.loss(model, *batch)
            loss.backward()
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return train_step
