"""Conditions on values in a traced step (indices in range), as outputs of its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from xla_dtensor.base.assertions import Judge
from xla_dtensor.forms.form import Form, device_form


class TraceAssertions:
    """What must hold in one trace.

    Attributes:
        of_indices: that indices are in range; None where that isn't checked.
        own: what the step asserts itself.
    """

    def __init__(self, checks_indices: bool) -> None:
        self.of_indices: list[Any] | None = [] if checks_indices else None
        self.own: list[Any] = []

    def judged(self, emit: Callable[[Any, Form], int]) -> tuple[tuple[Judge, ...], int | None]:
        """What judges whether what must hold does, and the output by which; None if nothing must.

        Args:
            emit: makes an array an output.
        """
        found = [*self.own, *(self.of_indices or ())]
        if not found:
            return (), None
        sums = jnp.stack([summary for summary, _ in found])
        form = device_form(None, sums.shape, dtype=torch.int64)
        return tuple(judge for _, judge in found), emit(sums, form)
