"""Tensor fusion: collectives that wait together are launched together, up to a number of bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import jax.numpy as jnp

from xla_dtensor.horovod.collectives.collective import Request
from xla_dtensor.horovod.collectives.requests import Response

VARIABLE = "HOROVOD_FUSION_THRESHOLD"
"""How many bytes may wait to be launched together; 0 launches each by itself. Horovod's
``HOROVOD_CYCLE_TIME`` has no meaning: nobody waits for a clock."""

_DEFAULT = 32 * 1024 * 1024


def threshold() -> int:
    """The bytes that may wait."""
    return int(os.environ.get(VARIABLE, _DEFAULT))


def size_of(request: Request) -> int:
    """The bytes of a rank's tensors.

    Args:
        request: the rank's part of a collective.
    """
    return sum(
        math.prod(shape) * jnp.dtype(dtype).itemsize
        for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
    )


class Waiting:
    """Responses that wait to be launched together, in their order."""

    def __init__(self) -> None:
        self._responses: list[Response] = []
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._responses)

    def add(self, response: Response) -> bool:
        """One more; whether there are enough to launch.

        Args:
            response: one without an error.
        """
        self._responses.append(response)
        self._bytes += size_of(response.one)
        return self._bytes >= threshold()

    def take(self) -> list[list[Response]]:
        """All of them, in lists that are one launch each; none are left."""
        responses, self._responses, self._bytes = self._responses, [], 0
        return batches(responses)


def batches(responses: Sequence[Response]) -> list[list[Response]]:
    """Responses that follow each other and are of the same ranks, together.

    Args:
        responses: in order.
    """
    found: list[list[Response]] = []
    alone = threshold() == 0
    for response in responses:
        if found and found[-1][0].ranks == response.ranks and not alone:
            found[-1].append(response)
        else:
            found.append([response])
    return found
