"""Compiles the whole step of torchtitan's trainer as one program, where the user asks for it.

The trainer computes forward and backward in one call (``fwd_bwd_fn``), then clips and updates. With
``xd.config.torchtitan_step = "whole"`` that call does all of it, and what the trainer then asks for
has been done already: it gets the norm, and its optimizer's step is passed over. Data, schedules,
metrics and checkpoints stay the trainer's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from xla_dtensor.base.config import config
from xla_dtensor.ecosystem.torchtitan import budget
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching.take_over import take_over


class _Done(threading.local):
    """What the program has done of a step that a trainer is in.

    Attributes:
        optimizers: the trainer's, whose step is part of the program.
        norm: of the gradients, once it has run.
    """

    optimizers: Any = None
    norm: Any = None


_done = _Done()


def hook_trainer(module: Any) -> None:
    """``torchtitan.trainer`` of 0.3.0 and after it."""
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.distributed import utils

    take_over(module.Trainer.train_step, _train_step)
    validate = getattr(module.Trainer.Config, "_validate_cuda_graphs", None)
    if validate is not None:
        take_over(validate, _validate)
    take_over(utils.clip_grad_norm_, _clip)
    take_over(OptimizersContainer.step, _update)
    take_over(OptimizersContainer.zero_grad, _forget_gradients)


def _validate(original: Any, args: Any, kwargs: Any) -> None:
    """After 0.3.0 the config refuses a CUDA graph of experts whose dispatcher asks the host for
    sizes. Ours doesn't."""
    from torchtitan.tools.utils import device_type

    parallelism = args[0].parallelism
    if device_type != "xla" or parallelism.pipeline_parallel_degree > 1:
        original(*args, **kwargs)


def _train_step(original: Any, args: Any, kwargs: Any) -> Any:
    from torchtitan.tools.utils import device_type

    if device_type != "xla":
        return original(*args, **kwargs)
    trainer = args[0]
    if config.torchtitan_step == "parts":
        budget.check(trainer)
        return original(*args, **kwargs)
    if not hasattr(trainer, "xla_step"):
        trainer.xla_step = _compiled(trainer)
    with _as_one(trainer):
        return original(*args, **kwargs)


def _compiled(trainer: Any) -> Any:
    """Forward, backward, clipping and update as one program.

    Raises:
        UnsupportedOpError: several batches are one step.
    """
    from torchtitan.distributed import utils

    from xla_dtensor.compilation import compile as compile_step

    if trainer.gradient_accumulation_steps > 1 or trainer.parallel_dims.pp_enabled:
        raise UnsupportedOpError(
            "xd.config.torchtitan_step = 'whole' (XLA_DTENSOR_TORCHTITAN_STEP) with "
            f"{trainer.gradient_accumulation_steps} gradient accumulation steps: each of them is a "
            "call of the trainer's, so the step isn't one program; raise "
            "training.local_batch_size, or leave it at 'parts'"
        )
    dims, limit = trainer.parallel_dims, trainer.config.training.max_norm

    def step(inputs: Any, labels: Any, valid_tokens: Any, others: Any) -> Any:
        loss = trainer._forward_backward_body(inputs, labels, valid_tokens, others)
        parameters = [p for part in trainer.model_parts for p in part.parameters()]
        norm = utils.clip_grad_norm_(
            parameters, limit, foreach=True, pp_mesh=None, ep_enabled=dims.ep_enabled
        )
        trainer.optimizers.step()
        trainer.optimizers.zero_grad()
        return loss.detach(), norm

    return compile_step(step)


@contextlib.contextmanager
def _as_one(trainer: Any) -> Iterator[None]:
    before = trainer.fwd_bwd_fn

    def step(*batch: Any) -> Any:
        trainer.checkpointer.maybe_wait_for_staging()  # of what the step overwrites
        loss, norm = trainer.xla_step(*batch)
        _done.optimizers, _done.norm = trainer.optimizers, norm
        return loss

    trainer.fwd_bwd_fn = step
    try:
        yield
    finally:
        trainer.fwd_bwd_fn = before
        _done.optimizers = _done.norm = None


def _clip(original: Any, args: Any, kwargs: Any) -> Any:
    if _done.norm is None:
        return original(*args, **kwargs)
    return _done.norm


def _update(original: Any, args: Any, kwargs: Any) -> Any:
    if _done.optimizers is not args[0]:
        return original(*args, **kwargs)
    _done.optimizers = None
    return None


def _forget_gradients(original: Any, args: Any, kwargs: Any) -> Any:
    """The trainer keeps gradients and fills them with zeros, since a CUDA graph wants their memory.
    The first step, which finds none, would be another program than the others."""
    from torchtitan.tools.utils import device_type

    return original(args[0]) if device_type == "xla" else original(*args, **kwargs)
