"""`Tracing`: the base of executors that run operations on JAX tracers, in a larger program."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
import torch

from xla_dtensor.base import executor, thread_state
from xla_dtensor.base.numbers.number_functions import number_value
from xla_dtensor.base.numbers.printed import only_shown
from xla_dtensor.base.numbers.python_numbers import is_number
from xla_dtensor.errors import NotInStepError, XlaDTensorError
from xla_dtensor.execution import value_checks
from xla_dtensor.execution.constants import Constants
from xla_dtensor.execution.interfaces import Call, Plan, Slot
from xla_dtensor.execution.on_host import ON_HOST, refuse_varying
from xla_dtensor.execution.recomputation import Recomputation
from xla_dtensor.execution.running import Running, base_of
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import to_host
from xla_dtensor.forms.read import constant_recipe, read, recipe_of_view
from xla_dtensor.forms.storage import Storage
from xla_dtensor.forms.views import is_at_traced, leave_open
from xla_dtensor.tensors.of_form import is_ours, new_tensor, tensor_class


class Tracing(Running):
    """Runs operations on tracers, by the functions of their plans.

    Attributes:
        scalars: what has been computed from scalars: (their arrays, the results), by the plan and
            the identity of the arrays.
        python_numbers: the numbers that Python code has been given, by weak references.
        assertions: what must hold of indices, each as (a summary, what judges by it); None where
            nobody asks.
        asserted: likewise what the program says itself (``torch._assert_async``).
    """

    is_step = True
    has_values = False
    scalars: dict[Any, Any]
    python_numbers: list[Any]

    @property
    def trace(self) -> Any:
        return self

    @property
    def assertions(self) -> list[Any] | None:
        return None

    @property
    def asserted(self) -> list[Any] | None:
        return None

    def joins(self, call: Call) -> bool:
        return False  # inputs of a step stay on their devices

    def place(self, storage: Any, frame: Any) -> None:
        """In a program everything is on its devices."""

    def moving(self, storage: Any) -> NoReturn:
        raise AssertionError("placed while a step is traced")  # captured state goes by its array

    def convert(
        self, tensor: Any, form: Form, conversion: Any, traced: Callable[[Any], Any]
    ) -> Any:
        array = read(tensor)
        with self.scope():
            value = traced(array)
        return new_tensor(value, form)

    def is_copy(self, tensor: Any, of: Any) -> None:
        recipe = None if tensor._form.unreduced else self._recipe(of)
        if recipe is not None:
            self.knows(tensor._storage_, recipe)

    def new_array(self, form: Form, eager: Any, traced: Callable[[Any], Any]) -> Any:
        return traced(self)

    def not_in_step(self, message: str, kind: Any = None) -> NoReturn:
        if kind is not None:
            raise kind(message)
        self.refuse_with(NotInStepError(message))

    def refuse_with(self, error: XlaDTensorError) -> NoReturn:
        """Refuse what is traced."""
        raise error

    # --- asked of tensors' values -------------------------------------------------------------

    def refuse(self, what: str, way: str = "") -> NoReturn:
        raise NotImplementedError

    def on_host(self, tensor: Any) -> Any:
        refuse_varying(tensor._form, ON_HOST)
        recipe = constant_recipe(tensor)
        return self.traced_on_host(tensor) if recipe is None else to_host(recipe())

    def traced_on_host(self, tensor: Any) -> Any:
        """`on_host` of a tensor whose value depends on the program's inputs."""
        self.refuse(f"the value of a tensor of shape {list(tensor.shape)} on the host")

    def item(self, tensor: Any) -> Any:
        if constant_recipe(tensor) is None:
            return self.traced_item(tensor)
        return super().item(tensor)

    def has_text(self, tensor: Any, frame: Any) -> bool | None:
        if constant_recipe(tensor) is not None or self.can_fetch(tensor):
            # What is only printed is no reason to look at what a step finds on the devices.
            return None if only_shown(frame, in_errors=False) else True
        if not only_shown(frame):
            node = tensor.grad_fn
            of = "" if node is None else f", of {node.name()}"
            self.refuse(
                f"Text of a tensor of shape {list(tensor.shape)} ({tensor.dtype}{of})",
                "Make text of it outside: return the tensor from the step, and format it after the "
                "call. What is only printed or logged (print(x), log.info(...), the message of an "
                "error) shows its shape",
            )
        return None

    def traced_item(self, tensor: Any) -> Any:
        """`item` of a tensor whose value depends on the program's inputs."""
        self.refuse(executor.ITEM)

    def gave_number(self, number: Any) -> None:
        self.python_numbers.append(weakref.ref(number))

    def random_key(self) -> Any:
        """A fresh JAX PRNG key for a random operation."""
        raise NotImplementedError

    def scope(self) -> Any:
        """A context in which what is traced has the name of the module that it is for."""
        return executor.NOTHING

    def constant(self, form: Form, value: Any, like: bool) -> Any:
        """A storage for a new tensor filled with ``value``, or None to compute it as usual.

        Args:
            like: whether it is made like another one (``zeros_like``).
        """
        return None

    # --- running operations -------------------------------------------------------------------

    def look(self, checked: tuple[Any, ...], call: Call) -> None:
        value_checks.trace(checked, call, self)

    def perform(self, plan: Plan, call: Call) -> Any:
        filled = call.filled_with()
        if filled is not None and plan.run is not None:
            form = plan.result_forms[0]
            assert form is not None
            storage = self.constant(form, filled, "_like." in call.info.name)
            if storage is not None:
                return tensor_class(form)(storage, form)
        if not plan.mutated or plan.grows or plan.run is None:
            return super().perform(plan, call)
        constants = self._constants(plan, call)  # of what was there before
        out = super().perform(plan, call)
        if constants is not None:
            first = len(plan.result_forms) - plan.result_forms.count(None)
            for position, i in enumerate(plan.mutated, first):
                self.knows(call.leaves[i]._storage_, functools.partial(constants.array, position))
        return out

    def compute(self, plan: Plan, call: Call) -> Iterable[Any]:
        leaves = [
            number_value(leaf)
            if not isinstance(form, Form)
            else read(leaf)
            if is_ours(leaf)
            else self.host_tensor(leaf)
            for leaf, form in zip(call.leaves, call.forms, strict=True)
        ]
        mutated = [call.leaves[i] for i in plan.mutated]
        bases = [base_of(t, self.array_of(t._storage_)) if t._steps else None for t in mutated]
        if plan.of_scalars:
            return self._of_scalars(plan, call, leaves, bases)
        formula = self.wide is not None and thread_state.is_in_formula()
        if formula and any(getattr(x, "dtype", None) == np.float64 for x in leaves):
            leaves = list(map(self.wide.as_computed, leaves))
        return self._traced(plan, leaves, bases)

    def _traced(self, plan: Plan, leaves: list[Any], bases: list[Any]) -> list[Any]:
        with jax.enable_x64(True), self.scope():
            arrays: list[Any] = plan.run.in_trace(self, leaves, bases)
        return arrays

    def _of_scalars(self, plan: Plan, call: Call, leaves: list[Any], bases: list[Any]) -> list[Any]:
        """Of many parameters the step counts are one array; what is made of them is made once."""
        # repr: 0.0 == -0.0 and 1 == True, and their results differ.
        key = (plan, *(repr(x) if isinstance(x, _NUMBERS) else id(x) for x in leaves))
        known = self.scalars.get(key)
        if known is not None:
            return known[1]
        alike = _of_one(call, leaves)
        if alike is not None:
            known = self.scalars.get(alike)
            if known is not None:
                return known[1] * len(call.args[0])
        given = leaves
        if self.wide is not None:
            with jax.enable_x64(True):
                given = list(map(self.wide.widened, leaves))
        arrays = self._traced(plan, given, bases)
        self.scalars[key] = leaves, arrays  # the leaves, so that their ids stay theirs
        one = list(arrays[:1])
        same = all(array is one[0] for array in arrays)
        if alike is not None and same and one and len(arrays) == len(call.args[0]):
            self.scalars[alike] = leaves, one
        return arrays

    def tensors(self, plan: Plan, call: Call, arrays: Iterator[Any]) -> list[Any]:
        results = super().tensors(plan, call, arrays)
        constants = None if plan.run is None or plan.mutated else self._constants(plan, call)
        if constants is not None:
            made = (tensor for tensor in results if tensor is not None)
            for position, tensor in enumerate(made):
                self.knows(tensor._storage_, functools.partial(constants.array, position))
        return results

    def recipe_of(self, storage: Storage) -> Any:
        """What gives a storage's value outside of the trace (`Storage.recipe`), or None."""
        return storage.recipe

    def _recipe(self, tensor: Any) -> Any:
        return recipe_of_view(self.recipe_of(tensor._storage_), tensor)

    def knows(self, storage: Storage, recipe: Any) -> None:
        """What gives the value that a storage has now is known."""
        storage.recipe = recipe

    def _constants(self, plan: Plan, call: Call) -> Constants | None:
        """What the results and the writes are, if they depend on no input of the step.

        `nn.TransformerEncoder` looks at a mask that it has made of sizes, attention at masks of all
        libraries, and contrastive losses take what a mask without the diagonal selects.
        """
        if not plan.run.is_of_values:
            return None
        recipes: list[Any] = []
        for leaf in call.leaves:
            if is_ours(leaf):
                reads = not plan.run.reads_nothing  # of what `torch.ones_like` is given, the shape
                recipe = self._recipe(leaf) if reads else functools.partial(_same, None)
            elif isinstance(leaf, torch.Tensor):
                recipe = self.host_constant(leaf)
            elif is_number(leaf):
                # The node, since the step's Python must have dropped the number itself at its end.
                recipe = functools.partial(functools.cache(functools.partial(_kept, leaf.node)))
            elif type(leaf) in _NUMBERS:  # a subclass's is an input of the program
                recipe = functools.partial(_same, leaf)
            else:
                recipe = None
            if recipe is None:
                return None
            recipes.append(recipe)
        bases: list[Any] = []
        written_to = [call.leaves[i] for i in plan.mutated]
        if len({id(tensor._storage_) for tensor in written_to}) < len(written_to):
            return None
        for written in written_to:
            recipe = self.recipe_of(written._storage_)
            if recipe is None or is_at_traced(written._steps):
                return None
            bases.append((recipe, leave_open(written._steps)[1]))
        forms = (form for form in (*plan.result_forms, *plan.base_forms) if form is not None)
        if any(form.varying or form.unreduced for form in forms):
            return None
        constants = Constants(plan, recipes, bases)
        # Beside numbers that are inputs nothing is constant; beside state, of whose values the
        # program is one, they may be kept.
        return None if any(map(is_number, call.leaves)) and not constants.state else constants


_NUMBERS = (bool, int, float, complex)


class TracingProgram(Tracing):
    """A trace that tells what it has made from what was there before."""

    def __init__(self) -> None:
        self._owned: dict[int, weakref.ref[Storage]] = {}
        # What is computed again in the backward pass, innermost last.
        self._recomputed: list[Recomputation] = []
        self._latest: Any = None  # the tracer that was made last

    def created(self, storage: Storage) -> None:
        key = id(storage)

        def gone(_: Any) -> None:
            self._owned.pop(key, None)

        self._owned[key] = weakref.ref(storage, gone)
        if isinstance(storage.array, jax.core.Tracer):
            self._latest = storage.array
        if self._recomputed:
            self._recomputed[-1].made.add(key)

    def owns(self, storage: Storage) -> bool:
        """Whether the storage was made in the trace."""
        reference = self._owned.get(id(storage))
        return reference is not None and reference() is storage

    def left_behind(self) -> list[Storage]:
        """The storages made in the trace that still exist."""
        storages = [reference() for reference in list(self._owned.values())]
        return [s for s in storages if s is not None]

    def begin_recomputation(self) -> None:
        self._recomputed.append(Recomputation(self._latest))

    def end_recomputation(self) -> None:
        self._recomputed.pop()


def _of_one(call: Call, leaves: list[Any]) -> Any:
    """What a call on lists does, if it does the same to one scalar again and again: the step counts
    of two groups of parameters, whose lists have other lengths."""
    is_list = call.args and isinstance(call.args[0], list)
    if not is_list or call.kwargs or not call.info.name.startswith("aten::_foreach_"):
        return None

    def text(value: Any) -> Any:
        if not isinstance(value, Slot):
            return repr(value)
        leaf = leaves[value.index]
        return repr(leaf) if isinstance(leaf, _NUMBERS) else id(leaf)

    parts: list[Any] = []
    for value in call.args:
        texts = set(map(text, value)) if isinstance(value, list) else {text(value)}
        if len(texts) != 1:
            return None
        parts.append((isinstance(value, list), *texts))
    return (call.info.name, *parts)


def _same(value: Any) -> Any:
    return value


def _kept(node: Any) -> Any:
    """The value of a number that is an input, with which the program then is for that value."""
    node.guard(node, "==", node.value)
    return node.value
