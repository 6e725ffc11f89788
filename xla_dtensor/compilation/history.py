"""Results of a compiled step that have a history: their gradient is a second program.

A step that computes a loss, or a model's output, and leaves ``backward()`` to its caller. Its trace
ends with torch's own backward pass over what it has recorded, from gradients that are inputs. What
of the traced operations depends on those inputs is the second program; the rest is the first, which
also returns what the second one needs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend import core as jax_core
from torch.distributed.tensor.placement_types import Partial, Replicate

from xla_dtensor.base import thread_state
from xla_dtensor.compilation.trace import READ, StepTrace, nodes_of
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.storage import Storage
from xla_dtensor.movement.redistribute import as_sharded, move
from xla_dtensor.movement.vary import vary
from xla_dtensor.tensors.of_form import new_tensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


class History:
    """The gradients of a step's results with respect to tensors from outside.

    Attributes:
        outputs: the templates of the tensors that have a history.
        inputs: the tensors that gradients go to (`Outside`).
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
        if not value.requires_grad or value.is_leaf:
            return False
        trace = self._trace
        if value.grad_fn._sequence_nr() < trace.history_begins:
            return False
        return not (trace.freed and any(n in trace.freed for n, _ in nodes_of([value])))

    def add(self, template: Any, tensor: Any) -> None:
        """``tensor``, which later calls make from ``template``, has a history."""
        if not any(template is known for known in self.outputs):
            self.outputs.append(template)
            self._tensors.append(tensor)

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
        leaves = {id(t): i for i, t in enumerate(tensors) if t.is_leaf}
        inner = {t.grad_fn._sequence_nr(): i for i, t in enumerate(tensors) if not t.is_leaf}

        def reached(tensor: Any, itself: int | None = None) -> set[int]:
            found = {inner[n] for n, _ in nodes_of([tensor]) if n in inner}
            found |= {leaves[id(v)] for v in _variables_of(tensor) if id(v) in leaves}
            return found - {itself}

        for i, tensor in enumerate(tensors):
            if not tensor.is_leaf and reached(tensor, i):
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
            form = _gradient_form(tensor._form if tensor._steps else tensor._storage_.form)
            with thread_state.active(None), jax.ensure_compile_time_eval(), jax.enable_x64(True):
                array = jnp.zeros(form.array_shape, form.jax_dtype, device=form.sharding)
            self.cotangents.append(array)
            self.cotangent_forms.append(form)
            grads.append(new_tensor(array, form))
        inputs = [outside.get() for outside in self.inputs]
        trace.differentiating, trace.shown = True, shown
        try:
            with _without_hooks(inputs):
                found = self._gradients(tensors, inputs, grads)
        finally:
            trace.differentiating = False
        for leaf, grad in zip(inputs, found, strict=True):
            if grad is None:
                self.gradients.append(None)
                continue
            grad = _landed(leaf, grad)
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
            if MODIFIED not in str(error):
                raise
        # The step has overwritten what the backward pass from some of them needs (its optimizer
        # has): that is an error when the caller begins one there, as under torch.
        for i in everything:
            try:
                of([i])
            except RuntimeError as error:
                if MODIFIED not in str(error):
                    raise
                self.errors[i] = str(error)
        rest = [i for i in everything if i not in self.errors]
        return of(rest) if rest else [None] * len(inputs)


# Torch's error for a value that a backward pass needs and that isn't there any more.
MODIFIED = "modified by an inplace operation"


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
    end = None if root.grad_fn is None else root.grad_fn._sequence_nr()
    node = view.grad_fn
    while node is not None:
        if end is None and getattr(node, "variable", None) is root:
            return True
        if end is not None and node._sequence_nr() == end:
            return True
        before = [n for n, _ in node.next_functions if n is not None]
        if isinstance(node, torch._C._FunctionBase) or len(before) != 1:
            return False
        node = before[0]
    return False


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
        reads, reads_constants: the marks (`StepTrace.reads`), and the constants, whose values the
            gradients depend on; each with the cotangents by way of which.
    """

    def __init__(
        self, jaxpr: Any, cotangents: list[int | None], gradients: list[int], outputs: list[int]
    ) -> None:
        """Args:
        cotangents: which constants stand for the cotangents; None for one that nothing uses.
        gradients, outputs: which outputs are those of the second and first part.
        """
        stand_ins = {jaxpr.constvars[c]: i for i, c in enumerate(cotangents) if c is not None}
        self._find_reads(jaxpr, stand_ins, [jaxpr.outvars[i] for i in gradients])
        jaxpr = _without_marks(jaxpr)
        late = set(stand_ins)
        first, second = [], []
        for equation in jaxpr.eqns:
            if any(not _is_literal(v) and v in late for v in equation.invars):
                late.update(equation.outvars)
                second.append(equation)
            else:
                first.append(equation)
        outvars = [jaxpr.outvars[i] for i in gradients]
        second = [*_moves(jaxpr.constvars, first, [*second, outvars]), *second]
        made = {v for e in second for v in e.outvars}
        early = {v for e in first for v in e.outvars} - made
        needed: dict[Any, None] = {}
        for equation in second:
            needed.update((v, None) for v in equation.invars if not _is_literal(v))
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

    def _find_reads(self, jaxpr: Any, stand_ins: dict[Any, int], gradients: list[Any]) -> None:
        """Where values meet cotangents on the way to ``gradients``."""
        marks: dict[Any, set[int]] = {}
        through: dict[Any, set[int]] = {v: {i} for v, i in stand_ins.items()}
        position = {v: i for i, v in enumerate(jaxpr.constvars)}
        self.reads: dict[int, set[int]] = {}
        self.reads_constants: dict[int, set[int]] = {}

        def met(variable: Any, cotangents: set[int]) -> None:
            for mark in marks.get(variable, ()):
                self.reads.setdefault(mark, set()).update(cotangents)
            if variable in position and variable not in through:
                self.reads_constants.setdefault(position[variable], set()).update(cotangents)

        for equation in _alive(jaxpr.eqns, gradients):
            inputs = [v for v in equation.invars if not _is_literal(v)]
            cotangents = set().union(*(through.get(v, ()) for v in inputs))
            if cotangents:
                for variable in inputs:
                    met(variable, cotangents)
                through.update((v, cotangents) for v in equation.outvars)
                continue
            mark = _mark_of(equation)
            found = set().union(*(marks.get(v, ()) for v in inputs))
            found |= set() if mark is None else {mark}
            if found:
                marks.update((v, found) for v in equation.outvars)
        for variable in gradients:
            if not _is_literal(variable):
                met(variable, through.get(variable, set(stand_ins.values())))


# What only puts a value in another order, or repeats it.
_MOVES = frozenset(
    {"transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "sharding_constraint"}
)


def _moves(constants: list[Any], equations: list[Any], users: list[Any]) -> list[Any]:
    """The equations that give ``users`` transposed parameters and the like: done again in the
    second part, or each call would keep a copy of all parameters for its backward pass.

    Args:
        constants: the variables that are there anyway.
        users: equations, or lists of variables.
    """
    there, movable = set(constants), dict[Any, Any]()
    for equation in equations:
        inputs = [v for v in equation.invars if not _is_literal(v)]
        if equation.primitive.name in _MOVES and there.issuperset(inputs):
            there.update(equation.outvars)
            movable.update((v, equation) for v in equation.outvars)
    needed: set[int] = set()
    stack = [v for user in users for v in getattr(user, "invars", user)]
    while stack:
        variable = stack.pop()
        equation = None if _is_literal(variable) else movable.get(variable)
        if equation is not None and id(equation) not in needed:
            needed.add(id(equation))
            stack += equation.invars
    return [equation for equation in equations if id(equation) in needed]


def _mark_of(equation: Any) -> int | None:
    """The number of the mark that an equation is, or None."""
    name = equation.params.get("name")
    if equation.primitive.name == "name" and name.startswith(READ):
        return int(name.removeprefix(READ))
    return None


def _without_marks(jaxpr: Any) -> Any:
    """The same with the values in place of their marks."""
    values: dict[Any, Any] = {}

    def value(variable: Any) -> Any:
        return variable if _is_literal(variable) else values.get(variable, variable)

    kept = []
    for equation in jaxpr.eqns:
        invars = list(map(value, equation.invars))
        if _mark_of(equation) is None:
            kept.append(equation.replace(invars=invars))
        else:
            values[equation.outvars[0]] = invars[0]
    return jaxpr.replace(eqns=kept, outvars=list(map(value, jaxpr.outvars)))


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
        results = call.run()
        ctx.backward_of = call.backward
        ctx.set_materialize_grads(False)
        # What the backward pass needs is there as long as torch keeps this: torch lets it go after
        # a backward pass, unless that retains the graph, and refuses a second one.
        token = torch.empty(0)
        token.kept = call.kept
        ctx.save_for_backward(token)
        # Hooks on saved tensors may give another tensor back.
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        ctx.kept = call.kept if hooked else None
        call.kept = None
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True goes through a compiled step, whose backward pass is a program "
                "that can't be differentiated again: take the gradient inside of the step "
                "(torch.autograd.grad(..., create_graph=True)), or call the step's function eagerly"
            )
        (token,) = ctx.saved_tensors
        kept = getattr(token, "kept", ctx.kept)
        return (None, *ctx.backward_of(kept, list(grads)))


class OnHost:
    """A CPU tensor as memory that is read: what torch counts of the writes to it."""

    __slots__ = ("form",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.form = tensor

    @property
    def version(self) -> int:
        return 0 if self.form.is_inference() else self.form._version


class Read:
    """Memory that the backward pass reads, and others may write to before.

    Attributes:
        storage: the memory.
        outputs: the outputs whose gradients come by its value.
        tensor: the one through which torch would read it, if that is one from outside: it may move
            to other memory, and torch would take the value there.
    """

    __slots__ = ("outputs", "storage", "tensor")

    def __init__(self, storage: Storage | OnHost, outputs: set[int], tensor: Any) -> None:
        self.storage, self.outputs, self.tensor = storage, outputs, tensor


_version, _storage = operator.attrgetter("version"), operator.attrgetter("storage")


class Kept:
    """What the backward pass of one call needs.

    Attributes:
        residuals: the arrays.
    """

    __slots__ = ("_reads", "_versions", "residuals")

    def __init__(self, residuals: list[Any], reads: list[Read]) -> None:
        self.residuals, self._reads = residuals, reads
        self._versions = list(map(_version, map(_storage, reads)))

    def check(self, grads: list[Any]) -> None:
        """Refuse a backward pass from ``grads`` that needs what has been overwritten.

        Raises:
            RuntimeError: it does.
        """
        for read, version in zip(self._reads, self._versions, strict=True):
            storage = read.storage
            same = storage.version == version
            if same and (read.tensor is None or read.tensor._storage_ is storage):
                continue
            if any(grads[i] is not None for i in read.outputs):
                what = MODIFIED if not same else "given other memory (.data = or set_)"
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been {what}: "
                    f"a tensor of shape {list(storage.form.shape)}, since the compiled step ran "
                    "whose result is differentiated"
                )


class Call:
    """One call of a program with a history, until it is a node.

    Attributes:
        run: gives the results that have a history.
        backward: the gradients of the inputs, from what was kept and the results' gradients.
        kept: what the backward pass needs, once it has run.
    """

    def __init__(
        self,
        run: Callable[[Call], list[Any]],
        backward: Callable[[Kept, list[Any]], list[Any]],
    ) -> None:
        self._run, self.backward = run, backward
        self.kept: Kept | None = None

    def run(self) -> list[Any]:
        return self._run(self)


def _gradient_form(form: Form) -> Form:
    """The form of the gradient of a tensor: replicated where that is ``Partial``, as in torch."""
    form = form.reduced()
    if form.mesh is None:
        return form
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in form.placements or ())
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
