"""A row's training step three times: the torch model, and its twin in JAX alone and by an expert.

"Alone" says nothing about activations, but for sequence parallelism, where the residual stream's
cut is the layout. "Expert" says what `sweep.layouts.ACTIVATIONS` lists, most of all that the stream
is cut along the batch, after the embedding and after each sum.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import torch
from jax import Array
from jax.sharding import PartitionSpec
from steps.case import Case
from steps.jax_training import AdamW
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

from sweep.layouts import LAYOUTS, OnMesh
from sweep.model import Model, Residual, Say

LR = 1e-3
TOLERANCE = 1e-4  # of a loss, relative to CPU torch's


def say(on: OnMesh, expert: bool) -> Say:
    """What a twin asks for of an activation.

    Args:
        on: the layout.
        expert: whether an expert has written it; otherwise it says what the layout itself is.
    """
    layout = LAYOUTS[on.layout]

    def asked(kind: str, x: Array) -> Array:
        is_layout = layout.sequence and kind == "stream"
        # Where the batch isn't cut over "tp", the sum over experts goes before the move.
        is_moot = kind == "token's experts" and not layout.all_axes
        if (expert and not is_moot) or is_layout:
            return jax.lax.with_sharding_constraint(x, on.activation(kind))
        return x

    return asked


def case(model: Model, on: OnMesh, expert: bool = False) -> Case:
    """The training step of a row.

    Args:
        expert: whether an expert has written the twin in JAX.
    """
    shapes = {name: tuple(p.shape) for name, p in model.make().named_parameters()}
    spec = lambda name: on.parameter(model.role(name), shapes[name])
    batch = PartitionSpec(on.batch)

    def shard_model(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for prefix, part in module.named_modules():
            for name, param in list(part.named_parameters(recurse=False)):
                where = on.placements(spec(f"{prefix}.{name}".lstrip(".")))
                part.register_parameter(
                    name, nn.Parameter(distribute_tensor(param.data, mesh, where))
                )
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, distribute_tensor(buffer, mesh, [Replicate()] * mesh.ndim))
            if isinstance(part, Residual) and LAYOUTS[on.layout].sequence:
                part.register_forward_hook(_laid_out(on))
        return module

    return Case(
        mesh_shape=on.shape,
        mesh_names=on.axes,
        make_model=model.make,
        make_batches=model.make_batches,
        loss=model.loss,
        shard_model=shard_model,
        shard_batch=lambda tensor, mesh: distribute_tensor(tensor, mesh, on.placements(batch)),
        make_optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=LR),
        jax_loss=model.jax_loss(say(on, expert)),
        jax_optimizer=AdamW(LR),
        param_spec=spec,
        batch_spec=batch,
        max_norm=None,
        tolerance=TOLERANCE,
    )


def _laid_out(on: OnMesh) -> Callable[[nn.Module, object, Tensor], Tensor]:
    """A hook that lays the residual stream out as the layout says."""
    where = on.placements(on.activation("stream"))

    def hook(module: nn.Module, inputs: object, x: Tensor) -> Tensor:
        laid_out: Tensor = x.redistribute(placements=where)
        return laid_out

    return hook
