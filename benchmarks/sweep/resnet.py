"""The residual network of `steps/resnet.py`. Tensor parallelism cuts the channels between the two
convolutions of a block, as Megatron cuts the hidden dim of an MLP."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array
from steps import jax_resnet, resnet
from steps.jax_training import Params

from sweep.model import DENSE, Model, Say

ROLES = {
    "conv1.weight": "column",
    "bn1.weight": "column bias",
    "bn1.bias": "column bias",
    "conv2.weight": "row",
    **dict.fromkeys(("conv.weight", "shortcut.weight", "output.weight"), "matrix"),
}


def role(name: str) -> str:
    return ROLES.get(".".join(name.split(".")[-2:]), "vector")


def jax_loss(say: Say) -> Callable[..., tuple[Array, Params]]:
    class Network(jax_resnet.Network):
        """Says where images lie that convolutions have made and norms are about to see."""

        def batch_norm(self, name: str, x: Array) -> Array:
            kind = "column's image" if name.endswith("bn1") else "image"
            return super().batch_norm(name, say(kind, x))

    return jax_resnet.make_loss(resnet.WIDTHS, resnet.BLOCKS, Network)


MODEL = Model(
    resnet.make_model,
    resnet.make_batches,
    resnet.loss,
    role,
    jax_loss,
    tuple(layout for layout in DENSE if layout != "fsdp+tp+sp"),
)
