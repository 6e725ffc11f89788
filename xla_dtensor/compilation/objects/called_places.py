"""State that is read by calling something: context variables, StringIO, events, thread-locals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xla_dtensor.compilation.objects.places import MISSING, Chosen, Entries, Live, Place


class Variable(Chosen):
    """What a ``ContextVar`` holds in the context of the call."""

    __slots__ = ()

    def __init__(self, owner: Any, path: str) -> None:
        super().__init__(owner, ("get()",), path)

    def content(self) -> dict[Any, Any]:
        return dict.fromkeys(self.keys, *_held(self.owner))

    def replace(self, content: dict[Any, Any]) -> None:
        for value in content.values():
            if value is not MISSING and _held(self.owner)[0] is not value:
                self.owner.set(value)

    def live(self) -> Live:
        return [], [(_held, self.owner)] if self.keys else []


def _held(variable: Any) -> tuple[Any]:
    """What a context variable holds, or its own default."""
    try:
        return (variable.get(),)
    except LookupError:
        return (MISSING,)


class Text(Place):
    """What an ``io.StringIO`` or ``io.BytesIO`` holds, and how far it has been read. Made anew
    whenever it is asked for, it is compared by value."""

    __slots__ = ()

    def content(self) -> dict[Any, Any]:
        if self.owner.closed:
            return {"getvalue()": MISSING, "tell()": MISSING}
        return {"getvalue()": self.owner.getvalue(), "tell()": self.owner.tell()}

    def replace(self, content: dict[Any, Any]) -> None:
        now = self.content() | content
        self.owner.seek(0)
        if now["getvalue()"] != self.owner.getvalue():
            self.owner.truncate()
            self.owner.write(now["getvalue()"])
        self.owner.seek(now["tell()"])


class Flag(Place):
    """Whether an event is set. Whoever waits for it is told when it is."""

    __slots__ = ()

    def content(self) -> dict[Any, Any]:
        return {"is_set()": self.owner.is_set()}

    def replace(self, content: dict[Any, Any]) -> None:
        for value in content.values():
            self.owner.set() if value else self.owner.clear()

    def live(self) -> Live:
        return [], [(lambda event: (event.is_set(),), self.owner)]


class OfThread(Entries):
    """Attributes of a ``threading.local``, in the thread that asks: a program of one thread's finds
    and leaves there what is the next one's in that."""

    __slots__ = ("local",)

    def __init__(self, local: Any, keys: Iterable[str], path: str, guarded: bool = True) -> None:
        self.local = local
        super().__init__(vars(local), keys, path, guarded)

    @property
    def owner(self) -> Any:
        return {} if self.local is None else vars(self.local)

    @owner.setter
    def owner(self, value: Any) -> None:
        if value is None:  # an effect lets go of its place
            self.local = None

    @property
    def container(self) -> int:
        return id(self.local)
