"""What a walk has reached: what is compared before a call, and what is checked after a trace."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from xla_dtensor.compilation.code.reflection import is_strict
from xla_dtensor.compilation.code.scripted import Scripted
from xla_dtensor.compilation.objects.carried import Carried
from xla_dtensor.compilation.objects.found import Found, found_as, is_atom
from xla_dtensor.compilation.objects.places import Place


@dataclass(eq=False)
class Reached:
    """What the Python of a step can read.

    Attributes:
        found: all that was come by, to be compared by value.
        places: every container on the way.
        tensors: the tensors found, by id, with their paths.
        arrays: the NumPy arrays and buffers found, with their content.
        live: what else is compared by identity: pairs of a function and its argument, whose result
            is an iterable. Unlike in a place, a trace undoes no change there.
        probes: what only a call tells: a function, and the object that it must give.
        typed: objects of which the class and the dict of attributes are compared.
        large: containers of which the length is compared, as all in them would be too much.
        imports: the Python modules that the code imports, or takes from ``sys.modules``.
        caches: functions under ``functools.cache``, with their paths.
        jax_arrays: the ids of the JAX arrays found.
        shared: queues, locks and semaphores found, with their paths: the step mustn't put, take,
            or leave them acquired.
        consumed: iterators found, with their paths: the step mustn't take from them.
        scripted: modules of TorchScript's.
        random_sources: generators of random numbers that the step may draw from.
        optimizers: the optimizers found, by id.
        settings: the entries of their param groups, if the code names those: (``id`` of the group,
            key).
        carried: the places found of those that each call takes its values from.
        inside: the lists, dicts and objects that are part of what is there (`Place.container`).
        plain: the ids of the dicts of objects' attributes that no library's code changes.
        codes: the code of all functions found.
    """

    found: list[Found] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    tensors: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    arrays: list[tuple[Any, Any]] = field(default_factory=list)
    live: list[tuple[Any, Any]] = field(default_factory=list)
    probes: list[tuple[Any, Any]] = field(default_factory=list)
    typed: list[Any] = field(default_factory=list)
    large: list[Any] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    caches: list[tuple[Any, str]] = field(default_factory=list)
    jax_arrays: set[int] = field(default_factory=set)
    shared: list[tuple[Any, str]] = field(default_factory=list)
    consumed: list[tuple[Any, str]] = field(default_factory=list)
    scripted: list[Scripted] = field(default_factory=list)
    random_sources: list[Any] = field(default_factory=list)
    optimizers: dict[int, Optimizer] = field(default_factory=dict)
    settings: set[tuple[int, str]] = field(default_factory=set)
    carried: list[Carried] = field(default_factory=list)
    inside: set[int] = field(default_factory=set)
    plain: set[int] = field(default_factory=set)
    codes: set[types.CodeType] = field(default_factory=set)
    _used_paths: dict[str, int] = field(default_factory=dict)

    def note(self, path: str, kind: Any, value: Any = None) -> None:
        """Something was come by (`Found`)."""
        # Paths need not be unique: two closures may both have a cell called "model".
        count = self._used_paths[path] = self._used_paths.get(path, 0) + 1
        path = path if count == 1 else f"{path} ({count})"
        self.found.append(found_as(kind, path, value))

    def note_kind(self, path: str, noted: Any, value: Any) -> None:
        """An object of this kind was come by, another one of which is something else; of an
        ``"object"``, a ``"module"`` and a ``type`` only another class is."""
        by_class = noted in ("object", "module", type)
        cls = type(value)
        self.note(path, cls if noted is type else noted, cls if by_class else value)

    def note_whole(self, path: str, value: Any) -> None:
        """What isn't followed: compared by value, or by which object it is."""
        atom = not is_strict(type(value)) and is_atom(value)
        self.note(path, "value" if atom else "opaque", value)

    def probe(self, path: str, read: Callable[[], Any]) -> None:
        """What only a call tells, by value."""
        value = read()
        self.probes.append((functools.partial(_equals, read, value), True))
        self.note(path, "value", value)


def _equals(read: Any, value: Any) -> bool:
    return bool(read() == value)
