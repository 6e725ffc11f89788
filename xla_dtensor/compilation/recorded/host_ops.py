"""Records operations on CPU tensors while a step is traced, to be run again in every call.

Operations on CPU tensors are written down while the step is traced. Those whose result depends on a
tensor from outside of the step, or on a number that is an input, run again on the host before each
call, and their results are inputs of the program. What would happen once, when the step is traced,
is refused: drawing random numbers.

Where a tensor's value comes from is known by the memory that it shows: torch's C++ makes new
tensors around the memory of others (``nn.Parameter(t)``, ``.data =``) without an operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from xla_dtensor.base import executor
from xla_dtensor.base.numbers.number_functions import plain_number
from xla_dtensor.base.numbers.python_numbers import is_number, is_pending
from xla_dtensor.base.numbers.traced_number import NumberNode
from xla_dtensor.base.ours import OurTensor, SaysCpu
from xla_dtensor.base.source_line import expression_here, user_line
from xla_dtensor.base.torch_private import (
    TorchDispatchMode,
    disable_current_modes,
    disable_function_of_subclasses,
    pytree,
    unseen,
)
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.code.identities import memory_on_host
from xla_dtensor.compilation.objects.global_state import active_modes
from xla_dtensor.compilation.recorded.host_memory import Memories, has_memory
from xla_dtensor.compilation.recorded.host_program import (
    Fetched,
    Gradient,
    HostInput,
    HostProgram,
    Reader,
    Value,
    as_plain,
    same_bits,
    shown_in,
    sizes_of,
    storage_of,
    values_in,
    written_by,
)
from xla_dtensor.compilation.recorded.looked_at import Looked
from xla_dtensor.compilation.trace import first_calls
from xla_dtensor.compilation.trace.host_reads import OF_ANY_SIZE, HostReads, is_on_host
from xla_dtensor.compilation.trace.items import TracedItems
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.errors import DataDependentError
from xla_dtensor.tensors.base import grad_of
from xla_dtensor.tensors.indexing import check_masks, is_mask, is_masked_fill
from xla_dtensor.tensors.of_form import is_ours

_Symbolic = torch.SymFloat | torch.SymInt

_ATEN = torch.ops.aten

_OF_ANY_SIZE = frozenset(getattr(_ATEN, name).default for name in OF_ANY_SIZE)


_BY_INDEX = frozenset(
    {
        *(_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default),
        _ATEN._index_put_impl_.default,
    }
)


class HostOperations(TorchDispatchMode):
    """Watches operations on CPU tensors while a step is traced.

    Args:
        originals: the arguments, with the history that they don't have in the trace.
        items: the items that are inputs beside those that are floats, by their lines, because
            they have changed between calls; None if no item can be one.

    Attributes:
        program: what has been written down.
        found: the tensors from outside that have taken part and are no arguments.
        fetched_from: the storages whose values have been fetched from the devices, by id.
    """

    def __init__(
        self,
        trace: StepTrace,
        arguments: Arguments,
        originals: Arguments,
        items: frozenset[str] | None,
    ) -> None:
        super().__init__()
        self._trace = trace
        self._input_items = items
        self.program = HostProgram()
        self._arguments = {id(t): i for i, t in enumerate(arguments.tensors)}
        self._originals = originals.tensors
        # Inputs by the id of their tensor; `_tensors` has the tensors by the id of their input.
        self._inputs: dict[int, HostInput] = {}
        self._unread: set[int] = set()
        self.found: list[torch.Tensor] = []
        self.fetched_from: dict[int, Any] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        # Per tensor that the step made: (weak reference, its memory, where its value comes from).
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int, Value]] = {}
        # The memory of arguments and of what the step made.
        self._memories = Memories()
        self.looked_at: list[Looked] = []
        self._asked: set[tuple[int, str]] = set()
        # How often the step's Python has got the item of one, and how often one was written to
        # without torch's counting it.
        self.items = self.uncounted = 0
        self.records = 0  # blocks of `recording` that it is in
        self.stand_ins = trace.stand_ins
        self._functions = HostReads(self)
        # Tensors from outside that the step writes: (the tensor, its value before), by memory.
        self._overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Tensors whose memory the step's Python has been given, with the content that is known.
        self._handed_out: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Tensors of a size that depends on values, the operation that gave it, and the sizes of
        # all that it gave.
        self._of_unknown_size: dict[int, tuple[weakref.ref[torch.Tensor], int, Any]] = {}
        # Tensors that are the same in each call, and that only the package has had (`knows`).
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        # Memory of tensors from outside that operations have used.
        self._outside: dict[int, HostInput] = {}
        # The leaves from outside, with their gradients when the step begins.
        self._leaves = [
            (tensor, outside.grad)
            for tensor, outside in trace.before.values()
            if outside.is_leaf and is_on_host(tensor)
        ]
        self._grads = {id(grad): leaf for leaf, grad in self._leaves if grad is not None}
        for tensor in arguments.tensors:
            if is_on_host(tensor):
                self._memories.shows(tensor, self._input(tensor))
        self._unread = set(map(id, self._inputs.values()))

    def __enter__(self) -> HostOperations:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._functions.__exit__(*exc_info)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(cls, (OurTensor, SaysCpu)) for cls in types):
            with disable_function_of_subclasses():  # their __torch_function__ has run already
                if func in _BY_INDEX and any(map(is_mask, map(_on_host, args[1]))):
                    args = self._at_positions(*args)
                return func(*args, **kwargs)
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if any(is_ours(x) for x in tensors):
            return func(*args, **kwargs)
        device = kwargs.get("device")
        devices = {x.device.type for x in tensors}
        if device is not None:
            devices -= {"meta"}  # torch.empty_like(of_a_meta_tensor, device="cpu")
            devices.add(torch.device(device).type)
        if not devices <= {"cpu"}:
            return func(*args, **kwargs)
        with unseen():  # our own look at the tensors isn't the step's
            return self._computed(func, args, kwargs, tensors)

    def _at_positions(self, x: Any, indices: Any, *rest: Any) -> Any:
        """What indexes an xla tensor with the positions that masks on the CPU have, in their place:
        the host finds them in each call."""
        if rest and is_masked_fill(x, indices, rest[0]):
            return x, indices, *rest
        check_masks(x, indices)
        found: list[Any] = []
        for index in indices:
            if is_mask(_on_host(index)) and index.ndim:
                with unseen():
                    at = self._computed(_ATEN.nonzero.default, (index,), {}, [index])
                    found += self._computed(_ATEN.unbind.int, (at, 1), {}, [at])
            else:
                found.append(index)
        return x, found, *rest

    def _computed(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """An operation's result, which is written down."""
        if self._trace.stand_ins:
            restore = self._trace.stand_ins.restore
            args = tuple(map(restore, args))
            kwargs = {name: restore(value) for name, value in kwargs.items()}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._trace.refuse(
                f"random numbers on the CPU ({func}; make them on device='xla'), which"
            )
        self.take_writes()
        if func is _ATEN._local_scalar_dense.default:
            return self._item(tensors[0])
        written, counted = written_by(func, args, kwargs)
        for x in written:
            self._overwrite(x, str(func))
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        symbolic = any(isinstance(x, _Symbolic) for x in leaves)
        plain_args, plain_kwargs = args, kwargs
        if symbolic:
            plain_args, plain_kwargs = pytree.tree_map(_present, (args, kwargs))
        if func is _ATEN.lift_fresh.default:
            result = func(*plain_args, **plain_kwargs)
            if self._made_here(result) is None:
                self._constant(result)
            return result
        if func not in _OF_ANY_SIZE:
            for x in tensors:
                self.size_matters(x)
        depends = symbolic or any(map(self._depends, tensors))
        written_args, written_kwargs = self._symbols((args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        number = self.program.add(func, written_args, written_kwargs, depends)
        results = pytree.tree_leaves(result)
        for i, x in enumerate(results):
            if is_on_host(x) and self._made_here(x) is None:
                self._made[id(x)] = weakref.ref(x), memory_on_host(x), Value(number, i)
                if memory_on_host(x) not in self._outside:
                    self._memories.shows(x, Value(number, i))
        self._note_what_python_gets(func, number, results)
        if written:
            if not counted:
                self.uncounted += 1
            self._handed_out = [(x, x.detach().clone()) for x, _ in self._handed_out]
        return result

    def _note_what_python_gets(self, func: Any, number: int, results: list[Any]) -> None:
        """Of an operation's results besides the values of tensors: what is no tensor
        (``torch.equal``), and sizes that depend on values, when the step goes by them."""
        operation = self.program.operations[number]
        if not operation.depends:
            return
        values = values_in(results)
        if values and not any(map(is_number, results)):
            operation.values = values
        sizes = sizes_of(results)
        if torch.Tag.dynamic_output_shape not in func.tags:
            # Some shapes depend on values without that tag (_pack_padded_sequence). The first
            # replay sets them: with gradients some operations return more (mkldnn_rnn_layer).
            operation.sizes = []
        else:
            for x in results:
                if isinstance(x, torch.Tensor):
                    self._of_unknown_size[id(x)] = weakref.ref(x), number, sizes

    def size_matters(self, tensor: Any) -> None:
        """The step goes by the size of a tensor."""
        known = self._of_unknown_size.get(id(tensor))
        if known is not None and known[0]() is tensor:
            self.program.operations[known[1]].sizes = known[2]

    def knows(self, tensor: torch.Tensor) -> None:
        """A tensor that is the same in each call, made where this doesn't look."""
        with unseen():
            self._constant(tensor)
        self._known[id(tensor)] = weakref.ref(tensor)

    def _constant(self, tensor: torch.Tensor) -> None:
        """A tensor with values of Python's: ``torch.tensor(2.0)``, ``torch.from_numpy(array)``."""
        source = self._symbols((tensor.detach().clone(),))
        value = Value(self.program.add(_ATEN.clone.default, source, {}, False), 0)
        self._made[id(tensor)] = weakref.ref(tensor), memory_on_host(tensor), value
        self._memories.shows(tensor, value)
        if has_memory(tensor) and not tensor.untyped_storage().resizable():  # NumPy's memory
            self._hand_out(tensor)

    # --- writes -------------------------------------------------------------------------------

    def _overwrite(self, tensor: torch.Tensor, what: str, before: Any = None) -> None:
        """The step writes to a tensor. One from outside, or a view of it, is a copy in the program,
        which each call writes back when it has run; it gets its value back when the trace is over.
        """
        memory = memory_on_host(tensor)
        if memory in self._overwritten:
            return
        if self._made_here(tensor) is not None:
            if memory not in self._outside:
                return
            source = self._outside[memory]
        else:
            source = self._outside.setdefault(memory, self._input(tensor))
        whole = self._of_input(source)
        name = f"{what} on a CPU tensor {list(tensor.shape)}"
        if whole.requires_grad and not whole.is_leaf:
            _refuse(
                f"{name} from outside of the step that requires grad: move it (or its module) to "
                'the devices, .to("xla"), or do that outside of the step'
            )
        others = [x for x in self._inputs.values() if x is not source and id(x) not in self._unread]
        if any(memory_on_host(self._of_input(other)) == memory for other in others):
            _refuse(
                f"{name} whose memory the step reads through another tensor from outside, too: "
                'move them to the devices, .to("xla"), or use one of them'
            )
        with disable_current_modes():
            self._overwritten[memory] = whole, whole.detach().clone() if before is None else before
        source.written = self.program.depends = True

    def hand_out(self, tensor: torch.Tensor) -> None:
        """The step's Python is given the memory of a CPU tensor, to which it may write."""
        with unseen():
            self._hand_out(tensor)

    def _hand_out(self, tensor: torch.Tensor) -> None:
        if not any(known is tensor for known, _ in self._handed_out):
            with disable_current_modes():
                self._handed_out.append((tensor, tensor.detach().clone()))

    def take_writes(self) -> None:
        """What Python has written to memory that it was given: constants, as it could only make
        them of what is part of the program."""
        if not self._handed_out:
            return
        with unseen():
            self._take_each()

    def _take_each(self) -> None:
        for i, (tensor, before) in enumerate(self._handed_out):
            with disable_current_modes():
                if same_bits(tensor, before):
                    continue
                now = tensor.detach().clone()
            self._handed_out[i] = tensor, now
            self._overwrite(tensor, "a write through NumPy", before)
            args = self._symbols((tensor, now))
            self.program.add(_ATEN.copy_.default, args, {}, False)
            self.uncounted += 1

    def writes(self) -> list[tuple[HostInput, Reader]]:
        """The tensors from outside that the step has written, and what gives their values."""
        with unseen():
            self.take_writes()
            found = []
            for tensor, _ in self._overwritten.values():
                found.append((self._input(tensor), self.reader(self.use(tensor))))
            return found

    def gradients(self) -> list[tuple[HostInput, Reader | None]]:
        """The leaves from outside that the step leaves with other gradients than they had, and what
        gives those."""
        found: list[tuple[HostInput, Reader | None]] = []
        for leaf, before in self._leaves:
            grad = grad_of(leaf)
            if grad is before:
                continue
            self.asked(leaf, "the .grad", _form_of_grad, before)
            source = None if grad is None else self.use(grad)
            if grad is None:
                found.append((self._input(leaf), None))
            elif source is None:
                with disable_current_modes():
                    constant = grad.detach().clone()
                found.append((self._input(leaf), lambda *_, of=constant: of.clone()))
            else:
                found.append((self._input(leaf), self.reader(source)))
        return found

    def undo(self) -> None:
        """Give the tensors from outside the values that they had before the trace."""
        with torch.no_grad(), disable_current_modes(), executor.running_at_once():
            for tensor, before in self._overwritten.values():
                tensor.copy_(before)
        self._overwritten, self._handed_out, self._leaves = {}, [], []
        # torch.utils.swap_tensors refuses tensors that have a weak reference
        for kept in (self._made, self._of_unknown_size, self._known, self._tensors):
            kept.clear()
        self._inputs, self._grads = {}, {}
        self._originals, self._memories = [], Memories()

    # --- where values come from ---------------------------------------------------------------

    def _made_here(self, tensor: torch.Tensor) -> Value | None:
        known = self._made.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == memory_on_host(tensor):
            return known[2]
        return self._shown(tensor)

    def _shown(self, tensor: torch.Tensor) -> Value | None:
        """Where the value of a tensor comes from that torch's C++ has made of another's memory."""
        if id(tensor) in self._trace.before or id(tensor) in self._inputs:
            return None
        if not has_memory(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        found = self._memories.source_of(tensor.data_ptr())
        if found is None:
            return None
        source, first = found
        args = source, tensor.dtype, tensor.data_ptr() - first, tensor.shape, tensor.stride()
        if isinstance(source, HostInput):
            self._outside.setdefault(memory_on_host(tensor), source)
        value = Value(self.program.add(shown_in, args, {}, self._depends_on(source)), 0)
        self._made[id(tensor)] = weakref.ref(tensor), memory_on_host(tensor), value
        return value

    def _depends_on(self, source: HostInput | Value) -> bool:
        return isinstance(source, HostInput) or self.program.depends

    def _input(self, tensor: torch.Tensor) -> HostInput:
        memory = memory_on_host(tensor)
        written = self._overwritten.get(memory)
        if written is not None and written[0] is not tensor:
            _refuse(
                f"the step reads a CPU tensor {list(tensor.shape)} whose memory it has written "
                "through another tensor from outside, and each call writes that when its program "
                'has run: move them to the devices, .to("xla"), or use one of them'
            )
        found = self._inputs.get(id(tensor))
        if found is None:
            index, leaf = self._arguments.get(id(tensor)), self._grads.get(id(tensor))
            if index is None and leaf is not None and id(tensor) not in self._trace.before:
                found = Gradient(self._input(leaf))
                self.asked(leaf, "the .grad", _form_of_grad, tensor)
            else:
                found = HostInput(tensor if index is None else None, index)
            if found.tensor is not None:
                first_calls.claim_met({memory: tensor}, tensor.shape)
                self.found.append(tensor)
            self._inputs[id(tensor)] = found
            self._tensors[id(found)] = tensor
            if index is None and leaf is None and tensor.dtype.is_floating_point:
                self.asked(tensor, "requires_grad", _requires_grad)
        self._unread.discard(id(found))
        return found

    def _of_input(self, source: HostInput) -> torch.Tensor:
        return self._tensors[id(source)]

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made a CPU tensor."""
        with unseen():
            return self._made_here(tensor) is not None

    def computes(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made a CPU tensor, or written to it."""
        with unseen():
            return memory_on_host(tensor) in self._overwritten or self.made(tensor)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a CPU tensor is what the step has made of constants: the same in each call."""
        with unseen():
            made = self._made_here(tensor)
        if made is None or tensor.is_inference() or tensor._version:
            return False  # it may have been written since
        return self.program.is_constant(made.operation)

    def _depends(self, tensor: torch.Tensor) -> bool:
        made = self._made_here(tensor)
        # The step may have written to a tensor that it made, by recorded operations. So if any of
        # those depends on the call, all run again, and the tensor counts as depending.
        return self.program.depends if made is not None else True

    def use(self, tensor: torch.Tensor) -> Any:
        """A CPU tensor's value of this moment is used: where it comes from in later calls.

        An `HostInput`, a `Value` of the host's program, or None for a constant.
        """
        known = self._known.get(id(tensor))
        if known is not None and known() is tensor:
            return None
        with unseen():
            self.take_writes()
            self.size_matters(tensor)
            made: HostInput | Value | None = self._made_here(tensor)
            if made is None:
                made = self._input(tensor)
                if not made.written:
                    return made
            if not self.program.depends:
                return None
            # A copy, as the step may write to the tensor later on.
            return Value(self.program.add(_ATEN.clone.default, (made,), {}, True), 0)

    def given_away(self, tensor: torch.Tensor) -> tuple[Reader | None, HostInput | None]:
        """A CPU tensor that the step has made and gives away at its end: what gives its value
        (None: it is a constant), and the tensor from outside whose memory it shows, if it does."""
        with unseen():
            self.take_writes()
            self.size_matters(tensor)
            source = self._made_here(tensor) if self.program.depends else None
            read = None if source is None else self.reader(source)
            return read, self._outside.get(memory_on_host(tensor))

    def _symbols(self, value: Any) -> Any:
        def symbol(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                made = self._made_here(x)
                if made is not None:
                    return made
                known = self._input(x)
                self._outside.setdefault(memory_on_host(x), known)
                return known
            if isinstance(x, torch.UntypedStorage):
                found = self._memories.source_of(x.data_ptr()) if x.nbytes() else None
                if found is None:
                    return x
                depends = self._depends_on(found[0])
                return Value(self.program.add(storage_of, found[:1], {}, depends), 0)
            if isinstance(x, _Symbolic):
                return x.node
            return x

        return pytree.tree_map(symbol, value)

    # --- values of tensors on the devices -----------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A block of the package's own operations on CPU tensors: torch has taken this mode away
        where an operation on an xla tensor is handled."""
        is_on = any(mode is self for _, mode in active_modes())
        again = None if is_on else super().__enter__()
        self.records += 1
        try:
            yield
        finally:
            self.records -= 1
            if again is self:
                super().__exit__(None, None, None)

    def fetched(self, recipe: Callable[[], Any], state: Iterable[Any]) -> torch.Tensor:
        """A CPU tensor with a value that the step finds on the devices (`Fetched`): a copy, as the
        step may write to it."""
        with unseen(), disable_current_modes():
            tensor = self._fetch(recipe, state)
            return self._computed(_ATEN.clone.default, (tensor,), {}, [tensor])

    def fetched_item(self, recipe: Callable[[], Any], state: Iterable[Any]) -> Any:
        """The item of such a value."""
        with unseen(), disable_current_modes():
            return self._item(self._fetch(recipe, state))

    def _fetch(self, recipe: Callable[[], Any], state: Iterable[Any]) -> torch.Tensor:
        source = Fetched(recipe, state)
        tensor = source.now()
        self.fetched_from.update((id(value.storage), value.storage) for value in state)
        self._inputs[id(tensor)] = source
        self._tensors[id(source)] = tensor
        return tensor

    # --- values in Python ---------------------------------------------------------------------

    def _item(self, tensor: torch.Tensor) -> Any:
        """``tensor.item()``: an input of the program where the value is a float, or an int that has
        changed between calls (known by the expression that asks for it); else part of the program.
        """
        self.items += 1
        with disable_current_modes():
            value = tensor.item()
        source, items = self.use(tensor), self._input_items
        computed = isinstance(source, Value)
        if source is None or (computed and self.program.is_constant(source.operation)):
            return value
        if items is not None:
            TracedItems.given += 1
            is_input = isinstance(value, float)
            if items and type(value) is int:  # few steps have such, and to name it takes its time
                is_input = expression_here()() in items
            if is_input:
                name = _named("the item", source, tensor)
                numbers = self._trace.numbers
                if computed:
                    return numbers.as_input(None, value, name, (source.operation, source.index))
                return numbers.as_input(
                    lambda arguments: source.read(arguments).item(), value, name
                )
        self._looked(source, tensor, "the item", type(value) is int)
        return value

    def _looked(self, source: Any, tensor: torch.Tensor, text: str, is_item: bool = False) -> None:
        compute = self.reader(source)
        text = _named(text, source, tensor)

        def read(arguments: Arguments, results: list[Any]) -> Any:
            return as_plain(compute(arguments, results))

        with disable_current_modes():
            looked = Looked(read, as_plain(tensor), text, expression_here(), is_item)
            self.looked_at.append(looked)

    def look(self, tensor: torch.Tensor, text: str) -> None:
        """The step's Python is given a CPU tensor's values: they become part of the program."""
        with unseen():
            source = self.use(tensor)
            if source is not None:
                self._looked(source, tensor, text)

    def asked(self, tensor: torch.Tensor, text: str, ask: Callable[[Any], Any], *now: Any) -> Any:
        """The step's Python, or C++, asks something of a CPU tensor that isn't its value, and that
        becomes part of the program; the answer.

        Args:
            ask: gives the answer for a tensor (and ``now``, which the step may have changed).
        """
        with unseen():
            index = self._arguments.get(id(tensor))
            original = tensor if index is None else self._originals[index]
            if (id(tensor), text) in self._asked or self.made(tensor):
                return original
            self._asked.add((id(tensor), text))
            source = self._input(tensor)
            value = ask(original, *now)
            name = f"{text} of a CPU tensor {list(tensor.shape)}"
            read = lambda arguments, results: ask(source.read(arguments))
            self.looked_at.append(Looked(read, value, name, expression_here()))
            return original

    def asks_grad(self, leaf: torch.Tensor) -> None:
        """The step's Python asks for the gradient of a CPU tensor."""
        with unseen():
            known = self._trace.before.get(id(leaf))
            if known is not None and grad_of(leaf) is known[1].grad:
                self.asked(leaf, "the .grad", _form_of_grad, known[1].grad)

    def reader(self, source: HostInput | Value) -> Reader:
        """What gives the value of a source (`use`)."""
        if isinstance(source, HostInput):
            return lambda arguments, results: source.read(arguments)
        operation, index = source.operation, source.index
        return lambda arguments, results: results[operation][index]


def _named(what: str, source: HostInput | Value, tensor: torch.Tensor) -> str:
    """What messages call something of a tensor on the CPU, or of one whose value is there."""
    return f"{what} of {getattr(source, 'kind', HostInput.kind)} {list(tensor.shape)}"


def _on_host(x: Any) -> Any:
    return x if is_on_host(x) else None


def _refuse(what: str) -> NoReturn:
    raise DataDependentError(f"{what}{user_line()}")


def _requires_grad(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


_UNSET: Any = object()


def _form_of_grad(leaf: torch.Tensor, grad: Any = _UNSET) -> Any:
    grad = grad_of(leaf) if grad is _UNSET else grad
    return None if grad is None else (grad.shape, grad.dtype)


def _present(x: Any) -> Any:
    # The present value, for this trace alone: later calls compute with the number they read.
    if is_pending(x):
        x.node.needed("a CPU tensor's operation with")  # the host computes before the launch
    return (
        x.node.value
        if isinstance(x, _Symbolic) and isinstance(x.node, NumberNode)
        else (plain_number(x))
    )
