"""``xla_dtensor.compile``: a training step as one XLA program."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from xla_dtensor.base import assertions, events, interrupts, thread_state
from xla_dtensor.base.cache import Cache
from xla_dtensor.compilation.arguments import Arguments
from xla_dtensor.compilation.audit import compare
from xla_dtensor.compilation.buckets import BucketedArguments, check_lengths
from xla_dtensor.compilation.decided import ManyTraces
from xla_dtensor.compilation.family import KINDS, Family
from xla_dtensor.compilation.looking import called_without_data, looked_at, tracing
from xla_dtensor.compilation.program import Program
from xla_dtensor.compilation.replayed import ReplayedStep
from xla_dtensor.compilation.step_traces import StepTraces, name_of
from xla_dtensor.compilation.trace import StepTrace
from xla_dtensor.dispatch import lazy
from xla_dtensor.runtime import abstract
from xla_dtensor.runtime.jax_runtime import code_bytes

PROGRAMS = 256

AUDIT_VARIABLE = "XLA_DTENSOR_AUDIT"


@overload
def compile(
    function: Callable[..., Any],
    *,
    compiler_options: dict[str, Any] | None = None,
    audit: int | None = None,
    checks: bool | None = None,
    watch: Literal["auto"] = "auto",
    buckets: Mapping[str, Any] | None = None,
) -> CompiledStep: ...


@overload
def compile(
    function: Callable[..., Any],
    *,
    compiler_options: dict[str, Any] | None = None,
    watch: Literal["replay"],
) -> ReplayedStep: ...


def compile(
    function: Callable[..., Any],
    *,
    compiler_options: dict[str, Any] | None = None,
    audit: int | None = None,
    checks: bool | None = None,
    watch: Literal["auto", "replay"] = "auto",
    buckets: Mapping[str, Any] | None = None,
) -> CompiledStep | ReplayedStep:
    """Make ``function``, a training step in ordinary torch code, run as one XLA program.

    The first call traces it: forward, backward, clipping, ``optimizer.step()``. Tensors that it
    uses are found by identity, wherever its Python has them from, and become inputs (donated where
    it overwrites them); those that it leaves behind (``.grad``, optimizer state) become outputs.
    What else its Python reads is watched: later calls run the program, or trace again what has
    changed and say so in ``recompilations``. The whole contract is in ``docs/compile.md``.

    The Python in ``function`` runs when it is traced, and not in every call, as under ``jax.jit``.
    A result with a history under torch has one here: its backward pass is a second program.
    Threads may share a step: its calls come one after another, and one trace runs at a time.

    Args:
        function: the step; a method, too (``@xd.compile`` in a class).
        compiler_options: passed to XLA's compiler, by name, as ``jax.jit``'s are.
        audit: in every ``audit``-th call, run the step's Python again and compare what it would do
            with the program. Default: the environment variable ``XLA_DTENSOR_AUDIT``, or never.
        checks: look for indices out of range, and raise after the call that had one; a call then
            waits for the devices. Default: whether ``XLA_DTENSOR_CHECKS`` is ``all``.
        watch: how a call knows that its program still is the step. ``"auto"``: what the Python
            reads is compared, and it doesn't run. ``"replay"``: it runs in every call, while the
            devices compute the step before, and what it asks for is compared: some ten
            microseconds an operation, and nothing that could be overlooked.
        buckets: which arguments are padded, by the names of the function's parameters, and to what:
            sizes by dim, ``{"tokens": {1: (512, 1024, 2048)}}``, or `Buckets`, or several. The
            function is given the true length (of ``tokens`` as ``n_tokens``, if it has such a
            parameter), and its results are cut back to it.

    Returns:
        the `CompiledStep`, or with ``watch="replay"`` the `ReplayedStep`, called like ``function``.

    Raises:
        TypeError: ``function`` can't be called, or is a generator or a coroutine; it has no
            parameter of a name in ``buckets``.
        ValueError: ``audit`` is no number of calls; ``watch`` is something else; ``audit``,
            ``checks`` or ``buckets`` of a replayed step; (when called) an argument is longer than
            its largest bucket, or it isn't known what of a result is padding.
        DataDependentError: (when called) the step needs a value in Python, or can't be one program.
        MeshMismatchError: (when called) it uses tensors on different sets of devices.
        StaleStepError: (when called) an audit has found a difference.

    Example::

        import torch, xla_dtensor as xd

        model = torch.nn.Linear(16, 4).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        @xd.compile
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()
        losses = [step(torch.ones(8, 16, device="xla")).item() for _ in range(3)]
        assert losses[2] < losses[0] and step.compilations == 1
    """
    if not callable(function):
        raise TypeError(f"xd.compile takes a function (the step), not {function!r}")
    code = inspect.unwrap(function)
    if inspect.isgeneratorfunction(code) or inspect.iscoroutinefunction(code):
        raise TypeError(
            f"xd.compile: {name_of(function)} is a generator or a coroutine, whose Python goes on "
            "when its caller asks; a step is one program: let it return its results"
        )
    if watch == "replay":
        if audit or checks is not None or buckets is not None:
            raise ValueError(
                'xd.compile(watch="replay") takes no audit= (its Python runs in every call), no '
                "checks= (indices are looked at as in eager code: xd.check_indices) and no buckets="
            )
        return ReplayedStep(function, compiler_options)
    if watch != "auto":
        raise ValueError(f'watch={watch!r}: it is "auto" or "replay"')
    if audit is None:
        audit = int(os.environ.get(AUDIT_VARIABLE, "0"))
    if isinstance(audit, bool) or audit < 0:
        raise ValueError(f"audit={audit!r}: a number of calls, or 0 for never")
    checks = assertions.switch.compiled if checks is None else checks
    return CompiledStep(function, compiler_options, audit, checks, buckets)


class CompiledStep(StepTraces):
    """A compiled step, which `compile` makes; call it like the function.

    Attributes:
        compilations: how many programs were compiled so far.
        traces: how many times the step's Python was run to make a program.
        recompilations: a line for each trace after the first that came to another program: why.

    Example::

        import torch, xla_dtensor as xd
        step = xd.compile(lambda x: x * 2)
        step(torch.ones(4, device="xla")), step(torch.ones(8, device="xla"))
        assert step.traces == step.compilations == 2 and len(step.recompilations) == 1
    """

    def __init__(
        self,
        function: Callable[..., Any],
        compiler_options: dict[str, Any] | None = None,
        audit: int = 0,
        checks: bool = False,
        buckets: Mapping[str, Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._options = compiler_options
        self._audit = audit
        self._checks = assertions.asking(checks)
        self._buckets = None if buckets is None else BucketedArguments(function, buckets)
        self._calls = 0
        # Threads may share a step: one call after another.
        self._lock = threading.RLock()
        name = f"compiled step {self._name()}"
        self._families: Cache[Any, Family] = Cache(f"{name}: kinds of arguments", KINDS)
        self._executables: Cache[Any, Any] = Cache(f"{name}: programs", PROGRAMS, size=code_bytes)
        self._last: tuple[Arguments, Program] | None = None
        # What it keeps outside of itself and replaces in each call, as messages call it; numbers.
        self._carried: frozenset[str] = frozenset()
        self._counted: frozenset[str] = frozenset()
        # What of it can't be taken from there, and why.
        self._not_carried: dict[str, Exception] = {}
        self.clear_cache()
        self.compilations = 0
        self.traces = 0
        self.recompilations: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch = thread_state.batch()
        inner = isinstance(thread_state.current(), StepTrace) or (
            batch is not None and batch.is_step
        )
        padding = None
        if self._buckets is not None:
            args, kwargs, padding = self._buckets.padded(args, kwargs, pad=not inner)
        if inner:
            return self._function(*args, **kwargs)  # part of the step around it
        if abstract.current() is not None:
            return called_without_data(self, args, kwargs)
        if not interrupts.ready():
            interrupts.install()
        lazy.flush_all()
        with self._lock:
            arguments = Arguments(args, kwargs)
            arguments.padding = padding
            return self._call(arguments)

    @interrupts.completed
    def _call(self, arguments: Arguments) -> Any:
        family = self._families.get_or_make(arguments.key, Family)
        if arguments.lengths:
            family.takes(arguments.lengths)
        missed: tuple[str, Program] | None = None
        for call, programs in family.candidates(arguments):
            for position, program in enumerate(programs):
                if position and program.decides_otherwise(call):
                    continue
                why = program.mismatch(call)
                if why is None:
                    if position:
                        programs.first(program)
                    if arguments.padding is not None:
                        check_lengths(program.traced.cuts or [], arguments.padding)
                    self._last = call, program
                    self._many.in_a_row = 0
                    observer = events.observer
                    if observer is not None:
                        observer.compiled(self._name())
                    if self._audit:
                        self._look_again(program, call)
                    return program.run(call)
                missed = missed or (why, program)
        return self._trace(arguments, family, missed)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The step's program for these arguments, not compiled and not run; nothing changes.

        Args:
            args, kwargs: as of a call.

        Returns:
            a ``jax.stages.Lowered``, with ``as_text()`` and ``compile()``.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x.sin())
            assert "sine" in step.lower(torch.ones(4, device="xla")).as_text() and step.traces == 0
        """
        if self._buckets is not None:
            args, kwargs, _ = self._buckets.padded(args, kwargs)
        return looked_at(self, args, kwargs, operator.attrgetter("lowered"))

    def clear_cache(self) -> None:
        """Forget all programs; the next call traces and compiles. The counts stay.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2)
            step(torch.ones(4, device="xla"))
            step.clear_cache()
            assert step.compiled_programs() == []
        """
        self._families.clear()
        self._executables.clear()
        self._last = None
        self._carried = self._counted = frozenset()
        self._not_carried = {}
        self._many = ManyTraces()

    def why_not(self, *args: Any, **kwargs: Any) -> str | None:
        """Why a call with these arguments would trace the step; nothing is traced, and nothing
        changes.

        Args:
            args, kwargs: as of a call.

        Returns:
            the reason in words, or None if a program is there that the call would run.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2)
            assert step.why_not(torch.ones(4, device="xla")) == "the step has not been called yet"
        """
        if self._buckets is not None:
            args, kwargs, _ = self._buckets.padded(args, kwargs)
        arguments = Arguments(args, kwargs)
        with self._lock:
            family = self._families.get(arguments.key) or Family()
            candidates = list(family.candidates(arguments))
            tried = [(program, call) for call, programs in candidates for program in programs]
            reasons = [program.mismatch(call) for program, call in tried]
            if None in reasons:
                return None
            if self._last is None:
                return "the step has not been called yet"
            return reasons[0] if reasons else self._explain(arguments, family)

    def compiled_programs(self) -> list[Any]:
        """The programs that exist, and what XLA made of the step.

        Returns:
            ``jax.stages.Compiled``, oldest first: ``as_text()``, ``memory_analysis()`` and others.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2)
            step(torch.ones(4, device="xla"))
            assert "f32[4]" in step.compiled_programs()[-1].as_text()
        """
        return list(self._executables.values())

    # --- internals ---------------------------------------------------------------------------

    def _look_again(self, program: Program, arguments: Arguments) -> None:
        """Every n-th call: the audit."""
        self._calls += 1
        if self._calls % self._audit == 0:
            with tracing, self._checks:
                compare(self._name(), self._function, program.traced, arguments)
