"""``xla_dtensor.compile``: a training step as one XLA program."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from xla_dtensor import _observe
from xla_dtensor.compilation.arguments import Arguments
from xla_dtensor.compilation.program import Program

logger = logging.getLogger("xla_dtensor")


def compile(
    function: Callable[..., Any], *, compiler_options: dict[str, Any] | None = None
) -> CompiledStep:
    """Make ``function``, a training step in ordinary torch code, run as one XLA program.

    The first call traces it: forward, ``loss.backward()``, clipping, ``optimizer.step()``. Tensors
    that it uses are found by themselves and become inputs (donated where the step overwrites them);
    tensors that it leaves behind (``.grad``, optimizer state) become outputs. Optimizer
    hyperparameters are read from ``param_groups`` before every call. Tensor arguments are dynamic:
    another shape, dtype or layout compiles again; all other arguments are static.

    As under ``jax.jit``, the Python in ``function`` runs when it is traced, not in every call: what
    it prints or counts happens then. Results come back without autograd history.

    Args:
        function: the step.
        compiler_options: passed to XLA's compiler, as ``jax.jit``'s are
            (``{"xla_tpu_enable_async_collective_fusion": True}``).

    Raises (when called):
        DataDependentError: the step needs a tensor's value in Python.
        MeshMismatchError: it uses tensors on different sets of devices.
    """
    return CompiledStep(function, compiler_options)


class CompiledStep:
    """A compiled step; call it like the function.

    Attributes:
        compilations: how many programs were compiled so far.
        recompilations: one line for each compilation after the first: why it happened.
    """

    def __init__(
        self, function: Callable[..., Any], compiler_options: dict[str, Any] | None = None
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = compiler_options
        self._programs: dict[Any, list[Program]] = {}
        self._executables: dict[str, Any] = {}
        self._last: tuple[Any, Program] | None = None
        self.compilations = 0
        self.recompilations: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments(args, kwargs)
        programs = self._programs.setdefault(arguments.key, [])
        for program in programs:
            if program.mismatch(arguments) is None:
                self._last = (arguments, program)
                if _observe.observer is not None:
                    _observe.observer.compiled(self._name())
                return program.run(arguments)
        why = self._explain(arguments, programs)
        program = Program(
            self._function, arguments, self._known_leaves(), self._executables, self._options
        )
        if program.newly_compiled:
            self.compilations += 1
            if why is not None:
                self.recompilations.append(why)
                logger.warning("xla_dtensor: recompiled %s: %s", self._name(), why)
        programs[:] = [p for p in programs if not p.stale]
        programs.insert(0, program)
        self._last = (arguments, program)
        return program.run(arguments)

    def compiled_programs(self) -> list[Any]:
        """The ``jax.stages.Compiled`` programs that exist, oldest first: their ``as_text()``,
        ``memory_analysis()`` and ``cost_analysis()`` say what XLA made of the step."""
        return list(self._executables.values())

    def _known_leaves(self) -> list[Any]:
        """The leaves that earlier programs used (weak references)."""
        return [r for group in self._programs.values() for p in group for r in p.leaf_references]

    def _name(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))

    def _explain(self, arguments: Arguments, programs: list[Program]) -> str | None:
        if programs:
            return programs[0].mismatch(arguments) or "the program was used up"
        if self._last is None:
            return None
        return arguments.difference(self._last[0])
