"""What a function's code reads and assigns, by name: from its bytecode, without running it."""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import re
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_dtensor.base.source_line import is_pythons
from xla_dtensor.compilation.code.instructions import instructions
from xla_dtensor.compilation.code.uses import (
    APPENDS,
    APPENDS_INSIDE,
    OTHERWISE,
    READ,
    UNNAMED,
    use_of,
)

# Libraries whose globals and names aren't read: what users change of them has its own guard
# (torch's global state), and the rest doesn't change.
LIBRARIES = frozenset(
    {"torch", "jax", "jaxlib", "numpy", "scipy", "xla_dtensor", "ml_dtypes"}
    # The module of the base class of pybind11's classes, such as torch's placements.
    | {"pybind11_builtins"}
    # What an `assert` of a test calls.
    | {"_pytest", "pluggy"}
)


def is_library(module_name: str | None) -> bool:
    """Whether code of the Python module of this name is a library's, not the user's."""
    if not module_name:
        return False
    package = module_name.partition(".")[0]
    return package in LIBRARIES or (package in sys.stdlib_module_names and _is_stdlib(package))


def _is_stdlib(name: str) -> bool:
    """Whether what is imported under a name of the standard library is that: a user's own file may
    be called ``sched`` or ``queue``, too."""
    if name in ("__main__", "test"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or is_pythons(file)


def is_library_class(cls: type) -> bool:
    """Whether a class is defined by a library."""
    module = cls.__module__
    return isinstance(module, str) and is_library(module)


@dataclass
class Names:
    """Names in code, of nested functions too.

    Attributes:
        globals: those read from the module's globals.
        stored: those assigned or deleted there.
        attributes: those read from any object. Strings count as well: ``getattr(x, "scale")``.
        assigned: attributes that are assigned or deleted.
        modules: Python modules that the code imports.
        any_attribute: whether it reads attributes by names that are made up while it runs:
            ``getattr(x, name)``, ``vars(x)``.
        any_global: likewise globals (``globals()[name]``, ``eval(text)``); of its own module.
        others_globals: likewise those of the Python modules of other functions
            (``function.__globals__``).
        any_module: likewise Python modules (``import_module(name)``, ``sys.modules[name]``).
        environment: whether it reads the environment's variables.
        uses: of variables outside of a function and of attributes what is done with them, as
            (name, `APPENDS`, `APPENDS_INSIDE` or `OTHERWISE`).
    """

    globals: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    any_attribute: bool = False
    any_global: bool = False
    others_globals: bool = False
    any_module: bool = False
    environment: bool = False
    uses: set[tuple[str, str]] = field(default_factory=set)

    def update(self, other: Names) -> None:
        self.globals |= other.globals
        self.stored |= other.stored
        self.attributes |= other.attributes
        self.assigned |= other.assigned
        self.modules |= other.modules
        self.any_attribute |= other.any_attribute
        self.any_global |= other.any_global
        self.others_globals |= other.others_globals
        self.any_module |= other.any_module
        self.environment |= other.environment
        self.uses |= other.uses

    def only(self, use: str, name: str) -> bool:
        """Whether the code does this with what it finds under a name, and nothing else: it neither
        looks at it nor puts another object there."""
        others = {APPENDS, APPENDS_INSIDE, OTHERWISE} - {use}
        return (
            (name, use) in self.uses
            and self.uses.isdisjoint((name, other) for other in others)
            and not (self.any_attribute or self.any_global or self.others_globals)
            and UNNAMED.isdisjoint(self.attributes)
            and UNNAMED.isdisjoint(self.globals)
            and name not in self.assigned
            and name not in self.stored
        )


_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME"}
_CELL = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_STORED = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_ASSIGNED = {"STORE_ATTR", "DELETE_ATTR"}

# Special methods that run only if code calls the function, or has the instruction (in capitals),
# under which they are listed.
_TEXT = ("__format__", "__str__", "__repr__")
_COPIES = ("__copy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
_PICKLES = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
CALLED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("str", "repr", "format", "ascii"), _TEXT),
    **dict.fromkeys(("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC"), _TEXT),
    "copy": (*_COPIES, "__deepcopy__"),
    **dict.fromkeys(("deepcopy", "replace"), (*_COPIES, "__deepcopy__", "__replace__")),
    **dict.fromkeys(("dump", "dumps", "Pickler"), _PICKLES),
    "dir": ("__dir__",),
    **dict.fromkeys(("getmembers", "getmembers_static"), ("__dir__",)),
    "getsizeof": ("__sizeof__",),
    "MATCH_CLASS": ("__match_args__",),
    "signature": ("__signature__", "__annotations__"),
    **dict.fromkeys(("get_type_hints", "get_annotations"), ("__annotations__",)),
    "LOAD_BUILD_CLASS": ("__init_subclass__",),
    **dict.fromkeys(("fields", "asdict", "astuple"), ("__dataclass_fields__",)),
}
ASKED_FOR = frozenset(name for names in CALLED_BY.values() for name in names)
_NAMED_BY = frozenset((*_GLOBAL, *_CELL, *_STORED, *_ASSIGNED, *READ, *CALLED_BY, "IMPORT_NAME"))
_NAMED_BY |= {"STORE_DEREF", "DELETE_DEREF"}


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    """The `Names` in ``code``."""
    names = Names()
    found = instructions(code)
    with_jumps = functools.cache(lambda: list(dis.get_instructions(code)))
    for position, instruction in enumerate(found):
        name, kind = instruction.argval, instruction.opname
        if kind not in _NAMED_BY:
            continue
        # json writes plain data only.
        of_json = name in ("dump", "dumps") and found[position - 1].argval == "json"
        if kind in _GLOBAL:
            names.globals.add(name)
        elif kind in _STORED:
            names.stored.add(name)
        elif kind in READ and not of_json:
            names.attributes.add(name)
        elif kind in _ASSIGNED:
            names.assigned.add(name)
        elif kind == "IMPORT_NAME":
            names.modules.add(name)
        elif kind in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
            names.uses.add((name, OTHERWISE))
        if kind in _GLOBAL or kind in READ or kind in _CELL:
            names.uses.add((name, use_of(found, position)))
        names.attributes.update(CALLED_BY.get(kind, ()))
        if kind not in _GLOBAL and kind not in READ:
            continue
        # The builtin `eval` and `sys.modules` are meant, not `model.eval()` or `model.modules()`.
        of_sys = found[position - 1].argval == "sys"
        if name in _ALL and code.co_name not in _PASS_ON:
            names.any_attribute = True
        if of_json:
            continue
        if kind in READ and (name in _BUILTIN or (name == "modules" and not of_sys)):
            continue
        names.attributes.update(CALLED_BY.get(name, ()))
        if name in MADE_UP and not names.any_attribute:
            names.any_attribute = name not in _NAMED or not _has_constant(with_jumps(), position)
        if name in MODULES:
            module = _constant_behind(with_jumps(), position)
            names.any_module |= module is None
            names.modules |= {module} if module is not None else set()
        if name in _ANY_GLOBAL:
            known = _constant_behind(with_jumps(), position) if name in TABLES else None
            names.any_global |= known is None
            names.globals |= {known} if known is not None else set()
            names.stored |= {known} if known is not None else set()
        names.others_globals |= name in _OTHERS_GLOBALS
        names.environment |= name in ENVIRONMENT
    # Whether a text in it may be an attribute's name: ``getattr(x, "scale")``, ``case X(scale=s)``.
    names_attributes = any(
        i.opname == "MATCH_CLASS" or (i.opname.startswith("LOAD_") and i.argval in MADE_UP)
        for i in found
    )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(names_of(constant))
        elif isinstance(constant, str):
            if constant.isidentifier():
                names.attributes.add(constant)
                if names_attributes:
                    names.uses.add((constant, OTHERWISE))
            elif "%" in constant:  # "%s" % x
                names.attributes.update(_TEXT)
            in_format = formatted(constant)
            names.attributes |= in_format
            names.uses.update((name, OTHERWISE) for name in in_format)
            names.any_attribute |= _CUT_FIELD.search(constant) is not None
        elif isinstance(constant, tuple):  # keyword names, `in ("a", "b")`
            listed = {c for c in constant if isinstance(c, str) and c.isidentifier()}
            names.attributes |= listed
            if names_attributes:
                names.uses.update((name, OTHERWISE) for name in listed)
    return names


_FIELD = re.compile(r"\{\w*((?:\.\w+|\[[^]{}]*\])+)[!:}]")
# A piece of a format string that ends before an attribute's name: ``"{0." + name + "}"``.
_CUT_FIELD = re.compile(r"\{\w*(?:\.\w+|\[[^]{}]*\])*\.(?:$|[%{])")


def formatted(text: str) -> set[str]:
    """The attributes that a text asks for if it is a format: ``"{0.scale}".format(x)``."""
    if "{" not in text:
        return set()
    return {name for field in _FIELD.findall(text) for name in re.findall(r"\.(\w+)", field)}


# Special methods that pass the name that they were called with on to their base class.
_PASS_ON = frozenset({"__getattr__", "__getattribute__", *_COPIES, "__deepcopy__"})
# These read all attributes of an object, or one whose name isn't in the code.
_ALL = {"__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__"}
_BUILTIN = frozenset({"eval", "exec", "dir", "vars", "globals"})
_NAMED = {"getattr", "hasattr", "setattr", "delattr", "methodcaller", "getattr_static"}
MADE_UP = {"vars", "__dict__", "attrgetter", "eval", "exec", "dir", "getmembers"} | _NAMED
MADE_UP |= {"getmembers_static", "dump", "dumps", "Pickler"}
MODULES = {"import_module", "__import__", "modules", "reload"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "expandvars", "expanduser"}
TABLES = {"globals", "__globals__", "f_globals"}
_OTHERS_GLOBALS = {"__globals__", "f_globals"}
_LOOKS_UP = {"get", "pop", "setdefault"}
_IMPORTS = {"import_module", "__import__", "reload"}
EVALUATES = frozenset({"eval", "exec"})
_ANY_GLOBAL = EVALUATES | TABLES


def _constant_behind(instructions: list[dis.Instruction], position: int) -> str | None:
    """The string that follows a name: in ``import_module("config")``, ``globals()["scale"]``,
    ``globals().get("scale")``; None if it is made up."""
    if instructions[position].argval in _IMPORTS:
        match _arguments(instructions, position):
            case [str(name)] if not name.startswith("."):
                return name
            case [str(name), str(package)]:
                return importlib.util.resolve_name(name, package)
        return None
    behind = position + 1
    while instructions[behind].opname in ("PRECALL", "PUSH_NULL", "CALL"):  # of `globals`
        behind += 1
    first = instructions[behind]
    if first.opname in READ and first.argval in _LOOKS_UP:
        match _arguments(instructions, behind):
            case [str(key), *_]:
                return key
    elif first.opname == "LOAD_CONST" and isinstance(first.argval, str):
        next_ = (i.opname for i in instructions[behind + 1 : behind + 4] if i.opname != "COPY")
        return first.argval if next(next_).endswith("_SUBSCR") else None
    return None


def _has_constant(instructions: list[dis.Instruction], position: int) -> bool:
    """Whether the call of ``getattr`` (or the like) at ``position`` names the attribute."""
    match instructions[position].argval, _arguments(instructions, position):
        case ("methodcaller", [str(name), *_]) | (_, [_, str(name), *_]):
            return name.isidentifier()
    return False


def _arguments(instructions: list[dis.Instruction], position: int) -> list[Any] | None:
    """What the function loaded at ``position`` is called with: constants as they are, `_MADE`
    for what is computed. None where it isn't called there, or with names, or ``*args``.

    Followed is what lies on Python's stack above the function.
    """
    stack: list[Any] | None = []  # None: the next instruction is only reached by a jump
    found: list[Any] | None = None
    jumped: dict[int, list[Any]] = {}  # the stack of a jump, by its target
    with_names = False
    for instruction in instructions[position + 1 :]:
        kind, argument, opcode = instruction.opname, instruction.arg, instruction.opcode
        stack = _merged(stack, jumped.pop(instruction.offset, None))
        if stack is None or (kind == "PUSH_NULL" and instruction is instructions[position + 1]):
            continue  # that PUSH_NULL belongs to the call itself
        if kind == _CALL and argument == len(stack):
            if with_names:
                return None
            # ``f(a) if x else f(b)`` has a call in each branch.
            found, stack = _merged(found, stack), None
            if not jumped:
                return found
            continue
        with_names = kind == "KW_NAMES"
        if opcode in _JUMPS and instruction.argval > instruction.offset:
            effect = dis.stack_effect(opcode, argument, jump=True)
            jumped[instruction.argval] = _after(stack, instruction, effect)
        effect = dis.stack_effect(opcode, argument, jump=False)
        if len(stack) + effect < 0:
            return None
        stack = None if kind.startswith(_NO_FURTHER) else _after(stack, instruction, effect)
    return None


_MADE = object()
_CALL = "PRECALL" if sys.version_info < (3, 12) else "CALL"
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_NO_FURTHER = ("JUMP_FORWARD", "JUMP_BACKWARD", "RETURN_", "RAISE_VARARGS", "RERAISE")
# Instructions that change nothing on the stack below the entries that they take.
_KEEP = (
    *("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "LOAD_CL", "PUSH_NULL", "NOP"),
    *("CACHE", "KW_NAMES", "POP_", "COPY", "EXTENDED_ARG"),
)


def _merged(one: list[Any] | None, other: list[Any] | None) -> list[Any] | None:
    """What lies on the stack where two ways come together."""
    if one is None or other is None:
        return other if one is None else one
    return [a if a is b else _MADE for a, b in zip(one, other, strict=False)]


def _after(stack: list[Any], instruction: dis.Instruction, effect: int) -> list[Any]:
    """What lies on the stack after an instruction that makes it higher by ``effect``."""
    kind, height = instruction.opname, len(stack) + effect
    if kind == "LOAD_CONST":
        return [*stack, instruction.argval]
    if kind.startswith(_KEEP):
        kept = min(len(stack), height)
    elif kind.startswith("BUILD_"):  # replaces its operands by one entry
        kept = height - 1
    else:  # may replace the top, or (SWAP) a lower entry
        kept = min(len(stack), height) - ((instruction.arg or 1) if kind == "SWAP" else 1)
    kept = max(kept, 0)
    return stack[:kept] + [_MADE] * (height - kept)


def describe(function: Any) -> str:
    """The name of a function in messages, and where it is when it has none."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    code = getattr(function, "__code__", None)
    if code is not None and "<lambda>" in name:
        return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return name


@functools.lru_cache(maxsize=4096)
def called_by(function: types.FunctionType) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """What a function of torch's calls of ``torch.nn.functional``, and what that calls of it: where
    it finds it (the globals of a Python module), and the names. Somebody may put another there."""
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    todo, known = [function], {function}
    while todo:
        inner = todo.pop()
        names, namespace = names_of(inner.__code__), inner.__globals__
        modules = [m for n in names.globals if (m := namespace.get(n)) is torch.nn.functional]
        places = [(namespace, names.globals), *((vars(m), names.attributes) for m in modules)]
        for where, wanted in places:
            for name in wanted:
                value = where.get(name)
                if not callable(value) or vars(torch.nn.functional).get(name) is not value:
                    continue
                found.setdefault(id(where), (where, set()))[1].add(name)
                if isinstance(value, types.FunctionType) and value not in known:
                    known.add(value)
                    todo.append(value)
    return [(where, tuple(sorted(names))) for where, names in found.values()]
