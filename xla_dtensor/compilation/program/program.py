"""One compiled form of a step: an executable, its guards, and its effects."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import jax
import torch

from xla_dtensor.base import events, interrupts
from xla_dtensor.base.random import rng
from xla_dtensor.base.tables import counters
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.compilation.budget.again import within_budgets
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.inputs import (
    LostArrays,
    check_alive,
    outputs_in_order,
    refuse_deleted,
)
from xla_dtensor.compilation.call.run import Outputs, Run
from xla_dtensor.compilation.call.sources import ArraySource, GradientSource
from xla_dtensor.compilation.program.backward import BackwardPass
from xla_dtensor.compilation.program.executable import Executable
from xla_dtensor.compilation.program.guards import Guards
from xla_dtensor.compilation.program.inputs import Groups, Inputs
from xla_dtensor.compilation.program.write_back import WriteBack
from xla_dtensor.compilation.recorded.history import History
from xla_dtensor.compilation.recorded.node import NodeCall, WithHistory
from xla_dtensor.compilation.recorded.split import reordered
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.compilation.trace import first_calls
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution import lazy
from xla_dtensor.forms.storage import Storage
from xla_dtensor.runtime import agreement
from xla_dtensor.runtime.jax_runtime import code_bytes
from xla_dtensor.tensors.of_form import is_ours


class Program:
    """One traced and compiled form of a step, valid while its guards hold.

    Args:
        traced: the trace.
        arguments: of the call that was traced.
        lays_out: whether its values lie where it communicates least (`layouts/`), and not where
            each operation's rule has them.
        in_blocks: whether its results have the same bits on any mesh (`blocks/`).

    Attributes:
        traced: what it is compiled from.
        jaxpr: what it computes, within the memory budgets of its backward passes (`budget/`).
        inputs, outputs: in their order, and in one call.
        guards: what must hold for it to run.
        executable, options: what XLA has made of it, and how, once it is compiled.
        finish: what follows a launch, see `WriteBack.finish`.
        runs: how often it has been launched.
    """

    def __init__(
        self,
        traced: Traced,
        arguments: Arguments,
        lays_out: bool = False,
        in_blocks: bool = False,
    ) -> None:
        self.traced, self.runs = traced, 0
        self._anchor: Callable[[], Storage | None] = lambda: None
        inputs = self.inputs = Inputs(traced)
        self.guards = Guards(traced, inputs, arguments)
        for outside in traced.outside:  # don't keep the gradients from before the trace alive
            outside.grad = None
        forms = [form.placed(traced.frame) for form in traced.outputs.forms]
        history = traced.outputs.history
        if in_blocks and history is not None:
            raise UnsupportedOpError(
                'a step with xd.config.reproducible = "across meshes" gives results with a '
                "history, whose backward pass would be another program: call backward() in the "
                "step, or return results that are detached"
            )
        with jax.enable_x64(True):
            groups = inputs.gather(arguments, self.guards.prepared, take=False)
        late = [] if history is None else history.cotangents_among(traced.inputs.sources)
        self.jaxpr = within_budgets(
            traced.jaxpr,
            traced.trace.passes.budgets,
            inputs.shardings(groups),
            [traced.jaxpr.constvars[i] for i in late if i is not None],
        )
        self._backward: BackwardPass | None = None
        if history is None:
            order = outputs_in_order(inputs.donated.sources, len(forms))
            jaxpr, residuals, donates = reordered(self.jaxpr, order), 0, True
        else:
            backward = BackwardPass(traced, self.jaxpr, history, inputs, forms)
            self._backward = backward
            order, jaxpr, residuals = backward.order, backward.jaxpr, backward.residuals
            donates = backward.donates
        self.outputs = Outputs(forms, order)
        self._write_back = WriteBack(traced, inputs, self.outputs, self.guards)
        self.finish = self._write_back.finish
        self._to_compile = functools.partial(
            Executable,
            *(traced, jaxpr, inputs, self.outputs, groups),
            residuals=residuals,
            donates=donates,
            lays_out=lays_out,
            in_blocks=in_blocks,
        )

    def compile(self, executables: Cache[Any, Any] | None, options: dict[str, Any] | None) -> None:
        """Compile it.

        Args:
            executables: those compiled so far; None to lower the program and no more.
            options: for XLA.
        """
        self.options = options
        self.executable = self._to_compile(executables=executables, options=options)
        del self._to_compile  # it has the arrays of the first call

    @property
    def frame(self) -> Any:
        """The devices that the program runs on."""
        return self.traced.frame

    @property
    def lowered(self) -> Any:
        """The ``jax.stages.Lowered`` of a program that was lowered and no more."""
        return self.executable.lowered

    @property
    def watch(self) -> Watch:
        """What the step's Python can read."""
        return self.guards.watch

    @functools.cached_property
    def bytes(self) -> int:
        """About how much memory of the host it takes: its code, and what is known of it."""
        known = 2048 * len(self.jaxpr.eqns) + 512 * len(self.watch.reached.found)
        return (code_bytes(self.executable.compiled) or 0) + known

    def input_sources(self) -> dict[str, list[ArraySource]]:
        """Where the program's arrays come from, by what its arguments are called."""
        return {"donated": self.inputs.donated.sources, "kept": self.inputs.kept.sources}

    def uses(self, arguments: Arguments) -> set[int]:
        """The memory that it uses in a call, be it of tensors whose gradients alone it uses."""
        found = (outside.storage for outside in self.traced.outside)
        tensors = first_calls.memory_of((*arguments.tensors, *self.traced.host.found))
        return {*self.inputs.storages, *tensors, *map(id, found)}

    def written(self, arguments: Arguments) -> dict[int, Any]:
        """The memory that it writes to in a call, or to whose tensors' gradients, or takes from
        these: they must be there when it is launched. And what the host reads when the step is
        traced, CPU tensors and others: it must be the same still."""
        outputs, all_slots = self.traced.outputs, self.traced.inputs.slots
        changed = [outside for outside, _ in (*outputs.grads, *outputs.switched)]
        changed += [outside for outside in self.traced.outside if outside.asks_grad]
        changed += [source.leaf for source in all_slots if isinstance(source, GradientSource)]
        tensors = filter(is_ours, (outside.of(arguments) for outside in changed))
        on_host = (*outputs.host_writes, *outputs.host_grads)
        slots = [source for source in all_slots if source.writes]
        storages = [
            *(storage for source in slots for storage in source.storages),
            *(source.storage(arguments) for source in slots if not source.is_fixed),
            *(storage for storage, _ in outputs.left),
        ]
        return {
            **first_calls.memory_of(tensors),
            **first_calls.memory_of(self.traced.host.found),
            **self.traced.host.fetched_from,
            **first_calls.memory_of(target.read(arguments) for target, _ in on_host),
            **{id(storage): storage for storage in storages},
        }

    def follows_itself(self, arguments: Arguments) -> bool:
        """Whether it may run after a call of its own, as far as that and others' changes of tensors
        can tell: it leaves nothing in Python's objects, finds tensors of the same kind, and decides
        by the values that the host has of them as it did."""
        traced = self.traced
        leaves = traced.effects.leave_others or traced.schedulers.calls or traced.outputs.switched
        if leaves or self.guards.stale is not None:
            return False
        return self.guards.other_tensors(arguments) is None

    # --- running -----------------------------------------------------------------------------

    @interrupts.atomic
    def launch(self, arguments: Arguments) -> Run:
        """Execute the program and write to what was there before; `finish` does the rest. (In a
        `forms.sharing.launching` block that begins before the guards are asked: a launch of another
        thread in between would leave other gradients, or take over the arrays.)

        Raises:
            BaseException: it couldn't be launched, and nothing has happened.
        """
        run = Run(arguments, self.guards.prepared, self.outputs)
        if self._backward is None:
            self._execute(run)
        else:
            assert self.traced.outputs.history is not None
            try:
                self._run_with_history(self._backward, self.traced.outputs.history, run)
            except BaseException as error:
                if run.arrays is None:
                    raise
                run.error = run.error or error
        return run

    def _run_with_history(self, backward: BackwardPass, history: History, run: Run) -> None:
        """Execute the program as a node of the caller's history."""

        def execute(call: NodeCall) -> list[Any]:
            residuals = self._execute(run)
            results = [template.make(run) for template in history.outputs]
            call.kept = backward.kept(run, residuals)
            return results

        inputs = [outside.of(run.arguments) for outside in history.inputs]
        # The node doesn't refer to this call, whose results refer to the node: that would be a
        # cycle. Grad mode is on, as the step may have turned it on itself.
        with torch.enable_grad():
            node = NodeCall(execute, functools.partial(backward.run, self))
            found = WithHistory.apply(node, *inputs)
        made = zip(history.outputs, found, strict=True)
        run.made.update((id(template), result) for template, result in made)

    def _execute(self, run: Run) -> list[Any]:
        """Launch, and write to what was there before; what the backward pass needs of it."""
        with jax.enable_x64(True):
            donated, *others = self.inputs.gather(run.arguments, run.prepared)
            groups = (lazy.to_take_over(donated), *others)
            try:
                arrays = self._launch(groups)
            except BaseException as error:
                operations = self.inputs.random_operations
                if operations:
                    rng.default.give_back(groups[3][-4:], operations)
                check_alive(groups[0], error)
                raise
            residuals: list[Any] = []
            backward = self._backward
            if backward is not None:
                count = len(arrays) - backward.residuals
                arrays, residuals = arrays[:count], arrays[count:]
                residuals = [*residuals, *backward.constants(groups)]
        self.runs, run.arrays = self.runs + 1, arrays
        counters.add("steps")
        if events.observer is not None:
            events.observer.launched(self, "forward", self.executable.compiled.as_text)
        self._write_back.put(run)
        if run.error is not None:
            LostArrays.seen = LostArrays.seen or self._write_back.has_lost()
        return residuals

    def _launch(self, groups: Groups) -> list[Any]:
        if self.traced.frame is not None and agreement.every_launch():
            numbers = zlib.crc32(groups[3].tobytes())
            agreement.agree(
                f"launches the compiled step with the digest {self.executable.digest}, on numbers "
                f"and a seed with the checksum {numbers:08x}"
            )
        if LostArrays.seen:
            refuse_deleted((*groups[0], *groups[1]))
        arrays: list[Any] = self.executable.compiled(*groups)
        return arrays

    # --- how long it lives, see `Programs` ---------------------------------------------------

    def anchored(self, other: Program) -> bool:
        """Be held by memory that this program uses and ``other`` doesn't; whether there is any."""
        if self._anchor() is not None:
            return True
        others = other.inputs.storages
        storages = [s for source in self.traced.inputs.slots for s in source.storages]
        # The last storage: an optimizer's state, which comes last, is freed before the model is.
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
