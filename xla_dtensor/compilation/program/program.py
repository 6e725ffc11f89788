"""One compiled form of a step: an executable, what must hold for it to run, and its effects."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from xla_dtensor.base import events, interrupts
from xla_dtensor.base.random import rng
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.buckets import cut_back
from xla_dtensor.compilation.call.inputs import Losses, check_alive, refuse_deleted
from xla_dtensor.compilation.call.recipes import Template
from xla_dtensor.compilation.call.run import Prepared, Run
from xla_dtensor.compilation.program.lowered import INPUTS
from xla_dtensor.compilation.program.write_back import WriteBack
from xla_dtensor.compilation.recorded.history import History
from xla_dtensor.compilation.recorded.node import Call, Kept, OnHost, Read, WithHistory, cotangent
from xla_dtensor.execution import lazy
from xla_dtensor.forms.sharing import launching
from xla_dtensor.runtime import agreement
from xla_dtensor.tensors.of_form import new_tensor


class Program(WriteBack):
    """One traced and compiled form of the step, valid while its guards hold.

    Args:
        executables: those compiled so far; None to lower the program and no more.

    Attributes:
        compiled: the ``jax.stages.Compiled``.
        lowered: the ``jax.stages.Lowered``, without ``executables``.
        newly_compiled: whether XLA had to compile it.
        launched: whether it has ever run.
        stale: why the next call has to trace again whatever it finds, or None.
        why_not: what `mismatch` said last.
    """

    # --- running -----------------------------------------------------------------------------

    @interrupts.atomic
    def run(self, arguments: Arguments, prepared: Prepared | None = None) -> Any:
        """Execute the program and put its effects in place.

        Raises:
            BaseException: it couldn't be launched, and nothing has happened; or something has
                failed in writing back, or what must hold of values doesn't, and everything else
                that the step does has happened.
        """
        run = Run(arguments, prepared or self._prepared)
        history = self._traced.history
        if history is None:
            self._execute(run)
        else:
            try:
                self._run_with_history(history, run)
            except BaseException as error:
                if run.arrays is None:
                    raise
                run.error = run.error or error
        self._finish(run)
        if run.error is not None:
            raise run.error
        results = [self._result(result, run) for result in self._traced.results]
        left = run.objects
        if self._traced.cuts and run.arguments.padding is not None:
            results, left = cut_back(results, self._traced.cuts, run.arguments.padding), {}
        if self._traced.judges:
            self._judge(run)
        return self._traced.result_tree.build(results, left)

    def _run_with_history(self, history: History, run: Run) -> None:
        """Execute the program as a node of the caller's history."""

        def execute(call: Call) -> list[Any]:
            residuals = self._execute(run, history=True)
            results = [self._tensor(template, run) for template in history.outputs]
            call.kept = Kept(residuals, [*self._reads, *self._other_reads(run)])
            return results

        inputs = [outside.of(run.arguments) for outside in history.inputs]
        # The node keeps none of what this call has: its own results among that would be a cycle.
        # The step may have turned gradients on itself.
        with torch.enable_grad():
            found = WithHistory.apply(Call(execute, self._run_backward), *inputs)
        made = zip(history.outputs, found, strict=True)
        run.made.update((id(template), result) for template, result in made)

    def _other_reads(self, run: Run) -> Iterator[Read]:
        for what, through, by in self._reads_found:
            if isinstance(what, Template):
                storage = self._tensor(what, run)._storage_
            elif isinstance(what, int):
                storage = OnHost(run.arguments.tensors[what])
            else:
                storage = what.storage(run.arguments)
            yield Read(storage, through, None if by is None else by.of(run.arguments))

    def _execute(self, run: Run, history: bool = False) -> list[Any]:
        """Launch, and write to what was there before; the backward pass's residuals."""
        with launching():
            return self._execute_alone(run, history)

    def _execute_alone(self, run: Run, history: bool) -> list[Any]:
        with jax.enable_x64(True):
            donated, *others = self._gather(run.arguments, run.prepared)
            inputs = (lazy.to_take_over(donated), *others)
            try:
                if self._frame is not None and agreement.every_launch():
                    numbers = zlib.crc32(inputs[3].tobytes())
                    agreement.agree(
                        f"launches the compiled step with the digest {self.digest}, on numbers "
                        f"and a seed with the checksum {numbers:08x}"
                    )
                if Losses.seen:
                    refuse_deleted((*inputs[0], *inputs[1]))
                arrays = self.compiled(*inputs)
            except BaseException as error:
                if self._random_operations:
                    rng.default.give_back(inputs[3][-4:], self._random_operations)
                check_alive(inputs[0], error)
                raise
            residuals = []
            if self._split is not None:
                count = len(arrays) - self._split.residuals
                arrays, residuals = arrays[:count], arrays[count:]
                if history:
                    residuals = [*residuals, *self._constants(inputs)]
        self.launched = True
        run.arrays = arrays
        if events.observer is not None:
            events.observer.launched(self, "forward", self.compiled.as_text)
        self._put(run)
        if run.error is not None:
            left = [storage.value for storage in self._written_storages]
            Losses.seen = Losses.seen or any(array.is_deleted() for array in left)
        return residuals

    def _constants(self, inputs: Any) -> list[Any]:
        """The inputs that the backward pass needs, too: the very arrays, not copies."""
        assert self._split is not None
        computed = iter(self._computing(*inputs) if self._computed else ())
        where, found = self._positions(), []
        for index in self._split.constants:
            source = self._traced.sources[index]
            if isinstance(source, INPUTS):
                group, position = where[id(source)]
                found.append(inputs[group][position])
            else:
                found.append(next(computed))
        return found

    def _run_backward(self, kept: Kept, grads: list[Any]) -> list[Any]:
        """The gradients of the inputs from those of the results."""
        history, residuals = self._traced.history, kept.residuals
        assert history is not None
        for i, message in history.errors.items():
            if grads[i] is not None:
                raise RuntimeError(message)
        kept.check(grads)
        with jax.enable_x64(True):
            forms = [form.placed(self._frame) for form in history.cotangent_forms]
            arrays = [cotangent(grads[n], forms[n]) for n in self._used_cotangents]
            for array in residuals:
                if isinstance(array, jax.Array) and array.is_deleted():
                    raise RuntimeError(
                        "a tensor that the backward pass of a compiled step needs has been "
                        "overwritten by another compiled step since; call backward() before the "
                        "parameters are updated"
                    )
            inputs = [*residuals, *arrays]

            def anew() -> Any:
                self._backward = self._make_backward()
                return self._backward(inputs)

            results = iter(self.lowering.attempt(lambda: self._backward(inputs), anew))
        if events.observer is not None:
            text = self._backward_text(inputs)
            events.observer.launched(self, "backward", text)
        found: list[Any] = []
        for i, gradient in enumerate(history.gradients):
            array = None if gradient is None else next(results)
            # A result that nobody has used gives no gradient, not one of zeros.
            used = any(
                grad is not None and i in reached
                for grad, reached in zip(grads, history.reached, strict=True)
            )
            if gradient is None or not used:
                found.append(None)
                continue
            found.append(new_tensor(array, gradient[1].placed(self._frame)))
        return found

    def _backward_text(self, inputs: list[Any]) -> Callable[[], str]:
        """What XLA made of the backward pass, for these inputs."""

        def text() -> str:
            with jax.enable_x64(True), self.lowering():
                return self._backward.lower(inputs).compile().as_text()

        return text

    # --- how long it lives, see `Programs` ---------------------------------------------------

    def anchored(self, other: Program) -> bool:
        """Be held by memory that this program uses and ``other`` doesn't; whether there is any."""
        if self._anchor() is not None:
            return True
        others = other._own_storages()
        storages = [s for source in self._traced.slots for s in source.storages]
        # The last: what an optimizer has made goes before the model does.
        anchor = next((s for s in reversed(storages) if id(s) not in others), None)
        if anchor is None:
            return False
        anchor.holds = [*getattr(anchor, "holds", ()), self]
        self._anchor = weakref.ref(anchor)
        return True

    def release(self) -> None:
        """Be held by no memory any more."""
        anchor = self._anchor()
        if anchor is not None:
            anchor.holds = [program for program in anchor.holds if program is not self]
