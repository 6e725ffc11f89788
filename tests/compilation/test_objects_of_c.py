"""Objects of classes of C that a compiled step reads, or leaves somewhere."""

from __future__ import annotations

import enum
import re
from types import SimpleNamespace
from typing import Any

import torch

import xla_dtensor as xd


class Kind(enum.Enum):
    ONE = "one"
    TWO = "two"


def test_a_method_is_the_same_when_it_is_read_again() -> None:
    """Its name is made anew for each read."""
    table = {Kind.ONE: 2.0, Kind.TWO: 3.0}
    get, settings = table.get, SimpleNamespace(scale=1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        assert Kind._new_member_ is object.__new__
        return x * get(Kind.ONE) * settings.scale

    compiled, x = xd.compile(step), torch.ones(2)
    for change in (lambda: None, lambda: setattr(settings, "other", 1), lambda: None):
        change()
        assert compiled(x.to("xla")).tolist() == step(x).tolist()
    assert compiled.traces == 1
    table[Kind.ONE] = 5.0
    assert compiled(x.to("xla")).tolist() == step(x).tolist() == [5, 5]
    settings.scale = 2.0
    assert compiled(x.to("xla")).tolist() == step(x).tolist() == [10, 10]
    assert not any("_new_member_" in text for text in compiled.recompilations)


def test_a_pattern_that_a_step_has_compiled() -> None:
    """It is compared by value."""
    kept: dict[str, Any] = {}

    def step(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if "pattern" not in kept:
            kept["pattern"] = re.compile(r"a+test_a_pattern")
        return x * 2, re.compile(r"b+test_a_pattern")

    compiled = xd.compile(step)
    for _ in range(3):
        result, pattern = compiled(torch.ones(2, device="xla"))
        assert result.tolist() == [2, 2]
        assert kept["pattern"].match("aatest_a_pattern") and pattern.match("bbtest_a_pattern")


def test_a_match_isnt_made_of_its_attributes() -> None:
    """It has more, and can't be made without ``re``: each call gives what the trace has made."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return x * 2, re.match(r"a+", "aab")

    compiled = xd.compile(step)
    for _ in range(3):
        result, match = compiled(torch.ones(2, device="xla"))
        assert result.tolist() == [2, 2] and match is not None and match.end() == 2
