"""Values on the host of what a step finds on the devices: buffers that its Python looks at.

``if self.initialized:`` needs a value while the step is traced, and a buffer has one: that from
before the step. What is computed of such tensors alone is known, too.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax

from xla_dtensor.compilation.trace.external_storages import ExternalStorage
from xla_dtensor.forms.host_values import fetch
from xla_dtensor.forms.read import computing_constants
from xla_dtensor.forms.storage import Storage
from xla_dtensor.runtime import arrays
from xla_dtensor.runtime.abstract_array import AbstractArray

# The most elements of a tensor whose value is fetched: flags, counters, masks, and no weights.
LARGEST = 2**20


class StateValue:
    """The value that a storage from outside has before the step: in the trace of what was there
    when the step first used it, later of what is there when a call begins.

    Attributes:
        captured: the storage, as the trace knows it; None when the trace is over.
    """

    def __init__(self, captured: ExternalStorage, storage: Storage) -> None:
        self.captured: ExternalStorage | None = captured
        self.storage = storage

    @property
    def state(self) -> tuple[StateValue, ...]:
        return (self,)

    def version(self) -> int:
        return (self.captured or self.storage).version

    def array(self) -> Any:
        """The logical value, as an array of this machine's CPU."""
        source: Any = self.captured or self.storage
        array, shape = source.array, source.form.shape
        arrays.about_to_read(array, f"a tensor of shape {list(shape)}")
        with computing_constants():  # of several processes' devices a program gathers it
            return jax.numpy.asarray(fetch(array, shape))


def recipe_of_state(captured: ExternalStorage, storage: Storage) -> Any:
    """What gives the value of a storage from outside (`constant_recipe`); None if the host can't
    have it before the step, or it is large."""
    form, array = captured.form, captured.array
    if captured.written or captured.fill_value is not None or form.varying or form.unreduced:
        return None
    if isinstance(array, jax.core.Tracer | AbstractArray) or math.prod(form.shape) > LARGEST:
        return None
    return functools.partial(StateValue(captured, storage).array)
