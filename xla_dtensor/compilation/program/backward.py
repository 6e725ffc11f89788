"""The backward pass of a step whose results require grad: a second program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xla_dtensor.base import events
from xla_dtensor.compilation.call.inputs import outputs_in_order
from xla_dtensor.compilation.call.recipes import NewTensor
from xla_dtensor.compilation.call.run import Run
from xla_dtensor.compilation.call.sources import ArraySource, StateSource
from xla_dtensor.compilation.program.executable import sharding_of
from xla_dtensor.compilation.program.input_layouts import Pinning, compile_somehow
from xla_dtensor.compilation.program.inputs import Groups, Inputs
from xla_dtensor.compilation.recorded.history import History
from xla_dtensor.compilation.recorded.node import MemoryRead, OnHost, SavedForBackward, cotangent
from xla_dtensor.compilation.recorded.split import SplitJaxpr
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.forms.form import Form
from xla_dtensor.tensors.of_form import new_tensor


class BackwardPass:
    """The second part of a trace, from the gradients of its results to those of its inputs.

    Args:
        traced: the trace.
        jaxpr: what it computes.
        history: how its results depend on tensors that require grad.
        inputs: of the first part.
        forms: those of all outputs.

    Attributes:
        order: the outputs of the first part.
        jaxpr: the first part; its last outputs are the residuals.
        residuals: how many those are.
        donates: whether the first part may overwrite its inputs: a backward pass may need the old
            values, but there is none where torch's would raise.
    """

    def __init__(
        self, traced: Traced, jaxpr: Any, history: History, inputs: Inputs, forms: list[Form]
    ) -> None:
        self._traced, self._history, self._inputs = traced, history, inputs
        cotangents = history.cotangents_among(traced.inputs.sources)
        gradients = [g[0] for g in history.gradients if g is not None]
        late = set(gradients)
        order = outputs_in_order(inputs.donated.sources, len(forms))
        self.order = [i for i in order if i not in late]
        split = SplitJaxpr(jaxpr, cotangents, gradients, self.order)
        self.jaxpr, self.residuals = split.forward, split.residuals
        self.donates = len(history.errors) == len(history.outputs)
        self._used_cotangents = [n for n, i in enumerate(cotangents) if i is not None]
        # Constants that are no inputs (numbers, random state) are computed again for the backward.
        self._constants = [traced.inputs.sources[i] for i in split.constants]
        computed = [i for i in split.constants if not traced.inputs.sources[i].is_input]
        self._computes = jax.jit(lambda *groups: _at(inputs.constants(*groups), computed))
        self._has_computed = bool(computed)
        self._plan_reads(split)
        shardings = [sharding_of(forms[i], traced.frame) for i in gradients]
        second = split.backward
        self._jit = lambda: jax.jit(
            lambda arrays: jaxpr_as_fun(ClosedJaxpr(second, []))(*arrays),
            out_shardings=shardings if any(shardings) else None,
        )
        self._compiled: Any = None

    def _plan_reads(self, split: SplitJaxpr) -> None:
        """Whose memory mustn't be written to before the backward pass, and for which results."""
        traced = self._traced
        found = [(*traced.inputs.reads[mark], through) for mark, through in split.reads.items()]
        found += [
            (traced.inputs.sources[i], None, through)
            for i, through in split.reads_constants.items()
        ]
        self._fixed_reads: list[MemoryRead] = []
        # Reads of arguments, gradients and results, which are other tensors in each call.
        self._found_reads: list[tuple[Any, set[int], Any]] = []
        for what, by, through in found:
            if isinstance(what, list):
                self._found_reads += [(template, through, None) for template in what]
            elif isinstance(what, StateSource):
                tensor = None if by is None else by.get()
                self._fixed_reads += [
                    MemoryRead(storage, through, tensor) for storage in what.storages
                ]
            elif isinstance(what, torch.Tensor):
                self._fixed_reads.append(MemoryRead(OnHost(what), through, None))
            elif isinstance(what, int | ArraySource):
                self._found_reads.append((what, through, by))

    def constants(self, groups: Groups) -> list[Any]:
        """What the second part needs besides the residuals: inputs of the first, the very arrays,
        not copies, and what is computed of them."""
        computed = iter(self._computes(*groups) if self._has_computed else ())
        return [
            self._inputs.of(source, groups) if source.is_input else next(computed)
            for source in self._constants
        ]

    def kept(self, run: Run, residuals: list[Any]) -> SavedForBackward:
        """What the backward pass of a call needs: the residuals, with the constants behind them."""
        return SavedForBackward(residuals, [*self._fixed_reads, *self._reads(run)])

    def _reads(self, run: Run) -> Iterator[MemoryRead]:
        for what, through, by in self._found_reads:
            if isinstance(what, NewTensor):
                storage = what.make(run)._storage_
            elif isinstance(what, int):
                storage = OnHost(run.arguments.tensors[what])
            else:
                storage = what.storage(run.arguments)
            yield MemoryRead(storage, through, None if by is None else by.of(run.arguments))

    def run(self, program: Any, kept: SavedForBackward, grads: list[Any]) -> list[Any]:
        """The gradients of the inputs from those of the results.

        Args:
            program: whose backward pass it is. (Not an attribute: a cycle.)
            kept: of the call.
            grads: the gradients of its results; None for one that nobody has used.

        Raises:
            RuntimeError: torch's backward pass would raise; or what it needs has been overwritten.
        """
        history, residuals = self._history, kept.residuals
        lowering: Pinning = program.executable.lowering
        frame = self._traced.frame
        for i, message in history.errors.items():
            if grads[i] is not None:
                raise RuntimeError(message)
        kept.check(grads)
        with jax.enable_x64(True):
            forms = [form.placed(frame) for form in history.cotangent_forms]
            arrays = [cotangent(grads[n], forms[n]) for n in self._used_cotangents]
            for array in residuals:
                if isinstance(array, jax.Array) and array.is_deleted():
                    raise RuntimeError(
                        "a tensor that the backward pass of a compiled step needs has been "
                        "overwritten by another compiled step since; call backward() before the "
                        "parameters are updated"
                    )
            inputs = [*residuals, *arrays]

            # Residuals come from one compiled program, and gradients are moved to their forms: all
            # lie alike in each call. (Two threads may both compile it, which does no harm.)
            if self._compiled is None:
                lower = lambda: self._jit().lower(inputs)
                self._compiled = compile_somehow(lower, lower, None, lowering)
            results = iter(self._compiled(inputs))
        if events.observer is not None:
            events.observer.launched(program, "backward", self._compiled.as_text)
        found: list[Any] = []
        for i, gradient in enumerate(history.gradients):
            array = None if gradient is None else next(results)
            # A result that nobody has used gives no gradient, not one of zeros.
            used = any(
                grad is not None and i in reached
                for grad, reached in zip(grads, history.reached, strict=True)
            )
            known = None if gradient is None or not used else gradient[1].placed(frame)
            found.append(None if known is None else new_tensor(array, known))
        return found


def _at(values: list[Any], positions: list[int]) -> list[Any]:
    return [values[i] for i in positions]
