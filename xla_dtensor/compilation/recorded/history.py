"""Results of a compiled step that require grad: their gradient is a second program.

A step that computes a loss, or a model's output, and leaves ``backward()`` to its caller. Its trace
ends with torch's own backward pass over what it has recorded, from gradients that are inputs. What
of the traced operations depends on those inputs is the second program; the rest is the first, which
also returns what the second one needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private.attributes import hooks_of_tensor, is_leaf, sequence_number_of
from xla_dtensor.compilation.call.sources import CotangentSource
from xla_dtensor.compilation.trace.external_tensors import without_hooks
from xla_dtensor.compilation.trace.graph import nodes_of
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.form import Form
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.of_form import new_tensor


class History:
    """The gradients of a step's results with respect to tensors from outside.

    Attributes:
        outputs: the templates of the tensors that have a history.
        inputs: the tensors that gradients go to (`ExternalTensor`).
        cotangents: the constants that stand for the gradients of the outputs.
        cotangent_forms: their forms.
        reached: per output the inputs that it depends on.
        gradients: per input the output with its gradient and its form; None if it gets none.
        errors: what torch's backward pass from an output raises, by its position.
    """

    def __init__(self, trace: StepTrace) -> None:
        self.outputs: list[Any] = []
        self._tensors: list[Any] = []
        self._trace = trace
        self.inputs = [
            outside
            for outside in trace.outside.values()
            if outside.requires_grad and isinstance(outside.get(), torch.Tensor)
        ]
        self.cotangents: list[Any] = []
        self.cotangent_forms: list[Form] = []
        self.gradients: list[tuple[int, Form] | None] = []
        self.reached: list[set[int]] = []
        self.errors: dict[int, str] = {}

    def takes(self, value: Any) -> bool:
        """Whether a tensor has a history that began in the step, which has not used it up."""
        if not value.requires_grad or is_leaf(value):
            return False
        trace = self._trace
        if sequence_number_of(value.grad_fn) < trace.history_begins:
            return False
        return not (trace.freed and any(n in trace.freed for n, _ in nodes_of([value])))

    def add(self, template: Any, tensor: Any) -> None:
        """``tensor``, which later calls make from ``template``, has a history."""
        if not any(template is known for known in self.outputs):
            self.outputs.append(template)
            self._tensors.append(tensor)

    def cotangents_among(self, sources: Sequence[Any]) -> list[int | None]:
        """Which of a program's constants stand for the cotangents; None for one that it lacks."""
        found: list[int | None] = [None] * len(self.cotangents)
        for i, source in enumerate(sources):
            if isinstance(source, CotangentSource):
                found[source.index] = i
        return found

    def check_leaves(self, made: list[Any]) -> None:
        """Refuse results that depend on leaves which the caller gets, too.

        Raises:
            DataDependentError: they do.
        """
        ids = {id(leaf) for leaf in made}
        if ids and any(id(v) in ids for t in self._tensors for v in _variables_of(t)):
            raise DataDependentError(
                "the step makes a tensor that requires grad, gives it away, and a result depends "
                "on it: its gradient would be that of a tensor of the trace; make it before the "
                "step, and give it as an argument"
            )

    def _find_reached(self) -> None:
        """Which results depend on which inputs.

        Raises:
            DataDependentError: an input was computed from another one before the step: torch's
                backward pass would go through the caller's history.
        """
        tensors = [outside.get() for outside in self.inputs]
        leaves = {id(t): i for i, t in enumerate(tensors) if is_leaf(t)}
        inner = {sequence_number_of(t.grad_fn): i for i, t in enumerate(tensors) if not is_leaf(t)}

        def reached(tensor: Any, itself: int | None = None) -> set[int]:
            found = {inner[n] for n, _ in nodes_of([tensor]) if n in inner}
            found |= {leaves[id(v)] for v in _variables_of(tensor) if id(v) in leaves}
            return found - {itself}

        for i, tensor in enumerate(tensors):
            if not is_leaf(tensor) and reached(tensor, i):
                raise DataDependentError(
                    f"the step's result depends on a tensor of shape {list(tensor.shape)} that was "
                    "computed before the step from another one that it depends on, too: pass it as "
                    "an argument, or compute it inside of the step"
                )
        self.reached = [reached(tensor) for tensor in self._tensors]

    def differentiate(self, template_of: Callable[[Any], Any], shown: set[int]) -> None:
        """Run torch's backward pass in the trace; the gradients become outputs of it.

        Args:
            shown: the storages of the step's that its caller gets to see.
        """
        trace = self._trace
        self._find_reached()
        tensors, self._tensors = self._tensors, []
        grads = []
        for tensor in tensors:
            form = _gradient_form(tensor._form)
            with executor.running_at_once(), jax.ensure_compile_time_eval(), jax.enable_x64(True):
                array = arrays.full(form.array_shape, 0, form.jax_dtype, form.sharding)
            self.cotangents.append(array)
            self.cotangent_forms.append(form)
            grads.append(new_tensor(array, form))
        inputs = [outside.get() for outside in self.inputs]
        trace.differentiating, trace.shown = True, shown
        try:
            with without_hooks(inputs):  # they are called when the gradient gets there
                found = self._gradients(tensors, inputs, grads)
        finally:
            trace.differentiating = False
        for leaf, grad in zip(inputs, found, strict=True):
            if grad is None:
                self.gradients.append(None)
                continue
            grad = _laid_out(leaf, grad)
            template = template_of(grad)
            self.gradients.append((template.index, template.form))

    def _gradients(self, tensors: list[Any], inputs: list[Any], grads: list[Any]) -> Any:
        def of(which: list[int]) -> Any:
            return torch.autograd.grad(
                [tensors[i] for i in which],
                inputs,
                [grads[i] for i in which],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=False,
            )

        everything = list(range(len(tensors)))
        try:
            return of(everything)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
        # Torch refuses the backward pass from some of them, if only because the step has
        # overwritten what it needs (its optimizer has): that is an error when the caller begins
        # one there, as under torch.
        for i in everything:
            try:
                of([i])
            except RuntimeError as error:
                if type(error) is not RuntimeError:
                    raise
                self.errors[i] = str(error)
        rest = [i for i in everything if i not in self.errors]
        return of(rest) if rest else [None] * len(inputs)


def _variables_of(tensor: Any) -> Iterator[Any]:
    """The leaves that a tensor depends on."""
    for _, node in nodes_of([tensor]):
        for next_node, _ in node.next_functions:
            variable = getattr(next_node, "variable", None)
            if variable is not None:
                yield variable


def is_view_by_torch(view: Any, root: Any) -> bool:
    """Whether nothing but torch's own views is between a tensor that requires grad and ``root``: a
    function of the user's may give back a view of what it is given, and have another gradient."""
    end = None if root.grad_fn is None else sequence_number_of(root.grad_fn)
    node = view.grad_fn
    while node is not None:
        if end is None and getattr(node, "variable", None) is root:
            return True
        if end is not None and sequence_number_of(node) == end:
            return True
        before = [n for n, _ in node.next_functions if n is not None]
        if isinstance(node, torch.autograd.function.BackwardCFunction) or len(before) != 1:
            return False
        node = before[0]
    return False


def _laid_out(leaf: Any, grad: Any) -> Any:
    """The gradient in its leaf's layout, as the leaf's own hook would give it."""
    hook = getattr(leaf, "_xla_grad_hook", None)
    hooks = hooks_of_tensor(leaf)
    if hook is None or not hooks or hook.id not in hooks:
        return grad
    laid_out = hooks[hook.id](grad)
    return grad if laid_out is None else laid_out


def _gradient_form(form: Form) -> Form:
    """The form of the gradient of a tensor: replicated where that is ``Partial``, as in torch."""
    form = form.reduced()
    if form.mesh is None:
        return form
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in form.placements or ())
    return form.with_placements(form.mesh, placements)
