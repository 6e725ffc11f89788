"""Flax: a torch module as an ``nnx.Module``, whose parameters are ``nnx.Param``s.

Needs ``pip install flax``.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def to_nnx(module: nn.Module, *, rngs: Any = None) -> Any:
    """A torch module as a ``flax.nnx.Module``, for ``nnx.jit``, ``nnx.grad``, ``nnx.Optimizer``.

    Its parameters are ``nnx.Param``s in the dict ``params`` by torch's names, its buffers
    ``nnx.BatchStat``s in ``buffers``; calling it updates the buffers, where they change.
    ``train()`` and ``eval()`` set the mode of its calls.

    Args:
        module: what `xla_dtensor.jax.from_module` takes.
        rngs: ``nnx.Rngs``, for modules that draw random numbers; each call takes a ``dropout`` key.

    Returns:
        the nnx module, called as the torch module is, with arrays for tensors.

    Raises:
        ImportError: Flax isn't installed.

    Example::

        import jax.numpy as jnp, torch
        from flax import nnx
        from xla_dtensor.ecosystem.flax import to_nnx

        model = to_nnx(torch.nn.Linear(4, 2))
        gradients = nnx.grad(lambda m: m(jnp.ones((3, 4))).sum())(model)
        assert gradients["params"]["bias"][...].tolist() == [3, 3]
    """
    from flax import nnx

    from xla_dtensor.jax_programs import from_module

    given, apply = from_module(module)

    class TorchModule(nnx.Module):
        """A torch module."""

        def __init__(self) -> None:
            self.params = nnx.data({n: nnx.Param(p) for n, p in given.items()})
            self.buffers = nnx.data({n: nnx.BatchStat(b) for n, b in apply.buffers.items()})
            self.rngs = rngs
            self.training = module.training

        def train(self, **attributes: Any) -> None:
            super().train(training=True, **attributes)

        def eval(self, **attributes: Any) -> None:
            super().eval(training=False, **attributes)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            values = {n: v[...] for n, v in (*self.params.items(), *self.buffers.items())}
            key = None if self.rngs is None else self.rngs.dropout()
            options = {"rng": key, "train": self.training, "mutable": True}
            out, buffers = apply(values, *args, **options, **kwargs)
            if self.training:
                for name, value in buffers.items():
                    self.buffers[name][...] = value
            return out

    return TorchModule()
