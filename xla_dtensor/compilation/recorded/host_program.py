"""A step's recorded operations on CPU tensors, which run again before each launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.base.numbers.traced_number import NumberNode
from xla_dtensor.base.torch_private import disable_current_modes, pytree, unseen
from xla_dtensor.base.torch_private.attributes import schema_of
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.trace.state_values import StateValue
from xla_dtensor.execution.constants import versions_of
from xla_dtensor.forms.host_values import to_host, to_numpy
from xla_dtensor.tensors.base import grad_of

# Overloads that write to arguments undeclared: their positions, and that of the flag that asks.
_WRITES: dict[Any, tuple[tuple[int, ...], int | None]] = {
    torch.ops.aten.native_batch_norm.default: ((3, 4), 5),
    torch.ops.aten.batch_norm_update_stats.default: ((1, 2), None),
}

Reader = Callable[[Arguments, list[Any]], torch.Tensor]
"""Gives a value from a call's arguments and the results of the host's program."""


class HostChanged(Exception):
    """The operations on CPU tensors can't go as they went when the step was traced."""


class HostInput:
    """A tensor from outside of the step: an argument, or one that it found.

    Attributes:
        kind: what it is, in messages.
        written: whether the step writes to its memory. The program then computes with a copy, that
            each call writes back when it has run.
    """

    __slots__ = ("index", "tensor", "written")

    kind = "a CPU tensor"

    def __init__(self, tensor: torch.Tensor | None, index: int | None) -> None:
        self.tensor, self.index, self.written = tensor, index, False

    def read(self, arguments: Arguments) -> torch.Tensor:
        if self.index is not None:
            return arguments.tensors[self.index]
        assert self.tensor is not None
        return self.tensor


class Gradient(HostInput):
    """The ``.grad`` of a leaf from outside, which is another tensor after each backward pass."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: HostInput) -> None:
        super().__init__(None, None)
        self.leaf = leaf

    def read(self, arguments: Arguments) -> torch.Tensor:
        grad = grad_of(self.leaf.read(arguments))
        if grad is None:
            raise HostChanged("the .grad of a CPU tensor: from a tensor to None")
        return grad


class Fetched(HostInput):
    """The value on the host of what the step finds on the devices, or computes of that alone.

    Args:
        recipe: gives it, as an array.
        state: the values that it depends on.
    """

    __slots__ = ("_recipe", "_state", "_versions")

    kind = "a tensor on the devices"

    def __init__(self, recipe: Callable[[], Any], state: Iterable[StateValue]) -> None:
        super().__init__(None, None)
        self._recipe, self._state = recipe, tuple(state)
        self._versions: list[int] = []

    def now(self) -> torch.Tensor:
        """The value: another tensor, if somebody has written to the state since."""
        versions = versions_of(self._state)
        if self.tensor is None or versions != self._versions:
            self.tensor, self._versions = to_host(self._recipe()), versions
        return self.tensor

    def read(self, arguments: Arguments) -> torch.Tensor:
        return self.now()


class Value:
    """A tensor that the step computed: result ``index`` of its operation ``operation``."""

    __slots__ = ("index", "operation")

    def __init__(self, operation: int, index: int) -> None:
        self.operation, self.index = operation, index


class HostOperation:
    """One operation.

    Attributes:
        depends: whether it depends on what is outside of the step.
        sizes: the shapes of its results, if they may be others in later calls and the step goes by
            them; empty until they are known.
        values: those of its results that aren't tensors, which the step's Python was given.
    """

    __slots__ = ("args", "depends", "func", "kwargs", "sizes", "values")

    def __init__(self, func: Any, args: Any, kwargs: Any, depends: bool) -> None:
        self.func, self.args, self.kwargs, self.depends = func, args, kwargs, depends
        self.sizes: list[torch.Size] | None = None
        self.values: list[str] | None = None

    def check(self, results: list[Any]) -> None:
        """
        Raises:
            HostChanged: the results aren't of the kind that the program was made for.
        """
        if self.sizes == []:
            self.sizes = sizes_of(results)
        if self.sizes is not None and self.sizes != sizes_of(results):
            is_now = [list(size) for size in sizes_of(results)]
            raise HostChanged(f"the shapes that {self.func} gives: now {is_now}")
        if self.values is not None and self.values != values_in(results):
            raise HostChanged(f"what {self.func} gives: now {values_in(results)}")


class HostProgram:
    """The operations on CPU tensors of one step.

    Attributes:
        operations: in order.
        depends: whether any of them depends on what is outside of the step.
    """

    def __init__(self) -> None:
        self.operations: list[HostOperation] = []
        self.depends = False

    def add(self, func: Any, args: Any, kwargs: Any, depends: bool) -> int:
        """Write an operation down; its number."""
        self.operations.append(HostOperation(func, args, kwargs, depends))
        self.depends |= depends
        return len(self.operations) - 1

    def is_constant(self, operation: int) -> bool:
        """Whether an operation gives the same in each call."""
        return not self.operations[operation].depends


class HostRun:
    """One call's run of the operations on CPU tensors, as far as somebody has asked.

    Attributes:
        results: of the operations so far.
    """

    def __init__(self, operations: list[HostOperation], arguments: Arguments) -> None:
        self._operations, self._arguments = operations, arguments
        self._copies: dict[int, torch.Tensor] = {}
        self.results: list[list[Any]] = []

    def through(self, operation: int, numbers: list[float]) -> list[Any]:
        """The results of one operation, for which those before it run.

        Args:
            numbers: that the call has, which they compute with.

        Raises:
            HostChanged: they can't be computed as when the step was traced, or what depends on
                values and was part of the program (a shape, ``torch.equal``) is another now.
        """
        value = partial(self._value, numbers=numbers)
        with torch.no_grad(), disable_current_modes(), unseen(), executor.running_at_once():
            for each in self._operations[len(self.results) : operation + 1]:
                try:
                    args, kwargs = pytree.tree_map(value, (each.args, each.kwargs))
                    out = pytree.tree_leaves(each.func(*args, **kwargs))
                except HostChanged:
                    raise
                except Exception as error:
                    # Eager torch would raise it, too, or take another branch: trace the step again.
                    raise HostChanged(f"{each.func} of CPU tensors: {error}") from error
                each.check(out)
                self.results.append(out)
        return self.results[operation]

    def _value(self, x: Any, numbers: list[float]) -> Any:
        if isinstance(x, Value):
            return self.results[x.operation][x.index]
        if isinstance(x, HostInput):
            found = self._copies.get(id(x)) if x.written else x.read(self._arguments)
            if found is None:
                found = self._copies[id(x)] = copy_of(x.read(self._arguments))
            return found
        if isinstance(x, NumberNode):
            return x.compute(numbers)
        return x


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of its own, in which the elements lie as they do in that of ``tensor``."""
    tensor = tensor.detach()
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return like.copy_(tensor)


def sizes_of(results: list[Any]) -> list[torch.Size]:
    """The shapes of the tensors among an operation's results."""
    return [x.shape for x in results if isinstance(x, torch.Tensor) and not x.is_nested]


def values_in(results: list[Any]) -> list[str]:
    """What is no tensor among them, as text: NaN isn't equal to itself."""
    return [repr(x) for x in results if not isinstance(x, torch.Tensor | torch.UntypedStorage)]


def as_plain(tensor: torch.Tensor) -> Any:
    """A CPU tensor's value in a form that can be compared."""
    array = to_numpy(tensor)
    return str(tensor.dtype), array.shape, array.tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same content, NaN and all."""
    return a.shape == b.shape and as_plain(a) == as_plain(b)


def written_by(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors that ``func`` writes to, and whether torch counts that."""

    def argument(position: int) -> Any:
        name = schema_of(func).arguments[position].name
        return args[position] if position < len(args) else kwargs.get(name)

    if func in _WRITES:
        positions, asks = _WRITES[func]
        if asks is not None and not argument(asks):
            return [], False
        return [x for x in map(argument, positions) if x is not None], False
    if not schema_of(func).is_mutable:
        return [], True
    found = [
        argument(i)
        for i, known in enumerate(schema_of(func).arguments)
        if known.alias_info is not None and known.alias_info.is_write
    ]
    return [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)], True


def shown_in(
    whole: torch.Tensor, dtype: torch.dtype, start: int, size: Any, stride: Any
) -> torch.Tensor:
    """The tensor that shows the memory of ``whole`` from ``start`` bytes behind its first
    element."""
    start += whole.storage_offset() * whole.element_size()
    made = torch.empty(0, dtype=dtype)
    return made.set_(whole.untyped_storage(), start // dtype.itemsize, size, stride)


def storage_of(whole: torch.Tensor) -> torch.UntypedStorage:
    """Its memory, for operations that take that."""
    return whole.untyped_storage()
