"""``module.to("xla")`` and back keep parameters what they are: shared, and known to optimizers.

torch puts another value into the same ``nn.Parameter`` where the types of tensors allow that, as
from the CPU to CUDA. From a plain tensor to ours they don't; it then makes new parameters, one for
each module that has one: tied weights come apart, and an optimizer made before trains what nobody
uses.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import nn


class _Moved(threading.local):
    """What the outermost call has moved so far where the same object couldn't be kept; None outside
    of one. With each the object that was there, whose id would be another's if it were gone."""

    by_id: dict[int, tuple[nn.Parameter, nn.Parameter]] | None = None


_moved = _Moved()


def install() -> None:
    """Hook ``nn.Module._apply``, which ``to``, ``cpu``, ``half`` and the like are made of."""
    original = nn.Module._apply

    @functools.wraps(original)
    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        before = {key: p for key, p in self._parameters.items() if p is not None}
        outermost = _moved.by_id is None
        if outermost:
            _moved.by_id = {}
        try:
            result = original(self, *args, **kwargs)
            for key, parameter in before.items():
                now = self._parameters[key]
                if now is not None and now is not parameter and _is_ours(now, parameter):
                    self._parameters[key] = _same(parameter, now)
        finally:
            if outermost:
                _moved.by_id = None
        return result

    nn.Module._apply = apply


def _is_ours(*tensors: torch.Tensor) -> bool:
    return any(tensor.device.type == "xla" for tensor in tensors)


def _same(parameter: nn.Parameter, moved: nn.Parameter) -> nn.Parameter:
    """``parameter`` with what ``moved`` is; if something else holds it (a graph, a weak
    reference), the new one, the same for each module that shares it."""
    from xla_dtensor.tensors.base import OWN_ATTRIBUTES  # needs the device's name

    assert _moved.by_id is not None
    known = _moved.by_id.get(id(parameter))
    if known is not None:
        return known[1]
    try:
        torch.utils.swap_tensors(parameter, moved)
    except RuntimeError:
        _moved.by_id[id(parameter)] = parameter, moved
        return moved
    for name, value in vars(moved).items():  # the user's marks, which have been swapped as well
        if name not in OWN_ATTRIBUTES:
            setattr(parameter, name, value)
    return parameter
