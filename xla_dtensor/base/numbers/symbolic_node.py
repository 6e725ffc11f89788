"""`SymbolicNode`: what torch asks of every node of a symbolic number, whoever's it is."""

from __future__ import annotations


class SymbolicNode:
    """A node that is a symbol and has a hint; whether of a number or of a bool says a subclass."""

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return False

    def is_bool(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True
