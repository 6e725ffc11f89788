"""Splits a call's arguments into leaves, which may vary, and a hashable key of the rest."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Any

import numpy as np
import torch

from xla_dtensor.base.numbers.python_numbers import NUMPY_NUMBERS
from xla_dtensor.base.tables.keys import exact
from xla_dtensor.base.torch_private.attributes import is_view
from xla_dtensor.compilation.call.argument_names import OTHER, difference, paths, paths_by_id
from xla_dtensor.compilation.call.buckets import Length, Padding
from xla_dtensor.compilation.code.identities import SameIdentity, aliases
from xla_dtensor.compilation.code.names import is_library_class
from xla_dtensor.compilation.code.reflection import is_strict, own_of
from xla_dtensor.compilation.objects.carried import Carried, has_history, is_state
from xla_dtensor.compilation.objects.found import content_of, is_atom
from xla_dtensor.compilation.objects.global_state import global_state
from xla_dtensor.compilation.objects.kinds import (
    DATACLASS,
    FUNCTION,
    ids_of_parts,
    kind_of,
    mapped,
    places_of,
)
from xla_dtensor.compilation.objects.kinds_of_code import IteratorArgument, without_cells
from xla_dtensor.compilation.objects.places import UNREAD, Attributes, Place
from xla_dtensor.compilation.objects.readers import ReadsMore
from xla_dtensor.compilation.trace.external_tensors import hooks_of
from xla_dtensor.tensors.attributes import OWN_ATTRIBUTES
from xla_dtensor.tensors.base import requires_grad_of_tensor
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

Plant = Callable[[Place, Any, Any], None]
"""Puts something into a place for the time of a trace."""


# Attributes of torch's tensors that are in the key only if the step's code reads them.
_ASKED = frozenset({"_version", "is_inference"})


class Arguments:
    """The arguments of one call.

    Args:
        args, kwargs: of the call.
        reads: the names of attributes that the step's code is known to read; None: it may read any.

    Attributes:
        values: what they consist of (`kinds`): tensors, numbers, and all that isn't taken apart.
        tensors: the tensors among them, and those in attributes of tensors; inputs of the program.
        anywhere: the per-device ones with one value. The key doesn't have the devices that they lie
            on, which follow from what eager operations were launched with.
        numbers: the numbers (not bools) among the values that may be inputs, by position.
        fields: which of those are inside of dataclasses and namespaces.
        containers: the objects that were taken apart: lists, dicts, dataclasses.
        arrays: NumPy's, and other buffers, with their content.
        key: of everything but the numbers' values: calls with different keys have different
            programs.
        carried: the same of what the step has kept from its last call (`carrying`), which comes
            behind the arguments.
        given: the arguments alone; None where there is nothing else. (A reference to itself would
            keep a batch until the next collection of cycles.)
        padding: what has been padded of them, or None.
        lengths: the numbers that are the lengths of what has been, by position.
    """

    # What most calls have: no such arguments.
    carried: tuple[Any, ...] = ()
    lengths: frozenset[int] = frozenset()
    fields: frozenset[int] = frozenset()
    given: Arguments | None = None
    _inputs, _all_inputs, _in_record = True, False, False
    _carried_names: Sequence[str] = ()
    _cut: Mapping[int, torch.Tensor] = MappingProxyType({})
    _kept: Mapping[int, Any] = MappingProxyType({})
    _rebuilt: Sequence[tuple[Any, list[int]]] = ()

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: frozenset[str] | None = frozenset(),
        padding: Padding | None = None,
    ) -> None:
        self.args, self.kwargs, self._reads, self.padding = args, kwargs, reads, padding
        self._asked = _ASKED & (reads or frozenset())
        self.values: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.anywhere: list[Any] = []
        self.numbers: dict[int, int | float] = {}
        self.containers: list[Any] = []
        self.arrays: list[tuple[Any, Any]] = []
        # Objects whose attributes the step's code may read: (prefix in messages, argument, object).
        self._objects: list[tuple[str, Any, Any]] = []
        self._index: dict[int, int] = {}
        self._parts: list[Any] = []
        structure: Any = tuple(map(self._structure, args))
        if kwargs:
            structure = structure, tuple(kwargs), tuple(map(self._structure, kwargs.values()))
        self.key = (structure, tuple(self._parts), aliases(self.tensors), global_state())
        self._positions = self._index

    def _structure(self, value: Any) -> Any:
        """Take a value apart; the part of the key for what isn't a leaf's."""
        cls = type(value)
        if cls is XLAShardedTensor or cls is XLATensor:
            self.values.append(value)
            self._parts.append(self._tensor(value))
            return None
        if cls is float or cls is int or cls is Length or cls in NUMPY_NUMBERS:
            self._parts.append(cls if self._inputs else exact(value))
            self.values.append(self._number(value) if self._inputs else value)
            return None
        if cls is str or cls is bool or cls is NoneType:
            self._parts.append((cls, value))
            self.values.append(value)
            return None
        kind = kind_of(value)
        if kind is None:
            self.values.append(value)
            self._parts.append(self._leaf(value))
            return None
        count = len(self.containers)
        index = self._index.setdefault(id(value), count)
        if index < count:  # it occurs twice, or contains itself
            return index
        self.containers.append(value)
        data, parts = kind.split(value)
        if kind is FUNCTION:
            self._objects.append(("", value, without_cells(value)))
        elif not is_library_class(cls):
            self._objects.append(("the class of ", value, cls))  # whose methods may be called
        before = self._inputs, self._in_record
        self._inputs = self._all_inputs or (self._inputs and kind.inputs)
        self._in_record = self._in_record or kind is DATACLASS
        found = kind.key(data), tuple(map(self._structure, parts))
        self._inputs, self._in_record = before
        return found

    def _number(self, value: Any) -> Any:
        position = len(self.values)
        if type(value) is Length:
            self.lengths, value = self.lengths | {position}, int(value)
        self.numbers[position] = value
        if self._in_record:
            self.fields |= {position}
        return value

    def _inside(self, attributes: Mapping[str, Any]) -> Any:
        """The part of the key for what a leaf keeps."""
        outer = self.values, self._parts, self._inputs
        self.values, self._parts, self._inputs = [], [], False
        structure = tuple(map(self._structure, attributes.values()))
        found = tuple(attributes), structure, tuple(self._parts)
        self.values, self._parts, self._inputs = outer
        return found

    def _tensor(self, value: Any) -> tuple[Any, ...]:
        self.tensors.append(value)
        requires_grad = requires_grad_of_tensor(value)
        hooks = hooks_of(value) if requires_grad else ()
        if hooks:
            self._objects += [("a hook of ", value, hook) for hook in hooks if callable(hook)]
        memory, steps = value._storage_.form, value._steps
        form = value._form if steps else memory
        anywhere = memory.anywhere()
        if anywhere is not None:
            self.anywhere.append(value)
            form, memory = (form.anywhere() or form) if steps else anywhere, anywhere
        return (
            form,
            memory,
            steps,
            requires_grad,
            requires_grad and value.is_leaf,
            tuple(map(SameIdentity, hooks)),
            None
            if value.__dict__.keys() <= OWN_ATTRIBUTES and not self._asked
            else self._attributes(value),
        )

    def _attributes(self, value: Any) -> Any:
        """What the user has put on a tensor, as far as the step's code may read it."""
        own, reads = value.__dict__, self._reads
        found = None
        if self._asked:
            inference = value.is_inference()
            counted = "_version" in self._asked and not inference
            found = inference, value._version if counted else 0
        if own.keys() <= OWN_ATTRIBUTES:
            return found
        names = sorted(own.keys() - OWN_ATTRIBUTES)
        names = [name for name in names if reads is None or name in reads]
        if not names:
            return found
        return found, self._inside({name: own[name] for name in names})

    def _leaf(self, value: Any) -> Any:
        """The part of the key for one leaf."""
        cls = type(value)
        if is_strict(cls):
            self._objects.append(("", value, value))
            return SameIdentity(value)
        if isinstance(value, torch.Tensor):
            if cls is not torch.Tensor and not is_library_class(cls):
                self._objects.append(("the class of ", value, cls))
            if is_ours(value):
                return cls, self._tensor(value)
            self.tensors.append(value)
            return (
                (cls, *value.shape),
                value.stride(),
                is_view(value),  # the step may reach another view of its base
                value.dtype,
                value.device,
                value.requires_grad,
                self._attributes(value),
            )
        if is_atom(value):
            if is_library_class(cls):
                return exact(value)
            if isinstance(value, enum.Enum):
                self._objects.append(("", value, value))
                return SameIdentity(value)
            self._objects.append(("the class of ", value, cls))
            return exact(value), self._inside(own_of(value))
        if isinstance(value, np.ndarray | np.void | bytearray | memoryview):
            content = content_of(value)
            self.arrays.append((value, content))
            index = self._index.setdefault(id(value), len(self.containers))
            self.containers.append(value)
            return cls, index, content, self._inside(own_of(value))
        self._objects.append(("", value, value))
        return SameIdentity(value)

    # --- what the step keeps ------------------------------------------------------------------

    def carrying(self, places: Sequence[Carried]) -> Arguments | None:
        """These, and behind them what is in ``places`` now; None if it can't be an argument."""
        given = self.given or self
        if not places:
            return given
        more = given._copy()
        more.given = given
        more.values, more.tensors = list(given.values), list(given.tensors)
        more.anywhere = list(given.anywhere)
        more.numbers = dict(given.numbers)
        names: list[str] = []
        more.containers, more._index, more._parts = [], {}, []
        more._all_inputs = True
        parts = []
        for place in places:
            value = place.read()
            if not is_state(value):
                return None
            before = len(more.values)
            parts.append((more._structure(value), tuple(more._parts)))
            more._parts = []
            names += [place.name] * (len(more.values) - before)
        more._carried_names = names
        more.carried = (*parts, aliases(more.tensors))
        more.containers, more._index = given.containers, given._index
        return more

    def _copy(self) -> Arguments:
        other = Arguments.__new__(Arguments)
        vars(other).update(vars(self))
        return other

    def carried_numbers(self) -> frozenset[int]:
        """The numbers that are kept. They are always inputs: they hardly stay as they are."""
        own = len(self.values) - len(self._carried_names)
        return frozenset(i for i in self.numbers if i >= own)

    def with_carried_numbers(
        self, places: Sequence[Carried], numbers: dict[int, Any]
    ) -> list[tuple[Carried, Any]]:
        """The places that hold numbers, each with its content with others instead."""
        positions = itertools.count(len(self.values) - len(self._carried_names))
        done: dict[int, Any] = {}

        def other(leaf: Any) -> Any:
            return numbers.get(next(positions), leaf)

        found = [(place, place.read()) for place in places]
        others = [(place, value, mapped(value, other, None, done)) for place, value in found]
        return [(place, new) for place, value, new in others if new is not value]

    # --- for the trace ------------------------------------------------------------------------

    def for_trace(
        self, numbers: dict[int, Any], plant: Plant, reads: frozenset[str] | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other numbers in the places of ``numbers``, and without history: lists
        and the like get them for the time of the trace. Attributes of tensors that aren't among
        ``reads`` are hidden: the step may assign them, be it what is there already."""
        for tensor in self.tensors if reads is not None else ():
            place = Attributes(tensor, OTHER)
            for name in place.content().keys() - (reads or frozenset()):
                plant(place, name, UNREAD)
        self.end_trace()
        has_streams = any(type(value) is IteratorArgument for value in self.containers)
        if not numbers and not self._cut and not has_streams:
            return self.args, self.kwargs
        positions = itertools.count()
        done: dict[int, Any] = {}

        def other(leaf: Any) -> Any:
            found = numbers.get(next(positions), leaf)
            return self._cut.get(id(leaf), found) if self._cut else found

        args = tuple(mapped(value, other, plant, done) for value in self.args)
        kwargs = {name: mapped(value, other, plant, done) for name, value in self.kwargs.items()}
        for tensor in self.tensors if self._cut else ():
            place = Attributes(tensor, OTHER)
            for name, value in place.content().items():
                new = mapped(value, lambda leaf: self._cut.get(id(leaf), leaf), plant, done)
                if new is not value:
                    plant(place, name, new)
        self._kept = done
        made = {id(new): self._index[key] for key, (_, new) in done.items() if key in self._index}
        self._positions = self._index | made
        others = [new for value, new in done.values() if new is not value]
        self._rebuilt = [(new, ids_of_parts(new)) for new in others]
        return args, kwargs

    def end_trace(self) -> None:
        """Let go of what was made for it: iterators hold numbers that end with it."""
        self._positions, self._kept, self._rebuilt = self._index, {}, []

    def check_reads(self, reads: frozenset[str] | None) -> None:
        """Raise `ReadsMore` if the step reads attributes of these tensors that aren't in their key,
        because it wasn't known to."""
        known = self._reads
        if known is None or reads == known:
            return
        more = (reads or frozenset()) - known
        if (self.tensors and "_version" in more) or any(
            name not in known and (reads is None or name in more)
            for tensor in self.tensors
            for name in Attributes(tensor, "").content()
        ):
            raise ReadsMore(reads)

    def without_history(self) -> Arguments:
        """The same for a trace: a tensor that has a history is a leaf there, with the same memory.
        torch's backward pass would go on into what the caller has computed."""
        if not any(map(has_history, self.tensors)):
            return self
        more = self._copy()
        cut: dict[int, torch.Tensor] = {}
        more.given, more._cut = None, cut
        for tensor in self.tensors:
            if has_history(tensor) and id(tensor) not in cut:
                leaf = cut[id(tensor)] = tensor.detach().requires_grad_()
                Attributes(leaf, "").put(Attributes(tensor, "").content())
        more.tensors = [cut.get(id(t), t) for t in self.tensors]
        return more

    def objects(self) -> tuple[Any, ...]:
        """All tensors and containers: what the step may ask the identity of."""
        return (*self.tensors, *self.containers)

    def position(self, container: Any) -> int | None:
        """Which of the containers something is."""
        return self._positions.get(id(container))

    def places(self) -> list[Place]:
        """Where a step may put something into its arguments."""
        paths = paths_by_id(self.args, self.kwargs)
        return [
            place
            for value in (*self.containers, *self.tensors)
            for place in places_of(value, paths.get(id(value), OTHER))
        ]

    def is_spoilt(self) -> bool:
        """Whether the step has changed what isn't changed in each call: an array, or an object that
        was made for the trace."""
        for value in self.containers:
            if type(value) is IteratorArgument:
                value.check()
        return any(content_of(value) != content for value, content in self.arrays) or any(
            ids_of_parts(new) != parts for new, parts in self._rebuilt
        )

    def roots(self) -> list[tuple[str, Any]]:
        """What the step's code may read from: (name in messages, object)."""
        paths = paths_by_id(self.args, self.kwargs) if self._objects else {}
        return [
            (prefix + paths.get(id(value), OTHER), thing) for prefix, value, thing in self._objects
        ]

    # --- for messages -------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of the values, in messages."""
        own = [path for path, _, is_leaf in paths(self.args, self.kwargs) if is_leaf]
        return [*own, *self._carried_names]

    def names_of_numbers(self) -> dict[int, str]:
        """The names of the numbers, by position."""
        names = self.names()
        return {i: names[i] for i in self.numbers}

    def name_of(self, tensor: Any) -> str:
        """What a tensor among the values is called in messages."""
        names = self.names()
        return next((n for n, v in zip(names, self.values, strict=False) if v is tensor), OTHER)

    def difference(self, other: Arguments) -> str | None:
        """What differs from another call, in words; None if nothing but numbers does."""
        names = self.names()
        return difference(self, other, names[: len(self.key[1])], names[len(self.key[1]) :])
