"""Where the inputs of a program come from in each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xla_dtensor.forms.form import Form
from xla_dtensor.forms.storage import Storage


class Source:
    """Where a constant of a trace's jaxpr comes from in later calls.

    Attributes:
        is_input: whether it is an input of its own. The others are made of the words, or constants.
        in_words: whether it is in the one array that has all numbers and the generator's state.
    """

    is_input = in_words = False

    def value(self, given: Callable[[Source], Any], words: Any) -> Any:
        """The constant in the program: one of its inputs (which ``given`` finds), or made of
        ``words``."""
        raise NotImplementedError

    def signature(self, given: Mapping[int, int]) -> Any:
        """What tells that two traces' sources are the same.

        Args:
            given: which argument has a storage, by its ``id``.
        """
        raise NotImplementedError


class ArraySource(Source):
    """The array of a storage.

    Attributes:
        storages: those that have the array; several only of state.
        writes: (output, the storages that get it), where the step overwrites them.
        form: the storage's before the step.
        is_fixed: whether it is the same storage in each call.
        argument: which argument's it is, or None.
    """

    is_input = True
    is_fixed = False
    argument: int | None = None

    def __init__(self, storages: tuple[Storage, ...], form: Form) -> None:
        self.storages, self.form = storages, form
        self.writes: list[tuple[int, tuple[Storage, ...]]] = []

    def value(self, given: Callable[[Source], Any], words: Any) -> Any:
        return given(self)

    def storage(self, arguments: Any) -> Storage:
        """The storage in a call with ``arguments``."""
        return self.storages[0]

    def forget(self) -> None:
        """Let go of storages that are others in each call."""

    def _written(self) -> list[int]:
        return [index for index, _ in self.writes]


class StateSource(ArraySource):
    """A storage from outside of the step; several, if they have one array."""

    is_fixed = True

    def signature(self, given: Mapping[int, int]) -> Any:
        storages = sorted(map(id, self.storages))
        if len(storages) == 1 and storages[0] in given:
            return ArgumentSource, given[storages[0]], self._written()
        return StateSource, storages, self._written()


class ArgumentSource(ArraySource):
    """The storage of an argument."""

    argument: int

    def __init__(self, argument: int, storage: Storage, form: Form) -> None:
        super().__init__((storage,), form)
        self.argument = argument

    def storage(self, arguments: Any) -> Storage:
        storage: Storage = arguments.tensors[self.argument]._storage_
        return storage

    def signature(self, given: Mapping[int, int]) -> Any:
        return ArgumentSource, self.argument, self._written()

    def forget(self) -> None:
        self.storages = ()
        self.writes = [(index, ()) for index, _ in self.writes]


class GradientSource(ArraySource):
    """The storage of a leaf's gradient (``leaf``: `ExternalTensor`)."""

    def __init__(self, leaf: Any, storage: Storage, form: Form) -> None:
        super().__init__((storage,), form)
        self.leaf = leaf

    def storage(self, arguments: Any) -> Storage:
        leaf = self.leaf.of(arguments)
        if leaf is None or leaf.grad is None:
            return self.storages[0]
        storage: Storage = leaf.grad._storage_
        return storage

    def signature(self, given: Mapping[int, int]) -> Any:
        return GradientSource, self._written()

    def forget(self) -> None:
        if not self.leaf.cleared:
            self.storages = ()
            self.writes = [(index, ()) for index, _ in self.writes]


class FilledSource(Source):
    """State that an optimizer has made in the trace, and that is gone: an array of one value."""

    def __init__(self, form: Form, fill_value: Any) -> None:
        self.form, self.fill_value = form, fill_value

    def value(self, given: Callable[[Source], Any], words: Any) -> Any:
        return jnp.full(self.form.array_shape, self.fill_value, self.form.jax_dtype)

    def signature(self, given: Mapping[int, int]) -> Any:
        return FilledSource, self.fill_value, self.form


class NumberSource(Source):
    """A number of Python's, the one with ``index``: two words."""

    in_words = True

    def __init__(self, index: int, integer: bool) -> None:
        self.index, self.integer = index, integer

    def value(self, given: Callable[[Source], Any], words: Any) -> Any:
        dtype = jnp.int64 if self.integer else jnp.float64
        return jax.lax.bitcast_convert_type(words[2 * self.index : 2 * self.index + 2], dtype)

    def signature(self, given: Mapping[int, int]) -> Any:
        return NumberSource, self.index


class GeneratorSource(Source):
    """The random number generator's state: four words behind those of ``numbers`` numbers."""

    in_words = True

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers

    def value(self, given: Callable[[Source], Any], words: Any) -> Any:
        return words[2 * self.numbers : 2 * self.numbers + 4]

    def signature(self, given: Mapping[int, int]) -> Any:
        return (GeneratorSource,)


class HostSource(Source):
    """A CPU tensor, which ``read`` gives from the arguments and what the host's program
    (`recorded/host_ops.py`) has computed."""

    is_input = True

    def __init__(self, read: Callable[[Any, list[Any]], Any]) -> None:
        self.read = read

    def value(self, given: Callable[[Source], Any], words: Any) -> Any:
        return given(self)

    def signature(self, given: Mapping[int, int]) -> Any:
        return (HostSource,)


class CotangentSource(Source):
    """The gradient of a result, the one with ``index``: an input of the backward pass alone."""

    def __init__(self, index: int) -> None:
        self.index = index

    def value(self, given: Callable[[Source], Any], words: Any) -> Any:
        return None

    def signature(self, given: Mapping[int, int]) -> Any:
        return CotangentSource, self.index


class ConstantSource(Source):
    """An array that is part of the program."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def value(self, given: Callable[[Source], Any], words: Any) -> Any:
        return self.array

    def signature(self, given: Mapping[int, int]) -> Any:
        return (ConstantSource,)
