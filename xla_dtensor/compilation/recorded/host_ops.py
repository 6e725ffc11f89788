"""CPU tensors in a compiled step: what the step computes with them is computed in every call.

Operations on CPU tensors are written down while the step is traced. Those whose result depends on a
tensor from outside of the step, or on a number that is an input, run again on the host before each
call, and their results are inputs of the program. What would happen once, when the step is traced,
is refused: writing to a tensor from outside, drawing random numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.base.numbers.number_functions import plain_number
from xla_dtensor.base.numbers.traced_number import NumberNode
from xla_dtensor.base.torch_private import TorchDispatchMode, disable_current_modes, pytree
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.trace.host_reads import HostReads
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.tensors.of_form import Ours

_Symbolic = torch.SymFloat | torch.SymInt

Reader = Callable[[Arguments, list[Any]], torch.Tensor]
"""Gives a value from a call's arguments and the results of the host's program."""


class _Input:
    """A tensor from outside of the step: an argument, or one that it found."""

    __slots__ = ("index", "tensor")

    def __init__(self, tensor: torch.Tensor | None, index: int | None) -> None:
        self.tensor, self.index = tensor, index

    def read(self, arguments: Arguments) -> torch.Tensor:
        if self.index is not None:
            return arguments.tensors[self.index]
        assert self.tensor is not None
        return self.tensor


class _Value:
    """A tensor that the step computed: result ``index`` of its operation ``operation``."""

    __slots__ = ("index", "operation")

    def __init__(self, operation: int, index: int) -> None:
        self.operation, self.index = operation, index


class _Operation:
    __slots__ = ("args", "depends", "func", "grad", "kwargs")

    def __init__(self, func: Any, args: Any, kwargs: Any, depends: bool) -> None:
        self.func, self.args, self.kwargs, self.depends = func, args, kwargs, depends


class HostProgram:
    """The operations on CPU tensors of one step, to be run again.

    Attributes:
        depends: whether any of them depends on what is outside of the step.
    """

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self.depends = False

    def add(self, func: Any, args: Any, kwargs: Any, depends: bool) -> int:
        """Write an operation down; its number."""
        self._operations.append(_Operation(func, args, kwargs, depends))
        self.depends |= depends
        return len(self._operations) - 1

    def is_constant(self, operation: int) -> bool:
        """Whether an operation gives the same in each call."""
        return not self._operations[operation].depends

    def run(self, arguments: Arguments, numbers: list[float]) -> list[Any]:
        """The results of all operations, from what the call is given."""
        results: list[Any] = []

        def value(x: Any) -> Any:
            if isinstance(x, _Value):
                return results[x.operation][x.index]
            if isinstance(x, _Input):
                return x.read(arguments)
            if isinstance(x, NumberNode):
                return x.compute(numbers)
            return x

        with torch.no_grad(), disable_current_modes(), executor.running_at_once():
            for operation in self._operations:
                args, kwargs = pytree.tree_map(value, (operation.args, operation.kwargs))
                out = operation.func(*args, **kwargs)
                results.append(pytree.tree_leaves(out))
        return results


class HostOperations(TorchDispatchMode):
    """Watches operations on CPU tensors while a step is traced.

    Args:
        asks_types: whether the step's code may find that an input isn't a ``float``.

    Attributes:
        program: what has been written down.
    """

    def __init__(self, trace: StepTrace, arguments: Arguments, asks_types: bool = False) -> None:
        super().__init__()
        self._trace = trace
        self._asks_types = asks_types
        self.program = HostProgram()
        self._arguments = {id(t): i for i, t in enumerate(arguments.tensors)}
        # Per tensor that the step made: (weak reference, where its value comes from).
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], _Value]] = {}
        # Values that the step's Python has looked at: (how to compute one, what it was, text).
        self.looked_at: list[tuple[Callable[[Arguments, list[Any]], Any], Any, str]] = []
        self.stand_ins = trace.stand_ins
        self._functions = HostReads(self)
        # Tensors from outside that the step writes: (the tensor, its value before).
        self._overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Tensors that show a NumPy array: (the tensor, its content at first).
        self._of_arrays: list[tuple[torch.Tensor, Any]] = []
        # Memory of tensors from outside that operations have used.
        self._outside: dict[int, _Input] = {}

    def __enter__(self) -> HostOperations:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._functions.__exit__(*exc_info)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(cls, Ours) for cls in types):
            return func(*args, **kwargs)
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if any(isinstance(x, Ours) for x in tensors):
            return func(*args, **kwargs)
        device = kwargs.get("device")
        on_host = (device is None or torch.device(device).type == "cpu") and all(
            x.device.type == "cpu" for x in tensors
        )
        if not on_host:
            return func(*args, **kwargs)
        if self._trace.stand_ins:
            restore = self._trace.stand_ins.restore
            args = tuple(map(restore, args))
            kwargs = {name: restore(value) for name, value in kwargs.items()}
            leaves = pytree.arg_tree_leaves(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._trace.refuse(
                f"random numbers on the CPU ({func}; make them on device='xla'), which"
            )
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._item(tensors[0])
        if func._schema.is_mutable:
            for x in tensors:
                if x is _written(func, args, kwargs):
                    self._overwrite(x, func)
        symbolic = any(isinstance(x, _Symbolic) for x in leaves)
        plain_args, plain_kwargs = args, kwargs
        if symbolic:
            plain_args, plain_kwargs = pytree.tree_map(_present, (args, kwargs))
        if func is torch.ops.aten.lift_fresh.default:
            # A constant written in the step: torch.tensor(2.0).
            source = args[0].detach().clone() if self._made_here(args[0]) is None else args[0]
            result = func(*plain_args, **plain_kwargs)
            if not result.untyped_storage().resizable():  # torch.from_numpy
                self._of_arrays.append((result, _as_plain(source)))
            number = self.program.add(
                torch.ops.aten.clone.default, self._symbols((source,)), {}, False
            )
        else:
            depends = symbolic or any(map(self._depends, tensors))
            written_args, written_kwargs = self._symbols((args, kwargs))
            result = func(*plain_args, **plain_kwargs)
            number = self.program.add(func, written_args, written_kwargs, depends)
        for i, x in enumerate(pytree.tree_leaves(result)):
            on_cpu = isinstance(x, torch.Tensor) and not isinstance(x, Ours)
            if on_cpu and self._made_here(x) is None:
                self._made[id(x)] = weakref.ref(x), _Value(number, i)
        return result

    # --- writes to tensors from outside -------------------------------------------------------

    def _overwrite(self, tensor: torch.Tensor, func: Any) -> None:
        """The step writes to a tensor. One from outside is a copy in the program, which each call
        writes back when it has run; it gets its value back when the trace is over."""
        memory = tensor.untyped_storage()._cdata
        known = self._made_here(tensor)
        if known is not None and (memory not in self._outside or self._is_overwritten(tensor)):
            return
        shared = any(
            other is not None and other is not tensor and other.untyped_storage()._cdata == memory
            for other in (reference() for reference, _ in self._made.values())
        )
        if known is not None or shared or tensor._is_view() or tensor.requires_grad:
            self._trace.refuse(
                f"{func} on a CPU tensor {list(tensor.shape)} whose memory is that of another from "
                "outside of the step (a view), or which requires grad: it"
            )
        with disable_current_modes():
            self._overwritten.append((tensor, tensor.detach().clone()))
        number = self.program.add(torch.ops.aten.clone.default, self._symbols((tensor,)), {}, True)
        self._made[id(tensor)] = weakref.ref(tensor), _Value(number, 0)

    def _is_overwritten(self, tensor: torch.Tensor) -> bool:
        return any(known is tensor for known, _ in self._overwritten)

    def writes(self) -> list[tuple[_Input, Reader]]:
        """The tensors from outside that the step has written, and what gives their values."""
        found = []
        with disable_current_modes():
            for tensor, content in self._of_arrays if self.program.depends else ():
                if not tensor._version and _as_plain(tensor) != content:
                    raise DataDependentError(_ARRAY_WRITTEN)
        self._of_arrays = []
        for tensor, _ in self._overwritten:
            found.append((self._input(tensor), self.reader(self.use(tensor))))
        return found

    def undo(self) -> None:
        """Give the tensors from outside the values that they had before the trace."""
        with torch.no_grad(), disable_current_modes(), executor.running_at_once():
            for tensor, before in self._overwritten:
                tensor.copy_(before)
        self._overwritten = []
        self._made.clear()  # torch swaps no tensor that has a weak reference

    # --- where values come from ---------------------------------------------------------------

    def _made_here(self, tensor: torch.Tensor) -> _Value | None:
        known = self._made.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _input(self, tensor: torch.Tensor) -> _Input:
        memory = tensor.untyped_storage()._cdata
        if not self._is_overwritten(tensor) and any(
            written.untyped_storage()._cdata == memory for written, _ in self._overwritten
        ):
            self._trace.refuse(
                f"a CPU tensor {list(tensor.shape)} whose memory the step has written through "
                "another tensor: each call writes that when its program has run, so it"
            )
        index = self._arguments.get(id(tensor))
        return _Input(tensor if index is None else None, index)

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made a CPU tensor."""
        return self._made_here(tensor) is not None

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a CPU tensor is what the step has made of constants: the same in each call."""
        made = self._made_here(tensor)
        if made is None or tensor.is_inference() or tensor._version:
            return False  # or somebody has written to it since
        return self.program.is_constant(made.operation)

    def _depends(self, tensor: torch.Tensor) -> bool:
        made = self._made_here(tensor)
        # A tensor that the step made may have been written since; what is written down says by
        # what, so all of it runs again as soon as anything depends.
        return self.program.depends if made is not None else True

    def use(self, tensor: torch.Tensor) -> Any:
        """A CPU tensor's value of this moment is used: where it comes from in later calls.

        An `_Input`, a `_Value` of the host's program, or None for a constant.
        """
        made = self._made_here(tensor)
        if made is None:
            return self._input(tensor)
        if not self.program.depends:
            return None
        # The step may write to the tensor later on.
        return _Value(self.program.add(torch.ops.aten.clone.default, (made,), {}, True), 0)

    def given_away(self, tensor: torch.Tensor) -> tuple[Reader | None, _Input | None]:
        """A CPU tensor that the step has made and gives away at its end: what gives its value
        (None: it is a constant), and the tensor from outside whose memory it shows, if it does."""
        source = self._made_here(tensor) if self.program.depends else None
        read = None if source is None else self.reader(source)
        return read, self._outside.get(tensor.untyped_storage()._cdata)

    def _symbols(self, value: Any) -> Any:
        def symbol(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                made = self._made_here(x)
                if made is not None:
                    return made
                known = self._input(x)
                self._outside.setdefault(x.untyped_storage()._cdata, known)
                return known
            if isinstance(x, _Symbolic):
                return x.node
            return x

        return pytree.tree_map(symbol, value)

    # --- values in Python ---------------------------------------------------------------------

    def _item(self, tensor: torch.Tensor) -> Any:
        """``tensor.item()``: an input of the program where the value is a float that is there
        before the step begins, else part of the program."""
        with disable_current_modes():
            value = tensor.item()
        source = self.use(tensor)
        if source is None:
            return value
        if isinstance(source, _Input) and isinstance(value, float) and not self._asks_types:
            return self._trace.numbers.as_input(
                lambda arguments: source.read(arguments).item(),
                value,
                f"the item of a CPU tensor {list(tensor.shape)}",
            )
        self._looked(source, tensor, f"the item of a CPU tensor {list(tensor.shape)}")
        return value

    def _looked(self, source: Any, tensor: torch.Tensor, text: str) -> None:
        compute = self.reader(source)

        def read(arguments: Arguments, results: list[Any]) -> Any:
            return _as_plain(compute(arguments, results))

        with disable_current_modes():
            self.looked_at.append((read, _as_plain(tensor), text))

    def look(self, tensor: torch.Tensor, text: str) -> None:
        """The step's Python is given a CPU tensor's values: they become part of the program."""
        source = self.use(tensor)
        if source is not None:
            self._looked(source, tensor, f"{text} of a CPU tensor {list(tensor.shape)}")

    def reader(self, source: _Input | _Value) -> Reader:
        """What gives the value of a source (`use`)."""
        if isinstance(source, _Input):
            return lambda arguments, results: source.read(arguments)
        operation, index = source.operation, source.index
        return lambda arguments, results: results[operation][index]


_ARRAY_WRITTEN = "the step writes to an array behind its torch.from_numpy(array): do it before that"


def _present(x: Any) -> Any:
    # Only this once: later calls compute it from the number that they read.
    return (
        x.node.value
        if isinstance(x, _Symbolic) and isinstance(x.node, NumberNode)
        else (plain_number(x))
    )


def _as_plain(tensor: torch.Tensor) -> Any:
    """A CPU tensor's value in a form that can be compared."""
    array = to_numpy(tensor)
    return str(tensor.dtype), array.shape, array.tobytes()


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """The argument that ``func`` writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[i] if i < len(args) else kwargs.get(argument.name)
    return None
