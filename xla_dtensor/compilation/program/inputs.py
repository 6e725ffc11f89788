"""The inputs of a program: which of a trace's sources they are, their order, and their values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xla_dtensor.base.random import rng
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.inputs import Arrays
from xla_dtensor.compilation.call.run import Prepared
from xla_dtensor.compilation.call.sources import (
    ArgumentSource,
    ArraySource,
    HostSource,
    Source,
)
from xla_dtensor.compilation.recorded.host_program import HostRun
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.compilation.trace.numbers import values_of
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.runtime import arrays

_NO_WORDS = np.empty(0, dtype=np.uint32)

Groups = tuple[Any, Any, Any, Any]
"""The inputs as a program takes them: arrays that it overwrites (donated), arrays that it keeps,
arrays of the host, and one array with all numbers and the generator's state."""


class Inputs:
    """The inputs of one program.

    Args:
        traced: the trace that the program is compiled from.

    Attributes:
        donated, kept: the arrays that the program overwrites, and those that it doesn't.
        to_arguments: (output, source) of what it writes to storages that are others in each call.
        random_operations: how many operations draw from the generator.
    """

    def __init__(self, traced: Traced) -> None:
        self._sources, self._numbers = traced.inputs.sources, traced.trace.numbers.inputs
        host = traced.host.program
        self._on_host = host.operations if host.depends else []
        self._frame, self.random_operations = traced.frame, traced.outputs.random_operations
        # In the order in which the step first used the storages: the jaxpr's order of constants
        # differs under ``xd.abstract``, and a program compiled there must have the same text here.
        met: dict[Source, int] = {source: i for i, source in enumerate(traced.inputs.slots)}
        found = dict.fromkeys(traced.inputs.sources)
        used = sorted(found, key=lambda source: met.get(source, len(met)))
        of_storages = [s for s in used if isinstance(s, ArraySource)]
        # Not the scalars: they are four bytes, and storages that this program doesn't use may have
        # their array, too (step counts of frozen parameters).
        donated = [s for s in of_storages if s.writes and not _is_scalar(s)]
        kept = [s for s in of_storages if not s.writes or _is_scalar(s)]
        self.donated, self.kept = (Arrays(some, traced.frame) for some in (donated, kept))
        self._hosts = [s for s in used if isinstance(s, HostSource)]
        self._uses_words = any(s.in_words for s in used)
        self.to_arguments = [
            (index, source)
            for source in traced.inputs.slots
            if not source.is_fixed
            for index, _ in source.writes
        ]
        groups: list[Sequence[Source]] = [donated, kept, self._hosts]
        self._places = {s: (g, i) for g, some in enumerate(groups) for i, s in enumerate(some)}
        self._slots = traced.inputs.slots

    @functools.cached_property
    def storages(self) -> frozenset[int]:
        """The ids of the storages that are the same in each call, of those that it only writes,
        too."""
        return frozenset(
            id(storage) for source in self._slots if source.is_fixed for storage in source.storages
        )

    @property
    def are_arguments(self) -> list[bool]:
        """Which constants of the trace's jaxpr are arguments that the step only reads."""
        return [isinstance(s, ArgumentSource) and not s.writes for s in self._sources]

    @property
    def depends_on_host(self) -> bool:
        """Whether operations on CPU tensors run before each call."""
        return bool(self._on_host)

    def constants(self, donated: Any, kept: Any, hosts: Any, words: Any) -> list[Any]:
        """The constants of the trace's jaxpr, made of the program's inputs (in its trace)."""
        groups = (donated, kept, hosts)
        return [source.value(lambda s: self.of(s, groups), words) for source in self._sources]

    def shardings(self, groups: Sequence[Any]) -> list[Any]:
        """Where the constants lie that are inputs; None for those that the program makes."""
        given = (self.of(s, groups) if s.is_input else None for s in self._sources)
        return [getattr(array, "sharding", None) for array in given]

    def of(self, source: Source, groups: Sequence[Any]) -> Any:
        """The input that a source is (`Source.is_input`)."""
        group, position = self._places[source]
        return groups[group][position]

    def prepare(self, arguments: Arguments) -> Prepared:
        """What is computed on the host before a call.

        Raises:
            NumberChanged: a number is none of the kind that the program was made for.
            HostChanged: what is computed isn't.
        """
        if not self._on_host:
            return Prepared(values_of(self._numbers, arguments), [])
        # Each operation runs once, in order, as soon as a number is the item of its result: a later
        # one may write to the same tensor.
        host = HostRun(self._on_host, arguments)
        numbers = values_of(self._numbers, arguments, host.through)
        host.through(len(self._on_host) - 1, numbers)
        return Prepared(numbers, host.results)

    def gather(self, arguments: Arguments, prepared: Prepared, take: bool = True) -> Groups:
        """The inputs of a call.

        Args:
            take: whether the call is in earnest: the generator moves on.
        """
        for _, source in self.to_arguments:
            source.storage(arguments).check_write()
        donated, kept = self.donated.gather(arguments), self.kept.gather(arguments)
        hosts: list[np.ndarray] = []
        if self._hosts:
            hosts = [to_numpy(source.read(arguments, prepared.host)) for source in self._hosts]
            if take and self._frame is not None:
                arrays.check_same(hosts, "gives a compiled step from the CPU")
        # Last, as it advances the generator: if something failed after it, numbers would be lost.
        words = self._words(prepared, take) if self._uses_words else _NO_WORDS
        return donated, kept, hosts, words

    def _words(self, prepared: Prepared, take: bool) -> np.ndarray:
        """All numbers and the generator's state as one array: each argument of a program that comes
        from the host costs a transfer to every device."""
        words = np.empty(2 * len(self._numbers) + 4, dtype=np.uint32)
        for i, (number, value) in enumerate(zip(self._numbers, prepared.numbers, strict=True)):
            dtype = np.int64 if number.integer else np.float64
            words[2 * i : 2 * i + 2].view(dtype)[0] = value
        operations = self.random_operations
        words[-4:] = (rng.default.take(operations) if take else rng.words()) if operations else 0
        return words


def _is_scalar(source: ArraySource) -> bool:
    return math.prod(source.form.array_shape) == 1
