"""Results of a compiled step that have a history: their gradient is a second program.

A step that computes a loss, or a model's output, and leaves ``backward()`` to its caller. Its trace
ends with torch's own backward pass over what it has recorded, from gradients that are inputs. What
of the traced operations depends on those inputs is the second program; the rest is the first, which
also returns what the second one needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend import core as jax_core

from xla_dtensor.base import thread_state
from xla_dtensor.compilation.trace import StepTrace, nodes_of
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.form import Form
from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.movement.local_view import as_sharded
from xla_dtensor.movement.relayout import move
from xla_dtensor.movement.vary import vary
from xla_dtensor.tensors.of_form import Ours, new_tensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


class History:
    """The gradients of a step's results with respect to tensors from outside.

    Attributes:
        outputs: the results that have a history, as positions among all results.
        inputs: the tensors that gradients go to (`Outside`).
        cotangents: the constants that stand for the gradients of the results.
        cotangent_forms: their forms.
        reached: per result with a history the inputs that it depends on.
        gradients: per input the output with its gradient and its form; None if it gets none.
    """

    def __init__(self, outputs: dict[int, Any], inputs: list[Any]) -> None:
        self.outputs = list(outputs)
        self._tensors = list(outputs.values())
        self.inputs = inputs
        self.cotangents: list[Any] = []
        self.cotangent_forms: list[Form] = []
        self.gradients: list[tuple[int, Form] | None] = []
        self.reached: list[set[int]] = []

    @staticmethod
    def of(trace: StepTrace, flat: list[Any]) -> History | None:
        """The history of the results ``flat``, if they have any that the step has not used up."""
        outputs: dict[int, Any] = {}
        seen: set[int] = set()
        for position, value in enumerate(flat):
            if not isinstance(value, Ours) or not value.requires_grad or value.is_leaf:
                continue
            if id(value) in seen or value.grad_fn._sequence_nr() < trace.history_begins:
                continue
            if trace.freed and any(n in trace.freed for n, _ in nodes_of([value])):
                continue
            seen.add(id(value))
            outputs[position] = value
        if not outputs:
            return None
        inputs = [
            outside
            for outside in trace.outside.values()
            if outside.requires_grad and isinstance(outside.get(), torch.Tensor)
        ]
        if not inputs:
            return None
        history = History(outputs, inputs)
        history._find_reached(trace)
        return history

    def _find_reached(self, trace: StepTrace) -> None:
        """Which results depend on which inputs.

        Raises:
            DataDependentError: an input was computed from another one before the step: torch's
                backward pass would go through the caller's history.
        """
        tensors = [outside.get() for outside in self.inputs]
        leaves = {id(t): i for i, t in enumerate(tensors) if t.is_leaf}
        inner = {t.grad_fn._sequence_nr(): i for i, t in enumerate(tensors) if not t.is_leaf}

        def reached(tensor: Any, itself: int | None = None) -> set[int]:
            found = {inner[n] for n, _ in nodes_of([tensor]) if n in inner}
            for _, node in nodes_of([tensor]):
                for next_node, _ in node.next_functions:
                    variable = getattr(next_node, "variable", None)
                    if variable is not None and id(variable) in leaves:
                        found.add(leaves[id(variable)])
            return found - {itself}

        for i, tensor in enumerate(tensors):
            if not tensor.is_leaf and reached(tensor, i):
                raise DataDependentError(
                    f"the step's result depends on a tensor of shape {list(tensor.shape)} that was "
                    "computed before the step from another one that it depends on, too: pass it as "
                    "an argument, or compute it inside of the step"
                )
        self.reached = [reached(tensor) for tensor in self._tensors]

    def differentiate(self, trace: StepTrace, template_of: Callable[[Any], Any]) -> None:
        """Run torch's backward pass in the trace; the gradients become outputs of it.

        Args:
            template_of: makes a tensor an output.
        """
        tensors, self._tensors = self._tensors, []
        grads = []
        for tensor in tensors:
            form = _gradient_form(tensor._form if tensor._steps else tensor._storage_.form)
            with thread_state.active(None), jax.ensure_compile_time_eval(), jax.enable_x64(True):
                array = jnp.zeros(form.array_shape, form.jax_dtype, device=form.sharding)
            self.cotangents.append(array)
            self.cotangent_forms.append(form)
            grads.append(new_tensor(array, form))
        inputs = [outside.get() for outside in self.inputs]
        trace.differentiating = True
        try:
            with _without_hooks(inputs):
                found = torch.autograd.grad(
                    tensors, inputs, grads, allow_unused=True, materialize_grads=False
                )
        finally:
            trace.differentiating = False
        for leaf, grad in zip(inputs, found, strict=True):
            if grad is None:
                self.gradients.append(None)
                continue
            grad = _landed(leaf, grad)
            template = template_of(grad)
            self.gradients.append((template.index, template.form))


class _without_hooks:
    """For a block, the hooks of tensors aren't called: they are when the gradient gets there."""

    def __init__(self, tensors: list[Any]) -> None:
        self._tensors = tensors

    def __enter__(self) -> None:
        self._saved = []
        for tensor in self._tensors:
            hooks = tensor._backward_hooks
            if hooks:
                self._saved.append((hooks, dict(hooks)))
                hooks.clear()

    def __exit__(self, *exc_info: object) -> None:
        for hooks, saved in self._saved:
            hooks.update(saved)


def _landed(leaf: Any, grad: Any) -> Any:
    """The gradient in its leaf's layout, as the leaf's own hook would give it."""
    landing = getattr(leaf, "_landing", None)
    hooks = leaf._backward_hooks
    if landing is None or not hooks or landing.id not in hooks:
        return grad
    landed = hooks[landing.id](grad)
    return grad if landed is None else landed


# --- two programs of one -------------------------------------------------------------------------


class Split:
    """A jaxpr in two parts.

    Attributes:
        forward: what doesn't depend on the cotangents: its results, then the residuals.
        residuals: how many those are.
        backward: takes the residuals, the constants in ``constants``, the cotangents.
        constants: which constants of the whole the second part needs, by position.
    """

    def __init__(
        self, jaxpr: Any, cotangents: list[int | None], gradients: list[int], outputs: list[int]
    ) -> None:
        """Args:
        cotangents: which constants stand for the cotangents; None for one that nothing uses.
        gradients, outputs: which outputs are those of the second and first part.
        """
        late = {jaxpr.constvars[i] for i in cotangents if i is not None}
        first, second = [], []
        for equation in jaxpr.eqns:
            if any(not _is_literal(v) and v in late for v in equation.invars):
                late.update(equation.outvars)
                second.append(equation)
            else:
                first.append(equation)
        early = {v for e in first for v in e.outvars}
        needed: dict[Any, None] = {}
        for equation in second:
            needed.update((v, None) for v in equation.invars if not _is_literal(v))
        outvars = [jaxpr.outvars[i] for i in gradients]
        needed.update((v, None) for v in outvars if not _is_literal(v))
        residuals = [v for v in needed if v in early]
        position = {v: i for i, v in enumerate(jaxpr.constvars)}
        self.constants = [position[v] for v in needed if v in position and v not in late]
        self.residuals = len(residuals)
        debug = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        kept = [jaxpr.outvars[i] for i in outputs]
        self.forward = jaxpr.replace(
            eqns=_alive(first, [*kept, *residuals]), outvars=[*kept, *residuals], debug_info=debug
        )
        self.backward = jaxpr.replace(
            constvars=[],
            invars=[
                *residuals,
                *(jaxpr.constvars[i] for i in self.constants),
                *(jaxpr.constvars[i] for i in cotangents if i is not None),
            ],
            eqns=second,
            outvars=outvars,
            debug_info=debug,
        )


def _is_literal(variable: Any) -> bool:
    return isinstance(variable, jax_core.Literal)


def _alive(equations: list[Any], outputs: list[Any]) -> list[Any]:
    """The equations that something needs."""
    needed = {v for v in outputs if not _is_literal(v)}
    kept = []
    for equation in reversed(equations):
        if equation.effects or any(v in needed for v in equation.outvars):
            needed.update(v for v in equation.invars if not _is_literal(v))
            kept.append(equation)
    return kept[::-1]


class WithHistory(torch.autograd.Function):
    """The node that a compiled step is in its caller's history."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Any) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        # torch refuses a second backward pass over it, unless the first has retained the graph.
        ctx.save_for_backward(torch.empty(0))
        return tuple(call.run())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True goes through a compiled step, whose backward pass is a program "
                "that can't be differentiated again: take the gradient inside of the step "
                "(torch.autograd.grad(..., create_graph=True)), or call the step's function eagerly"
            )
        _ = ctx.saved_tensors
        return (None, *ctx.call.backward(list(grads)))


class Call:
    """One call of a program with a history."""

    def __init__(
        self,
        run: Callable[[], list[Any]],
        backward: Callable[[list[Any]], list[Any]],
    ) -> None:
        self.run, self.backward = run, backward


def _gradient_form(form: Form) -> Form:
    """The form of the gradient of a tensor: replicated where that is ``Partial``, as in torch."""
    form = form.reduced()
    if form.mesh is None:
        return form
    placements = unpartial(form.placements or ())
    return form.with_placements(form.mesh, placements)


def cotangent(grad: Any, form: Form) -> Any:
    """The array in ``form`` of a gradient that a result got (None: zeros)."""
    if grad is None:
        return jnp.zeros(form.array_shape, form.jax_dtype, device=form.sharding)
    grad = grad.detach().to(form.dtype)
    if form.mesh is not None:
        grad = as_sharded(grad, form.mesh)
        if grad._steps or grad._form is not form:
            assert form.placements is not None
            grad = move(grad, form.mesh, form.placements)
    elif isinstance(grad, XLAShardedTensor):
        grad = grad.full_tensor()
    if form.varying and grad._form.varying != form.varying:
        assert form.frame is not None
        grad = vary(grad, form.varying, form.frame)
    if form.frame is not None and not grad._steps:
        grad._storage_.place(form.frame)
    return grad.jax_array
