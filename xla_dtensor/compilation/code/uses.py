"""What code does with what it finds under a name: whether it only appends to it."""

from __future__ import annotations

import dis

from xla_dtensor.compilation.code.instructions import NamedInstruction

# What gives an object's attributes without naming them; the list of a bound method.
UNNAMED = frozenset({"deepcopy", "dump", "dumps", "Pickler", "save", "replace"})
UNNAMED |= {"fields", "asdict", "astuple", "__self__", "cell_contents", "__match_args__"}
APPENDS, APPENDS_INSIDE, OTHERWISE = "x.append", "x[key].append", "otherwise"
READ = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"}
_APPENDS = ("append", "extend")


def use_of(instructions: list[NamedInstruction], position: int) -> str:
    """What is done with what the instruction at ``position`` loads."""
    above = 0  # how many entries of Python's stack are above it: a key
    for at in range(position + 1, len(instructions)):
        one = instructions[at]
        if above == 0 and one.opname in READ and one.argval in _APPENDS:
            return APPENDS
        if above == 1 and (one.opname == "BINARY_SUBSCR" or one.argrepr == "[]"):
            behind = instructions[at + 1]
            is_append = behind.opname in READ and behind.argval in _APPENDS
            return APPENDS_INSIDE if is_append else OTHERWISE
        taken = _TAKES.get(one.opname, 0)
        taken = (one.arg or 0) if taken is None else taken
        if not one.opname.startswith(_OF_KEYS) or taken > above:
            return OTHERWISE
        above += dis.stack_effect(one.opcode, one.arg, jump=False)
    return OTHERWISE


# Instructions by which a key is made, and how many entries of the stack they take (None: as they
# say); of a format with a width one more, which is below it.
_OF_KEYS = ("LOAD_", "FORMAT_", "CONVERT_VALUE", "BUILD_STRING", "BUILD_TUPLE", "CACHE", "NOP")
_TAKES: dict[str, int | None] = {
    **dict.fromkeys(("BUILD_STRING", "BUILD_TUPLE")),
    **dict.fromkeys(("FORMAT_SIMPLE", "CONVERT_VALUE", "LOAD_ATTR"), 1),
    **dict.fromkeys(("FORMAT_VALUE", "FORMAT_WITH_SPEC"), 1),
}
