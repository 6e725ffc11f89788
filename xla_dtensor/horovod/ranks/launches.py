"""Launching what ranks have come to, for the ranks that are in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xla_dtensor.horovod.collectives.requests import Response, failed
from xla_dtensor.horovod.ranks import exchange
from xla_dtensor.horovod.ranks.exchange import Exchanged
from xla_dtensor.horovod.ranks.ranked import RankedHandle
from xla_dtensor.horovod.world.timeline import timeline


class Launches:
    """The handles of the ranks that are here, until there are results for them.

    Args:
        here: these ranks.
        devices: by rank, its JAX device.
    """

    def __init__(self, here: Sequence[int], devices: Sequence[Any]) -> None:
        self._here, self._devices = here, devices
        self._handles: dict[tuple[str, int], RankedHandle] = {}

    def put(self, rank: int, handle: RankedHandle) -> None:
        """A rank waits for what comes of its request."""
        self._handles[handle.request.key, rank] = handle

    def launch(self, batch: Sequence[Response]) -> None:
        """Collectives of the same ranks, in one program. Where it fails all of them say why."""
        values = [
            {rank: self._value(response, rank) for rank in response.ranks if rank in self._here}
            for response in batch
        ]
        timeline.launch([self._handles[key].request for key in self._waiting(batch)])
        try:
            found = exchange.run(batch, values, self._devices)
        except Exception as error:  # XLA's, which is an error of all ranks
            for response in batch:
                self.deliver(failed(response, error))
            return
        for response, outputs in zip(batch, found, strict=True):
            self.deliver(response, outputs)

    def _waiting(self, batch: Sequence[Response]) -> list[tuple[str, int]]:
        return [(r.key, rank) for r in batch for rank in r.requests if rank in self._here]

    def _value(self, response: Response, rank: int) -> Sequence[Any]:
        if rank in response.requests:
            return self._handles[response.key, rank].arrays
        # It has joined.
        pairs = zip(response.one.shapes, response.one.dtypes, strict=True)
        return [np.zeros(shape, jnp.dtype(dtype)) for shape, dtype in pairs]

    def deliver(self, response: Response, outputs: Sequence[Exchanged] = ()) -> None:
        """Tell the ranks that wait for it.

        Args:
            response: what has come of their requests.
            outputs: its tensors; none of one without.
        """
        for key in self._waiting([response]):
            handle = self._handles.pop(key)
            handle.outputs = outputs
            handle.response = response
