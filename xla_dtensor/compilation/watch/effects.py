"""Changes that a step's Python makes outside of it, other than to tensors' values.

Attributes, closure cells, lists, modes of modules.

A program is only valid for what its trace found before the step (`watch.py`). So what the trace
left there is what every valid call would leave: it is put there again after each run. A tensor of
the step's in such a place is a new tensor in each call. What is another value after every call (a
counter) can't be had that way, and is refused.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xla_dtensor.base.numbers.python_numbers import is_number, present_value
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.code.threads import others_run
from xla_dtensor.compilation.objects.carried import Carried
from xla_dtensor.compilation.objects.found import is_atom, same_atom
from xla_dtensor.compilation.objects.places import (
    MISSING,
    Appended,
    Attributes,
    Chosen,
    Elements,
    Place,
)
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.errors import DataDependentError


class Effect:
    """One place that the step has changed.

    Attributes:
        place: where.
        before, after: what it held and holds, by key; only what is not the same.
        argument: which of the arguments' places it is (`Arguments.places`); None: of none.
    """

    __slots__ = ("_keys", "after", "argument", "before", "place")

    def __init__(
        self,
        place: Place,
        before: dict[Any, Any],
        after: dict[Any, Any],
        argument: int | None = None,
    ) -> None:
        self.place, self.argument = place, argument
        self.before, self.after = _different(before, after)
        # All keys afterwards, if a list's or dict's keys, or their order, have changed; else None.
        self._keys = None if list(before) == list(after) else list(after)
        if isinstance(place.owner, set):
            self.after, self._keys = after, list(after)

    def name(self) -> str:
        """The name of what changed, in messages."""
        return self.place.label(next(iter({**self.before, **self.after})))

    def changed(self) -> set[Any]:
        """What has changed, by identity: a list or a dict as a whole, an attribute."""
        if isinstance(self.place, _BY_NAME):
            return {(self.place.container, key) for key in {**self.before, **self.after}}
        return {self.place.container}

    def labels(self) -> set[str]:
        """The names of everything that changed, in messages."""
        return {self.place.label(key) for key in self.before}

    def appends(self) -> bool:
        """Whether a list or a deque from outside has more elements at its end, and no others."""
        place = self.place
        if type(place) is not Elements or type(place.owner) not in (list, deque):
            return False
        return self.argument is None and all(v is MISSING for v in self.before.values())

    def as_appended(self, place: Appended) -> Effect:
        """The same of a list whose content doesn't matter."""
        return Effect(place, {}, dict(enumerate(self.after.values())))

    def concerns(self, path: str) -> bool:
        """Whether what is called ``path`` in messages is a part of what has changed."""
        names = self.labels() if isinstance(self.place, _BY_NAME) else {self.place.path}
        return any(map(path.startswith, names))

    def grows(self) -> bool:
        """Whether a list or a dict has got other keys, or lost some."""
        return self._keys is not None and not isinstance(self.place, _BY_NAME)

    def text(self) -> str:
        """From what to what."""
        key = next(iter({**self.before, **self.after}))
        before, after = self.before.get(key, MISSING), self.after.get(key, MISSING)
        return f"{self.place.label(key)} from {_short(before)} to {_short(after)}"

    def left(self, key: Any, value: Any) -> bool:
        """Whether it may have left ``value`` under a key."""
        if key not in self.after or (self.after[key] is MISSING) != (value is MISSING):
            return False
        after = self.after[key]
        return after is value or not (is_atom(after) and is_atom(value)) or _same(after, value)

    def is_there(self) -> bool:
        """Whether its place may still be as it has left it."""
        if self.argument is not None or isinstance(self.place.owner, set):
            return True
        return all(self.left(key, self.place.at(key)) for key in self.after)

    def repeat(self, made: Callable[[Any], Any], arguments: Arguments) -> None:
        """Change the place as the step has: ``made`` of each value is put there."""
        place = self.place if self.argument is None else arguments.places()[self.argument]
        changes = {key: made(value) for key, value in self.after.items()}
        if isinstance(place, Appended):
            place.owner.extend(changes.values())
            return
        if self._keys is None or isinstance(place, _BY_NAME):
            place.put(changes)
            return
        now = place.content()
        place.replace({k: changes[k] if k in changes else now[k] for k in self._keys})

    def let_go(self) -> None:
        """Of an argument, which is another one in each call."""
        if self.argument is not None:
            self.place.owner, self.before = None, dict.fromkeys(self.before)

    def convert(self, convert: Callable[[Any], Any]) -> None:
        """Keep ``convert`` of each value in place of it."""
        self.after = {key: convert(value) for key, value in self.after.items()}


class _Anything:
    """Stands for what a place held that was something else for the time of the trace."""

    def __repr__(self) -> str:
        return "something"


_ANYTHING = _Anything()
_BY_NAME = Chosen | Attributes


def _different(
    before: dict[Any, Any], after: dict[Any, Any]
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    keys = [
        key
        for key in {**before, **after}
        if before.get(key, MISSING) is not after.get(key, MISSING)
    ]
    return (
        {key: before.get(key, MISSING) for key in keys},
        {key: after.get(key, MISSING) for key in keys},
    )


class PlacesBefore:
    """The places around a step as they are before it.

    Args:
        watch: what the step can reach.
        arguments: of the call. What of them the watch finds elsewhere is the same in each call.

    Attributes:
        planted: is told that a value has been put into a place (its container, the key) for the
            step to find.
        others: the names in messages of attributes that another thread has changed meanwhile.
    """

    def __init__(self, watch: Watch, arguments: Arguments) -> None:
        looked_at = (p for p in watch.reached.places if not isinstance(p, Appended))
        found: list[tuple[Place, int | None]] = [
            (place, None) for place in (*looked_at, *watch.appended())
        ]
        known = {place.container for place in watch.reached.places}
        given = enumerate(arguments.places())
        found += [(place, i) for i, place in given if place.container not in known]
        self._before = [(place, place.content(), argument) for place, argument in found]
        self._held = {place.container: content for place, content, _ in self._before}
        self._watch = watch
        self._alone = not others_run()
        self._there = {id(place.owner) for place, _ in found} - watch.reached.inside
        self._there |= {id(value) for value, _ in (*watch.reached.arrays, *watch.reached.consumed)}
        self._arguments = arguments
        self._planted: dict[tuple[int, Any], Any] = {}
        self.others: set[str] = set()
        # Of the dict alone, as an optimizer's hooks keep it: they mustn't keep the arguments alive.
        self.planted = self._planted.__setitem__

    def plant(self, carried: Carried, value: Any) -> None:
        """Let the step find ``value`` in a place. If it is there at the end, nothing is changed."""
        place, key = carried.place, carried.key
        before = self._held.get(place.container, {}).get(key, MISSING)
        with _no_other_thread():
            now = place.at(key)
            moved = before is not MISSING and now is not before
            # Another thread may have written after the arguments were read and before `before` was.
            read = present_value(value) if is_number(value) else now
            if moved or not (read is now or _same(read, present_value(now))):
                self.others.add(place.label(key))
            else:
                self.put(place, key, value)

    def put(self, place: Place, key: Any, value: Any) -> None:
        """The same, whatever another thread has made of it."""
        self.planted((place.container, key), value)
        place.put({key: value})

    def holds(self, value: Any) -> bool:
        """Whether a list or a dict was there before the step, the same one in each call, or is an
        argument."""
        return id(value) in self._there or self._arguments.position(value) is not None

    def memory(self) -> list[Any]:
        """The arrays, and the tensors, that were there before the step."""
        watch, given = self._watch, self._arguments
        arrays = [value for value, _ in (*given.arrays, *watch.reached.arrays)]
        return [*arrays, *given.tensors, *watch.leaves]

    def effects(self) -> list[Effect]:
        """What has changed by now."""
        found = []
        for place, before, argument in self._before:
            if isinstance(place, Appended):
                found += self._appended(place, before)
                continue
            now = place.content()
            if not self._planted and _is_untouched(before, now):
                continue  # as most places are
            after = self._but_for_planted(place, before, now)
            others = self._of_other_threads(place, before, after)
            self.others |= {place.label(k) for k, old in others.items() if after[k] is not old}
            after |= others
            assigned = (self._assigned(place) & before.keys()) - others.keys()
            kept = (key for key in assigned if after.get(key, MISSING) is not MISSING)
            before = before | dict.fromkeys(kept, _ANYTHING)
            if before.keys() == after.keys() and all(
                a is b or _same(a, b) for a, b in zip(before.values(), after.values(), strict=True)
            ):
                continue
            found.append(Effect(place, before, after, argument))
        return found

    @staticmethod
    def _appended(place: Appended, before: dict[Any, Any]) -> list[Effect]:
        added = place.added(before)
        if added is None:
            raise DataDependentError(
                f"the step appends to {place.path}, a full deque of ints, strings and the like (or "
                "of one object several times): it can't be told what it has appended; append "
                "outside of the step"
            )
        return [Effect(place, {}, added)] if added else []

    def _but_for_planted(
        self, place: Place, before: dict[Any, Any], after: dict[Any, Any]
    ) -> dict[Any, Any]:
        planted = self._planted_in(place)
        return {
            key: before[key] if key in planted and planted[key] is value else value
            for key, value in after.items()
        }

    def _assigned(self, place: Place) -> set[Any]:
        """The keys of planted values that the step has replaced, be it by what was there before: in
        a later call that may be something else."""
        planted = self._planted_in(place)
        return {key for key, value in planted.items() if place.at(key) is not value}

    def _planted_in(self, place: Place) -> dict[Any, Any]:
        return {key: v for (where, key), v in self._planted.items() if where == place.container}

    def restore(self) -> None:
        """Put everything back."""
        for place, before, _ in self._before:
            after = place.content()
            others = self._of_other_threads(place, before, after)
            for key, planted in self._planted_in(place).items():
                if key in others:  # another thread wrote it: its value stays, as a plain number
                    with _no_other_thread():
                        present = place.at(key)
                        own = present is planted
                        place.put({key: before[key] if own else present_value(present)})
            put_back(place, before, after | others)
        self._planted.clear()  # symbolic numbers, of use in the trace alone

    def _of_other_threads(
        self, place: Place, before: dict[Any, Any], after: dict[Any, Any]
    ) -> dict[Any, Any]:
        """Attributes that the step's code doesn't assign anywhere, but another thread has, as they
        were before: they are none of the step's doing."""
        names = self._watch.assigned_in(place)
        if names is None or (self._alone and not others_run()):
            return {}
        return {key: before[key] for key in after if key not in names and key in before}


def put_back(place: Place, before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """Have a place hold what it held.

    Args:
        before, after: its content then and now.
    """
    if list(before) != list(after):
        place.replace(before)
        return
    # Only the changed keys: another thread may have written the others.
    changed = {key: value for key, value in before.items() if after[key] is not value}
    if isinstance(place.owner, set) and changed:
        place.replace(before)
    elif changed:
        place.put(changed)


@contextlib.contextmanager
def _no_other_thread() -> Iterator[None]:
    """Let no other thread run Python between a look at a place and what is put there: Python has no
    "replace it if it is still this", and what the other has written in between would be lost."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # seconds
    time.sleep(0)  # a thread that already waits gets its turn first
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def _is_untouched(before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    return before.keys() == now.keys() and all(map(operator.is_, before.values(), now.values()))


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, int | float | str | bytes | tuple) and is_atom(a) and same_atom(a, b)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def grows_by_tensors(effect: Effect, is_new: Callable[[Any], bool]) -> bool:
    """Whether a list or a set takes up tensors in every call.

    Args:
        is_new: whether a tensor is one that the step made.
    """
    in_sequence = isinstance(effect.place, Elements) and not isinstance(effect.place, Appended)
    if not in_sequence or effect.argument is not None:
        return False
    grows = any(value is MISSING for value in effect.before.values())
    return grows and any(isinstance(v, torch.Tensor) and is_new(v) for v in effect.after.values())


def in_context_of_its_own(function: Callable[[], Any]) -> Any:
    """Call ``function`` such that a ``ContextVar`` which it sets is as before when it is over: one
    that held nothing couldn't be given that back.

    Raises:
        DataDependentError: it resets a variable to what it was before.
    """
    try:
        return contextvars.copy_context().run(function)
    except ValueError as error:
        if "created in a different Context" not in str(error):
            raise
        raise DataDependentError(
            f"the step resets a ContextVar by a token from outside of it ({error}): set() the "
            "value that it is to have, or reset it outside of the compiled step"
        ) from error
