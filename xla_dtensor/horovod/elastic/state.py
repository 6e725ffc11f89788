"""`State`, `ObjectState`, `TorchState`: what training commits, and goes back to."""

from __future__ import annotations

import copy
import os
import queue
from collections.abc import Callable, Iterable
from typing import Any

import torch

from xla_dtensor.checkpoint import CheckpointManager
from xla_dtensor.errors import HostsUpdatedInterrupt
from xla_dtensor.horovod.api.state_of_training import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from xla_dtensor.horovod.elastic.sampler import ElasticSampler
from xla_dtensor.horovod.world.current_world import current
from xla_dtensor.runtime import processes

ADDED, REMOVED = 1, 2
"""What has happened to hosts, as bits: some have been added, or removed."""


class State:
    """What has to be the same on all ranks when training goes on; `TorchState` is one."""

    def __init__(self) -> None:
        self._messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_update = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call functions after each reset, as one that adapts the learning rate to the new size."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks are others now: forget messages, and call the callbacks."""
        self._messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have been added (1) or removed (2): to be called by whoever knows, on rank 0."""
        self._messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keep what there is now, and see whether hosts come or go.

        Raises:
            HostsUpdatedInterrupt: they do.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """See whether hosts come or go; all ranks have to ask, and get rank 0's answer.

        Raises:
            HostsUpdatedInterrupt: they do.
        """
        before = newest = self._last_update
        result = 0
        while not self._messages.empty():
            timestamp, update = self._messages.get()
            if timestamp > newest:
                newest = timestamp
                result |= update
        before, self._last_update, result = broadcast_object((before, newest, result))
        if self._last_update > before:
            raise HostsUpdatedInterrupt(skip_sync=result == REMOVED)

    def save(self) -> None:
        """Keep what there is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was last kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks what rank 0 has."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the ranks that there are now."""


class ObjectState(State):
    """Python objects as attributes.

    Args:
        kwargs: their names and values.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._kept = dict(kwargs)
        self._put_back()

    def _put_back(self) -> None:
        for name, value in copy.deepcopy(self._kept).items():
            setattr(self, name, value)

    def save(self) -> None:
        self._kept = {name: copy.deepcopy(getattr(self, name)) for name in self._kept}

    def restore(self) -> None:
        self._put_back()

    def sync(self) -> None:
        if self._kept:
            self._kept = broadcast_object({name: getattr(self, name) for name in self._kept})
            self._put_back()


class TorchState(ObjectState):
    """Models, optimizers, `ElasticSampler`s and Python objects, as attributes.

    Args:
        model: a module.
        optimizer: its optimizer.
        kwargs: more of these, and Python objects, by name.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        model = torch.nn.Linear(2, 1).to("xla")
        state = hvd.elastic.TorchState(model=model, epoch=0)
        state.epoch = 1
        state.commit()
        state.epoch = 2
        state.restore()
        assert state.epoch == 1
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._states = {name: v for name, v in given.items() if isinstance(v, _HAVE_STATE)}
        self._manager: CheckpointManager | None = None
        self._commits = 0
        self._of_states: dict[str, Any] = {}
        for name, value in self._states.items():
            setattr(self, name, value)
        super().__init__(**{n: v for n, v in given.items() if n not in self._states})
        self._keep_states()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_states", ()) and self._states[name] is not value:
            self._states[name] = value
            self._of_states[name] = copy.deepcopy(value.state_dict())

    def _keep_states(self) -> None:
        self._of_states = {
            name: copy.deepcopy(value.state_dict()) for name, value in self._states.items()
        }

    def save(self) -> None:
        self._keep_states()
        super().save()
        self._commits += 1
        if self._manager is not None:
            self._on_disk["attributes"] = self._kept
            self._manager.save(self._commits)

    def restore(self) -> None:
        for name, value in self._states.items():
            value.load_state_dict(copy.deepcopy(self._of_states[name]))
        super().restore()

    def sync(self) -> None:
        for value in self._states.values():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(broadcast_object(value.state_dict()))
        super().sync()
        self._commits = broadcast_object(self._commits)
        self._keep_states()

    def reset(self) -> None:
        for value in self._states.values():
            if isinstance(value, ElasticSampler):
                value.reset()

    def keep_in(self, folder: str | os.PathLike[str], **options: Any) -> int:
        """Write what is committed to a folder, too, and begin with the newest that is there: what a
        job needs that its launcher starts again, as ``torchrun --max-restarts`` and Ray do. (Not in
        Horovod, whose launcher keeps the processes that are left.) All ranks call it; process 0
        writes. Random state is each process's own.

        Args:
            folder: all of it this job's.
            options: of ``xla_dtensor.checkpoint.CheckpointManager``.

        Returns:
            how many commits there had been; of `hvd.run`'s threads in rank 0 alone.
        """
        self._on_disk: dict[str, Any] = {"attributes": self._kept}
        if not current().is_coordinator and not processes.several():
            return 0  # a thread
        objects = {**self._states, "committed": self._on_disk}
        self._manager = CheckpointManager(folder, objects, signals=(), **options)
        self._commits = self._manager.restore()
        if self._commits:
            self._kept = self._on_disk["attributes"]
            self._put_back()
            self._keep_states()
        return self._commits

    def close(self) -> None:
        """Let go of the folder of `keep_in`, when all of it is written."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None


_HAVE_STATE = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
