"""The outputs of a trace's program, and what each is for: a result, a write, a gradient."""

from __future__ import annotations

from typing import Any

import jax

from xla_dtensor.compilation.call.recipes import NewTensor, Recipe
from xla_dtensor.compilation.recorded.history import History
from xla_dtensor.compilation.recorded.host_ops import HostOperations
from xla_dtensor.compilation.recorded.output_recipes import OutputRecipes
from xla_dtensor.compilation.trace.external_storages import ExternalStorage
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.read import logical_value
from xla_dtensor.forms.storage import Storage
from xla_dtensor.tensors.base import grad_of, set_grad_of


class TracedOutputs:
    """The outputs of a trace.

    Attributes:
        forms: those of the outputs.
        results, tree: what the step returns.
        gives_items: whether each call reads values for Python's numbers.
        to_check: numbers that each call computes for the errors that Python may raise.
        history: how its results depend on tensors that require grad, or None.
        grads: (leaf, template of its new gradient or None).
        switched: (tensor from outside, the ``requires_grad`` that the step leaves it with).
        printed: what it prints that is known when it has run: (what prints, values).
        host_writes: (CPU tensor from outside, what gives its new value).
        host_grads: (CPU leaf from outside, what gives its new gradient, or None).
        come_apart: (storage from outside of which the devices have one value before the step, its
            form after it, when each has its own).
        left: (storage that the step made and left somewhere unknown, output).
        judges, judged: what judges by which output whether what must hold does.
        random_operations: how many operations draw from the generator.
        captured: the storages from outside that it uses, in the order of their first uses.
        written: by the ``id`` of those that it writes which output they get.
        shown: the memory that the caller gets to see, by id: the templates with it.
    """

    def __init__(self, trace: StepTrace, host: HostOperations) -> None:
        self.trace, self.host = trace, host
        self._arrays: list[Any] = []
        self.forms: list[Form] = []
        self.results: list[Recipe] = []
        self.gives_items = False
        self.to_check: list[Recipe] = []
        self.printed: list[tuple[Any, list[Any]]] = []
        self.tree: Any = None
        self.history: History | None = None
        self.grads: list[tuple[Any, Recipe | None]] = []
        self.captured: list[ExternalStorage] = []
        self.written: dict[int, int] = {}
        self.come_apart: list[tuple[Storage, Form]] = []
        self.left: list[tuple[Storage, int]] = []

    def emit(self, array: Any, form: Form) -> int:
        """Make an array an output; its index."""
        self._arrays.append(form.physical(array))
        self.forms.append(form)
        return len(self._arrays) - 1

    def template(self, tensor: Any) -> NewTensor:
        """An output that is the tensor's value; memory of its own."""
        form = tensor._form.reduced()
        return NewTensor(self.emit(logical_value(tensor), form), form)

    def take_arrays(self) -> list[Any]:
        """The arrays that the program returns, when all are known."""
        self.judges, self.judged = self.trace.must_hold.judged(self.emit)
        arrays, self._arrays = self._arrays, []
        return arrays

    def collect_gradients(self, made: OutputRecipes, history: History, kept: set[int]) -> None:
        """What the step leaves in leaves' ``.grad``, which get back what they had before; and the
        history of its results.

        Args:
            kept: the memory, by id, of what an optimizer has made and keeps.
        """
        self.random_operations = self.trace.random_operations()  # not those of the backward program
        # A copy of the dict: a gradient that is a view of a captured tensor adds that tensor to it.
        for outside in list(self.trace.outside.values()):
            leaf = outside.get()
            if leaf is None or not outside.takes_gradient:
                continue
            grad = grad_of(leaf)
            if grad is outside.grad and not outside.cleared:
                continue
            if not outside.asks_grad and self.trace.has_others_gradient(outside):
                continue
            template = None if grad is None else made.gradient(grad, kept)
            self.grads.append((outside, template))
            set_grad_of(leaf, outside.grad)
        made.finish()
        self.shown = made.shown
        self.host_grads = self.host.gradients()
        self.host_writes = self.host.writes()
        self.switched = self.trace.switched()
        if history.outputs and history.inputs:
            if self.switched:
                raise DataDependentError(
                    "the step leaves a parameter with another requires_grad than it found, and "
                    "returns a result with a history: detach the result, or switch it back"
                )
            history.differentiate(self.template, set(made.shown))
            self.history = history

    def collect_storages(self) -> None:
        """What the step writes to storages from outside, and what it leaves behind in its own."""
        trace = self.trace
        self.captured = sorted(
            (c for c in trace.captured if c.first_use is not None),
            key=lambda c: c.first_use,  # type: ignore[arg-type, return-value]
        )
        counters: dict[tuple[int, int], int] = {}
        for captured in self.captured:
            storage = captured.storage
            if not captured.written or storage is None:
                continue
            if captured.fill_value is None and _comes_apart(captured.form, storage.form):
                self.come_apart.append((storage, storage.form))
            shared = id(captured.array), id(storage.array)
            if trace.numbers.is_counter(captured.array) and shared in counters:
                self.written[id(captured)] = counters[shared]
                continue
            index = self.emit(logical(storage.array, storage.form), storage.form.reduced())
            self.written[id(captured)] = counters[shared] = index
        # Some optimizers keep a copy of each parameter: it has the captured array, an output too.
        used = {id(captured.array) for captured in self.captured}
        for storage in trace.left_behind():
            if isinstance(storage.array, jax.core.Tracer) or id(storage.array) in used:
                form = storage.form.reduced()
                self.left.append((storage, self.emit(logical(storage.array, storage.form), form)))

    def forget_trace(self) -> None:
        """Let go of tracers, of which no input is left to be named."""
        for captured in self.captured:
            captured.array = None  # or old values would be kept alive
        self.captured, self.shown = [], {}
        self.trace.forget()


def _comes_apart(before: Form, after: Form) -> bool:
    """Whether the devices had one value, and now each has its own, laid out as it was."""
    layout = lambda form: (form.mesh, form.placements)
    return layout(before) == layout(after) and set(before.varying) < set(after.varying)
