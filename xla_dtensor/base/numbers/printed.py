"""Finds text that is only printed or logged: a step's program needn't depend on it.

What a compiled step prints is printed when it is traced, so that it may show the number of that
call without the program depending on it. `PrintedNumbers` gives ``print`` and log records plain
numbers. Of text that is made before (``print(f"step {n}")``) `only_printed` says, by the line of
source that makes it (`uses_of_text`), whether it goes nowhere but there. Where that isn't certain
the program depends on the number, as in any other use of its text.

What is printed of a number that isn't known before the program has run is printed by each call,
when it has.

Text of a tensor that has no value yet is its shape. `only_shown` says whether nobody but people
read it: printed, logged, or in an error's message.
"""

from __future__ import annotations

import ast
import builtins
import copy
import datetime
import functools
import inspect
import logging
import sys
import time
import warnings
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import torch

from xla_dtensor.base import torch_private
from xla_dtensor.base.numbers.text_of_numbers import (
    Marks,
    NumberInText,
    Parts,
    shown_now,
    waiting,
)
from xla_dtensor.base.numbers.traced_number import NumberNode
from xla_dtensor.base.numbers.uses_of_text import Use, uses_at, uses_of_call
from xla_dtensor.base.source_line import is_pythons, is_users

_LOGGING = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")


class PrintedNumbers:
    """While it is entered, ``print`` and loggers are given symbolic numbers as plain ones.

    Args:
        plain: a value as the number that it is now, if it is a symbolic one that has a value.
    """

    # The streams of what is entered (text that goes elsewhere may be read again), and its marks.
    _streams: list[tuple[Any, Any]] = []
    marks: list[Marks] = []

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __enter__(self) -> None:
        self._streams.append((sys.stdout, sys.stderr))
        self.marks.append(Marks())
        self._print, self._handle = builtins.print, logging.Logger.handle
        builtins.print = functools.wraps(print)(self._printing(print))
        logging.Logger.handle = self._handling(self._handle)  # type: ignore[method-assign]

    def __exit__(self, *exc_info: object) -> None:
        self._streams.pop()
        self.marks.pop()
        builtins.print = self._print
        logging.Logger.handle = self._handle  # type: ignore[method-assign]

    def _printing(self, printed: Any) -> Any:
        def print_numbers(*values: Any, **options: Any) -> None:
            to_the_user = _goes_to_the_user(options.get("file"))
            if not to_the_user:
                printed(*values, **options)
                return
            between = {name: options[name] for name in ("sep", "end") if options.get(name)}

            def show(*given: Any) -> None:
                count = len(between)
                named = dict(zip(between, given[:count], strict=True))
                printed(*given[count:], **{**options, **named})

            self._show(show, (*between.values(), *values), sys._getframe(1))

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

            given = record.msg, *values
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
            show(*(shown_now(p) if isinstance(p, Parts) else p for p in parts))
            return
        users = _of_user(frame)
        if _tells_time(users):
            node.needed("a text for people by a function that asks for the time, in which there is")
        if users is not None and users.f_code in self.marks[-1].without:
            node.needed(
                "a text for people by a function that has put another number into one by % and "
                "its like (use an f-string), in which there is"
            )
        node.trace.show(show, list(map(_as_it_is, parts)))

    def _parts(self, value: Any) -> Any:
        """The parts of a text that has marks, or of a number that isn't known yet; anything else
        as people are shown it."""
        parts = self.marks[-1].parts(value) if isinstance(value, str) else None
        if parts is not None:
            return parts
        symbolic = isinstance(value, torch.SymFloat | torch.SymInt)
        if symbolic and isinstance(value.node, NumberNode):
            return Parts([NumberInText(value.node, None)])
        return self._plain(value)


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
    constant = value is None or isinstance(value, Parts)
    constant = constant or type(value) in (bool, int, float, complex, str, bytes)
    return value if constant else _Shown(value)


_TIMES = (time.time, time.perf_counter, time.monotonic, time.process_time, time.strftime)


def _of_user(frame: FrameType | None) -> FrameType | None:
    """The user's function that prints."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame if frame is None else _around(frame)


def _tells_time(frame: FrameType | None) -> bool:
    """Whether the code of a frame asks for the time."""
    if frame is None:
        return False
    names = frame.f_code.co_names
    values = [frame.f_globals.get(name) for name in names]
    if any(module in values for module in (time, datetime, datetime.datetime)):
        return not {"now", "today", "utcnow", *(f.__name__ for f in _TIMES)}.isdisjoint(names)
    return any(value is function for value in values for function in _TIMES)


_PRINTING = "print_numbers"


def _goes_to_the_user(file: Any = None) -> bool:
    """Whether what is written to ``file`` (None: by ``print``) comes to where it did when the trace
    began."""
    streams = PrintedNumbers._streams
    file = sys.stdout if file is None else file
    return any(file is stream for stream in (streams[-1] if streams else (sys.stdout, sys.stderr)))


def marked(frame: FrameType | None, node: NumberNode, text: Callable[[Any], str]) -> str | None:
    """What stands for the text of a number that is made in ``frame`` and only printed by `print`
    and loggers as they are now, as it is or as a part of a text; None if it goes anywhere else."""
    if frame is None or not PrintedNumbers._streams:
        return None
    prints = lambda use, frame: use.whole and _prints(use, frame, by_us=True)
    if not _all(prints, uses_at(frame), frame):
        return None
    return PrintedNumbers.marks[-1].mark(node, text)


def only_printed(frame: FrameType | None) -> bool:
    """Whether the text that is made at this moment in ``frame`` goes into ``print`` or a logger's
    method, and nowhere else."""
    if frame is None or not PrintedNumbers._streams:
        return False
    printed = _all(_prints, uses_at(frame), frame)
    if printed:
        PrintedNumbers.marks[-1].without.add(_around(frame).f_code)
    return printed


def only_shown(frame: FrameType | None, in_errors: bool = True) -> bool:
    """Whether nobody but people will read the text that is made at this moment in ``frame``, or for
    it: what is printed or logged, what a debugger asks for, what torch notes for itself, and (if
    ``in_errors``) a part of an error or a warning."""
    shows = _shows if in_errors else _prints
    while frame is not None:
        code, module = frame.f_code, _module_of(frame)
        if module == __name__ and code.co_name == _PRINTING:
            return bool(frame.f_locals["to_the_user"])
        # A debugger evaluates what is typed, and a formatter of the user's is called by `logging`.
        if _shows_text(frame) or _shows_text(frame.f_back):
            return True
        if in_errors and _is_made(frame, BaseException):
            return True
        if not _passes_text_on(_around(frame)):
            return not is_users(code.co_filename) or _all(shows, uses_at(frame), frame)
        frame = frame.f_back
    return True


def _all(
    holds: Callable[[Use, FrameType], bool], uses: tuple[Use, ...] | None, frame: FrameType
) -> bool:
    """Whether something holds of all uses of a text."""
    frame = _around(frame)
    code = frame.f_code
    return uses is not None and all(
        all(name in code.co_varnames and name not in code.co_cellvars for name in use.variables)
        and holds(use, frame)
        for use in uses
    )


def _around(frame: FrameType) -> FrameType:
    """The frame of the function in which a comprehension is."""
    while frame.f_code.co_name in _COMPREHENSIONS and frame.f_back is not None:
        frame = frame.f_back
    return frame


_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


def _prints(use: Use, frame: FrameType, by_us: bool = False) -> bool:
    """Whether a call is one of ``print`` or of a logger's method; or nothing is done with it.

    Args:
        by_us: whether it has to be the ``print`` that is there while a step is traced.
    """
    if not isinstance(use.node, ast.Call):
        return isinstance(use.node, ast.Expr)
    function = use.node.func
    value = _resolved(frame, function)
    originals = getattr(builtins.print, "printed", None)
    if value is builtins.print or (value is originals and not by_us):
        files = [k.value for k in use.node.keywords if k.arg in ("file", None)]
        found = [_resolved(frame, file) for file in files]
        return None not in found and _goes_to_the_user(*found)
    if not isinstance(function, ast.Attribute) or function.attr not in _LOGGING:
        return False
    owner = _resolved(frame, function.value)
    if owner is logging:
        return True
    of_python = isinstance(owner, logging.Logger | logging.LoggerAdapter)
    return of_python and type(owner).__module__ == "logging"


def _shows(use: Use, frame: FrameType) -> bool:
    """The same, or whether it is to be read by people otherwise."""
    if isinstance(use.node, ast.Raise | ast.Assert):
        return True
    if isinstance(use.node, ast.Return | ast.Lambda):
        return _is_shown_by_caller(frame)
    if _prints(use, frame):
        return True
    assert isinstance(use.node, ast.Call)
    function = use.node.func
    value = _resolved(frame, function)
    if isinstance(value, type) and issubclass(value, BaseException):
        return True
    if not isinstance(function, ast.Attribute):
        return any(value is each for each in _FOR_MESSAGES)
    owner = _resolved(frame, function.value)
    if function.attr in ("write", "writelines", "add_note"):
        return isinstance(owner, BaseException) or _goes_to_the_user(owner)
    if isinstance(owner, ModuleType):
        return any(value is each for each in _FOR_MESSAGES) or _package(owner.__name__) in _DISPLAYS
    return any(_package(cls.__module__) in _DISPLAYS for cls in type(owner).__mro__)


def _is_shown_by_caller(frame: FrameType) -> bool:
    """Whether the text that a function returns is only shown where it is called."""
    caller = frame.f_back
    if frame.f_code.co_name in _MAKE_TEXT:
        return only_shown(caller)
    if caller is None or frame.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    if caller.f_code is torch_private.check_with.__code__:
        return True
    found = uses_of_call(caller)
    if found is None:
        return False
    called = _resolved(caller, found[0].func)
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    return code is frame.f_code and _all(_shows, found[1], caller)


def _passes_text_on(frame: FrameType) -> bool:
    """Whether the text that a frame makes becomes part of what its caller makes: it is the text of
    an object, or what Python's own code makes (`json`)."""
    code = frame.f_code
    if code.co_name in _MAKE_TEXT or is_pythons(code.co_filename):
        return True
    of_mode = code.co_name == "__torch_function__" and not is_users(code.co_filename)
    return of_mode or _module_of(frame) in _TEXT_OF_TENSORS


_MAKE_TEXT = ("__repr__", "__str__", "__format__", "extra_repr")
_TEXT_OF_TENSORS = ("torch._tensor", "torch._tensor_str", "torch.overrides")
# Functions that are given the message of an error that they may raise, and what warns.
_FOR_MESSAGES = (
    *(warnings.warn, warnings.warn_explicit),
    *(torch_private.assert_in_python, torch_private.assert_async),
)
# Python's modules that make text for people, and other packages.
_PYTHONS = frozenset({"logging", "warnings", "traceback", "pprint", "pdb", "bdb", "cmd", "code"})
_DISPLAYS = frozenset(
    {"tqdm", "rich", "loguru", "structlog", "absl", "_pytest", "IPython", "ipdb", "pudb"}
    | {"pydevd", "_pydevd_bundle", "debugpy"}
)


def _shows_text(frame: FrameType | None) -> bool:
    """Whether it is code of what makes text for people alone."""
    if frame is None:
        return False
    package = _package(_module_of(frame))
    if package not in _PYTHONS or not is_pythons(frame.f_code.co_filename):
        return package in _DISPLAYS
    if package != "pprint":
        return True
    printer = frame.f_locals.get("self")  # of pformat() it writes nowhere
    return frame.f_code.co_name == "pprint" and _goes_to_the_user(getattr(printer, "_stream", ""))


def _is_made(frame: FrameType, cls: type) -> bool:
    """Whether an object of a class is being made in a frame."""
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), cls)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _resolved(frame: FrameType, node: ast.AST) -> Any:
    """The object that a name in the source is in ``frame``, or an attribute of one; None if that
    isn't known without running code."""
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in names:
                return names[node.id]
    if isinstance(node, ast.Call):
        called = _resolved(frame, node.func)
        return logging.root if called is logging.getLogger else None
    if not isinstance(node, ast.Attribute):
        return None
    owner = _resolved(frame, node.value)
    found = inspect.getattr_static(owner, node.attr, None)
    return getattr(found, "__func__", found)
