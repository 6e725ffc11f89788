"""float32 scalars that a trace computes in double precision, as Python computes its floats."""

from __future__ import annotations

from typing import Any


class WideScalars:
    """float32 scalars that are computed in double precision: which is which, by identity."""

    __slots__ = ("_narrow", "_wide")

    def __init__(self) -> None:
        # (the key's array, so that its id stays its own, and the other one)
        self._wide: dict[int, tuple[Any, Any]] = {}
        self._narrow: dict[int, tuple[Any, Any]] = {}

    def widened(self, array: Any) -> Any:
        """A float32 scalar in double precision; anything else as it is."""
        if getattr(array, "dtype", None) != "float32":
            return array
        known = self._wide.get(id(array))
        if known is None:
            known = self._wide[id(array)] = array, array.astype("float64")
        return known[1]

    def as_computed(self, array: Any) -> Any:
        """A float32 scalar that was computed in double precision so, next to what is float64;
        anything else as it is."""
        return self._wide[id(array)][1] if id(array) in self._wide else array

    def narrowed(self, array: Any) -> Any:
        """The float32 scalar of one in double precision, always the same one."""
        known = self._narrow.get(id(array))
        if known is None:
            narrow = array.astype("float32")
            known = self._narrow[id(array)] = array, narrow
            self._wide[id(narrow)] = narrow, array
        return known[1]
