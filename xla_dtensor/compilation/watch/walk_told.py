"""Operators of ``torch.library.custom_op`` and modules of TorchScript's on the walk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base.torch_private import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    custom_op_definitions,
)
from xla_dtensor.compilation.code.scripted import Scripted
from xla_dtensor.compilation.watch.walk_classes import WalkClasses

_OPERATORS = (OpOverload, OpOverloadPacket, CustomOpDef)


class WalkTold(WalkClasses):
    """What is found in them; see `Watch`."""

    _probe: Callable[[str, Callable[[], Any]], None]

    def _start(self) -> None:
        super()._start()
        self.scripted: list[Scripted] = []

    def _walk_parts(self, value: Any, path: str) -> None:
        if isinstance(value, _OPERATORS):
            self._operator(value, path)
        elif isinstance(value, torch.jit.ScriptModule):
            self._scripted(value, path)
        else:
            super()._walk_parts(value, path)

    def _in_library(self, value: Any, path: str) -> None:
        if issubclass(type(value), _OPERATORS):
            self._walk(value, path)
        else:
            super()._in_library(value, path)

    def _operator(self, operator: Any, path: str) -> None:
        """An operator, and the functions of which ``torch.library.custom_op`` has made it. (Those
        of a ``Library`` only torch's dispatcher has.)"""
        self._note(path, "opaque", operator)
        if isinstance(operator, OpOverload):
            operator = operator.overloadpacket
        if isinstance(operator, OpOverloadPacket):
            operator = custom_op_definitions.get(operator._qualified_op_name)
        if isinstance(operator, CustomOpDef):
            own = vars(operator)
            functions = [name for name in own if name.endswith(("_fn", "_fns"))]
            self._entries(own, functions, path, operator)

    def _scripted(self, module: torch.jit.ScriptModule, path: str) -> None:
        """What the module's code in TorchScript may read: all that it holds."""
        self._note(path, "module", type(module))
        self._typed.append(module)
        scripted = Scripted(module, path)
        self.scripted.append(scripted)
        for name, value in scripted.held.items():
            if isinstance(value, torch.Tensor):
                self._walk(value, f"{path}.{name}")
                self.probes.append((functools.partial(scripted.is_still, name), True))
            else:
                self._probe(f"{path}.{name}", functools.partial(scripted.value, name))
        for name, inner in module.named_children():
            self._walk(inner, f"{path}.{name}")
        self._entries(vars(module), ["forward"], path, module)  # somebody may put one there
