"""Parameters that several modules share (tied weights) stay one parameter."""

from __future__ import annotations

from torch import nn

from xla_dtensor.base.torch_private.attributes import parameters_of
from xla_dtensor.tensors.sharded_tensor import DTENSORS

Slots = list[tuple[str, nn.Module, str]]


def shared_slots(module: nn.Module) -> list[Slots]:
    """Where each parameter is that is in several places: (name, module, key)."""
    found: dict[int, Slots] = {}
    for name, inner in module.named_modules():
        for key, parameter in parameters_of(inner).items():
            if parameter is not None:
                path = f"{name}.{key}" if name else key
                found.setdefault(id(parameter), []).append((path, inner, key))
    return [slots for slots in found.values() if len(slots) > 1]


def share_again(shared: list[Slots]) -> None:
    """Put one parameter into all places of each, after every place has got one of its own.

    Raises:
        ValueError: they lie differently.
    """
    for slots in shared:
        now = [(name, parameters_of(module).get(key)) for name, module, key in slots]
        if any(parameter is None for _, parameter in now):
            continue  # taken out on purpose
        (first_name, first), *others = now
        for name, other in others:
            if other is not first and _layout(other) != _layout(first):
                raise ValueError(
                    f"{first_name} and {name} are one parameter, but are to lie differently: "
                    f"{_layout(first)} and {_layout(other)}. Give both the same placements, or "
                    "make them two parameters first"
                )
        for _, module, key in slots:
            parameters_of(module)[key] = first


def _layout(parameter: nn.Parameter | None) -> object:
    return parameter.placements if isinstance(parameter, DTENSORS) else None
