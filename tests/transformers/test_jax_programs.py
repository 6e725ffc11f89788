"""transformers' models in JAX programs: loss and gradients are CPU torch's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="it isn't installed: make test-transformers")

import jax
import jax.numpy as jnp
import numpy as np
import torch

import xla_dtensor as xd
from tests.transformers.architectures import ALL, Architecture

FAST = {"Llama", "BERT"}
ROWS = [
    pytest.param(one, id=one.name, marks=() if one.name in FAST else pytest.mark.slow)
    for one in ALL
]
pytestmark = pytest.mark.filterwarnings("ignore")


def arrays(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: jnp.asarray(value.numpy()) for name, value in batch.items()}


@pytest.mark.parametrize("architecture", ROWS)
def test_loss_and_gradients(architecture: Architecture) -> None:
    model, batch = architecture.make(), architecture.batch()
    wanted = model(**batch).loss
    wanted.backward()
    params, apply = xd.jax.from_module(model)

    def loss(params: Any, batch: Any) -> Any:
        return apply(params, **batch, rng=jax.random.key(0))["loss"]

    value, gradients = jax.jit(jax.value_and_grad(loss))(params, arrays(batch))
    assert abs(float(value) - wanted.item()) < 1e-5
    largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        scale = max(grad.abs().max().item(), 1e-3 * largest)
        assert np.abs(np.asarray(gradients[name]) - grad.numpy()).max() < 1e-4 * scale, name


def test_logits_of_the_docs() -> None:
    architecture = next(one for one in ALL if one.name == "Llama")
    model = architecture.make().eval()
    params, apply = xd.jax.from_module(model)

    @jax.jit
    def logits(params: Any, tokens: Any) -> Any:
        return apply(params, input_ids=tokens, use_cache=False).logits

    tokens = architecture.batch()["input_ids"]
    wanted = model(input_ids=tokens, use_cache=False).logits.detach().numpy()
    found = logits(params, jnp.asarray(tokens.numpy()))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
