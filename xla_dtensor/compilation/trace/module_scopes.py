"""Names the module of each traced operation in the program: ``nn:layers.0.attention``.

What runs in a module's forward is the module's: it is found on Python's stack, so that nothing of
the process's is replaced for a trace, which other threads would see. What runs in backward is that
of the module whose forward made the node of autograd's that runs: nodes are numbered as they are
made, and at each operation of another module it is noted which number the last one had come to.
"""

from __future__ import annotations

import bisect
import contextlib
import sys
from typing import Any

import jax

from xla_dtensor.base import torch_private
from xla_dtensor.base.source_line import BACKWARD, FORWARD, OPTIMIZER
from xla_dtensor.base.torch_private import current_autograd_node, sequence_number
from xla_dtensor.base.torch_private.attributes import sequence_number_of

NO_SCOPE = contextlib.nullcontext()


class ModuleScopes:
    """Which modules the traced code has been in."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._seen = sequence_number()
        self._starts: list[int] = []
        self._scopes: list[str] = []

    def scope(self, in_optimizer: bool) -> Any:
        """A context in which the operation that is about to be traced has its module's name."""
        if in_optimizer:
            return jax.named_scope(OPTIMIZER)
        name, node = self._inside(), current_autograd_node()
        if name or node is None:
            if not self._scopes or self._scopes[-1] != name:
                self._starts.append(self._seen)
                self._scopes.append(name)
            self._seen = sequence_number()
            return jax.named_scope(FORWARD + name) if name else NO_SCOPE
        at = bisect.bisect_right(self._starts, sequence_number_of(node)) - 1
        if at >= 0 and self._scopes[at]:
            return jax.named_scope(BACKWARD + self._scopes[at])
        return NO_SCOPE

    def _inside(self) -> str:
        """The innermost module that is running, by the name that it has in the outermost one."""
        module = outermost = None
        frame: Any = sys._getframe(2)
        while frame is not None:
            if frame.f_code is _CALL:
                outermost = frame.f_locals["self"]
                if module is None:
                    module = outermost
                    if id(module) in self._names:
                        break
            frame = frame.f_back
        if module is None or outermost is None:
            return ""
        if id(module) not in self._names:
            for name, inner in outermost.named_modules():
                self._names[id(inner)] = name or type(outermost).__name__
        return self._names.setdefault(id(module), type(module).__name__)


_CALL = torch_private.call_of_module.__code__
