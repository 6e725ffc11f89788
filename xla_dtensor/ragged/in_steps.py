"""How compiled steps take tensors of so many rows apart, arguments and what they give away."""

from __future__ import annotations

from typing import Any

from xla_dtensor.base import executor
from xla_dtensor.compilation.objects.kind import ObjectKind
from xla_dtensor.compilation.objects.kinds import own_class
from xla_dtensor.ragged.on_host import CountsOnHost, stays
from xla_dtensor.ragged.tensor import RaggedTensor, refuse


class _Ragged(ObjectKind):
    """Its buffer and its number of rows."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        if value.requires_grad:
            refuse(
                value,
                "a result with a history",
                "call backward() in the step, or detach() it: a tensor of so many rows can't be "
                "an argument or a result of a compiled step with its history",
            )
        if value.buffer is None:
            refuse(value, "a result", "nothing has been written to it")
        return (value.along, value.copied), [value.buffer, value.rows]

    def make(self, data: Any, parts: list[Any]) -> Any:
        return RaggedTensor(parts[0], data[0], parts[1], data[1])


class _OnHost(ObjectKind):
    """Integers that were to go to the host."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        return None, [value.there]

    def make(self, data: Any, parts: list[Any]) -> Any:
        there = parts[0]
        if stays(there):
            return CountsOnHost(there)
        return executor.current().on_host(there)  # a result, whose value is there


def install() -> None:
    """Let steps take them apart."""
    own_class(RaggedTensor, _Ragged())
    own_class(CountsOnHost, _OnHost())
