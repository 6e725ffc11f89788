"""The residual network of resnet.py, written by hand in JAX.

Weights are [out, in, height, width], images [batch, channels, height, width], as torch has them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from steps.jax_training import Params

EPS, MOMENTUM = 1e-5, 0.1  # torch.nn.BatchNorm2d's defaults


def convolution(x: Array, weight: Array, stride: int = 1) -> Array:
    padding = weight.shape[-1] // 2
    return jax.lax.conv_general_dilated(
        x,
        weight,
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )


class Network:
    """A forward pass in training: it keeps the statistics that it changes in `buffers`."""

    def __init__(self, params: Params, buffers: Params) -> None:
        self.params, self.old, self.buffers = params, buffers, dict[str, Array]()

    def batch_norm(self, name: str, x: Array) -> Array:
        mean = jnp.mean(x, (0, 2, 3))
        variance = jnp.mean(jnp.square(x - mean[:, None, None]), (0, 2, 3))
        count = x.size // x.shape[1]
        for key, value in (("mean", mean), ("var", variance * count / (count - 1))):
            running = f"{name}.running_{key}"
            new = (1 - MOMENTUM) * self.old[running] + MOMENTUM * jax.lax.stop_gradient(value)
            self.buffers[running] = new
        tracked = f"{name}.num_batches_tracked"
        self.buffers[tracked] = self.old[tracked] + 1
        scale = jax.lax.rsqrt(variance + EPS) * self.params[f"{name}.weight"]
        shift = self.params[f"{name}.bias"] - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]

    def block(self, name: str, x: Array, stride: int) -> Array:
        params = self.params
        y = convolution(x, params[f"{name}.conv1.weight"], stride)
        y = convolution(
            jax.nn.relu(self.batch_norm(f"{name}.bn1", y)), params[f"{name}.conv2.weight"]
        )
        y = self.batch_norm(f"{name}.bn2", y)
        if f"{name}.shortcut.weight" in params:
            x = convolution(x, params[f"{name}.shortcut.weight"], stride)
            x = self.batch_norm(f"{name}.shortcut_bn", x)
        return jax.nn.relu(y + x)

    def logits(self, x: Array, widths: tuple[int, ...], blocks: int) -> Array:
        params = self.params
        x = jax.nn.relu(self.batch_norm("bn", convolution(x, params["conv.weight"])))
        for i in range(len(widths) * blocks):
            x = self.block(f"blocks.{i}", x, stride=2 if i and i % blocks == 0 else 1)
        return jnp.mean(x, (2, 3)) @ params["output.weight"].T + params["output.bias"]


def make_loss(
    widths: tuple[int, ...], blocks: int, kind: type[Network] = Network
) -> Callable[..., tuple[Array, Params]]:
    def loss(params: Params, buffers: Params, images: Array, labels: Array) -> tuple[Array, Params]:
        network = kind(params, buffers)
        log_probs = jax.nn.log_softmax(network.logits(images, widths, blocks))
        taken = jnp.take_along_axis(log_probs, labels[:, None], axis=-1)
        return -jnp.mean(taken), network.buffers

    return loss
