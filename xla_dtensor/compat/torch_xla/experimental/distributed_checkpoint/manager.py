"""``CheckpointManager`` as torch_xla calls it, over `xla_dtensor.checkpoint.CheckpointManager`."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from xla_dtensor import checkpoint
from xla_dtensor.checkpoint.folders import Folder
from xla_dtensor.checkpoint.random_state import random_state, set_random_state
from xla_dtensor.checkpoint.stopping import Stopping
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.runtime import processes

_NAME = "state"


class _State:
    """The state dict of a call, as an object that is saved and restored."""

    current: dict[str, Any]

    def __init__(self) -> None:
        self.current = {}

    def state_dict(self) -> dict[str, Any]:
        return self.current

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the tensors that are there, and else into the dict."""
        _fill(self.current, state)


def _fill(own: Any, saved: Any) -> None:
    keys = saved.keys() if isinstance(saved, Mapping) else range(len(saved))
    for key in keys:
        value = saved[key]
        there = own[key] if not isinstance(own, Mapping) or key in own else None
        if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
            if value is not there:
                with torch.no_grad():
                    there.copy_(value)
        elif isinstance(value, dict | list) and isinstance(there, dict | list):
            _fill(there, value)
        else:
            own[key] = value


class CheckpointManager:
    """Saves state dicts every so many steps, keeps the newest, and saves on preemption.

    Args:
        path: the folder, for one run at a time.
        save_interval: save when the step divides by it.
        max_to_keep: how many of those saved last stay; 0 for all.
        max_pending_async: torch_xla's; one is written at a time.
        process_group: torch_xla's; no effect.
        chkpt_on_preemption: save, whatever the step, once SIGTERM has come.

    Raises:
        SpmdError: ``save_interval`` isn't positive.

    Example::

        import tempfile, torch
        from xla_dtensor.compat.torch_xla.experimental.distributed_checkpoint import (
            CheckpointManager,
        )

        model = torch.nn.Linear(4, 4).to("xla")
        with tempfile.TemporaryDirectory() as folder:
            manager = CheckpointManager(folder, save_interval=10, chkpt_on_preemption=False)
            assert manager.save(10, model.state_dict()) and not manager.save(11, {})
            manager.restore(10, model.state_dict())
            assert manager.all_steps() == [10]
            manager.close()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        save_interval: int,
        max_to_keep: int = 0,
        max_pending_async: int = 1,
        process_group: Any = None,
        chkpt_on_preemption: bool = True,
    ) -> None:
        if save_interval <= 0:
            raise SpmdError(f"CheckpointManager(save_interval={save_interval}): give 1 or more")
        self._interval, self._keep = save_interval, max_to_keep
        self._state = _State()
        self._folder = Folder(Path(path))
        self._stopping = Stopping((signal.SIGTERM,) if chkpt_on_preemption else (), None)
        self._manager = checkpoint.CheckpointManager(
            path, {_NAME: self._state}, keep_last=None, signals=()
        )
        found = sorted((each.stat().st_mtime_ns, step) for step, each in self._folder.steps())
        self._order = [step for _, step in found]

    def should_save(self, step: int) -> bool:
        """Whether `save` of this step would."""
        return step % self._interval == 0 or self.reached_preemption(step)

    def save(self, step: int, state_dict: dict[str, Any], force: bool = False) -> bool:
        """Save, if it is time to, and wait until it is on the disk.

        Args:
            step: the number of the checkpoint.
            state_dict: trees of tensors and plain values.
            force: save in any case.

        Returns:
            whether it has saved.
        """
        saved = self.save_async(step, state_dict, force=force)
        self.join()
        return saved

    def save_async(
        self, step: int, state_dict: dict[str, Any], planner: Any = None, force: bool = False
    ) -> bool:
        """`save` that returns when the values are copied.

        Args:
            step, state_dict, force: as of `save`.
            planner: torch_xla's; no effect.

        Returns:
            whether it saves.
        """
        if not force and not self.should_save(step):
            return False
        self._state.current = state_dict
        self._manager.wait()
        self._remove(step)
        self._manager.save(step)
        self._order = [*(known for known in self._order if known != step), step]
        while self._keep and len(self._order) > self._keep:
            self._manager.wait()  # the new one is whole before an old one goes
            self._remove(self._order.pop(0))
        return True

    def _remove(self, step: int) -> None:
        if processes.index() == 0:
            for known, path in self._folder.steps():
                if known == step:
                    self._folder.remove(path)

    def restore(self, step: int, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint into a state dict: into its tensors, in their layouts.

        Raises:
            CheckpointError: there is none of this step, or it is of another state.
        """
        self._state.current = state_dict
        random = random_state()
        try:
            self._manager.restore(step)
        finally:
            set_random_state(random)  # torch_xla's has none

    def all_steps(self) -> list[int]:
        """The steps of which there is a checkpoint, in the order in which they were saved."""
        there = {step for step, _ in self._folder.steps()}
        return [step for step in self._order if step in there]

    def join(self) -> None:
        """Wait until everything is on the disk."""
        self._manager.wait()

    def reached_preemption(self, step: int) -> bool:
        """Whether SIGTERM has come."""
        return self._stopping.reason is not None

    def close(self) -> None:
        """Wait, and let signals do what they did before."""
        self._stopping.close()
        self._manager.close()


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give an optimizer that hasn't taken a step the state that a checkpoint is loaded into: a step
    with gradients of 0 and a learning rate of 0.

    Args:
        optimizer: without a state; its parameters' gradients are lost.

    Returns:
        ``optimizer``.
    """
    if any(optimizer.state.values()):
        return optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return optimizer
