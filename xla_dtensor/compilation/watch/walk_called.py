"""Settings, files in memory, events, random generators and threads' own objects on the walk: what
they hold is had by calling."""

from __future__ import annotations

import functools
import io
import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.compilation.objects.called_places import Flag, OfThread, Text
from xla_dtensor.compilation.objects.places import Entries, Slots
from xla_dtensor.compilation.objects.settings import Settings, guards_of
from xla_dtensor.compilation.watch.walk_optimizers import WalkOptimizers

_READS_TEXT = frozenset(
    {
        *("getvalue", "getbuffer", "read", "read1", "readinto", "readinto1", "readline"),
        *("readlines", "tell"),
    }
)


class WalkCalled(WalkOptimizers):
    """What is found in them; see `Watch`."""

    _without_taken: Callable[[Entries | Slots], tuple[str, ...]]

    def _probe(self, path: str, read: Callable[[], Any]) -> None:
        """What only a call tells, by value."""
        value = read()
        self.probes.append((functools.partial(_equals, read, value), True))
        self._note(path, "value", value)

    def _settings(self) -> None:
        """Those of torch and Python that functions keep."""
        called = (names for _, names in self._globals.values())
        names = self._names.attributes.union(self._readers, *called)
        for text, read in guards_of(names):
            self._probe(text, read)
        self._place(Settings(names | self._names.assigned))  # a switch is an attribute
        self._library_class(torch.Tensor)

    def _text(self, text: io.StringIO | io.BytesIO, path: str) -> None:
        """What the step reads from memory as from a file. Where it only writes to it that happens
        once, as with any file."""
        self._note(path, "object", type(text))
        names = self._names.attributes
        if not _READS_TEXT.isdisjoint(names) or not (
            self._calls("print") or "write" in names or "writelines" in names
        ):
            place = Text(text, path)
            self._place(place)
            for key in place.content():
                self._probe(place.label(key), functools.partial(place.at, key))
        self._own_parts(text, path)

    def _event(self, event: threading.Event, path: str) -> None:
        self._note(path, "object", type(event))
        names = self._names.attributes
        flag = Flag(event, path, guarded=not names.isdisjoint({"is_set", "isSet", "wait"}))
        if flag.guarded:
            self._note(f"{path}.is_set()", "value", event.is_set())
        if not names.isdisjoint({"set", "clear"}):
            self._place(flag)
        elif flag.guarded:  # other threads set it
            self.live += flag.live()[1]
        if not self._of_library(type(event)):
            self._own_parts(event, path)

    def _random_source(self, source: Any, path: str) -> None:
        """A generator of random numbers. The step mustn't draw from it; but it may look at it."""
        self.random_sources.append(source)
        self._note(path, "random generator", source)
        names = self._names.attributes
        if isinstance(source, random.Random):
            if "getstate" in names:
                self._probe(f"{path}.getstate()", source.getstate)
        elif not names.isdisjoint({"get_state", "bit_generator"}):
            generator = source.bit_generator if hasattr(source, "bit_generator") else source
            read = lambda: repr(getattr(generator, "state", None) or source.get_state())
            self._probe(f"{path}'s state", read)

    def _thread_local(self, local: threading.local, path: str) -> None:
        """What it holds in this thread; each has a dict of its own."""
        self._note(path, "object", type(local))
        own = vars(local)
        self.probes.append((functools.partial(vars, local), own))
        names = list(filter(self._is_read, own))
        for name in self._without_taken(OfThread(local, names, path)):
            self._walk(own[name], f"{path}.{name}")
        assigned = [name for name in self._names.assigned if name not in names]
        if assigned:
            self._place(OfThread(local, sorted(assigned), path, guarded=False))
        self._class(type(local))


def _equals(read: Any, value: Any) -> bool:
    return bool(read() == value)
