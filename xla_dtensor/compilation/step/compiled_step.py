"""A compiled step: finds the program that a call runs, and has the methods of `CompiledStep`."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from xla_dtensor.base import assertions, events, executor, interrupts
from xla_dtensor.base.tables import counters
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.base.thread_state import in_blocks, is_in_blocks, tracing
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.buckets import BucketedArguments, check_lengths
from xla_dtensor.compilation.call.retraces import MANY_TRACES, ManyTraces
from xla_dtensor.compilation.call.run import Run
from xla_dtensor.compilation.call.streams import call_with_streams, has_streams
from xla_dtensor.compilation.code.garbage import Seldom
from xla_dtensor.compilation.objects.readers import ReadsMore
from xla_dtensor.compilation.program.guards import Mismatch
from xla_dtensor.compilation.program.program import Program
from xla_dtensor.compilation.program.saved import (
    Executables,
    check_place,
    compiled_for_file,
    read,
    write,
)
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.compilation.step.audit import compare
from xla_dtensor.compilation.step.base_step import BaseStep, logger
from xla_dtensor.compilation.step.fallback import Begun, Fallback
from xla_dtensor.compilation.step.family import KINDS, Family
from xla_dtensor.compilation.step.lower_only import called_without_data
from xla_dtensor.compilation.step.step_traces import StepTraces
from xla_dtensor.compilation.trace import first_calls
from xla_dtensor.compilation.trace.first_calls import FirstCall
from xla_dtensor.compilation.trace.items import PutOff
from xla_dtensor.compilation.trace.numbers import NumberChanged
from xla_dtensor.errors import (
    CompiledFileError,
    DataDependentError,
    StaleStepError,
    UnsupportedOpError,
)
from xla_dtensor.execution import lazy
from xla_dtensor.forms.sharing import launching
from xla_dtensor.layouts.report import report
from xla_dtensor.runtime import abstract
from xla_dtensor.runtime.jax_runtime import code_bytes
from xla_dtensor.runtime.program_cache import not_kept

PROGRAMS = 256


class CompiledStep(BaseStep):
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
        layouts: Literal["step", "torch"] = "step",
        blocks: bool = False,
        traced_only: bool = True,
    ) -> None:
        asked = compiler_options, audit, checks, buckets, layouts, blocks, traced_only
        super().__init__(function, *asked)
        self._options = compiler_options
        self._audit = audit
        # What is computed in blocks must be the same operations on each mesh.
        self._lays_out, self._in_blocks = layouts == "step" and not blocks, blocks
        self._checks = assertions.asking(checks)
        self._buckets = None if buckets is None else BucketedArguments(function, buckets)
        self._calls = 0
        # Threads may share a step: one call after another.
        self._lock = threading.RLock()
        name = f"compiled step {self._name()}"
        self._families: Cache[Any, Family] = Cache(f"{name}: kinds of arguments", KINDS, stays=True)
        self._executables = Executables(f"{name}: programs", PROGRAMS, size=code_bytes)
        self._traces = StepTraces(function, self._buckets)
        self._fallback = None if traced_only else Fallback(self, function, compiler_options)
        # The call that ran last.
        self._last: tuple[Arguments, Program] | None = None
        # The arguments of the call that ran last, if its Python ran in place of a program.
        self._replayed: Arguments | None = None
        self.clear_cache()

    # The whole call, not `_call` alone: an interrupt before the lock is released would leave it
    # locked for all threads.
    @interrupts.completed
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = executor.is_in_step()
        padding = None
        if self._buckets is not None:
            args, kwargs, padding = self._buckets.padded(args, kwargs, pad=not inner)
        if inner:
            if self._in_blocks and not is_in_blocks():
                raise UnsupportedOpError(
                    f'{self._name()} was compiled with xd.config.reproducible = "across meshes", '
                    "and is called in a step (or JAX program) that wasn't, whose bits depend on "
                    "the mesh: compile that one with the switch, too"
                )
            return self._function(*args, **kwargs)  # part of the step around it
        if abstract.current() is not None:
            return called_without_data(self, args, kwargs)
        if not interrupts.ready():
            interrupts.install()
        lazy.flush_all()
        with self._lock:
            if has_streams(args, kwargs):
                made = functools.partial(Arguments, reads=self._traces.reads, padding=padding)
                return call_with_streams(self._call, args, kwargs, made, self._streams)
            call = Arguments(args, kwargs, self._traces.reads, padding)
            return self._call(call, self._fallback)

    def programs(self) -> list[Program]:
        """What `xla_dtensor.metrics` looks at: the programs that may run again, each with what it
        was traced from, how often it has run, and its ``executable``.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2)
            step(torch.ones(4, device="xla")), step(torch.ones(4, device="xla"))
            assert [program.runs for program in step.programs()] == [2]
        """
        with self._lock:
            kept = [p for family in self._families.values() for p in family.programs.values()]
            return [program for programs in kept for program in programs]

    @interrupts.completed
    def _call(self, arguments: Arguments, fallback: Fallback | None = None) -> Any:
        """What a call gives.

        Args:
            fallback: what it is left to if its Python can't be one program.
        """
        family = self._families.get_or_make(arguments.key, Family)
        if arguments.lengths:
            family.takes(arguments.lengths)
        is_audited = bool(self._audit) and (self._calls + 1) % self._audit == 0
        if is_audited:
            self._look_again(family, arguments)
        busy: FirstCall | None = None
        while True:
            if busy is not None:
                busy.wait()
            # From the guards to the launch, or another thread's launch might leave other gradients.
            with launching():
                if first_calls.under_way:
                    busy = first_calls.may_launch(family.uses(arguments))
                    if busy is not None:
                        continue
                found, missed = family.find(arguments)
                if found is None:
                    break
                call, program = found
                if arguments.padding is not None:
                    check_lengths(program.traced.cuts or [], arguments.padding)
                self._last = call, program
                self._replayed = None
                self._many.in_a_row = family.misses = 0
                self._calls += not is_audited
                run = program.launch(call)
            observer = events.observer  # not above: it writes a log, which has locks of its own
            if observer is not None:
                observer.compiled(self._name())
            return program.finish(run)
        if fallback is not None and not self._executables and family.refused is None:
            fallback.refuse_as_others(family)
        tried = fallback is None or family.tries()
        if tried:
            with Seldom(), counters.timing("compile"):
                result, done = self._trace(arguments, family, missed, fallback)
            if done:
                return result
        assert fallback is not None
        self._replayed = arguments
        return fallback.run(arguments.args, arguments.kwargs, again=tried)

    @interrupts.completed
    def again(self) -> Any:
        """The last call once more, as its program: the arguments are the same objects, and what
        else the step's Python reads isn't compared with what it was, which is most of what a short
        call costs. Values of tensors are those of now. It is for loops of one's own around a step
        that changes tensors in place, a token or a time step in each call. A step that changes
        something else (counts in Python), that decides otherwise by a tensor's value, or whose
        tensors are others by now (a gradient that is there, another shape), is called as always.

        Returns:
            what the step does.

        Raises:
            RuntimeError: there was no call, the programs have been forgotten, or this is inside of
                a compiled step.

        Example::

            import torch, xla_dtensor as xd
            x = torch.ones(2, device="xla")
            step = xd.compile(lambda x: x.mul_(2))
            step(x)
            for _ in range(3):
                step.again()
            assert x.tolist() == [16, 16]
        """
        if executor.is_in_step() or abstract.current() is not None:
            raise RuntimeError(f"{self._name()}: again() in a step or a plan: call the step itself")
        lazy.flush_all()
        with self._lock:
            if self._replayed is not None:
                return self._call(self._replayed, self._fallback)
            if self._last is None:
                raise RuntimeError(f"{self._name()}: again() needs a call before it")
            call, program = self._last
            with launching():
                follows = not first_calls.under_way and program.follows_itself(call)
                run = program.launch(call) if follows else None
            return self._call(call, self._fallback) if run is None else program.finish(run)

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
        return self.looked_at(args, kwargs, operator.attrgetter("lowered"))

    def looked_at(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], look: Callable[[Program], Any]
    ) -> Any:
        """What ``look`` sees of the program that a call with these arguments would run, which is
        lowered and not compiled; nothing runs, changes or is counted. State that the step's
        optimizer makes is there while it looks. `lower` and ``xd.plan`` are such looks.

        Args:
            args, kwargs: as of a call.
            look: is given the program (`compilation.program.Program`).

        Returns:
            what ``look`` does.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2)
            x = torch.ones(4, device="xla")
            jaxpr = step.looked_at((x,), {}, lambda program: program.jaxpr)
            assert "mul" in str(jaxpr) and step.traces == 0
        """
        if self._buckets is not None:
            args, kwargs, _ = self._buckets.padded(args, kwargs)
        lazy.flush_all()
        blocks, prints = in_blocks(self._in_blocks), PutOff.shown_if_failed()
        with self._lock, tracing, FirstCall() as first, self._checks, blocks, Seldom(), prints:
            begun = Begun()
            try:
                traced = self._as_called(args, kwargs)
            except Exception as error:
                refused = begun.refused(error)
                if refused is None or refused is error:
                    raise
                raise refused from error
            traced.print_now()
            try:
                program = self._program(traced, traced.take_call())
                first.only_writes({})
                program.compile(None, self._options)
                return look(program)
            finally:
                traced.undo()

    def _as_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        traces = self._traces.copy()
        try:
            return traces.as_called(Arguments(args, kwargs, traces.reads), self._families)
        except ReadsMore as more:
            traces.read(more.reads, more.watch)
            return traces.as_called(Arguments(args, kwargs, traces.reads), self._families)

    def layouts(self) -> str:
        """What the layouts of the program that ran last communicate, as they were chosen over the
        whole step: for each module, line of the user's and operation its layouts, the collectives,
        how often they run, their megabytes on a device by the estimate that was chosen by, and
        those of its next best layout; and the sum.

        Raises:
            RuntimeError: they were not chosen (``layouts="torch"``, or no tensors on a mesh), or
                nothing has run yet.

        Example::

            import torch, xla_dtensor as xd
            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            x = xd.distribute_tensor(torch.ones(8, 8), mesh, [xd.Shard(0), xd.Replicate()])
            w = xd.distribute_tensor(torch.ones(8, 8), mesh, [xd.Replicate(), xd.Shard(0)])
            step = xd.compile(lambda x, w: x @ w)
            assert step(x, w).full_tensor()[0, 0] == 8
            print(step.layouts())
        """
        choice = None if self._last is None else self._last[1].executable.layouts
        if self._replayed is not None:
            raise RuntimeError(
                f"{self._name()}: no layouts were chosen: its Python has run in place of a "
                "program, and each operation's rule has chosen its layouts; why_not() says why"
            )
        if choice is None:
            raise RuntimeError(
                f"{self._name()}: no layouts were chosen: they are when a step has computed "
                'something on a mesh, without layouts="torch", and not for a backward pass outside'
            )
        return report(choice)

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
        self._traces.forget()
        self._last = None
        self._replayed = None
        if self._fallback is not None:
            self._fallback.clear_cache()
        # How much it takes from iterators among its arguments.
        self._streams: dict[Any, list[tuple[int, bool]]] = {}
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
        arguments = Arguments(args, kwargs, self._traces.reads)
        with self._lock:
            family = self._families.get(arguments.key) or Family()
            candidates = family.candidates(arguments)
            tried = [(program, call) for call, programs in candidates for program in programs]
            reasons = [program.guards.mismatch(call) for program, call in tried]
            if None in reasons:
                return None
            if family.refused is not None:
                return f"its Python runs in every call: {family.refused}"
            if self._last is None:
                return "the step has not been called yet"
            if reasons and reasons[0]:
                return reasons[0].why
            return family.explain(arguments, self._last)

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
        replayed = [] if self._fallback is None else self._fallback.compiled_programs()
        return [*self._executables.values(), *replayed]

    def save_compiled(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Compile the program that a call with these arguments would run, and write it to a file,
        from which `xla_dtensor.load_compiled` takes it in another process; nothing runs. In an
        ``xd.abstract`` block it is compiled for the devices of that block. Several processes all
        call it; process 0 writes.

        Args:
            path: where it goes. A file that is there is replaced when the new one is complete.
            args, kwargs: as of a call.

        Raises:
            CompiledFileError: JAX can't write down what these devices run, or the file can't be
                written: there is no such folder, or the disk is full. A file that was there stays.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2)
            step.save_compiled("/tmp/step.xla", torch.ones(4, device="xla"))
            assert step.traces == 0 and step.load_compiled("/tmp/step.xla", trusted=True) == 1
        """
        check_place(path)
        options = abstract.compiler_options(self._options)
        look = functools.partial(compiled_for_file, options=options)
        with not_kept():
            program = self.looked_at(args, kwargs, look)
        write(path, self._name(), self._options, [program])

    def load_compiled(self, path: str | Path, *, trusted: bool = False) -> int:
        """What `xla_dtensor.load_compiled` does, which see.

        Args:
            path: of the file.
            trusted: whether you know who has written it.

        Example::

            import torch, xla_dtensor as xd
            step, x = xd.compile(lambda x: x * 3), torch.ones(4, device="xla")
            step.save_compiled("/tmp/thrice.xla", x)
            assert step.load_compiled("/tmp/thrice.xla", trusted=True) == 1
            step(x)
            assert step.compilations == 0
        """
        if not trusted:
            raise CompiledFileError(
                f"{path} holds compiled code, and a pickle of JAX's: whoever wrote it can run what "
                "they like here. If that is you, say trusted=True"
            )
        found = read(path, self._name(), self._options)
        self._executables.add(found)
        return len(found)

    # --- internals ---------------------------------------------------------------------------

    @interrupts.completed
    def _trace(
        self,
        arguments: Arguments,
        family: Family,
        missed: Mismatch | None,
        fallback: Fallback | None,
    ) -> tuple[Any, bool]:
        """Make a program and run it.

        Args:
            missed: why the first one that there was doesn't fit.

        Returns:
            what the step gives, and True; or False: nothing has happened, and it is left to the
            ``fallback``.
        """
        why = family.explain(arguments, self._last) if missed is None else missed.why
        begun = Begun()
        PutOff.begin()
        try:
            call, program, run = self._first_launch(arguments, family, missed)
        except ReadsMore as more:
            self._traces.read(more.reads, more.watch)
            given = arguments.args, arguments.kwargs
            again = Arguments(*given, self._traces.reads, arguments.padding)
            return self._call(again, fallback), True
        except Exception as error:
            refused = None if fallback is None else fallback.serves(error, begun)
            if fallback is None or refused is None:
                PutOff.show_failed()
                raise
            fallback.refuse(family, str(refused))
            return None, False
        family.refused = None
        try:
            result = program.finish(run)
        except BaseException:  # a scheduler's step: the program has done what it had to
            self._count(program.executable.is_new, why)
            self._keep(program, call, family)
            raise
        family.last = dict(arguments.numbers)
        self._count(program.executable.is_new, why)
        self._keep(program, call, family)
        told = self._many.message(why, missed.decided if missed else None)
        family.misses = 0 if missed is None else family.misses + 1
        often = told or f"is traced in every call: {why}"
        if fallback is not None and family.misses >= MANY_TRACES and fallback.serves_many(often):
            family.refuse(why or "", for_good=True)
        elif told is not None:
            logger.warning("xla_dtensor: %s %s", self._name(), told)
        return result, True

    @interrupts.completed
    def _first_launch(
        self, arguments: Arguments, family: Family, missed: Mismatch | None
    ) -> tuple[Arguments, Program, Run]:
        """Make a program and launch it."""
        with FirstCall() as first:
            with tracing:
                with self._checks, in_blocks(self._in_blocks):
                    traced = self._traces.made(arguments, family, missed)
                traced.print_now()
                paths = missed.paths if missed else frozenset()
                self._traces.compare_what_it_assigns(traced, paths)
                call = traced.take_call()
                try:
                    program = self._program(traced, call)
                except BaseException as error:
                    _undo(traced, error)
                    raise
                first.only_writes(program.written(call))
            try:
                program.compile(self._executables, self._options)
                while True:
                    with launching():
                        busy = first_calls.may_launch(program.uses(call), but_compiled=True)
                        if busy is None:
                            run = program.launch(call)
                            traced.taken_back = None  # what it has done is done
                            return call, program, run
                    busy.wait()
            except BaseException as error:
                if not program.runs:
                    _undo(traced, error)
                raise

    def _program(self, traced: Traced, arguments: Arguments) -> Program:
        return Program(traced, arguments, self._lays_out, self._in_blocks)

    def _keep(self, program: Program, call: Arguments, family: Family) -> None:
        family.keep(program, call)
        for other in self._families.values():
            for programs in other.programs.values():
                programs.succeeded(program)
        self._last = call, program
        self._replayed = None

    def _look_again(self, family: Family, arguments: Arguments) -> None:
        """Every n-th call: the audit."""

        def find() -> tuple[Arguments, Program] | None:
            with launching():
                return family.find(arguments, to_run=False)[0]

        found = find()
        self._calls += found is not None  # though it raises
        while found is not None:
            call, program = found
            with FirstCall(), tracing, self._checks, in_blocks(self._in_blocks):
                try:
                    compare(self._name(), self._function, program.traced, call)
                    return
                except StaleStepError:
                    found = find()  # another thread's launch may have come before the trace
                    if found is not None and found[1] is program:
                        raise


def _undo(traced: Traced, error: BaseException) -> None:
    """Take back what the trace of a program has made that isn't going to run."""
    traced.undo(error)
    if isinstance(error, NumberChanged):
        raise DataDependentError(
            f"the step changes a number that it takes as an input ({error}): do that outside of "
            "the compiled step"
        ) from error
