"""Finds code that tests a number's type by identity, ``type(x) is float``.

The type of a stand-in (`base/numbers/python_numbers.py`) is equal to ``float``, has its hash, its
name and its bases, and makes floats. Only identity tells them apart: ``type(n) is float``.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from typing import Any, NamedTuple

from xla_dtensor.base.numbers.python_numbers import NUMPY_NUMBERS
from xla_dtensor.compilation.code.instructions import NamedInstruction, instructions

_NUMBERS = frozenset({int, float, *NUMPY_NUMBERS})
_UNKNOWN = object()
_NOTHING = ("CACHE", "NOP", "PRECALL", "EXTENDED_ARG", "PUSH_NULL")
_LOADS = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CONST", "LOAD_ATTR")
_HARMLESS = (
    *("COMPARE_OP", "CONTAINS_OP", "BINARY_SUBSCR", "BINARY_OP", "POP_TOP"),
    *("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE"),
)


class TypesAsked(NamedTuple):
    """What a function's code, with the functions inside of it, does with types.

    Attributes:
        passes: gives the type of something to a function.
        takes: asks for the type of something, and not only for its name or whether it is equal to
            another.
        compares: what it compares by ``is``, as chains of names (``("nn", "Linear")``); None for
            what has no name.
    """

    passes: bool
    takes: bool
    compares: frozenset[tuple[str, ...] | None]

    def asks(self, function: types.FunctionType) -> bool:
        """Whether the function itself may compare the type of a number."""
        return self.passes or (
            self.takes and any(self._may_be_number(function, c) for c in self.compares)
        )

    def compares_numbers(self, function: types.FunctionType) -> bool:
        """Whether it compares something, be it a type that another has asked for, with those of
        numbers."""
        named = (chain for chain in self.compares if chain is not None)
        return any(_bound(function, chain) in _NUMBERS for chain in named)

    def _may_be_number(self, function: types.FunctionType, chain: Any) -> bool:
        found = _UNKNOWN if chain is None else _bound(function, chain)
        return found is _UNKNOWN or found in _NUMBERS


def _bound(function: types.FunctionType, chain: tuple[str, ...]) -> Any:
    """What a chain of names leads to in a function, if that can be said without running code; of
    what is no class nothing matters but that it is something else."""
    name, *names = chain
    code, namespace = function.__code__, function.__globals__
    if name in code.co_freevars:
        cell = (function.__closure__ or ())[code.co_freevars.index(name)]
        try:
            value = cell.cell_contents
        except ValueError:
            return _UNKNOWN
    elif name in namespace:
        value = namespace[name]
    elif hasattr(builtins, name) and name not in code.co_cellvars:
        value = getattr(builtins, name)
    else:
        return _UNKNOWN
    for name in names:
        if isinstance(value, types.ModuleType):
            value = vars(value).get(name, _UNKNOWN)
        elif isinstance(value, type):
            value = next((vars(c)[name] for c in value.__mro__ if name in vars(c)), _UNKNOWN)
        else:
            return _UNKNOWN
    return value if isinstance(value, type) or value is _UNKNOWN else None


@functools.lru_cache(maxsize=4096)
def types_asked(code: types.CodeType) -> TypesAsked:
    """The `TypesAsked` of ``code``."""
    asks = "type" in code.co_names or dis.opmap["IS_OP"] in code.co_code[::2]
    found = instructions(code) if asks else []
    passes = takes = False
    compares: set[tuple[str, ...] | None] = set()
    for position, instruction in enumerate(found):
        is_type = (
            instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "type"
        )
        if instruction.opname == "IS_OP":
            compares |= _operand(found[:position])
        elif is_type and not _is_asked_for(found, position):
            use = _use(found[position:])
            passes |= use == "passes"
            takes |= use in ("passes", "takes")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = types_asked(constant)
            passes, takes = passes or inner.passes, takes or inner.takes
            compares |= inner.compares
    return TypesAsked(passes, takes, frozenset(compares))


def _is_asked_for(instructions: list[NamedInstruction], position: int) -> bool:
    """Whether that ``type`` is the last argument of ``isinstance(x, type)``."""
    after = next(i.opname for i in instructions[position + 1 :] if i.opname not in _NOTHING)
    before = {i.argval for i in instructions[max(0, position - 12) : position]}
    return after.startswith("CALL") and not before.isdisjoint({"isinstance", "issubclass"})


def _operand(before: list[NamedInstruction]) -> set[tuple[str, ...] | None]:
    """What the last instructions have loaded: a name, with attributes of it."""
    names: list[str] = []
    for instruction in reversed(before):
        kind, name = instruction.opname, instruction.argval
        if kind in _NOTHING:
            continue
        if kind == "LOAD_ATTR" and isinstance(name, str):
            names.append(name)
        elif kind in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") and isinstance(name, str):
            return {(name, *reversed(names))}
        else:
            return set() if kind == "LOAD_CONST" else {None}
    return {None}


def _use(instructions: list[NamedInstruction]) -> str:
    """What becomes of the type that ``type(...)``, which the first instruction loads, gives:
    ``"passes"`` (to a function), ``"takes"``, or nothing that matters."""
    depth = 1 + _has_null(instructions[0])
    for position, instruction in enumerate(instructions[1:], 1):
        kind = instruction.opname
        if "JUMP" in kind:
            return "takes"  # type(a if b else c)
        depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if depth <= 1 and kind.startswith("CALL"):
            return _of_result(instructions[position + 1 :]) if depth >= 0 else "takes"
    return "takes"


def _has_null(instruction: NamedInstruction) -> bool:
    """Whether it loads the NULL that is below (from Python 3.13 on: above) a function, too."""
    return instruction.opname == "LOAD_GLOBAL" and bool((instruction.arg or 0) & 1)


def _of_result(after: list[NamedInstruction]) -> str:
    loaded = False
    for instruction in after:
        kind = instruction.opname
        if kind in _NOTHING:
            continue
        if kind in _HARMLESS or (kind in ("LOAD_ATTR", "LOAD_METHOD") and not loaded):
            return ""
        if kind.startswith("CALL"):
            return "passes"
        if not kind.startswith(_LOADS):
            return "takes"
        loaded = True
    return "takes"
