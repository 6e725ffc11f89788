"""Bytecode with the names in it: what `dis.get_instructions` gives, in a fifth of the time.

A first call looks at the code of all functions that a step may run, thousands in a large program,
and `dis` spends most of its time on lines, positions and jumps that nobody asks for here.
"""

from __future__ import annotations

import dis
import sys
import types
from typing import Any, NamedTuple


class NamedInstruction(NamedTuple):
    """One instruction.

    Attributes:
        opname, opcode, arg: as those of `dis.Instruction`.
        argval: the name or the constant that it has; None if it has none (or two names).
        argrepr: ``"[]"`` if it gives an element of something, from Python 3.14 on; there other
            operators are the same instruction.
    """

    opname: str
    opcode: int
    arg: int | None
    argval: Any
    argrepr: str


_NOTHING, _NAME, _CONSTANT, _VARIABLE = range(4)
# How many bits of its argument say something besides the number of the name.
_FLAGS = {"LOAD_GLOBAL": 1, "LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 2}
if sys.version_info < (3, 12):
    _FLAGS = {"LOAD_GLOBAL": 1}
_WITH_ARGUMENT = frozenset(getattr(dis, "hasarg", range(dis.HAVE_ARGUMENT, 256)))


def _has(opcode: int) -> int:
    """What an instruction's argument is the number of."""
    if opcode in dis.hasname:
        return _NAME
    if opcode in dis.hasconst:
        return _CONSTANT
    has_variable = opcode in dis.haslocal or opcode in dis.hasfree
    has_two = dis.opname[opcode].count("_FAST") > 1
    return _VARIABLE if has_variable and not has_two else _NOTHING


_OPCODES = [
    (name, opcode, opcode in _WITH_ARGUMENT, _has(opcode), _FLAGS.get(name, 0))
    for opcode, name in enumerate(dis.opname[:256])
]
_CACHE = dis.opmap["CACHE"]
_ELEMENT = next(
    (i.opcode, i.arg)
    for i in dis.get_instructions(compile("x[y]", "", "eval"))
    if i.opname.startswith("BINARY_")
)


def instructions(code: types.CodeType) -> list[NamedInstruction]:
    """Those of ``code``, without inline caches, and without those of functions inside of it.

    Example::

        found = instructions((lambda x: x.grad).__code__)
        assert "grad" in [instruction.argval for instruction in found]
    """
    # An argument that an inner function uses is among both.
    cells = [name for name in code.co_cellvars if name not in code.co_varnames]
    variables = (*code.co_varnames, *cells, *code.co_freevars)
    tables: tuple[Any, ...] = ((), code.co_names, code.co_consts, variables)
    found: list[NamedInstruction] = []
    raw, higher = code.co_code, 0
    for byte, low in zip(raw[::2], raw[1::2], strict=True):
        if byte == _CACHE:
            continue
        name, opcode, takes, has, flags = _OPCODES[byte]
        number = low | higher
        higher = number << 8 if byte == dis.EXTENDED_ARG else 0
        found.append(
            NamedInstruction(
                name,
                opcode,
                number if takes else None,
                tables[has][number >> flags] if has else None,
                "[]" if (opcode, number) == _ELEMENT else "",
            )
        )
    return found
