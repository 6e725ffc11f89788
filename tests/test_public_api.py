"""What users can name, and how they call it: `public_api.txt`, which a change updates on purpose.

python -m tests.test_public_api        # write it anew
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xla_dtensor as xd

SNAPSHOT = Path(__file__).with_name("public_api.txt")
STABLE = Path(__file__).parents[1] / "docs" / "api.md"


def lines() -> Iterator[str]:
    """One per name: functions with their signatures, classes with their own public members."""
    for name in xd.__all__:
        value = getattr(xd, name)
        yield from described(f"xd.{name}", value)
        if inspect.ismodule(value):
            for inner in sorted(value.__all__):
                yield from described(f"xd.{name}.{inner}", getattr(value, inner))


def described(path: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        ours = (value.__module__ or "").startswith("xla_dtensor")
        bases = [b.__name__ for b in value.__bases__ if b is not object]
        yield f"class {path}({', '.join(bases)})" if ours else f"{path} = {named(value)}"
        if ours:
            for name, member in sorted(vars(value).items()):
                if not name.startswith("_"):
                    yield f"    {member_text(name, member)}"
    elif callable(value):
        ours = (getattr(value, "__module__", "") or "").startswith("xla_dtensor")
        yield f"{path}{signature(value)}" if ours else f"{path} = {named(value)}"
    elif type(value).__module__.startswith("xla_dtensor"):
        yield f"{path}: {type(value).__name__}"
        for name, member in sorted(vars(type(value)).items()):
            if not name.startswith("_"):
                yield f"    {member_text(name, member)}"
    else:
        yield f"{path}: {'module' if inspect.ismodule(value) else type(value).__name__}"


def named(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def member_text(name: str, member: Any) -> str:
    if isinstance(member, staticmethod | classmethod):
        return f"{type(member).__name__} {name}{signature(member.__func__)}"
    if inspect.isfunction(member):
        return f"{name}{signature(member)}"
    return name


def signature(function: Any) -> str:
    try:
        found = inspect.signature(function)
    except ValueError:
        return "(...)"
    bare = [
        p.replace(annotation=inspect.Parameter.empty)
        if p.default is inspect.Parameter.empty or isinstance(p.default, str | int | float | tuple)
        else p.replace(annotation=inspect.Parameter.empty, default=_Word(p.default))
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class _Word:
    """A default whose text has no address."""

    def __init__(self, value: Any) -> None:
        self.text = re.sub(r" at 0x\w+", "", repr(value))

    def __repr__(self) -> str:
        return self.text


def test_the_api_is_what_was_agreed() -> None:
    now = "\n".join(lines()) + "\n"
    assert now == SNAPSHOT.read_text(), "if this is meant: python -m tests.test_public_api"


def test_dir_shows_the_public_names() -> None:
    assert dir(xd) == sorted(xd.__all__) == sorted(set(xd.__all__))


def test_every_name_says_how_stable_it_is() -> None:
    told = re.findall(r"^\| `([\w.]+)`", STABLE.read_text(), re.MULTILINE)
    assert sorted(told) == sorted(xd.__all__)


OURS = [
    n
    for n in xd.__all__
    if "xla_dtensor" in (getattr(getattr(xd, n), "__module__", None) or "xla_dtensor")
]


@pytest.mark.parametrize("name", OURS)
def test_every_name_is_documented(name: str) -> None:
    assert (getattr(xd, name).__doc__ or "").strip()


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(lines()) + "\n")
