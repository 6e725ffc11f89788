"""What users can name, and how they call it: `public_api.txt`, which a change updates on purpose.

python -m tests.test_public_api        # write it anew
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd

SNAPSHOT = Path(__file__).with_name("public_api.txt")
STABLE = Path(__file__).parents[1] / "docs" / "api.md"
PACKAGES = ("xla_dtensor", "torch.xla")  # where our classes say that they are from


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
        ours = (value.__module__ or "").startswith(PACKAGES)
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
    told = re.findall(r"^\| `([\w.]+)`", page()[0], re.MULTILINE)
    assert sorted(told) == sorted(xd.__all__)


def page() -> tuple[str, str]:
    """docs/api.md: what there is, and what had another name."""
    names, _, renamed = STABLE.read_text().partition("## Renamed")
    return names, renamed


def test_every_old_name_says_what_it_is_now() -> None:
    told = re.findall(r"^\| `xd\.(\w+)` \| `(xd[\w.]+)`", page()[1], re.MULTILINE)
    assert dict(told) == {name: new for name, (_, new) in xd._RENAMED.items()}
    assert not set(xd._RENAMED) & set(xd.__all__)


ALIKE = {name: new for name, (_, new) in xd._RENAMED.items() if new.split(".")[-1] == name}


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has asked for no old name."""
    for name in xd._RENAMED:
        monkeypatch.delitem(vars(xd), name, raising=False)


@pytest.mark.parametrize("name", ALIKE)
def test_old_names_are_the_new_ones(name: str, forgotten: None) -> None:
    with pytest.warns(DeprecationWarning, match=re.escape(f"xd.{name} is now {ALIKE[name]};")):
        found = getattr(xd, name)
    assert found is eval(ALIKE[name], {"xd": xd})
    vars(xd).pop(name)


def test_old_names_that_are_more_than_moved(forgotten: None) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))).to("xla")
    with pytest.warns(DeprecationWarning, match=r"is now xd\.scan_layers;"):
        block = xd.scan_equal_layers

    def step(x: torch.Tensor) -> torch.Tensor:
        with block(at_least=2, recompute=True):
            return model(x).sum()

    assert "stablehlo.while" in xd.compile(step).lower(torch.ones(2, 4).to("xla")).as_text()
    with pytest.warns(DeprecationWarning, match=r"is now xd\.config\.checks;"):
        check_indices = xd.check_indices
    table, wrong = torch.ones(4, 2, device="xla"), torch.tensor([9]).to("xla")
    with xd.config.override(checks="eager"):
        check_indices(False)
        assert torch.nn.functional.embedding(wrong, table).shape == (1, 2)
        check_indices(True)
        with pytest.raises(IndexError):
            torch.nn.functional.embedding(wrong, table).sum().item()


def test_an_old_name_is_told_once_in_a_process_and_at_its_line(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import xla_dtensor as xd\n"
        "for _ in range(3):\n"
        "    xd.zero\n"
        "xd.zero\n"
        "from xla_dtensor import zero, shard_batch\n"
        "assert zero is xd.parallel.zero and shard_batch is xd.data.shard_batch\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning:__main__", str(program)],
        env=os.environ | {"PYTHONPATH": str(STABLE.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    told = re.findall(r"train\.py:(\d+): DeprecationWarning: (xd\.\w+)", done.stderr)
    assert told == [("3", "xd.zero"), ("5", "xd.shard_batch")], done.stderr


def test_names_that_never_were() -> None:
    with pytest.raises(AttributeError, match="no attribute 'zeros'"):
        xd.zeros  # noqa: B018


OURS = [
    n
    for n in xd.__all__
    if (getattr(getattr(xd, n), "__module__", None) or "xla_dtensor").startswith(PACKAGES)
]


@pytest.mark.parametrize("name", OURS)
def test_every_name_is_documented(name: str) -> None:
    assert (getattr(xd, name).__doc__ or "").strip()


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(lines()) + "\n")
