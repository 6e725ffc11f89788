"""What a function's code reads and assigns, by name: from its bytecode, without running it."""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from dataclasses import dataclass, field
from typing import Any

# Whose own globals and names aren't looked at: what users change of them has its own guard
# (torch's global state), and the rest doesn't change.
LIBRARIES = frozenset({"torch", "jax", "jaxlib", "numpy", "scipy", "xla_dtensor", "ml_dtypes"})


def is_library(module_name: str | None) -> bool:
    """Whether code of the Python module of this name is a library's, not the user's."""
    if not module_name:
        return False
    package = module_name.partition(".")[0]
    return package in LIBRARIES or (package in sys.stdlib_module_names and _is_stdlib(package))


_STDLIB = os.path.dirname(os.__file__) + os.sep


def _is_stdlib(name: str) -> bool:
    """Whether what is imported under a name of the standard library is that: a user's own file may
    be called ``sched`` or ``queue``, too."""
    if name in ("__main__", "test"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or (file.startswith(_STDLIB) and "-packages" + os.sep not in file)


def is_library_class(cls: type) -> bool:
    """Whether a class is defined by a library."""
    return is_library(cls.__module__)


@dataclass
class Names:
    """Names in code, of nested functions too.

    Attributes:
        globals: those read from (or assigned in) the module's globals.
        attributes: those read from any object. Strings count as well: ``getattr(x, "scale")``.
        assigned: attributes that are assigned or deleted.
        modules: Python modules that the code imports.
        any_attribute: whether it reads attributes by names that are made up while it runs:
            ``getattr(x, name)``, ``vars(x)``.
        environment: whether it reads the environment's variables.
    """

    globals: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    any_attribute: bool = False
    environment: bool = False

    def update(self, other: Names) -> None:
        self.globals |= other.globals
        self.attributes |= other.attributes
        self.assigned |= other.assigned
        self.modules |= other.modules
        self.any_attribute |= other.any_attribute
        self.environment |= other.environment


_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
_READ = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"}
_ASSIGNED = {"STORE_ATTR", "DELETE_ATTR"}


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    """The `Names` in ``code``."""
    names = Names()
    instructions = list(dis.get_instructions(code))
    for position, instruction in enumerate(instructions):
        name, kind = instruction.argval, instruction.opname
        if kind in _GLOBAL:
            names.globals.add(name)
        elif kind in _READ:
            names.attributes.add(name)
        elif kind in _ASSIGNED:
            names.assigned.add(name)
        elif kind == "IMPORT_NAME":
            names.modules.add(name)
        if name in _MADE_UP and kind in _GLOBAL | _READ:
            names.any_attribute |= name not in _NAMED or not _has_constant(instructions, position)
        names.environment |= name in ("environ", "getenv")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(names_of(constant))
        elif isinstance(constant, str):
            if constant.isidentifier():
                names.attributes.add(constant)
        elif isinstance(constant, tuple):  # keyword names, `in ("a", "b")`
            names.attributes |= {c for c in constant if isinstance(c, str) and c.isidentifier()}
    if "globals" in names.globals:
        names.globals |= names.attributes
    return names


_NAMED = {"getattr", "hasattr", "setattr", "delattr"}  # the name is an argument
_MADE_UP = {"vars", "__dict__", "attrgetter", "eval", "exec"} | _NAMED


def _has_constant(instructions: list[dis.Instruction], position: int) -> bool:
    """Whether the call of ``getattr`` (or the like) at ``position`` names the attribute."""
    found = False
    for instruction in instructions[position + 1 : position + 16]:
        kind = instruction.opname
        if kind == "LOAD_CONST" and isinstance(instruction.argval, str):
            found = instruction.argval.isidentifier()
        elif kind.startswith(("BUILD_STRING", "FORMAT", "BINARY_OP")):
            return False  # f"layer{i}"
        elif kind.startswith(("CALL", "PRECALL")):
            return found
    return False


def describe(function: Any) -> str:
    """How to call a function in messages: its name, and where it is when it has none."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    code = getattr(function, "__code__", None)
    if code is not None and "<lambda>" in name:
        return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return name
