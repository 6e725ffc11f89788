"""What a model of the sweep consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jax import Array
from steps.case import Batch
from steps.jax_training import Params
from torch import Tensor, nn

Say = Callable[[str, Array], Array]
"""Of a kind of activation (one of `sweep.layouts.ACTIVATIONS`) and the activation: itself, with the
layout that the twin asks for, if any."""


DENSE = ("dp", "dp-all", "tp", "fsdp0", "fsdp-largest", "fsdp+tp", "fsdp+tp+sp")
"""The layouts of a model without experts."""


class Residual(nn.Identity):
    """The residual stream goes through this after the embedding and after each sum, so that a hook
    can lay it out; torch gives it as it comes."""


@dataclass(frozen=True)
class Model:
    """A torch model and its twin in JAX.

    Args:
        make: the torch model, with the same weights in every call.
        make_batches: so many batches, the same in every call.
        loss: of the torch model and a batch.
        role: of a parameter's name, one of `sweep.layouts.PARAMETERS`.
        jax_loss: of what the twin says about activations: a function of parameters, buffers (both
            keyed as in the torch model) and a batch, which gives the loss, and the buffers that
            have changed.
        layouts: what it is measured in, of `sweep.layouts.LAYOUTS`.
    """

    make: Callable[[], nn.Module]
    make_batches: Callable[[int], list[Batch]]
    loss: Callable[..., Tensor]
    role: Callable[[str], str]
    jax_loss: Callable[[Say], Callable[..., tuple[Array, Params]]]
    layouts: tuple[str, ...] = DENSE
