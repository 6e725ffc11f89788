"""Names the module of each traced operation in the program: ``nn:layers.0.attention``.

What runs in a module's forward is the module's. What runs in backward is that of the module whose
forward made the node of autograd's that runs: nodes are numbered as they are made, so it is enough
to note at which number a module was entered and left.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from torch import nn

from xla_dtensor.base import executor
from xla_dtensor.base.source_line import BACKWARD, FORWARD, OPTIMIZER
from xla_dtensor.base.torch_private import current_autograd_node, sequence_number
from xla_dtensor.base.torch_private.attributes import sequence_number_of
from xla_dtensor.compilation.code.patched import patched


class ModuleScopes:
    """Which modules the traced code has been in."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._scopes: list[str] = []

    @contextlib.contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """The block is a call of ``module``, by the name that it has in the outermost one."""
        if not self._stack:
            for name, inner in module.named_modules():
                self._names[id(inner)] = name or type(module).__name__
        self._stack.append(self._names.get(id(module), type(module).__name__))
        self._note()
        try:
            yield
        finally:
            self._stack.pop()
            self._note()

    def _note(self) -> None:
        self._starts.append(sequence_number())
        self._scopes.append(self._stack[-1] if self._stack else "")

    def scope(self, in_optimizer: bool) -> Any:
        """A context in which the operation that is about to be traced has its module's name."""
        if in_optimizer:
            return jax.named_scope(OPTIMIZER)
        if self._stack:
            return jax.named_scope(FORWARD + self._stack[-1])
        node = current_autograd_node()
        if node is not None:
            at = bisect.bisect_right(self._starts, sequence_number_of(node)) - 1
            if at >= 0 and self._scopes[at]:
                return jax.named_scope(BACKWARD + self._scopes[at])
        return NO_SCOPE


NO_SCOPE = contextlib.nullcontext()


class _State:
    scopes: ModuleScopes | None = None


_state = _State()


def scope(in_optimizer: bool) -> Any:
    """`ModuleScopes.scope`, or a context that does nothing where traces don't name modules."""
    return NO_SCOPE if _state.scopes is None else _state.scopes.scope(in_optimizer)


@contextlib.contextmanager
def naming_modules() -> Iterator[None]:
    """The trace of the block names modules; one thread at a time."""
    with patched(_state, "scopes", ModuleScopes()):
        yield


@contextlib.contextmanager
def entering_modules() -> Iterator[None]:
    """In the block, which is in one of `naming_modules`, calls of modules are noted. It is as long
    as the step's Python runs: what looks at that afterwards is to find ``nn.Module`` as it was."""
    scopes, original = _state.scopes, nn.Module.__call__
    assert scopes is not None

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if executor.trace() is None:  # another thread's, or outside of the step
            return original(module, *args, **kwargs)
        with scopes.inside(module):
            return original(module, *args, **kwargs)

    with patched(nn.Module, "__call__", call):
        yield
