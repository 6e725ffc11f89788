"""`elastic.run`: calls a training function again, from its last commit, after a failure."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from xla_dtensor.errors import HorovodInternalError, HostsUpdatedInterrupt
from xla_dtensor.horovod.elastic.state import State
from xla_dtensor.horovod.launching.lifecycle import init, shutdown

logger = logging.getLogger("xla_dtensor")

_TRIES = 3


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """A training function that begins again where it last committed, when a collective fails or
    hosts come and go.

    A process that is gone ends the others, since XLA's programs are of a fixed number of processes:
    the launcher starts all of them again (``torchrun --max-restarts``, Ray), and
    `TorchState.keep_in` brings back what was committed. Collectives before the function is called
    are the same on all ranks.

    Args:
        func: takes a `State` first.

    Returns:
        a function of the same arguments, which gives the state to all ranks before it calls
        ``func``.

    Raises:
        HorovodInternalError: the same failure three times without a commit in between.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()

        @hvd.elastic.run
        def train(state):
            while state.epoch < 3:
                state.epoch += 1
                state.commit()
            return state.epoch

        assert train(hvd.elastic.TorchState(epoch=0)) == 3
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync, failures, commits = False, 0, _commits(state)
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                failures = failures + 1 if _commits(state) == commits else 1
                commits = _commits(state)
                if failures == _TRIES:
                    raise
                logger.warning("horovod goes back to what was last committed, since: %s", error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            shutdown()
            init()
            state.on_reset()

    return wrapper


def _commits(state: State) -> int:
    return getattr(state, "_commits", 0)
