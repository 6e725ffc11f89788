"""Torch modules as modules of Flax's, and trained by optax, where these are installed."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import xla_dtensor as xd
from xla_dtensor.ecosystem.flax import to_nnx


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 2))


def test_nnx_trains_as_torch_does() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax isn't installed")
    optax = pytest.importorskip("optax", reason="optax isn't installed")
    reference = model()
    module = to_nnx(copy.deepcopy(reference), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
    torchs = torch.optim.SGD(reference.parameters(), lr=0.1)

    @nnx.jit
    def step(module, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(module)
        optimizer.update(module, gradients)
        return value

    for _ in range(4):
        x = torch.randn(6, 4)
        value = step(module, optimizer, jnp.asarray(x.numpy()))
        torchs.zero_grad()
        loss = reference(x).pow(2).mean()
        loss.backward()
        torchs.step()
        assert abs(float(value) - loss.item()) < 1e-5
    module.eval()
    wanted = reference.eval()(x).detach().numpy()
    np.testing.assert_allclose(module(jnp.asarray(x.numpy())), wanted, atol=1e-5)
    assert int(module.buffers["1.num_batches_tracked"][...]) == 4


def test_optax_trains_as_torch_does() -> None:
    optax = pytest.importorskip("optax", reason="optax isn't installed")
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    params, apply = xd.jax.from_module(reference)
    transform = optax.adamw(1e-3)
    state = transform.init(params)

    @jax.jit
    def step(params, state, x):
        gradients = jax.grad(lambda p: (apply(p, x) ** 2).mean())(params)
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    torchs = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=1e-4)
    for _ in range(4):
        x = torch.randn(6, 4)
        params, state = step(params, state, jnp.asarray(x.numpy()))
        torchs.zero_grad()
        reference(x).pow(2).mean().backward()
        torchs.step()
    for name, parameter in reference.named_parameters():
        np.testing.assert_allclose(params[name], parameter.detach().numpy(), atol=1e-5)
