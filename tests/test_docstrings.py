"""The docstrings of what users can name: each says what its arguments are, and its example runs.

An ``Example::`` block runs as it is pasted, in a namespace of its own. That of an error raises it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest

import xla_dtensor as xd
from xla_dtensor.base.registry import Changes, Registry
from xla_dtensor.custom_ops import distributed_op

RULES = ("Alternative", "Call", "Merged", "TensorInfo", "register_rule", "replicate_rule")
"""What of `xd.rules` users write rules with; the other names are the library's."""

TORCHS = ("FSDPModule", "ReplicateModule", "XLADeviceMesh")
"""Their methods are torch's, whose documentation has them."""

OPEN = {"kwargs", "args"}
"""``*args`` and ``**kwargs`` are passed on."""


def names() -> Iterator[tuple[str, Any]]:
    for name in xd.__all__:
        value = getattr(xd, name)
        if inspect.ismodule(value):
            for inner in RULES if name == "rules" else value.__all__:
                yield f"{name}.{inner}", getattr(value, inner)
        else:
            yield name, value


def is_ours(value: Any) -> bool:
    callable_ = inspect.isclass(value) or inspect.isfunction(value)
    return callable_ and value.__module__.startswith("xla_dtensor")


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that the package gives a class, as functions."""
    seen = set()
    for base in cls.__mro__:
        if base.__module__.startswith("xla_dtensor"):
            for name, member in vars(base).items():
                function = getattr(member, "__func__", getattr(member, "func", member))
                known = isinstance(member, property) or inspect.isfunction(function)
                if known and not name.startswith("_") and name not in seen:
                    seen.add(name)
                    yield name, member if isinstance(member, property) else function


FOUND = [(name, value) for name, value in names() if is_ours(value)]
# Some have two names.
PUBLIC = {n: v for i, (n, v) in enumerate(FOUND) if v not in [w for _, w in FOUND[:i]]}
CLASSES = {
    name: value
    for name, value in PUBLIC.items()
    if inspect.isclass(value) and name not in TORCHS and not issubclass(value, Exception)
}
MEMBERS = {
    f"{name}.{inner}": (cls, member)
    for name, cls in CLASSES.items()
    for inner, member in members(cls)
}
ERRORS = {n: v for n, v in PUBLIC.items() if inspect.isclass(v) and issubclass(v, Exception)}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: value
    for name, value in [*PUBLIC.items(), *((n, m) for n, (_, m) in MEMBERS.items())]
    if inspect.isfunction(value)
}


def doc_of(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def example(value: Any) -> str | None:
    """The code of the ``Example::`` block."""
    found = re.search(r"^Example::\n((?:\n|    .*\n?)+)", doc_of(value), re.MULTILINE)
    return None if found is None else textwrap.dedent(found[1]).strip()


def section(doc: str, *titles: str) -> str:
    """The text of the first section with one of these titles."""
    found = re.search(rf"^(?:{'|'.join(titles)}):\n((?:\n|    .*\n?)+)", doc, re.MULTILINE)
    return "" if found is None else textwrap.dedent(found[1])


def told(text: str) -> set[str]:
    """The names at the beginning of a section's entries, ``name:`` or ``one, another:``."""
    entries = re.findall(r"^([*\w]+(?:, [*\w]+)*):", text, re.MULTILINE)
    return {name.strip("*") for entry in entries for name in entry.split(", ")}


EXAMPLES = {
    name: code
    for name, value in [*PUBLIC.items(), *((n, m) for n, (_, m) in MEMBERS.items())]
    if (code := example(value)) is not None
}


@pytest.fixture(autouse=True)
def _own_ops(scratch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_op, "OPS", Registry("op", Changes()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    code = compile(EXAMPLES[name], f"<example of {name}>", "exec")
    space = {"__name__": "__main__"}
    if name in ERRORS:
        with pytest.raises(ERRORS[name]):
            exec(code, space)
    else:
        exec(code, space)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short_and_say_what_comes_out(name: str) -> None:
    lines = EXAMPLES[name].splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith("import ")
    assert name in ERRORS or any(line.strip().startswith("assert ") for line in lines)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_has_an_example(name: str) -> None:
    assert name in EXAMPLES


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_is_in_an_example(name: str) -> None:
    """Methods that users call have their own; that of the class may have properties."""
    cls, member = MEMBERS[name]
    inner = name.rpartition(".")[2]
    assert doc_of(member)
    assert name in EXAMPLES or re.search(rf"\.{inner}\b|\bdef {inner}\b", example(cls) or "")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_told(name: str) -> None:
    doc = doc_of(FUNCTIONS[name])
    parameters = list(inspect.signature(FUNCTIONS[name]).parameters)
    taken = {p for p in parameters if p not in ("self", "cls")}
    assert told(section(doc, "Args")) == taken


@pytest.mark.parametrize(
    "name", ["DistributedOp", "Layout", *(n for n, c in CLASSES.items() if is_dataclass(c))]
)
def test_what_makes_an_object_is_told(name: str) -> None:
    taken = set(inspect.signature(CLASSES[name]).parameters)
    assert taken <= told(section(doc_of(CLASSES[name]), "Args", "Attributes"))
