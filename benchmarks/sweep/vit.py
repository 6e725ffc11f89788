"""A vision transformer: a convolution makes patches, qkv is fused, tokens are averaged."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import Array
from steps.case import Batch
from steps.jax_training import Params
from torch import Tensor, nn

from sweep import transformer
from sweep.model import Model, Residual, Say

CONFIG = transformer.Config(fused=True, layer_norm=True, causal=False, bias=True)
BATCH, HEIGHT, WIDTH, PATCH, CLASSES = 16, 32, 64, 4, 64
TOKENS = HEIGHT // PATCH * (WIDTH // PATCH)


class VisionTransformer(nn.Module):
    """Images [B, 3, height, width] to logits [B, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, CONFIG.dim, PATCH, PATCH)
        self.position = nn.Embedding(TOKENS, CONFIG.dim)
        self.residual = Residual()
        self.layers = nn.ModuleList(transformer.Block(CONFIG) for _ in range(CONFIG.layers))
        self.norm = CONFIG.norm()
        self.head = nn.Linear(CONFIG.dim, CLASSES)
        transformer.initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        x_BSD = self.patch(images).flatten(2).transpose(1, 2) + self.position.weight
        x_BSD = self.residual(x_BSD)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(self.norm(x_BSD).mean(1))


def make() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer()


def make_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(BATCH, 3, HEIGHT, WIDTH, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(count)
    ]


def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def role(name: str) -> str:
    return "matrix" if name == "patch.weight" else transformer.role(name)


def jax_loss(say: Say) -> Callable[..., tuple[Array, Params]]:
    def of(params: Params, buffers: Params, images: Array, labels: Array) -> tuple[Array, Params]:
        x = jax.lax.conv_general_dilated(
            images,
            params["patch.weight"],
            (PATCH, PATCH),
            "VALID",
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )
        x_BSD = x.reshape(*x.shape[:2], -1).swapaxes(1, 2) + params["patch.bias"]
        x_BSD = say("stream", x_BSD + params["position.weight"])
        for i in range(CONFIG.layers):
            x_BSD = transformer.block(params, f"layers.{i}", x_BSD, CONFIG, say)
        pooled = jnp.mean(transformer.norm(params, "norm", x_BSD, CONFIG), 1)
        log_probs = jax.nn.log_softmax(transformer.linear(params, "head", pooled))
        return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=-1)), {}

    return of


MODEL = Model(make, make_batches, loss, role, jax_loss)
