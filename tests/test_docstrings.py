"""The docstrings of what users can name: each says what its arguments are, and its example runs.

An ``Example::`` block runs as it is pasted, in a namespace of its own. That of an error raises it.

And those of all modules: the first line says what the module is about, and can be read alone.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import xla_dtensor as xd
from tests.test_public_api import PACKAGES
from xla_dtensor.base.tables.registry import Changes, Registry
from xla_dtensor.custom_ops import distributed_op

RULES = ("Alternative", "Call", "Merged", "TensorInfo", "register_rule", "replicate_rule")
"""What of `xd.rules` users write rules with; the other names are the library's."""

TORCHS = ("FSDPModule", "parallel.ReplicateModule", "pipeline.PipelineStage", "XLADeviceMesh")
"""Their methods are torch's, whose documentation has them."""

HAVE_OWN = (
    "CompiledStep",
    "DFunction",
    "DistributedOp",
    "Layout",
    "XLAShardedTensor",
    "XLATensor",
    "debug.Explanation",
)
"""Each method of these has an example; a property may be in that of its class."""


def names() -> Iterator[tuple[str, Any]]:
    for name in xd.__all__:
        value = getattr(xd, name)
        if inspect.ismodule(value):
            for inner in RULES if name == "rules" else value.__all__:
                yield f"{name}.{inner}", getattr(value, inner)
        elif not inspect.isclass(value) and type(value).__module__.startswith("xla_dtensor"):
            yield name, type(value)  # an object, as `config`
        else:
            yield name, value


def is_ours(value: Any) -> bool:
    callable_ = inspect.isclass(value) or inspect.isfunction(value)
    return callable_ and value.__module__.startswith(PACKAGES)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that the package gives a class."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith(PACKAGES):
            continue
        for name, member in vars(base).items():
            found = getattr(member, "__func__", None) or getattr(member, "func", member)
            if name.startswith("_") or name in seen:
                continue
            if inspect.isfunction(found) or isinstance(found, property):
                seen.add(name)
                yield name, found


def once(found: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """By name, without what has another name already."""
    result: dict[str, Any] = {}
    for name, value in found:
        if not any(value is known for known in result.values()):
            result[name] = value
    return result


PUBLIC = once((name, value) for name, value in names() if is_ours(value))
ERRORS = {n: v for n, v in PUBLIC.items() if inspect.isclass(v) and issubclass(v, Exception)}
CLASSES = {
    name: value
    for name, value in PUBLIC.items()
    if inspect.isclass(value) and name not in (*TORCHS, *ERRORS)
}
MEMBERS = once(
    (f"{name}.{inner}", member) for name, cls in CLASSES.items() for inner, member in members(cls)
)
DOCUMENTED = {**PUBLIC, **MEMBERS}
FUNCTIONS = {name: value for name, value in DOCUMENTED.items() if inspect.isfunction(value)}


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


# They raise in several processes: tests/runtime/test_processes.py runs them there.
OF_SEVERAL_PROCESSES = {"DivergenceError"}

EXAMPLES = {n: code for n, v in DOCUMENTED.items() if (code := example(v)) is not None}


@pytest.fixture(autouse=True)
def _own_ops(scratch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_op, "OPS", Registry("op", Changes()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    code = compile(EXAMPLES[name], f"<example of {name}>", "exec")
    space = {"__name__": "__main__"}
    if name in ERRORS and name not in OF_SEVERAL_PROCESSES:
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
    assert doc_of(MEMBERS[name])
    cls, inner = name.rsplit(".", 1)
    if name not in EXAMPLES:
        assert cls not in HAVE_OWN or isinstance(MEMBERS[name], property)
        assert re.search(rf"\.{inner}\b", EXAMPLES[cls])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_and_result_is_told(name: str) -> None:
    doc = doc_of(FUNCTIONS[name])
    parameters = list(inspect.signature(FUNCTIONS[name]).parameters)
    taken = {p for p in parameters if p not in ("self", "cls")}
    assert told(section(doc, "Args")) == taken
    if name in PUBLIC:
        assert bool(section(doc, "Returns")) == (
            FUNCTIONS[name].__annotations__["return"] != "None"
        )


@pytest.mark.parametrize(
    "name", ["DistributedOp", "Layout", *(n for n, c in CLASSES.items() if is_dataclass(c))]
)
def test_what_makes_an_object_is_told(name: str) -> None:
    taken = set(inspect.signature(CLASSES[name]).parameters)
    assert taken <= told(section(doc_of(CLASSES[name]), "Args", "Attributes"))


def test_every_modules_first_line_is_a_sentence() -> None:
    """Within a line's length, which the linter limits: readers find a file by this line."""
    files = sorted(Path(xd.__file__).parent.rglob("*.py"))
    firsts = {
        file: (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
        for file in files
    }
    assert len(firsts) > 600
    assert [str(file) for file, line in firsts.items() if not re.search(r"\w.*\.$", line)] == []
