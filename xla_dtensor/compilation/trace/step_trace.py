"""The trace of a training step: the executor that records which values it reads and writes.

The step's Python runs once, on JAX tracers. Arrays that it touches become inputs of the program,
found by identity among the constants of the traced jaxpr; what it overwrote or left behind becomes
outputs. Nothing has to be declared.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.ad_checkpoint import checkpoint_name

from xla_dtensor.base import assertions, executor, thread_state
from xla_dtensor.base.jax_private import convert_element_type
from xla_dtensor.base.numbers.printed import marked
from xla_dtensor.base.numbers.valueless_number import valueless_number
from xla_dtensor.base.numbers.wide_scalars import WideScalars
from xla_dtensor.base.random import rng
from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.torch_private import sequence_number, unseen
from xla_dtensor.base.torch_private.attributes import is_leaf, is_view, sequence_number_of
from xla_dtensor.base.torch_private.dispatch_keys import making_history
from xla_dtensor.compilation.trace import external_storages, first_calls
from xla_dtensor.compilation.trace.assertions import TraceAssertions
from xla_dtensor.compilation.trace.backward_passes import BackwardPasses
from xla_dtensor.compilation.trace.doubles import StandIns
from xla_dtensor.compilation.trace.external_storages import ExternalStorage
from xla_dtensor.compilation.trace.external_tensors import ExternalTensor
from xla_dtensor.compilation.trace.graph import nodes_of
from xla_dtensor.compilation.trace.items import TracedItems
from xla_dtensor.compilation.trace.module_scopes import ModuleScopes
from xla_dtensor.compilation.trace.numbers_of_trace import TraceNumbers
from xla_dtensor.compilation.trace.state_values import StateValue, recipe_of_state
from xla_dtensor.dispatch import dispatch
from xla_dtensor.errors import DataDependentError, UnsupportedOpError, XlaDTensorError
from xla_dtensor.execution.constants import state_of
from xla_dtensor.execution.tracing import TracingProgram
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.read import logical_value
from xla_dtensor.forms.storage import Storage, next_version
from xla_dtensor.mesh import Frame
from xla_dtensor.plans.ops import info_of
from xla_dtensor.runtime import arrays
from xla_dtensor.runtime.abstract_array import AbstractArray, traced
from xla_dtensor.tensors.base import grad_of, set_grad_of
from xla_dtensor.tensors.of_form import is_ours, new_tensor
from xla_dtensor.tensors.printing import print_options

# What marks of reads are called, in front of their number.
READ = "xla_dtensor reads "


class StepTrace(TracingProgram):
    """The trace of one step; see `base.executor.Executor` for what it is told and asked."""

    def __init__(self, leaves: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        # Flags and gradients, before the trace, of the tensors that the step can reach by name.
        self.before = {id(t): (t, ExternalTensor(t)) for t in leaves}
        self.optimizer_hooks: Any = None
        self.captured: list[ExternalStorage] = []
        self._captured_by_id: dict[int, ExternalStorage] = {}
        self._uses = 0
        # CPU tensors that take part, by id and version: (the tensor, its array, the source).
        self.host_arrays: dict[tuple[int, int, int], tuple[Any, Any, Any]] = {}
        self.numbers = TraceNumbers()
        self.items = TracedItems(self.refuse)
        self.must_hold = TraceAssertions(checks_indices=assertions.asked())
        self.stand_ins = StandIns()
        # The numbers that the step's Python has been given or has computed.
        self.python_numbers: list[weakref.ref[Any]] = []
        self.settings: dict[Callable[[], Any], tuple[Any, str]] = {}
        self._settle: dict[Callable[[], Any], executor.Settle] = {}
        self._print_options = print_options()  # the step may set them before it makes text
        # What puts settings that the step leaves otherwise where it would find them in later calls.
        self.settling: list[Callable[[], bool]] = []
        self.outside: dict[int, ExternalTensor] = {}
        self.frame: Frame | None = None
        self._taken_along: list[tuple[Storage, Form, Form]] = []
        self.random = thread_state.RandomNumbers(*rng.position(), self.refuse)
        self.rng_words = jax.device_put(rng.words())
        self._array_ids: set[int] = set()
        self._begins = next_version()
        self.loop_begins = 0  # the version at which the loop body that is being traced began
        self.optimizer_depth = 0
        # Scalars by their operands, so that equal ones are computed once: the step counts of 600
        # parameters, and an optimizer's factors from them.
        self.scalars: dict[Any, Any] = {}
        self._wide = WideScalars()
        self.refused: XlaDTensorError | None = None  # the latest of `refuse`
        self._modules = ModuleScopes()
        self.passes = BackwardPasses()
        self._accumulates = False  # whether a backward pass has added to leaves' gradients
        # Scalars whose item an optimizer's formula has asked for: (the array, the number), by id.
        self._items: dict[int, tuple[Any, Any]] = {}
        self.history_begins = sequence_number()
        self.freed: set[int] = set()
        self.differentiating = False
        # Memory that the backward pass will read, and the user may write to before it, by the
        # number of the mark: the storage, and the tensor from outside through which it is read.
        self.reads: list[tuple[Storage | torch.Tensor | int, ExternalTensor | None]] = []
        self.shown: set[int] = set()
        self._marked: dict[tuple[int, int], tuple[Any, Any]] = {}
        # Arrays that rest in the host's memory, and what has been fetched of them, by id.
        self._in_devices: dict[int, tuple[Any, Any]] = {}
        self.host: Any = None
        # The storages, by id, whose values the host isn't given before the step: arguments' and
        # gradients', which are others in later calls, and those of parameters, which training
        # changes: what is computed of them would be computed on the host, too, in each call.
        self.not_fetched: set[int] = set()
        for tensor, outside in self.before.values():
            self._keep_on_devices(tensor, outside)
        # What gives the value of what the step has computed of state alone, by the version.
        self._recipes: dict[int, Any] = {}
        self._state: list[StateValue] = []

    @property
    def routes(self) -> tuple[Any, ...]:  # type: ignore[override]
        return (self._with_numbers, self._at_position)

    def _with_numbers(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call with the numbers that doubles in torch's C++ stand for."""
        if not self.stand_ins:
            return NotImplemented
        restore = self.stand_ins.restore
        restored = [restore(value) for value in args]
        named = {name: restore(value) for name, value in kwargs.items()}
        old, new = (*args, *kwargs.values()), (*restored, *named.values())
        if all(a is b for a, b in zip(old, new, strict=True)):
            return NotImplemented
        return dispatch(func, restored, named)

    def _at_position(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A view at a position that is an input."""
        info = info_of(func)
        if info.view is None or self.positions is None:
            return NotImplemented
        return self.positions.view(info, args, kwargs, dispatch)

    # --- what dispatch reports ---------------------------------------------------------------

    def array_of(self, storage: Storage, tensor: Any = None) -> Any:
        array = storage.array
        if not self.owns(storage):
            captured = self._use(storage)
            if tensor is not None:
                with unseen():
                    self._touched(tensor)
            array = storage.array  # another one, if two storages had one
            if captured.is_written_by_others():
                array = captured.array  # which is the input
        if isinstance(array, AbstractArray):
            array = traced(array)
        if storage.form.memory is not None:
            array = self._fetched(storage.form, array)
        if self.differentiating and (id(storage) in self.shown or not self.owns(storage)):
            array = self._mark(storage, array, tensor)
        if self._recomputed:
            array = self._recomputed[-1].barred(storage, array)
        return array

    def _fetched(self, form: Form, array: Any) -> Any:
        """What rests in another memory, in the devices' own: once, before anything is done with it
        (libtpu ends the process on a barrier in front of a copy from the host)."""
        known = self._in_devices.get(id(array))
        if known is None or known[0] is not array:
            with self.scope():
                fetched = form.fetched(array)
            known = self._in_devices[id(array)] = array, fetched
        return known[1]

    def _mark(self, storage: Storage | torch.Tensor, array: Any, tensor: Any) -> Any:
        """``array`` behind an equation that does nothing, and says that the backward pass reads
        ``storage`` (a CPU tensor itself) through ``tensor``."""
        outside = self.outside.get(id(tensor))
        if outside is not None and outside.get() is not tensor:
            outside = None  # a view, which keeps its memory if its base gets other memory
        key = id(array), id(outside)
        known = self._marked.get(key)
        if known is None:
            marked = checkpoint_name(array, f"{READ}{len(self.reads)}")
            # Memory that the step made by its id: the results that show it are known at the end.
            self.reads.append((id(storage) if self.owns(storage) else storage, outside))
            known = self._marked[key] = array, marked
        return known[1]

    def touched(self, tensor: Any) -> None:
        storage = getattr(tensor, "_storage_", None)
        if storage is not None and self.owns(storage):
            return
        with unseen():
            self._touched(tensor)

    def _touched(self, tensor: Any) -> None:
        known = self.outside.get(id(tensor))
        if known is None or known.get() is not tensor:
            # Not of `fully_shard`'s sums, which are no tensors.
            is_tensor = isinstance(tensor, torch.Tensor)
            asks = is_tensor and tensor.requires_grad and is_view(tensor)
            with making_history() if asks else executor.NOTHING:
                met = self._met(tensor)
            if met is None:
                return
            self._keep_on_devices(tensor, met)
            if self.optimizer_depth:
                met.only_optimizer = True
            self.outside[id(tensor)] = known = met
        known.only_moved = False
        if tensor.requires_grad != known.requires_grad:
            known.switched = True

    def moves(self, tensor: Any, value: Any) -> None:
        if id(tensor) not in self.outside and is_ours(value) and self.owns(value._storage_):
            self.touched(tensor)
            known = self.outside.get(id(tensor))
            if known is not None:
                known.only_moved = True

    def _keep_on_devices(self, tensor: Any, outside: ExternalTensor) -> None:
        for each in (tensor if outside.requires_grad else None, outside.grad):
            if is_ours(each):
                self.not_fetched.add(id(each._storage_))

    def _met(self, tensor: Any) -> ExternalTensor | None:
        """A tensor that wasn't used before; None if it is one that the step made."""
        if tensor.requires_grad and not is_leaf(tensor) and self._made_here(tensor):
            return None
        known_before = self.before.get(id(tensor))
        if known_before is None or known_before[0] is not tensor:
            return ExternalTensor(tensor)
        outside = known_before[1]
        if outside.grad is not None and grad_of(tensor) is None:
            outside.cleared = True
        return outside

    def reads_grad(self, tensor: Any) -> None:
        self.touched(tensor)
        known = self.outside.get(id(tensor))
        if known is not None:
            known.asks_grad = True

    def sets_grad(self, tensor: Any) -> None:
        known = self.outside.get(id(tensor))
        matters = known is not None and self._grad_matters(known)
        self.reads_grad(tensor)
        known = self.outside.get(id(tensor))
        if known is not None:
            known.cleared |= not matters

    def _grad_matters(self, outside: ExternalTensor) -> bool:
        """Whether the step may have looked at a leaf's gradient so far, or added to it (a backward
        pass to some leaf is taken for one to all: it says only where it begins)."""
        storage = getattr(outside.grad, "_storage_", None)
        seen = outside.asks_grad or (storage is not None and self.uses(storage))
        return seen or self._accumulates

    def _made_here(self, tensor: Any) -> bool:
        """Whether a tensor that has a history is a view that the step made."""
        return sequence_number_of(tensor.grad_fn) >= self.history_begins

    def writing(self, storage: Storage) -> None:
        if storage.version < self.loop_begins:
            raise UnsupportedOpError(
                f"scan_layers: a layer writes to a tensor of shape {list(storage.form.shape)} from "
                "outside (a buffer, as BatchNorm does; an argument), which a loop over layers "
                "can't; run them one by one"
            )
        if not self.owns(storage):
            self._use(storage).writing()

    # The backward program adds no assertions: the forward pass has checked the same indices.

    @property
    def assertions(self) -> list[Any] | None:
        return None if self.differentiating else self.must_hold.of_indices

    @property
    def asserted(self) -> list[Any] | None:
        return None if self.differentiating else self.must_hold.own

    def depends_on(self, read: Callable[[], Any], text: str, settle: executor.Settle) -> None:
        if read not in self.settings:
            found = self._print_options if read is print_options else read()
            self.settings[read], self._settle[read] = (found, text), settle

    def note_left(self) -> None:
        """Note what the step leaves of what it depends on."""
        self.settling = [
            functools.partial(self._settle[read], found, left)
            for read, (found, _) in self.settings.items()
            if found != (left := read())
        ]

    @property
    def wide(self) -> WideScalars | None:
        """Scalars in double precision. An optimizer that runs eagerly computes with Python's floats
        what becomes of step counts; ``1 - beta**step`` in float32 would have three digits."""
        return self._wide if self.optimizer_depth else None

    def scope(self) -> Any:
        """A context that gives operations of the trace the name of their module."""
        return self.passes.scope(self._modules.scope(self.optimizer_depth > 0))

    def random_key(self) -> Any:
        key = rng.key_of(self.rng_words, self.random_operations())
        self.random.advance()
        return key

    def random_operations(self) -> int:
        """By how much the step moves the generator."""
        return self.random.counter - self.random.start

    def host_tensor(self, tensor: torch.Tensor) -> Any:
        array = self._host_array(tensor)[1]
        return self._mark(tensor, array, None) if self.differentiating else array

    def host_constant(self, tensor: torch.Tensor) -> Callable[[], Any] | None:
        _, array, source = self._host_array(tensor)
        return functools.partial(_as_constant, array) if source is None else None

    def made_of_constants(self, tensor: torch.Tensor) -> torch.Tensor:
        self.host.knows(tensor)
        return tensor

    @contextlib.contextmanager
    def making_state(self) -> Iterator[None]:
        self.optimizer_depth += 1
        try:
            yield
        finally:
            self.optimizer_depth -= 1

    def made_with(self, tensor: Any) -> Any:
        captured = self._captured_by_id.get(id(tensor._storage_))
        if captured is None or captured.storage is not tensor._storage_:
            return None
        return None if captured.fill_value is None else new_tensor(captured.array, captured.form)

    def _host_array(self, tensor: torch.Tensor) -> tuple[Any, Any, Any]:
        self.host.take_writes()
        # Inference tensors have no version counter: each use gets a number of its own.
        version = -1 - len(self.host_arrays) if tensor.is_inference() else tensor._version
        key = id(tensor), version, self.host.uncounted
        known = self.host_arrays.get(key)
        if known is None or known[0] is not tensor:
            source = self.host.use(tensor)
            with executor.running_at_once(), jax.ensure_compile_time_eval(), jax.enable_x64(True):
                array = jnp.asarray(to_numpy(tensor))
            known = self.host_arrays[key] = (tensor, array, source)
        return known

    def traced_item(self, tensor: Any) -> Any:
        """In the formulas of torch's optimizers a number without a present value, which goes into
        operations as the learning rate does."""
        floating = tensor.dtype.is_floating_point and not tensor._form.varying
        if not thread_state.is_in_formula() or not floating:
            recipe = self._recipe(tensor)
            if recipe is None:
                return self._pending_item(tensor)
            return self.host.fetched_item(recipe, self._asked_of(tensor, recipe))
        array = logical_value(tensor).reshape(())
        known = self._items.get(id(array))
        if known is None:
            with jax.enable_x64(True):
                wide = self._wide.widened(array).astype(jnp.float64)
                weak = convert_element_type(wide, weak_type=True)
            refuse = functools.partial(self.refuse, executor.ITEM)
            number = valueless_number(weak, "a tensor's item", refuse)
            # With the array, so that its id stays its own.
            known = self._items[id(array)] = array, number
        return known[1]

    def _pending_item(self, tensor: Any) -> Any:
        """A number that is known when the program has run."""
        if not self._has_item(tensor):
            self.refuse(executor.ITEM)
        if self.items.types_matter:
            self.refuse(
                ".item() in a step whose code asks for the type() of numbers (isinstance is fine)"
            )
        self.touched(tensor)
        return self.items.of(tensor)

    def _has_item(self, tensor: Any) -> bool:
        """Whether the program may give a number: not in a loop's body, nor in a backward pass of
        its own."""
        in_part = self.loop_begins or self.differentiating
        return not in_part and self.items.is_number(tensor)

    def printed_text(self, tensor: Any, frame: Any, spec: str) -> str | None:
        if not self._has_item(tensor):
            return None
        number = self.items.of(tensor.detach())
        return marked(frame, number.node, lambda value: format(value, spec))

    def can_fetch(self, tensor: Any) -> bool:
        return self._recipe(tensor) is not None

    def recording(self) -> Any:
        return self.host.recording()

    def traced_on_host(self, tensor: Any) -> Any:
        recipe = self._recipe(tensor)
        if recipe is None or not self.host.records:
            return super().traced_on_host(tensor)
        return self.host.fetched(recipe, self._asked_of(tensor, recipe))

    def _asked_of(self, tensor: Any, recipe: Any) -> tuple[StateValue, ...]:
        """The state that a value depends on which the host is given: the step uses it."""
        state: tuple[StateValue, ...] = state_of(recipe)
        for value in state:
            self._use(value.storage)
        self.touched(tensor)
        return state

    def recipe_of(self, storage: Storage) -> Any:
        recipe = super().recipe_of(storage)
        if self.loop_begins:
            return recipe  # one body is for all layers, which have other buffers
        recipe = recipe or self._recipes.get(storage.version)
        if recipe is not None or self.owns(storage) or id(storage) in self.not_fetched:
            return recipe
        if storage.is_given_back or self.numbers.is_counter(storage.array):
            return None
        captured = self._captured_by_id.get(id(storage))
        if captured is None or captured.storage is not storage:
            captured = ExternalStorage(storage)
        recipe = recipe_of_state(captured, storage)
        if recipe is not None:
            self._recipes[storage.version] = recipe
            self._state += state_of(recipe)
        return recipe

    def knows(self, storage: Storage, recipe: Any) -> None:
        if state_of(recipe):
            self._recipes[storage.version] = recipe
        else:
            super().knows(storage, recipe)

    def refuse(self, what: str, way: str = "") -> NoReturn:
        way = way or (
            "Keep the value on the devices (torch.where, a tensor in place of a number), return it "
            "from the step and look at it there, or move this line out of the compiled function"
        )
        self.refuse_with(
            DataDependentError(
                f"{what} needs a value that doesn't exist while the step is compiled"
                f"{user_line()}\n{way}"
            )
        )

    def refuse_with(self, error: XlaDTensorError) -> NoReturn:
        """Refuse the step, also if its Python catches the error."""
        self.refused = error
        raise error

    # --- internals ----------------------------------------------------------------------------

    def _use(self, storage: Storage) -> ExternalStorage:
        captured = self._captured_by_id.get(id(storage))
        # An id may have been reused: the storage that had it may be a temporary that is gone.
        if captured is None or captured.storage is not storage:
            captured = self._capture(storage)
        if captured.first_use is None:
            captured.first_use = self._uses
            self._uses += 1
        return captured

    def uses(self, storage: Storage) -> bool:
        """Whether the step has used a storage from outside."""
        captured = self._captured_by_id.get(id(storage))
        return captured is not None and captured.storage is storage

    def computes_with(self, tensor: Any) -> bool:
        """Whether the step has used a tensor from outside, and not just another one of its memory
        (the ``weight_orig`` of which torch's ``spectral_norm`` makes its ``weight``)."""
        storage, known = tensor._storage_, self.outside.get(id(tensor))
        if not self.uses(storage) or (known is not None and known.get() is tensor):
            return self.uses(storage)
        alive = (outside.get() for outside in self.outside.values())
        return not any(getattr(other, "_storage_", None) is storage for other in alive)

    def _capture(self, storage: Storage, fill_value: Any = None) -> ExternalStorage:
        frame = storage.form.frame
        if frame is not None:
            if self.frame is None:
                self.frame = frame
            elif self.frame.device_ids != frame.device_ids:
                external_storages.refuse_other_devices(self.frame, frame, storage)
        # Not optimizers' new state and step counts, which the trace makes outside of the program.
        own = fill_value is not None or self.numbers.is_counter(storage.array)
        if storage.version > self._begins and not own and not self._was_there(storage):
            external_storages.refuse_made_meanwhile(storage)
        if fill_value is None:
            first_calls.claim_met({id(storage): storage}, storage.form.shape)
        array = storage.array
        if id(array) in self._array_ids and not self.numbers.is_counter(array):
            # Two storages share this array; as inputs, which may be donated, they must be two.
            with executor.running_at_once(), jax.ensure_compile_time_eval():
                copied = array.copy() if isinstance(array, AbstractArray) else jnp.copy(array)
                array = storage.array = copied
        self._array_ids.add(id(array))
        captured = self._captured_by_id[id(storage)] = ExternalStorage(storage, fill_value)
        self.captured.append(captured)
        return captured

    def _was_there(self, storage: Storage) -> bool:
        """Whether memory is that of a tensor that the step could reach before the trace: another
        thread has written to it."""
        return any(outside.storage is storage for _, outside in self.before.values())

    def constant(self, form: Form, value: Any, like: bool = False) -> Storage | None:
        """A new storage filled with ``value``, if it may be state that outlives the step.

        State that an optimizer makes in its first step would otherwise be a constant of the first
        program and an input of all later ones: two programs for the same step. So what optimizers
        fill is made outside of the trace and captured.
        """
        if not self.optimizer_depth or isinstance(value, torch.SymInt | torch.SymFloat):
            return None
        with executor.running_at_once(), jax.ensure_compile_time_eval(), jax.enable_x64(True):
            if form.shape == () and not like:  # the moments of a parameter without dims are like it
                array = self.numbers.counter(form, value)
            else:
                array = arrays.full(form.array_shape, value, form.jax_dtype, form.sharding)
            storage = Storage(array, form)
        self._capture(storage, fill_value=value)
        return storage

    def backward(
        self, outputs: Iterable[Any], keeps_graph: bool, accumulates: bool, to_leaves: bool
    ) -> None:
        """A backward pass from ``outputs`` begins.

        Raises:
            DataDependentError: it would go on outside of the step.
        """
        self.passes.begins()
        self._accumulates |= accumulates
        if self.differentiating:
            return
        for number, node in nodes_of(outputs):
            if number < self.history_begins and to_leaves:
                raise DataDependentError(
                    f"backward() in the compiled step goes on into what was computed before it "
                    f"({node.name()}): it would do so when the step is traced, and in no later "
                    f"call{user_line()}\nCompute that inside of the step, too, or call backward() "
                    "outside, on the step's result"
                )
            if not keeps_graph:
                self.freed.add(number)

    def switched(self) -> list[tuple[ExternalTensor, bool]]:
        """The tensors that the step leaves with another ``requires_grad`` than they had, with it.
        It doesn't have to have used them."""
        return [(o, not o.requires_grad) for o in self._all_outside() if o.is_switched()]

    def forget(self) -> None:
        """Keep alive nothing of what the trace has used: a program says itself what it needs."""
        for kept in (
            *(self.before, self._captured_by_id, self.host_arrays, self.scalars),
            *(self._items, self._marked, self._owned, self._in_devices, self._recipes),
            self._state,
        ):
            kept.clear()
        self.numbers.forget()
        self.items.forget()
        self.captured, self.reads, self._latest = [], [], None
        self._wide = WideScalars()

    def let_go(self) -> None:
        """Refer to nothing outside of a trace that has failed."""
        for outside in self._all_outside():
            outside.let_go()

    def _all_outside(self) -> list[ExternalTensor]:
        """Each once, those from before the trace first."""
        both = (*(outside for _, outside in self.before.values()), *self.outside.values())
        return list({id(outside): outside for outside in both}.values())

    @property
    def took_along(self) -> bool:
        """Whether there was something to `take_along`."""
        return bool(self._taken_along)

    def take_along(self, tensors: Iterable[torch.Tensor], frame: Frame) -> None:
        """Take tensors of the default device for ones on all of a program's devices, as they will
        be when it runs: lowerings go by it (what XLA partitions wrongly they do in other ways)."""
        tensors_: Iterable[Any] = filter(is_ours, tensors)
        for storage in {tensor._storage_ for tensor in tensors_}:
            form = storage.form
            if form.frame is None and form.anywhere() is form:
                storage.form = form.placed(frame)  # not `reform`: it is undone
                self._taken_along.append((storage, form, storage.form))

    def undo(self) -> None:
        """Give every storage, gradient and the generator its value from before the trace."""
        for value in self._state:
            value.captured = None
        for captured in self.captured:
            captured.restore()
        for storage, before, taken in self._taken_along:
            if storage.form is taken:
                storage.form = before
        found = self._all_outside()
        for outside in found:
            outside.switch_back()
            outside.count_writes()
        # Tensors may share a version counter: undo in reverse, the first has the oldest count.
        for outside in reversed(found):
            outside.forget_writes()
        for outside in found:
            tensor = outside.get()
            if tensor is None or not outside.is_leaf or grad_of(tensor) is outside.grad:
                continue
            # A trace sets gradients of tensors that it uses, or notes (`sets_grad`). Another leaf's
            # was set by another thread, which trains another model.
            is_used = id(tensor) in self.outside or not is_ours(tensor)
            if is_used and not self.has_others_gradient(outside):
                set_grad_of(tensor, outside.grad)

    def has_others_gradient(self, outside: ExternalTensor) -> bool:
        """Whether another thread has set or cleared a leaf's gradient since the trace began: eager
        code, as far as one can tell. What the step sets itself it has made, or notes."""
        leaf = outside.get()
        grad = grad_of(leaf)
        if grad is outside.grad or not is_ours(leaf):
            return False
        if grad is None:
            return not outside.asks_grad
        storage = getattr(grad, "_storage_", None)
        return (
            storage is not None
            and storage.version > self._begins
            and not (self.owns(storage) or self.uses(storage))
        )


def _as_constant(array: Any) -> Any:
    """Where constants are computed, which is where JAX's default device is then."""
    return jnp.asarray(np.asarray(array))
