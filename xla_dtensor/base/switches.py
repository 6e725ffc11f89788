"""The table of the package's switches, `SWITCHES`: names, kinds of values, what each does.

`config` has their values; messages, ``print(config)`` and docs/config.md are made from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


def listed(words: Iterable[str]) -> str:
    """``a, b or c``."""
    *first, last = words
    return f"{', '.join(first)} or {last}"


class ValueKind(Protocol):
    """Which values a switch has."""

    def __str__(self) -> str:
        """The values in words, for messages and the table."""

    def check(self, value: Any) -> Any:
        """``value`` as it is kept.

        Raises:
            ValueError: it isn't allowed.
        """

    def parse(self, text: str) -> Any:
        """The value that an environment variable's text means; `check` looks at it then.

        Raises:
            ValueError: it means none.
        """


@dataclass(frozen=True)
class OneOf:
    """One of some words.

    Attributes:
        words: the allowed ones.
        short: what an environment variable may say in place of a word.
    """

    words: tuple[str, ...]
    short: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return listed(map(repr, self.words))

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError
        return self.words[self.words.index(value)]  # this object: comparing it takes no time

    def parse(self, text: str) -> str:
        return dict(self.short).get(text, text)


@dataclass(frozen=True)
class Count:
    """A number of times; 0 for never."""

    def __str__(self) -> str:
        return "an int from 0"

    def check(self, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError
        return value

    def parse(self, text: str) -> int:
        return int(text)


@dataclass(frozen=True)
class Positive:
    """A finite number above 0, or None where that is allowed, too."""

    or_none: bool = False

    def __str__(self) -> str:
        return "a number above 0" + (" or None" if self.or_none else "")

    def check(self, value: Any) -> float | None:
        if value is None and self.or_none:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError
        if not 0 < value < float("inf"):
            raise ValueError
        return float(value)

    def parse(self, text: str) -> float:
        return float(text)


@dataclass(frozen=True)
class NameList:
    """Some of these names, with commas between them."""

    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"'' or, with commas between them, any of {', '.join(map(repr, self.known))}"

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError
        asked = {name.strip() for name in value.split(",")} - {""}
        if not asked <= set(self.known):
            raise ValueError
        return ",".join(name for name in self.known if name in asked)

    def parse(self, text: str) -> str:
        return text


@dataclass(frozen=True)
class FolderPath:
    """A path, or one of two words."""

    def __str__(self) -> str:
        return "'user', 'off' or the path of a folder"

    def check(self, value: Any) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not value:
            raise ValueError
        return value

    def parse(self, text: str) -> str:
        return text


@dataclass(frozen=True)
class Switch:
    """One switch.

    Attributes:
        name: of the attribute of `config`.
        kind: which values it has.
        default: its value where neither the environment nor the program says another.
        does: what it is for, in a line or two of Markdown.
        read: when its value is looked at.
        variable: the environment variable; empty or missing, the default counts.
    """

    name: str
    kind: ValueKind
    default: Any
    does: str
    read: str

    @property
    def variable(self) -> str:
        return f"XLA_DTENSOR_{self.name.upper()}"

    def checked(self, value: Any) -> Any:
        """``value`` as it is kept.

        Raises:
            ValueError: it isn't allowed.
        """
        try:
            return self.kind.check(value)
        except ValueError:
            message = f"xd.config.{self.name} = {value!r}: it is {self.kind}"
            raise ValueError(message) from None

    def of(self, environ: Mapping[str, str]) -> Any:
        """What the environment says; None where it says nothing.

        Raises:
            ValueError: no allowed value.
        """
        text = environ.get(self.variable, "").strip()
        if not text:
            return None
        try:
            return self.kind.check(self.kind.parse(text))
        except ValueError:
            raise ValueError(f"{self.variable}={text!r}: it is {self.kind}") from None


_SWITCHES = (
    Switch(
        "eager",
        OneOf(("lazy", "strict")),
        "lazy",
        "Operations are written down and launched together (`lazy`), or each is launched where it "
        "stands (`strict`).",
        "in each eager operation",
    ),
    Switch(
        "checks",
        OneOf(("off", "eager", "compiled", "all")),
        "eager",
        "Who looks for indices out of range and the like, and raises what CPU torch raises: "
        "`eager` operations, `compiled` steps, or `all`.",
        "in each eager operation; by `xd.compile`",
    ),
    Switch(
        "audit",
        Count(),
        0,
        "Every how many calls a compiled step's Python runs again, and has to do what the program "
        "does; 0: never.",
        "by `xd.compile`",
    ),
    Switch(
        "watch",
        OneOf(("auto", "trace")),
        "auto",
        "What becomes of a compiled step whose Python can't be one program: it runs in every call, "
        "with a warning (`auto`), or raises (`trace`).",
        "by `xd.compile`",
    ),
    Switch(
        "logs",
        NameList(("layouts",)),
        "",
        "What is logged as it happens: `layouts` is a line for each operation.",
        "in each operation",
    ),
    Switch(
        "cache",
        FolderPath(),
        "user",
        "Where compiled programs, and what compilers have said of those for devices that aren't "
        "here, are kept between runs: in the user's cache folder, in another folder, or nowhere "
        "(`off`). JAX's own setting goes before it for the first.",
        "when JAX starts",
    ),
    Switch(
        "check_processes",
        OneOf(("programs", "values", "launches"), (("0", "programs"), ("1", "launches"))),
        "values",
        "What several processes compare: which programs they compile and what they read "
        "(`programs`; in the variable also `0`), then also what they bring together from values "
        "of their own (`values`), then also each launch and what they distribute (`launches`; "
        "also `1`). The same in all.",
        "in each launch",
    ),
    Switch(
        "start_timeout",
        Positive(),
        25.0,
        "How many seconds processes that are started together wait for each other.",
        "when the processes meet",
    ),
    Switch(
        "heartbeat_timeout",
        Positive(),
        30.0,
        "After how many seconds without a sign of life a process counts as gone, and the others "
        "end. The same in all.",
        "when the processes meet",
    ),
    Switch(
        "torchtitan_step",
        OneOf(("parts", "whole")),
        "parts",
        "Whether torchtitan's trainer runs forward and backward as a program and the rest by "
        "parts, or the `whole` step as one program.",
        "in each step of the trainer",
    ),
    Switch(
        "expert_capacity",
        Positive(or_none=True),
        None,
        "How many rows a device may send to another one's experts in torchtitan's models, over "
        "what that would be if all got as many; None: all rows have room.",
        "when a program is traced",
    ),
    Switch(
        "device_memory",
        Positive(or_none=True),
        None,
        "How many bytes of a device the layouts that are chosen for a step may take: where those "
        "that communicate least take more, by an estimate, others are chosen; None: as many as the "
        "device says it has, which simulated ones don't.",
        "when a program is compiled",
    ),
    Switch(
        "reproducible",
        OneOf(("on a mesh", "across meshes")),
        "on a mesh",
        "Whether compiled steps give the same bits in each run on the same mesh and layouts, or "
        "`across meshes`: on any number of devices and in any layout, at a price.",
        "in `xd.compile`",
    ),
    Switch(
        "device",
        OneOf(("auto", "xla", "never"), (("1", "xla"), ("0", "never"))),
        "auto",
        "Whether libraries that look for a device take `xla`: where JAX has accelerators and torch "
        "has none of its own (`auto`; simulated devices are none), always (`xla`; in the variable "
        "also `1`), or `never` (also `0`).",
        "when a library looks for its device",
    ),
)
SWITCHES = {switch.name: switch for switch in _SWITCHES}
