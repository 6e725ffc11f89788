"""``torch.Generator(device="xla")``: a class in place of torch's, whose C++ can't make ours."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.random.generator import XLAGenerator
from xla_dtensor.base.torch_private import CppGenerator


class _OneOfAll(type(CppGenerator)):  # type: ignore[misc]
    """The class `Generator` makes those of torch and ours, and knows them as its own."""

    def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is not Generator:
            return super().__call__(*(() if device is None else (device,)), *args, **kwargs)
        if device is None:
            return CppGenerator(*args, **kwargs)
        if torch.device(device).type == "xla":
            from xla_dtensor.dispatch import refuse_other_device

            refuse_other_device("torch.Generator", torch.device(device))
            return XLAGenerator(device)
        return CppGenerator(device, *args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, CppGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, CppGenerator)


class Generator(CppGenerator, metaclass=_OneOfAll):
    __doc__ = CppGenerator.__doc__


def install() -> None:
    """Put the class in the place of torch's."""
    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    torch.Generator = Generator
