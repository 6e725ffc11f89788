"""A training step by hand in JAX: optimizers with torch's formulas, clipping, state, shardings.

Nothing here uses torch or xla_dtensor. State is {"params", "buffers", "optimizer"}; parameters and
buffers are keyed as in the torch model's state_dict, so that both sides start from one set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Params = dict[str, Array]
State = dict[str, Any]


class Optimizer(Protocol):
    """Moments beside the parameters, keyed as these, and one count of steps."""

    @property
    def moments(self) -> tuple[str, ...]: ...
    @property
    def lr(self) -> float: ...

    def update(
        self, param: Array, grad: Array, moments: list[Array], step: Array, lr: Array
    ) -> tuple[Array, list[Array]]:
        """The new parameter and its new moments."""
        ...


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW's defaults and formulas; the learning rate is an input of the step."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    moments: tuple[str, ...] = ("mean", "square")

    def update(
        self, param: Array, grad: Array, moments: list[Array], step: Array, lr: Array
    ) -> tuple[Array, list[Array]]:
        mean, square = moments
        mean = self.beta1 * mean + (1 - self.beta1) * grad
        square = self.beta2 * square + (1 - self.beta2) * grad * grad
        scale = jnp.sqrt(square) / jnp.sqrt(1 - self.beta2**step) + self.eps
        correction = 1 - self.beta1**step
        param = param * (1 - lr * self.weight_decay) - lr / correction * mean / scale
        return param, [mean, square]


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD with momentum, of which the first is the first gradient."""

    lr: float
    momentum: float = 0.9
    moments: tuple[str, ...] = ("momentum",)

    def update(
        self, param: Array, grad: Array, moments: list[Array], step: Array, lr: Array
    ) -> tuple[Array, list[Array]]:
        momentum = self.momentum * moments[0] + grad
        return param - lr * momentum, [momentum]


def clip_by_global_norm(grads: Params, max_norm: float) -> Params:
    """torch.nn.utils.clip_grad_norm_."""
    # Not vdot: it flattens, and XLA gathers each sharded gradient for that.
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return {name: grad * factor for name, grad in grads.items()}


@dataclass(frozen=True)
class Training:
    """The step of a loss and an optimizer on a mesh.

    Args:
        loss: of parameters, buffers and a batch: the loss, and the buffers that have changed.
        param_spec: where a parameter of this name lies.
        batch_spec: where the arrays of a batch lie.
    """

    loss: Callable[..., tuple[Array, dict[str, Array]]]
    optimizer: Optimizer
    mesh: Mesh
    param_spec: Callable[[str], P]
    batch_spec: P
    max_norm: float | None

    def step(self, state: State, batch: tuple[Array, ...], lr: Array) -> tuple[State, Array]:
        params, buffers, old = state["params"], state["buffers"], state["optimizer"]
        value_and_grad = jax.value_and_grad(self.loss, has_aux=True)
        (loss, changed), grads = value_and_grad(params, buffers, *batch)
        if self.max_norm is not None:
            grads = clip_by_global_norm(grads, self.max_norm)
        step = old["step"] + 1
        new: State = {"params": {}, "optimizer": {key: {} for key in self.optimizer.moments}}
        for name, grad in grads.items():
            moments = [old[key][name] for key in self.optimizer.moments]
            result = self.optimizer.update(params[name], grad, moments, step, lr)
            new["params"][name], moments = result
            for key, moment in zip(self.optimizer.moments, moments, strict=True):
                new["optimizer"][key][name] = moment
        new["optimizer"]["step"] = step
        return new | {"buffers": {**buffers, **changed}}, loss

    def shardings(self, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> State:
        whole = NamedSharding(self.mesh, P())
        where = {name: NamedSharding(self.mesh, self.param_spec(name)) for name in params}
        optimizer: State = dict.fromkeys(self.optimizer.moments, where)
        return {
            "params": where,
            "buffers": dict.fromkeys(buffers, whole),
            "optimizer": optimizer | {"step": whole},
        }

    def start(
        self, params: Mapping[str, np.ndarray], buffers: Mapping[str, np.ndarray]
    ) -> tuple[State, Callable[..., tuple[State, Array]]]:
        """The state at the start, on the devices, and the jitted step."""
        where = self.shardings(params, buffers)
        optimizer: State = {
            key: {name: np.zeros_like(param) for name, param in params.items()}
            for key in self.optimizer.moments
        }
        state = {
            "params": dict(params),
            "buffers": dict(buffers),
            "optimizer": optimizer | {"step": np.zeros((), np.float32)},
        }
        return jax.device_put(state, where), self.jitted(where)

    def jitted(self, where: State) -> jax.stages.Wrapped:
        """The step, which donates the state: (state, batch, lr) -> (state, loss).

        Args:
            where: the state's `shardings`.
        """
        batch = NamedSharding(self.mesh, self.batch_spec)
        whole = NamedSharding(self.mesh, P())
        return jax.jit(
            self.step,
            in_shardings=(where, batch, whole),
            out_shardings=(where, whole),
            donate_argnums=0,
        )
