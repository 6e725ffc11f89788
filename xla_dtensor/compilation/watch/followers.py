"""The table of followers, and the walk repeated until it meets no new name."""

from __future__ import annotations

import copyreg
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.compilation.objects.carried import parts_of
from xla_dtensor.compilation.objects.kinds import places_of
from xla_dtensor.compilation.objects.places import Items
from xla_dtensor.compilation.objects.settings import SettingsPlace, guards_of
from xla_dtensor.compilation.watch import functions, python_objects, torch_objects
from xla_dtensor.compilation.watch.attributes import (
    library_class,
    methods,
    of_atom,
    of_class,
    of_object,
)
from xla_dtensor.compilation.watch.reached import Reached
from xla_dtensor.compilation.watch.walk import Followed, Followers, Walk

FOLLOWERS = Followers(
    of_atom,
    (
        *functions.KINDS,
        *torch_objects.KINDS,
        Followed(type, "class", of_class),
        *python_objects.KINDS,
        Followed(object, None, of_object),
    ),
)


def reach(roots: list[tuple[str, Any]], begin: Callable[[], Walk]) -> Reached:
    """What can be read from ``roots``. Names come from all code that is met, and more names lead to
    more code, so it is walked until nothing is new."""
    while True:
        walk = begin()
        names, reached, before = walk.names, walk.reached, walk.names.count()
        for path, value in roots:
            walk.follow(value, path)
        torch_objects.global_hooks(walk)
        functions.registered(walk)
        if "__reduce_ex__" in names.attributes:  # copying and pickling use it
            walk.follow(copyreg.dispatch_table, "copyreg.dispatch_table")
        for one in reached.carried:
            _inside(walk, one.read(), one.name)
        if names.count() == before:
            walk.end()
            if names.count() == before:
                break
    functions.place_globals(walk)
    if reached.imports:  # compared, but not undone: an import in the step stays
        reached.live.append((functools.partial(map, sys.modules.get), sorted(reached.imports)))
    _settings(walk)
    if names.environment:
        walk.place(Items(os.environ._data, "os.environ"))  # type: ignore[attr-defined]
        for key, value in os.environ.items():
            reached.note(f"os.environ[{key!r}]", "value", value)
    return reached


def _settings(walk: Walk) -> None:
    """Those of torch and Python that functions keep."""
    called = (names for _, names in walk.names.namespaces.values())
    names = walk.names.attributes.union(walk.names.readers, *called)
    for text, read in guards_of(names):
        walk.reached.probe(text, read)
    walk.place(SettingsPlace(names | walk.names.assigned))  # switches are attributes of `xd.config`
    library_class(walk, torch.Tensor)


def _inside(walk: Walk, value: Any, path: str) -> None:
    """The lists, dicts and records in what a call takes like an argument: the step mustn't change
    them, since it is given others in the next call."""
    for name, inner in parts_of(value):
        _inside(walk, inner, f"{path}{name}")
    if not walk.of_library(type(value)):  # the step may call its methods
        methods(walk, type(value))
    for place in () if isinstance(value, torch.Tensor) else places_of(value, path):
        walk.place(place)
        walk.reached.inside.add(place.container)
