"""Where text goes that a function makes, by its source: into ``print``, an error, anything else.

`uses_at` looks at the line of source that makes it. Text that becomes part of other text goes
where that goes, and a variable where all that read it do. Where there is no source, or another one
by now, the instructions say it of the plain cases. Whether a name is what it looks like (``print``)
is for `printed` to say.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

# Methods of a text that give a text.
_OF_TEXT = frozenset(
    {"ljust", "rjust", "center", "strip", "lstrip", "rstrip", "upper", "lower", "title", "replace"}
)
# What in a function may read its variables by another way than their names.
_READS_VARIABLES = frozenset(
    {"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe", "f_locals"}
)


@dataclass(frozen=True)
class Use:
    """Where text goes.

    Attributes:
        node: a call that is given it; the statement that raises or returns it (the ``lambda``), or
            drops it.
        variables: the variables in which it is kept until then.
        whole: whether it is there character for character, in one that it is a part of: neither
            cut nor padded, nor in a list whose `repr` is shown.
    """

    node: ast.AST
    variables: tuple[str, ...] = ()
    whole: bool = False


_Path = tuple[ast.AST, ...]
"""From a file's tree to a node in it."""


def uses_at(frame: FrameType) -> tuple[Use, ...] | None:
    """Where the text goes that ``frame`` is making; None where that isn't certain. What makes it
    may be the call that is given it: ``print(x)``."""
    found = _uses_at(frame.f_code, frame.f_code.co_filename, frame.f_lasti, False)
    if found is not None:
        return found[1]
    called = uses_of_call(frame)
    if called is not None:
        return (Use(called[0]),)
    use = _use_by_instructions(frame.f_code, frame.f_lasti)
    return None if use is None else (use,)


def uses_of_call(frame: FrameType) -> tuple[ast.Call, tuple[Use, ...]] | None:
    """The call in which ``frame`` is, and where the text goes that it gives, likewise."""
    return _uses_at(frame.f_code, frame.f_code.co_filename, frame.f_lasti, True)


@functools.lru_cache(1024)
def _uses_at(code: CodeType, filename: str, instruction: int, is_call: bool) -> Any:
    """What makes the text, and its uses. (Equal codes may be of several files.)"""
    path = _path_to(code, instruction, _is_call if is_call else _makes_text)
    if path is None and not is_call:
        path = _to_percent(_path_to(code, instruction, lambda node: isinstance(node, ast.expr)))
    uses = None if path is None else _uses_of(path, code, ())
    return None if path is None or uses is None else (path[-1], uses)


def _to_percent(path: _Path | None) -> _Path | None:
    """The path to ``"%s of %s" % (n, x)``, which Python compiles like an f-string, from one to what
    is formatted there."""
    if path is None or not isinstance(path[-2], ast.Tuple):
        return None
    return path[:-2] if _makes_text(path[-3]) and isinstance(path[-3], ast.BinOp) else None


def _path_to(code: CodeType, instruction: int, wanted: Callable[[Any], bool]) -> _Path | None:
    """The path to the outermost node that is wanted at exactly the place of an instruction.
    (Before Python 3.12 the parts of an f-string are where it is as a whole.)"""
    first, last, left, right = list(code.co_positions())[instruction // 2]
    if first is None or last is None or left is None or right is None:
        return None
    tree = _tree(code.co_filename, tuple(linecache.getlines(code.co_filename)))
    return None if tree is None else _find(tree, (first, last, left, right), wanted, ())


@functools.lru_cache(64)
def _tree(filename: str, lines: tuple[str, ...]) -> ast.Module | None:
    try:
        return ast.parse("".join(lines))
    except SyntaxError:
        return None


def _find(node: Any, place: Any, wanted: Callable[[Any], bool], path: _Path) -> _Path | None:
    here = (*path, node)
    if wanted(node) and _span(node) == place:
        return here
    for child in ast.iter_child_nodes(node):
        first, last, *_ = _span(child)
        if first is None or (first <= place[0] and place[1] <= (last or 0)):
            found = _find(child, place, wanted, here)
            if found is not None:
                return found
    return None


def _span(node: Any) -> tuple[int | None, ...]:
    if not hasattr(node, "lineno"):
        return None, None, None, None
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _uses_of(
    path: _Path,
    code: CodeType,
    variables: tuple[str, ...],
    whole: bool | None = None,
    held: bool = False,
) -> tuple[Use, ...] | None:
    """Where the text goes that the last node of ``path`` makes.

    Args:
        whole: whether it is whole so far; None: it is what the node makes of a number.
        held: whether it is in a list, a tuple or a generator.
    """
    whole = _makes_it_whole(path[-1]) if whole is None else whole
    statement = next(i for i in reversed(range(len(path))) if isinstance(path[i], ast.stmt))
    raising = path[statement]
    if isinstance(raising, ast.Assert) and path[statement + 1] is not raising.msg:
        return None
    if isinstance(raising, ast.Assert | ast.Raise):
        return (Use(raising, variables),) if _is_in(raising, code) else None
    for outer, inner in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
        if isinstance(outer, ast.Expr | ast.Return):
            return (Use(outer, variables, whole and not held),)
        if isinstance(outer, ast.Lambda):
            return (Use(outer, variables),) if inner is outer.body else None
        if isinstance(outer, ast.Assign | ast.AugAssign | ast.AnnAssign):
            return _uses_of_variable(outer, path, code, variables, whole, held)
        if _passes_text_on(outer, inner):
            joins = isinstance(outer, ast.Call) and _is_method_of_text(outer.func, "join")
            taken_out = joins or isinstance(outer, ast.Starred | ast.BinOp)
            held = isinstance(outer, _HOLDS) or (held and not taken_out)
            whole = whole and _leaves_it_whole(outer, inner)
            continue
        if not isinstance(outer, ast.Call) or inner is outer.func or not _is_in(outer, code):
            return None
        return (Use(outer, variables, whole and not held),)
    return None


_HOLDS = (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp)


def _makes_it_whole(node: ast.AST) -> bool:
    """Whether what makes the text of a number has that in it as the number's own methods give it.
    (Of an f-string the whole is known, and not which of its numbers it is.)"""
    if isinstance(node, ast.BinOp):
        return _is_plain_template(node.left)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id != "ascii"
        return isinstance(node.func, ast.Attribute) and _is_plain_template(node.func.value)
    formatted = (each for each in ast.walk(node) if isinstance(each, ast.FormattedValue))
    return not any(
        each.format_spec is not None and (each.conversion != -1 or _has_values(each.format_spec))
        for each in formatted
    )


def _has_values(spec: ast.AST) -> bool:
    return any(isinstance(each, ast.FormattedValue) for each in ast.walk(spec))


# ``%8s``, ``{!r:>8}``, ``{:>{}}``: what is made of a text, or by a number.
_OF_WIDTH = re.compile(r"%[^%a-zA-Z]+[sra]|![rsa]:|\{[^{}]*\{(?!\{)")


def _is_plain_template(node: ast.AST) -> bool:
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and _OF_WIDTH.search(text) is None


def _leaves_it_whole(outer: Any, inner: ast.AST) -> bool:
    """Whether a text is whole still in what passes it on."""
    if isinstance(outer, ast.FormattedValue):
        return inner is outer.value and outer.format_spec is None and outer.conversion == -1
    if isinstance(outer, ast.BinOp):
        return isinstance(outer.op, ast.Add) or _is_plain_template(outer.left)
    if isinstance(outer, ast.Call):
        if _is_method_of_text(outer.func, "join"):
            return True
        template: Any = getattr(outer.func, "value", None)
        return _is_plain_template(template) and ":" not in template.value
    return not isinstance(outer, ast.Attribute | ast.Subscript | ast.Dict)


def _is_in(node: ast.AST, code: CodeType) -> bool:
    """Whether code has a node of the source: the file may be another one than it was made of. (A
    comprehension may be an argument of it.)"""
    nested = code.co_name.startswith("<")
    return nested or any(where == _span(node) for where in code.co_positions())


def _uses_of_variable(
    statement: Any,
    path: _Path,
    code: CodeType,
    variables: tuple[str, ...],
    whole: bool,
    held: bool,
) -> tuple[Use, ...] | None:
    """Where a variable goes that is assigned, in all of its function."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    (target, *others) = targets
    if others or not isinstance(target, ast.Name):
        return None
    if isinstance(statement, ast.AugAssign) and not isinstance(statement.op, ast.Add):
        return None
    name = target.id
    if name in variables:
        return ()
    function = next((i for i in reversed(range(len(path))) if isinstance(path[i], _FUNCTION)), None)
    if function is None:
        return None
    found: list[Use] = []
    for read in _reads(path[function], name, path[:function]):
        if isinstance(read, ast.AST):
            return None
        uses = _uses_of(read, code, (*variables, name), whole, held)
        if uses is None:
            return None
        found += uses
    return tuple(found)


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _reads(node: Any, name: str, path: _Path) -> list[Any]:
    """The paths to where a variable is read; a node that may read it otherwise."""
    here = (*path, node)
    if isinstance(node, ast.Name | ast.Attribute):
        word = node.id if isinstance(node, ast.Name) else node.attr
        if word in _READS_VARIABLES:
            return [node]
    if isinstance(node, ast.Name):
        return [here] if node.id == name and isinstance(node.ctx, ast.Load) else []
    return [read for child in ast.iter_child_nodes(node) for read in _reads(child, name, here)]


def _passes_text_on(outer: Any, inner: ast.AST) -> bool:
    """Whether the text of ``inner`` only becomes part of the text ``outer``."""
    if isinstance(outer, ast.Call):
        if inner is outer.func:  # f"{x}".ljust(8)
            return isinstance(inner, ast.Attribute) and inner.attr in _OF_TEXT
        return _is_method_of_text(outer.func, "format", "join")
    if isinstance(outer, ast.Attribute):
        return outer.attr in _OF_TEXT
    if isinstance(outer, ast.BinOp):
        return isinstance(outer.op, ast.Add) or (_makes_text(outer) and inner is outer.right)
    if isinstance(outer, ast.Subscript):  # f"{x}"[:8]
        return inner is outer.value and isinstance(outer.slice, ast.Slice)
    if isinstance(outer, ast.IfExp):
        return inner is not outer.test
    if isinstance(outer, ast.Dict):
        return inner in outer.values
    if isinstance(outer, ast.ListComp | ast.GeneratorExp):
        return inner is outer.elt
    parts = ast.JoinedStr | ast.FormattedValue | ast.Tuple | ast.List | ast.keyword | ast.Starred
    return isinstance(outer, parts)


@functools.lru_cache(1024)
def _use_by_instructions(code: CodeType, instruction: int) -> Use | None:
    """Where text goes, by the places in the source that instructions are for: those that take it
    come later, and are for a place around it."""
    instructions = list(dis.get_instructions(code))
    # Behind it there may be room for what the interpreter notes.
    made = max(i for i, one in enumerate(instructions) if one.offset <= instruction)
    place = instructions[made].positions
    names = [one.opname for one in instructions]
    # A number in an f-string, by its own format: not one with a conversion and a width.
    converts_too = names[made] == "FORMAT_VALUE" and all(instructions[made].argval)
    whole = names[made].startswith("FORMAT_") and not converts_too
    if "LOAD_ASSERTION_ERROR" in names[:made]:  # whose places are those of what is asserted
        asserted = made - 1 - names[:made][::-1].index("LOAD_ASSERTION_ERROR")
        if "RAISE_VARARGS" not in names[asserted:made]:
            return Use(ast.Raise())
    for i, one in enumerate(instructions[made + 1 :], made + 1):
        if not _is_around(one.positions, place):
            continue
        if one.opname in ("KW_NAMES", "LOAD_CONST"):
            known = code.co_consts[one.arg or 0]
            if isinstance(known, tuple) and "file" in known:
                return None
            continue
        if one.opname in _CALLS:
            return _call_by_instructions(instructions[:made], one.positions, whole)
        if one.opname == "RAISE_VARARGS":
            return Use(ast.Raise())
        adds = one.opname == "BINARY_OP" and one.argrepr == "+"
        if one.opname not in _MAKE_PARTS and not adds:
            return None
        kept = adds or one.opname in _KEEP_IT_WHOLE or _is_of_another(instructions[:i], one)
        whole, place = whole and kept, one.positions
    return None


_KEEP_IT_WHOLE = ("BUILD_STRING", "PRECALL", "PUSH_NULL", "CACHE")


def _is_of_another(before: list[dis.Instruction], one: dis.Instruction) -> bool:
    """Whether an instruction formats another value than the text that was made before it. (Before
    Python 3.12 all of an f-string are for one place.)"""
    if one.opname != "FORMAT_VALUE":
        return False
    made = next(n for n, each in enumerate(reversed(before)) if each.opname in _MAKE_STRINGS)
    conversion, has_width = one.argval
    between = before[len(before) - made :]  # a text's own width is all that lies between
    if len(between) > has_width:
        return True
    return conversion is None and not has_width


_MAKE_STRINGS = ("FORMAT_VALUE", "BUILD_STRING")
_CALLS = ("CALL", "CALL_KW")
_MAKE_PARTS = frozenset(
    {"FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "BUILD_STRING", "BUILD_TUPLE"}
    | {"BUILD_LIST", "PRECALL", "PUSH_NULL", "CACHE"}
)


def _call_by_instructions(before: list[dis.Instruction], place: Any, whole: bool) -> Use | None:
    """A call, by the instructions before its last argument."""
    function: Any = None
    for one in before:
        at = one.positions
        if at is None or (at.lineno, at.col_offset) != (place.lineno, place.col_offset):
            continue  # it doesn't begin where the call does
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"):
            function = ast.Name(one.argval)
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD") and function is not None:
            function = ast.Attribute(function, one.argval)
    return None if function is None else Use(ast.Call(function, [], []), whole=whole)


def _is_around(outer: Any, inner: Any) -> bool:
    if outer is None or inner is None or None in (*outer, *inner):
        return False
    begins = (outer.lineno, outer.col_offset) <= (inner.lineno, inner.col_offset)
    ends = (outer.end_lineno, outer.end_col_offset) >= (inner.end_lineno, inner.end_col_offset)
    return begins and ends


def _is_call(node: Any) -> bool:
    return isinstance(node, ast.Call)


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
            return function.id in ("str", "repr", "format", "ascii")
        return _is_method_of_text(function, "format", "join")
    return isinstance(node, ast.JoinedStr | ast.FormattedValue)


def _is_method_of_text(function: ast.AST, *names: str) -> bool:
    """Whether it is such a method of a text in the source: ``"{}".format``."""
    if not isinstance(function, ast.Attribute) or function.attr not in names:
        return False
    return isinstance(function.value, ast.Constant)
