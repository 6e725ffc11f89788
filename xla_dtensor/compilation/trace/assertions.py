"""What must hold of values in a step that is traced (`plans/conditions.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from xla_dtensor.base.assertions import Judge, asked
from xla_dtensor.forms.form import Form, device_form


class TraceAssertions:
    """The part of `StepTrace` that is about that.

    Attributes:
        checks_indices: whether the step looks for indices out of range.
        differentiating: whether a backward pass of the caller's is traced.
    """

    differentiating: bool

    def _start_assertions(self) -> None:
        self.checks_indices = asked()
        # What must hold: of indices, if that is asked for, and what the step asserts itself.
        self._assertions: list[Any] | None = [] if self.checks_indices else None
        self._asserted: list[Any] = []

    @property
    def assertions(self) -> list[Any] | None:
        """In the backward pass of a caller's there are no others than in the forward pass."""
        return None if self.differentiating else self._assertions

    @property
    def asserted(self) -> list[Any] | None:
        return None if self.differentiating else self._asserted

    def judged(self, emit: Callable[[Any, Form], int]) -> tuple[tuple[Judge, ...], int | None]:
        """What judges whether what must hold does, and the output by which; None if nothing must.

        Args:
            emit: makes an array an output.
        """
        found = [*self._asserted, *(self._assertions or ())]
        if not found:
            return (), None
        sums = jnp.stack([summary for summary, _ in found])
        form = device_form(None, sums.shape, dtype=torch.int64)
        return tuple(judge for _, judge in found), emit(sums, form)
