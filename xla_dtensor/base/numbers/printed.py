"""Finds symbolic numbers that are only printed or logged: the program needn't depend on them.

What a compiled step prints is printed when it is traced, so that it may show the number of that
call without the program depending on it. `PrintedNumbers` gives ``print`` and log records plain
numbers. Of text that is made before (``print(f"step {n}")``) `only_printed` says, by the line of
source that makes it, whether it goes nowhere but there. Where that isn't certain the program
depends on the number, as in any other use of its text.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import linecache
import logging
import sys
from types import CodeType, FrameType, ModuleType
from typing import Any

_LOGGING = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")


class PrintedNumbers:
    """While it is entered, ``print`` and log records are given symbolic numbers as plain ones.

    Args:
        plain: a value as the number that it is now, if it is a symbolic one.
    """

    # The streams of what is entered: text that goes elsewhere may be read again.
    _streams: list[Any] = []

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __enter__(self) -> None:
        self._streams.append(sys.stdout)
        self._print, self._factory = builtins.print, logging.getLogRecordFactory()
        builtins.print = functools.wraps(print)(self._printing(print))
        logging.setLogRecordFactory(self._recording(self._factory))

    def __exit__(self, *exc_info: object) -> None:
        self._streams.pop()
        builtins.print = self._print
        logging.setLogRecordFactory(self._factory)

    def _printing(self, printed: Any) -> Any:
        def print_numbers(*values: Any, **options: Any) -> None:
            if options.get("file") is None and goes_to_the_user():
                values = tuple(map(self._plain, values))
            printed(*values, **options)

        print_numbers.printed = printed  # type: ignore[attr-defined]
        return print_numbers

    def _part(self, value: Any) -> Any:
        if type(value) is dict:  # of "%(n)d"
            return {key: self._plain(inner) for key, inner in value.items()}
        return self._plain(value)

    def _recording(self, factory: Any) -> Any:
        def made(name: Any, level: Any, path: Any, line: Any, msg: Any, args: Any, *more: Any,
                 **options: Any) -> Any:  # fmt: skip
            if type(args) is tuple:
                args = tuple(map(self._part, args))
            return factory(name, level, path, line, self._plain(msg), args, *more, **options)

        return made


def goes_to_the_user() -> bool:
    """Whether ``print`` still writes to where it did when the trace began."""
    streams = PrintedNumbers._streams
    return bool(streams) and sys.stdout is streams[-1]


def only_printed(frame: FrameType | None) -> bool:
    """Whether the text that is made at this moment in ``frame`` goes into ``print`` or a logger's
    method, and nowhere else."""
    if frame is None or not PrintedNumbers._streams:
        return False
    function = _destination(frame.f_code, frame.f_lasti)
    if function is None:
        return False
    if isinstance(function, ast.Name):
        return goes_to_the_user() and _is_print(_named(frame, function.id))
    owner = function.value
    if isinstance(owner, ast.Name):
        value = _named(frame, owner.id)
    else:  # self.logger
        assert isinstance(owner, ast.Attribute)
        assert isinstance(owner.value, ast.Name)
        value = getattr(_named(frame, owner.value.id), "__dict__", {}).get(owner.attr)
    if isinstance(value, ModuleType):
        return value is logging
    return isinstance(value, logging.Logger) and type(value).__module__ == "logging"


def _is_print(value: Any) -> bool:
    return value is builtins.print or value is getattr(builtins.print, "printed", None)


def _named(frame: FrameType, name: str) -> Any:
    for names in (frame.f_locals, frame.f_globals, vars(builtins)):
        if name in names:
            return names[name]
    return None


@functools.lru_cache(1024)
def _destination(code: CodeType, instruction: int) -> Any:
    """The function (``print``, ``log.info``) in whose call the text is an argument that an
    instruction makes; None where it is anything else."""
    first, last, left, right = list(code.co_positions())[instruction // 2]
    if first is None or last is None or left is None or right is None:
        return None
    found: list[list[ast.AST]] = []
    for statement in _printing_statements(code.co_filename):
        if statement.lineno <= first and last <= (statement.end_lineno or 0):
            _find(statement, (first, left), (last, right), [], found)
    if len(found) != 1:
        return None
    path = found[0]
    call = path[1]
    assert isinstance(call, ast.Call)
    if any(keyword.arg not in ("end", "sep", "flush") for keyword in call.keywords):
        return None
    # The file may be another one than the code was made of.
    if not any(where == _span(call) for where in code.co_positions()):
        return None
    for outer, inner in itertools.pairwise(path[1:]):
        if not _passes_text_on(outer, inner, outer is call):
            return None
    return call.func


def _passes_text_on(outer: ast.AST, inner: ast.AST, is_printing: bool) -> bool:
    """Whether the text of ``inner`` only becomes part of the text ``outer``."""
    if isinstance(outer, ast.Call):
        if is_printing:
            return inner in outer.args
        if isinstance(outer.func, ast.Name):
            return False
        # "...".format(...)
        return _is_format(outer.func) and inner in outer.args
    if isinstance(outer, ast.JoinedStr):
        return isinstance(inner, ast.FormattedValue)
    if isinstance(outer, ast.FormattedValue):
        return inner is not outer.value or isinstance(inner, ast.JoinedStr)
    if isinstance(outer, ast.BinOp):
        return isinstance(outer.op, ast.Add)
    return False


def _find(
    node: ast.AST,
    start: tuple[int, int],
    end: tuple[int, int],
    path: list[ast.AST],
    found: list[list[ast.AST]],
) -> None:
    """The path to the outermost node at exactly this place that makes text of a number. (Before
    Python 3.12 the parts of an f-string are where it is as a whole.)"""
    here = [*path, node]
    place = start[0], end[0], start[1], end[1]
    if isinstance(node, _MAKES_TEXT) and _makes_text(node) and _span(node) == place:
        found.append(here)
        return
    for child in ast.iter_child_nodes(node):
        _find(child, start, end, here, found)


def _span(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


_MAKES_TEXT = (ast.JoinedStr, ast.FormattedValue, ast.Call, ast.BinOp)


def _makes_text(node: Any) -> bool:
    if isinstance(node, ast.BinOp):  # "..." % n
        left = node.left
        return isinstance(node.op, ast.Mod) and (
            isinstance(left, ast.JoinedStr)
            or (isinstance(left, ast.Constant) and isinstance(left.value, str))
        )
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Name):
            return function.id in ("str", "repr", "format")
        return _is_format(function)
    return True


def _is_format(function: ast.AST) -> bool:
    """Whether it is the ``format`` of a text in the source."""
    if not isinstance(function, ast.Attribute) or function.attr != "format":
        return False
    return isinstance(function.value, ast.Constant)


@functools.lru_cache(64)
def _statements_of(filename: str, lines: tuple[str, ...]) -> tuple[ast.Expr, ...]:
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return ()
    return tuple(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and _may_print(node.value.func)
    )


def _printing_statements(filename: str) -> tuple[ast.Expr, ...]:
    """The statements of a file that are a call of ``print`` or of a logger's method."""
    return _statements_of(filename, tuple(linecache.getlines(filename)))


def _may_print(function: ast.AST) -> bool:
    if isinstance(function, ast.Name):
        return function.id == "print"
    if not isinstance(function, ast.Attribute) or function.attr not in _LOGGING:
        return False
    owner = function.value
    return isinstance(owner, ast.Name) or (
        isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name)
    )
