"""Finds text that is only printed or logged: a step's program needn't depend on it.

What a compiled step prints is printed when it is traced, so that it may show the number of that
call without the program depending on it. `PrintedNumbers` gives ``print`` and loggers plain
numbers. Of text that is made before (``print(f"step {n}")``) `only_printed` says, by the line of
source that makes it (`uses_of_text`), whether it goes nowhere but there. Where that isn't certain
the program depends on the number, as in any other use of its text.

Text of a tensor that has no value yet is its shape. `only_shown` says whether nobody but people
read it: printed, logged, or in an error's message.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from xla_dtensor.base import torch_private
from xla_dtensor.base.numbers.text_of_numbers import Marks
from xla_dtensor.base.numbers.traced_number import NumberNode
from xla_dtensor.base.numbers.uses_of_text import Use, uses_at, uses_of_call
from xla_dtensor.base.source_line import is_pythons, is_users

_LOGGING = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")


class Entered(NamedTuple):
    """What `printing_numbers.PrintedNumbers` has in place.

    Attributes:
        stdout, stderr: the streams of before: text that goes elsewhere may be read again.
        marks: those of texts that `print` and loggers put together.
    """

    stdout: Any
    stderr: Any
    marks: Marks


entered: list[Entered] = []
"""Innermost last."""

PRINTING, TEXT_OF = "print_numbers", "text_of_object"
"""The functions of `printing_numbers` that print, and that ask an object for its text to print."""


def goes_to_the_user(file: Any = None) -> bool:
    """Whether what is written to ``file`` (None: by ``print``) comes to where it did when the trace
    began."""
    file = sys.stdout if file is None else file
    streams = entered[-1][:2] if entered else (sys.stdout, sys.stderr)
    return any(file is stream for stream in streams)


def marked(frame: FrameType | None, node: NumberNode, text: Callable[[Any], str]) -> str | None:
    """What stands for the text of a number that is made in ``frame`` and only printed by `print`
    and loggers as they are now, as it is or as a part of a text; None if it goes anywhere else."""
    if frame is None or not entered:
        return None
    while not _all(_prints_it_whole, uses_at(frame), frame):
        # The text of an object (a meter's ``__str__``) goes where the object is asked for it.
        if frame.f_code.co_name not in _MAKE_TEXT or frame.f_back is None:
            return None
        if not _all(_returns_it_whole, uses_at(frame), frame):
            return None
        frame = frame.f_back
        if _is_in(frame, TEXT_OF):
            break
    return entered[-1].marks.mark(node, text)


def _is_in(frame: FrameType | None, name: str) -> bool:
    return frame is not None and frame.f_code.co_name == name and module_of(frame) == _PRINTS


_HERE = __name__.rpartition(".")[0]
_PRINTS = f"{_HERE}.printing_numbers"


def _prints_it_whole(use: Use, frame: FrameType) -> bool:
    return use.whole and _prints(use, frame, by_us=True)


def _returns_it_whole(use: Use, frame: FrameType) -> bool:
    return use.whole and isinstance(use.node, ast.Return)


def only_printed(frame: FrameType | None) -> bool:
    """Whether the text that is made at this moment in ``frame`` goes into ``print`` or a logger's
    method, and nowhere else."""
    if frame is None or not entered:
        return False
    printed = _all(_prints, uses_at(frame), frame)
    if printed:
        entered[-1].marks.without.add(around(frame).f_code)
    return printed


def only_shown(frame: FrameType | None, in_errors: bool = True) -> bool:
    """Whether nobody but people will read the text that is made at this moment in ``frame``, or for
    it: what is printed or logged, what a debugger asks for, what torch notes for itself, and (if
    ``in_errors``) a part of an error or a warning."""
    shows = _shows if in_errors else _prints
    while frame is not None:
        code = frame.f_code
        if _is_in(frame, PRINTING):
            return bool(frame.f_locals["to_the_user"])
        # A debugger evaluates what is typed, and a formatter of the user's is called by `logging`.
        if _shows_text(frame) or _shows_text(frame.f_back):
            return True
        if in_errors and _is_made(frame, BaseException):
            return True
        if not _passes_text_on(around(frame)):
            return not is_users(code.co_filename) or _all(shows, uses_at(frame), frame)
        frame = frame.f_back
    return True


def _all(
    holds: Callable[[Use, FrameType], bool], uses: tuple[Use, ...] | None, frame: FrameType
) -> bool:
    """Whether something holds of all uses of a text."""
    frame = around(frame)
    code = frame.f_code
    return uses is not None and all(
        all(name in code.co_varnames and name not in code.co_cellvars for name in use.variables)
        and holds(use, frame)
        for use in uses
    )


def around(frame: FrameType) -> FrameType:
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
        return None not in found and goes_to_the_user(*found)
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
        return isinstance(owner, BaseException) or goes_to_the_user(owner)
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
    return of_mode or module_of(frame) in _TEXT_OF_TENSORS


_MAKE_TEXT = ("__repr__", "__str__", "__format__", "extra_repr")
# The last one passes on what ``json`` asks a user's ``default`` for.
_TEXT_OF_TENSORS = (
    *("torch._tensor", "torch._tensor_str", "torch.overrides"),
    f"{_HERE}.math_of_numbers",
)
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
    package = _package(module_of(frame))
    if package not in _PYTHONS or not is_pythons(frame.f_code.co_filename):
        return package in _DISPLAYS
    if package != "pprint":
        return True
    printer = frame.f_locals.get("self")  # of pformat() it writes nowhere
    return frame.f_code.co_name == "pprint" and goes_to_the_user(getattr(printer, "_stream", ""))


def _is_made(frame: FrameType, cls: type) -> bool:
    """Whether an object of a class is being made in a frame."""
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), cls)


def module_of(frame: FrameType) -> str:
    """The name of the module whose code a frame runs."""
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
