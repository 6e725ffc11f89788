"""Residuals of each layer that the forward loop saves for the backward loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch.autograd.graph import saved_tensors_hooks

from xla_dtensor.compilation.scan.arrays import fresh
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.read import logical_value
from xla_dtensor.tensors.of_form import is_ours, new_tensor


class Residuals:
    """What autograd saves in a layer's forward, so that backward needn't compute it again.

    Backward calls the layer once more all the same, for its graph; there what is saved is what
    forward has kept, and XLA leaves out what nothing needs any more.

    Args:
        trace: of the step.
    """

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._places: list[int | None] = []  # of each tensor that is saved; None: known anyway
        self._forms: list[Form] = []  # of what is kept

    @contextlib.contextmanager
    def collected(self, inputs: list[Any]) -> Iterator[list[jax.Array]]:
        """Collects what is saved in the block, but for the layer's ``inputs``, parameters, and
        what isn't made in the block."""
        self._places, self._forms = [], []
        found: list[jax.Array] = []
        places: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> None:
            place = None
            if self._is_made_here(tensor, inputs):
                array = logical_value(tensor)
                place = places.get(id(array))
                if place is None:
                    place = places[id(array)] = len(found)
                    found.append(array)
                    self._forms.append(fresh(tensor._form))
            self._places.append(place)

        with saved_tensors_hooks(pack, _never):
            yield found

    @contextlib.contextmanager
    def given(self, kept: list[jax.Array]) -> Iterator[None]:
        """In the block what is saved has the values that `collected` has found."""
        places = iter(self._places)

        def pack(tensor: Any) -> Any:
            place = next(places, None)
            if place is not None and tensor._form.shape != self._forms[place].shape:
                raise UnsupportedOpError(
                    "scan_layers(recompute=False): in backward a layer computes something else "
                    f"than in forward (a tensor of shape {list(tensor.shape)} for one of "
                    f"{list(self._forms[place].shape)}). Leave recompute=False out"
                )
            # Its number, not the tensor: a result saved by its own node would be a reference cycle.
            return tensor if place is None else place

        def unpack(packed: Any) -> Any:
            if isinstance(packed, torch.Tensor):
                return packed
            return new_tensor(kept[packed], self._forms[packed])

        with saved_tensors_hooks(pack, unpack):
            yield

    def _is_made_here(self, tensor: torch.Tensor, inputs: list[Any]) -> bool:
        if not is_ours(tensor) or any(tensor._storage_ is x._storage_ for x in inputs):
            return False
        return bool(tensor._storage_.version >= self._trace.loop_begins)


def _never(packed: None) -> torch.Tensor:
    raise AssertionError("the loop forward has no backward of its own")


def to_host(arrays: Any) -> Any:
    """Arrays in the host's memory, as the devices have them."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), arrays)


def to_devices(arrays: Any) -> Any:
    """`to_host` undone."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), arrays)
