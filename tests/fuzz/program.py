"""A program as text: its leaves, its lines, what is compared; and running it by CPU torch.

A line is one statement of Python over names ``v0``, ``v1``, ...: what is shrunk, and the script
that is written of it, are these lines.
"""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.fuzz.functions import DRAWS, NAMES, RANDOM
from tests.fuzz.layouts_text import short

NAME = re.compile(r"\bv\d+\b")
WIDER = {
    "torch.float32": "torch.float64",
    "torch.bfloat16": "torch.float64",
    "torch.complex64": "torch.complex128",
}


def names(text: str) -> list[str]:
    """The names in a text, each once, in order."""
    return list(dict.fromkeys(NAME.findall(text)))


def made(line: str) -> list[str]:
    """The names that a line makes."""
    left, equals, _ = line.partition(" = ")
    return names(left) if equals and re.fullmatch(r"v\d+(, v\d+)*", left) else []


def used(line: str) -> list[str]:
    """The names that a line reads or writes to."""
    return names(line.partition(" = ")[2] if made(line) else line)


@dataclass(frozen=True)
class Leaf:
    """An input.

    Attributes:
        value: in double precision, or whole numbers; exact in ``dtype``.
        placements: as text, one per mesh dim: ``"[Shard(0), Replicate()]"``.
    """

    name: str
    value: torch.Tensor
    dtype: str
    placements: str
    requires_grad: bool = False

    def tensor(self, wide: bool = False) -> torch.Tensor:
        """On the CPU: as the program has it, or in double precision."""
        name = WIDER.get(self.dtype, self.dtype) if wide else self.dtype
        dtype = getattr(torch, name.removeprefix("torch."))
        return self.value.detach().clone().to(dtype).requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Program:
    """What a seed stands for.

    Attributes:
        mesh: its shape, ``"2x4"``.
        lines: the statements, one operation each.
        outputs: the names that the program returns.
        loss: the expression of the loss, or "" for a program without gradients.
    """

    mesh: str
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    loss: str = ""

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.mesh.split("x")))

    @property
    def draws(self) -> bool:
        """Whether it has random numbers."""
        return any(f"{f.__name__}(" in line for line in self.lines for f in RANDOM)

    def text(self) -> str:
        """The program as a function."""
        body = [*self.lines, f"loss = {self.loss or None}"]
        body.append(f"return loss, [{', '.join(self.outputs)}]")
        arguments = ", ".join(leaf.name for leaf in self.leaves)
        return "\n    ".join([f"def program({arguments}):", *body]) + "\n"

    def function(self, mesh: Any, wide: bool = False) -> Callable[..., Any]:
        """The program, on a mesh or, given its shape, on CPU torch."""
        text = in_double(self.text()) if wide else self.text()
        scope = {**NAMES, "mesh": mesh}
        exec(compile(text, "<program>", "exec"), scope)
        return scope["program"]

    def told(self) -> str:
        """The leaves' layouts and the lines, for a report."""
        heads = [
            f"# {leaf.name}: {leaf.dtype.removeprefix('torch.')}{list(leaf.value.shape)} on "
            f"{short(leaf.placements)}{', requires grad' * leaf.requires_grad}"
            for leaf in self.leaves
        ]
        return "\n".join([f"# mesh {self.mesh}", *heads, self.text()])

    def used_alone(self) -> Program:
        """Without lines and leaves that nothing depends on."""
        needed = set(self.outputs) | set(names(self.loss))
        kept: list[str] = []
        for line in reversed(self.lines):
            makes = made(line)
            if not makes or needed.intersection(makes):
                kept.insert(0, line)
                needed.update(used(line))
        leaves = tuple(leaf for leaf in self.leaves if leaf.name in needed)
        return replace(self, lines=tuple(kept), leaves=leaves)


def packed(program: Program) -> str:
    """A program as text, for another process."""
    return base64.b64encode(pickle.dumps(program)).decode()


def unpacked(text: str) -> Program:
    """The program of `packed`."""
    return pickle.loads(base64.b64decode(text))


def in_double(text: str) -> str:
    """A program's text in double precision."""
    return re.sub("|".join(map(re.escape, WIDER)), lambda match: WIDER[match[0]], text)


@dataclass
class Run:
    """What a program has computed: results, gradients, and its leaves afterwards."""

    results: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, what: str, pairs: Iterable[tuple[str, Any]]) -> None:
        for name, value in pairs:
            self.results.append(
                (f"{what} {name}".strip(), None if value is None else value.detach())
            )


def on_cpu(program: Program, wide: bool = False) -> Run:
    """The program by CPU torch.

    Raises:
        Exception: CPU torch refuses it.
    """
    leaves = [leaf.tensor(wide) for leaf in program.leaves]
    DRAWS.start(DRAWS.values)
    loss, outputs = program.function(program.mesh_shape, wide)(*leaves)
    if loss is not None:
        loss.backward()
    return collected(program, loss, outputs, leaves)


def collected(program: Program, loss: Any, outputs: Any, leaves: Any) -> Run:
    """What is compared of a run."""
    run = Run()
    run.add("", zip(program.outputs, outputs, strict=True))
    if loss is not None:
        run.add("", [("loss", loss)])
    named = [leaf.name for leaf in program.leaves]
    if not all(map(made, program.lines)):
        run.add("afterwards", zip(named, leaves, strict=True))
    run.add(
        "gradient of",
        [(n, t.grad) for n, t in zip(named, leaves, strict=True) if t.requires_grad and t.is_leaf],
    )
    return run
