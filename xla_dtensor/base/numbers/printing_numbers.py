"""``print`` and loggers while a step is traced: they get numbers where it has symbolic ones.

What is printed of a number that isn't known before the program has run is printed by each call,
when it has. What else the user's code prints waits until the trace is through, as it may have to
be made again.
"""

from __future__ import annotations

import builtins
import copy
import datetime
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import torch

from xla_dtensor.base.numbers.printed import (
    Entered,
    around,
    entered,
    goes_to_the_user,
    module_of,
)
from xla_dtensor.base.numbers.text_of_numbers import (
    Marks,
    NumberInText,
    Parts,
    shown_now,
    waiting,
)
from xla_dtensor.base.numbers.traced_number import NumberNode
from xla_dtensor.base.source_line import is_users


class PrintedNumbers:
    """While it is entered, ``print`` and loggers are given symbolic numbers as plain ones.

    Args:
        plain: a value as the number that it is now, if it is a symbolic one that has a value.
        put_off: keeps what is to be called when the trace is through.
    """

    def __init__(self, plain: Any, put_off: Callable[[Callable[[], None]], None]) -> None:
        self._plain, self._put_off = plain, put_off

    def __enter__(self) -> None:
        entered.append(Entered(sys.stdout, sys.stderr, Marks()))
        self._thread = threading.get_ident()
        self._print, self._handle = builtins.print, logging.Logger.handle
        builtins.print = functools.wraps(print)(self._printing(print))
        logging.Logger.handle = self._handling(self._handle)  # type: ignore[method-assign]

    def __exit__(self, *exc_info: object) -> None:
        entered.pop()
        builtins.print = self._print
        logging.Logger.handle = self._handle  # type: ignore[method-assign]

    def _printing(self, printed: Any) -> Any:
        def print_numbers(*values: Any, **options: Any) -> None:
            to_the_user = goes_to_the_user(options.get("file"))
            if not to_the_user:
                printed(*values, **options)
                return
            between = {name: options[name] for name in ("sep", "end") if options.get(name)}

            def show(*given: Any) -> None:
                count = len(between)
                named = dict(zip(between, given[:count], strict=True))
                printed(*given[count:], **{**options, **named})

            texts = map(text_of_object, values)
            self._show(show, (*between.values(), *texts), sys._getframe(1))

        print_numbers.printed = printed  # type: ignore[attr-defined]
        return print_numbers

    def _handling(self, handle: Any) -> Any:
        def handled(logger: Any, record: Any) -> None:
            args: Any = record.args
            named = tuple(args) if type(args) is dict else None  # of "%(n)d"
            values = args if type(args) is tuple else () if named is None else tuple(args.values())
            if args and not values:
                handle(logger, record)
                return

            given = (record.msg, *map(_text_with_numbers, values))
            record.msg, record.args = "", None  # it isn't to keep the numbers

            def show(msg: Any, *values: Any) -> None:
                own = copy.copy(record)  # each call has one
                own.created, own.msg = time.time(), msg
                own.args = values if named is None else dict(zip(named, values, strict=True))
                handle(logger, own)

            self._show(show, given, sys._getframe(1))

        return functools.wraps(handle)(handled)

    def _show(self, show: Callable[..., Any], values: tuple[Any, ...], frame: FrameType) -> None:
        """Call ``show`` with values for people, now or when all are known."""
        parts = [self._parts(value) for value in values]
        node = next(filter(None, (waiting(p) for p in parts if isinstance(p, Parts))), None)
        if node is None:
            now = [shown_now(p) if isinstance(p, Parts) else p for p in parts]
            own = threading.get_ident() == self._thread
            if own and all(map(_is_constant, now)) and _is_the_steps(frame):
                self._put_off(functools.partial(show, *now))
            else:
                show(*now)
            return
        users = _of_user(frame)
        if _tells_time(users):
            node.needed("a text for people by a function that asks for the time, in which there is")
        if users is not None and users.f_code in entered[-1].marks.without:
            node.needed(
                "a text for people by a function that has put another number into one by % and "
                "its like (use an f-string), in which there is"
            )
        node.trace.show(show, list(map(_as_it_is, parts)))

    def _parts(self, value: Any) -> Any:
        """The parts of a text that has marks, or of a number that isn't known yet; anything else
        as people are shown it."""
        parts = entered[-1].marks.parts(value) if isinstance(value, str) else None
        if parts is not None:
            return parts
        symbolic = isinstance(value, torch.SymFloat | torch.SymInt)
        if symbolic and isinstance(value.node, NumberNode):
            return Parts([NumberInText(value.node, None)])
        return self._plain(value)


def _text_with_numbers(value: Any) -> Any:
    """`text_of_object` if there is a number in it; else a logger asks for its text by itself."""
    text = text_of_object(value)
    is_made = text is not value and entered[-1].marks.parts(text) is not None
    return text if is_made else value


def text_of_object(value: Any) -> Any:
    """The text of an object whose class makes it in Python, which may be of numbers (a meter's);
    anything else as it is."""
    if isinstance(value, torch.Tensor | torch.SymFloat | torch.SymInt | torch.SymBool):
        return value
    makes = (type(value).__str__, type(value).__repr__)
    return str(value) if any(isinstance(each, FunctionType) for each in makes) else value


class _Shown:
    """What people are shown of an object: its text of the moment."""

    def __init__(self, value: Any) -> None:
        self._texts = str(value), repr(value)

    def __str__(self) -> str:
        return self._texts[0]

    def __repr__(self) -> str:
        return self._texts[1]


def _as_it_is(value: Any) -> Any:
    """What is printed later of a value that may be another one by then."""
    return value if isinstance(value, Parts) or _is_constant(value) else _Shown(value)


def _is_constant(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _is_the_steps(frame: FrameType | None) -> bool:
    """Whether it is the user's code itself that prints or logs, and no debugger, whom somebody
    waits for."""
    while frame is not None and module_of(frame).partition(".")[0] == "logging":
        frame = frame.f_back
    if frame is None or not is_users(frame.f_code.co_filename):
        return False
    while frame is not None and module_of(frame) not in _DEBUGGERS:
        frame = frame.f_back
    return frame is None


_DEBUGGERS = ("bdb", "pdb", "IPython.terminal.debugger", "pydevd", "debugpy", "pudb")


_TIMES = (time.time, time.perf_counter, time.monotonic, time.process_time, time.strftime)


def _of_user(frame: FrameType | None) -> FrameType | None:
    """The user's function that prints."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame if frame is None else around(frame)


def _tells_time(frame: FrameType | None) -> bool:
    """Whether the code of a frame asks for the time."""
    if frame is None:
        return False
    names = frame.f_code.co_names
    values = [frame.f_globals.get(name) for name in names]
    if any(module in values for module in (time, datetime, datetime.datetime)):
        return not {"now", "today", "utcnow", *(f.__name__ for f in _TIMES)}.isdisjoint(names)
    return any(value is function for value in values for function in _TIMES)
