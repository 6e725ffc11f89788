"""Draws programs: each operation is run by CPU torch as it is drawn, so that what comes next fits.

The same seed gives the same program everywhere: what is decided by values is decided in double
precision, with margins far above its rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.fuzz import layouts_text
from tests.fuzz.functions import NAMES
from tests.fuzz.program import Leaf, Program, in_double, made, on_cpu, used

SIZES = (1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 8, 12)
LARGEST, MOST_ELEMENTS, MOST_DIMS = 60.0, 400, 4
MESHES = ("2x4", "4x2", "2x2x2", "8")
ROUNDED = 1e-3  # of the largest number: what separates values that are compared
COARSE = 0.06  # where bfloat16 has been on the way


# Findings that wait for their remedy, and what isn't drawn until then. Empty is what it should be.
EXCLUDED: dict[str, str] = {}


class UnsuitableError(Exception):
    """What was drawn doesn't fit the program, and something else is drawn."""


Operation = Callable[["Draw"], None]
OPERATIONS: dict[str, tuple[Operation, float]] = {}


def operation(weight: float = 1.0) -> Callable[[Operation], Operation]:
    """An operation that is drawn ``weight`` times as often as others."""

    def register(function: Operation) -> Operation:
        OPERATIONS[function.__name__] = function, weight
        return function

    return register


def _is(value: torch.Tensor, suits: Callable[[torch.Tensor], Any]) -> bool:
    try:
        return bool(suits(value))
    except RuntimeError:  # a view of several, whose base was written to, can't be asked any more
        return False


class Draw:
    """A program that grows.

    Attributes:
        true, wide: the names' values by CPU torch, as the program has them and in double precision.
        exact: names whose values no rounding has touched.
        coarse: names that bfloat16 is on the way to.
        given: names whose values come from the devices' random numbers, which CPU torch hasn't.
        local: names of per-device tensors, which don't meet the others.
        kept: memory that mustn't be written, as torch doesn't say who sees it.
    """

    def __init__(self, seed: str, mesh: str) -> None:
        self.rng = random.Random(seed)
        self.mesh = mesh
        self.mesh_shape = tuple(map(int, mesh.split("x")))
        self.leaves: list[Leaf] = []
        self.lines: list[str] = []
        self.true: dict[str, torch.Tensor] = {}
        self.wide: dict[str, torch.Tensor] = {}
        self.exact: set[str] = set()
        self.coarse: set[str] = set()
        self.given: set[str] = set()
        self.kept: set[str] = set()
        self.local: set[str] = set()
        self.scope = {**NAMES, "mesh": self.mesh_shape}
        self.read: set[str] = set()
        self.count = 0
        self.written = False
        self.gradients = self.rng.random() < 0.8

    # What is drawn

    def choice(self, of: Sequence[Any]) -> Any:
        if not of:
            raise UnsuitableError
        return of[self.rng.randrange(len(of))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def number(self) -> float:
        return self.choice([-1.5, -0.75, -0.5, 0.25, 0.5, 0.75, 1.25, 1.5, 2.0, 3.0])

    def size(self) -> int:
        return 0 if self.chance(0.01) else self.choice(SIZES)

    def shape(self, least: int = 1, most: int = 3) -> list[int]:
        while True:
            shape = [self.size() for _ in range(self.rng.randint(least, most))]
            if math.prod(shape) <= 240:
                return shape

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        return layouts_text.drawn(self.rng, shape, dtype, self.mesh_shape)

    def pick(self, suits: Callable[[torch.Tensor], Any] = lambda t: True) -> str:
        """A name whose value suits; later ones, and such as nothing has read, are more likely."""
        found = [n for n, value in self.true.items() if n not in self.local and _is(value, suits)]
        if not found:
            raise UnsuitableError
        unread = [name for name in found if name not in self.read]
        if unread and self.chance(0.5):
            found = unread
        return found[-1 - int(len(found) * self.rng.random() ** 1.7)]

    def floats(self, least: int = 0) -> str:
        return self.pick(lambda t: t.is_floating_point() and t.ndim >= least)

    def dim(self, name: str) -> int:
        value = self.true[name]
        dim = self.choice(range(value.ndim))
        return dim - value.ndim if self.chance(0.3) else dim

    # Leaves

    def _new(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def leaf(
        self, shape: Sequence[int], dtype: str = "torch.float32", below: int | None = None
    ) -> str:
        """A new input: distinct numbers away from 0, whole ones below a bound, or a mask."""
        if len(self.leaves) >= 8:
            raise UnsuitableError
        count = math.prod(shape)
        if count > MOST_ELEMENTS:
            raise UnsuitableError
        grad = False
        if below is not None:
            if count and below <= 0:
                raise UnsuitableError
            value = torch.tensor([self.rng.randrange(below) for _ in range(count)])
        elif dtype == "torch.bool":
            value = torch.tensor([self.chance(0.5) for _ in range(count)], dtype=torch.bool)
        elif dtype in ("torch.int64", "torch.int32"):
            value = torch.tensor([self.rng.randint(-9, 9) for _ in range(count)])
        else:
            grad = self.gradients and self.chance(0.7)
            value = self._distinct(count, dtype)
            if dtype == "torch.complex64":
                value = torch.complex(value, self._distinct(count, dtype))
        value = value.reshape(list(shape))
        name = self._new()
        kind = getattr(torch, dtype.removeprefix("torch."))
        leaf = Leaf(name, value, dtype, self.layout(shape, kind), grad)
        self.leaves.append(leaf)
        self.true[name], self.wide[name] = leaf.tensor(), leaf.tensor(wide=True)
        self.exact.add(name)
        if dtype == "torch.bfloat16":
            self.coarse.add(name)
        return name

    def _distinct(self, count: int, dtype: str) -> torch.Tensor:
        """Odd numbers over a power of two: distinct, never 0, exact in bfloat16 if need be."""
        half = 128 if count <= 256 else 512
        if half == 512 and dtype == "torch.bfloat16":
            raise UnsuitableError
        odd = [sign * n for n in range(1, 2 * half, 2) for sign in (1, -1)]
        return torch.tensor(self.rng.sample(odd, count), dtype=torch.float64) / half

    def indices(self, shape: Sequence[int], bound: int) -> str:
        """Whole numbers from 0 up to ``bound``: of the program, or a new input."""
        suits = lambda t: (
            t.dtype == torch.int64
            and list(t.shape) == list(shape)
            and t.numel()
            and int(t.min()) >= 0
            and int(t.max()) < bound
        )
        if self.chance(0.5):
            found = [n for n, t in self.true.items() if suits(t) and n not in self.given]
            if found:
                return self.choice(found)
        return self.leaf(shape, "torch.int64", below=bound)

    # Lines

    def let(self, expression: str, results: int = 1, moves: bool = False) -> list[str]:
        """A line that makes names of an expression.

        Args:
            expression: over names.
            results: how many tensors it gives.
            moves: whether it only moves values, so that their rounding stays.

        Raises:
            UnsuitableError: CPU torch refuses it, or its numbers don't suit.
        """
        new = [self._new() for _ in range(results)]
        line = f"{', '.join(new)} = {expression}"
        self._run(line)
        sources = used(line)
        for name in new:
            value = self.true[name]
            if value.numel() > MOST_ELEMENTS or value.ndim > MOST_DIMS:
                raise UnsuitableError
            if moves and self.exact.issuperset(sources):
                self.exact.add(name)
            if value.dtype == torch.bfloat16 or self.coarse.intersection(sources):
                self.coarse.add(name)
            if self.given.intersection(sources):
                self.given.add(name)
        self._check(new)
        self.lines.append(line)
        self.read.update(sources)
        return new

    def let_local(self, expression: str) -> list[str]:
        """A line that makes a per-device tensor."""
        new = self.let(expression)
        self.local.update(new)
        return new

    def write(self, line: str, target: str) -> None:
        """A line that writes to the memory of ``target``."""
        if self.memory(target) in self.kept:
            raise UnsuitableError
        self.written = True
        self._run(line)
        seen = [n for n in self.true if self.memory(n) == self.memory(target)]
        self.exact.difference_update(seen)
        sources = [n for n in used(line) if n != target]
        for marks in (self.coarse, self.given):
            if marks.intersection(sources):
                marks.update(seen)
        self._check(list(self.true))
        # A compiled step refuses that an argument gets a history: few programs are spent on that.
        taken = [x for x in self.leaves if self.true[x.name].requires_grad > x.requires_grad]
        if taken and self.chance(0.9):
            raise UnsuitableError
        self.lines.append(line)
        if any(leaf.requires_grad for leaf in self.leaves):
            self._differentiable()

    def memory(self, name: str) -> str:
        """Which memory a name's value lies in: the first name that is there, too."""
        pointer = self.wide[name].untyped_storage().data_ptr()
        for other, value in self.wide.items():
            if value.untyped_storage().data_ptr() == pointer:
                return other
        return name

    def overlapping(self, name: str) -> None:
        """A view that may have an element several times: then its memory isn't written to."""
        if "F2" not in EXCLUDED:
            return
        value = self.wide[name]
        places = torch.arange(value.untyped_storage().nbytes() // value.element_size())
        seen = places.as_strided(value.shape, value.stride(), value.storage_offset())
        if seen.unique().numel() < seen.numel():
            self.kept.add(self.memory(name))

    def _run(self, line: str) -> None:
        try:
            exec(line, self.scope, self.true)
            exec(in_double(line), self.scope, self.wide)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise UnsuitableError(str(error)) from error
        for name in made(line):
            if not isinstance(self.true[name], torch.Tensor):
                raise UnsuitableError

    def _check(self, new: list[str]) -> None:
        for name in new:
            value = self.wide[name].detach()
            if not bool(torch.isfinite(value).all()) or largest(value) > LARGEST:
                raise UnsuitableError

    def _differentiable(self) -> None:
        """CPU torch can still differentiate what there is, after a write."""
        floats = [n for n, t in self.true.items() if t.is_floating_point() and t.requires_grad]
        floats = [name for name in floats if name not in self.local]
        program = self.program(floats[-6:], floats[-6:])
        try:
            on_cpu(program, wide=True)
        except RuntimeError as error:
            raise UnsuitableError(str(error)) from error

    def apart(self, name: str, dim: int | None = None, values: torch.Tensor | None = None) -> None:
        """Whether rounding can change the order of the numbers along a dim, or of all.

        Raises:
            UnsuitableError: it can.
        """
        if name in self.given:
            raise UnsuitableError
        value = self.wide[name].detach() if values is None else values
        if value.dtype == torch.bool or not value.numel():
            return
        if dim is None:
            value, dim = value.reshape(-1), 0
        elif value.ndim == 0:
            return
        self._wide_enough(name, value, value.sort(dim).values.diff(dim=dim))

    def away(self, name: str, *borders: float) -> None:
        """Whether rounding can bring a number to the other side of one of ``borders``."""
        if name in self.given:
            raise UnsuitableError
        value = self.wide[name].detach()
        for border in borders:
            self._wide_enough(name, value, (value - border).abs())

    def _wide_enough(self, name: str, value: torch.Tensor, gaps: torch.Tensor) -> None:
        if not gaps.numel():
            return
        least = 0.0
        if name not in self.exact and value.is_floating_point():
            least = (COARSE if name in self.coarse else ROUNDED) * float(value.abs().max())
        if float(gaps.min()) <= least:
            raise UnsuitableError

    # The program

    def step(self, kinds: dict[str, tuple[Operation, float]]) -> str | None:
        """One more operation; its name."""
        weights = [weight for _, weight in kinds.values()]
        for _ in range(40):
            name = self.rng.choices(list(kinds), weights)[0]
            before = len(self.lines), len(self.leaves), self.count
            self.written = False
            marks = [set(m) for m in self._marks()]
            try:
                kinds[name][0](self)
            except UnsuitableError:
                self._back(*before)
                self.exact, self.coarse, self.given, self.kept, self.local = marks
            else:
                return name
        return None

    def _marks(self) -> list[set[str]]:
        return [self.exact, self.coarse, self.given, self.kept, self.local]

    def _back(self, lines: int, leaves: int, count: int) -> None:
        del self.lines[lines:], self.leaves[leaves:]
        self.count = count
        if not self.written:
            for world in (self.true, self.wide):
                for name in [n for n in world if int(n[1:]) >= count]:
                    del world[name]
            return
        self.true = {leaf.name: leaf.tensor() for leaf in self.leaves}
        self.wide = {leaf.name: leaf.tensor(wide=True) for leaf in self.leaves}
        for line in self.lines:
            self._run(line)
        # Names in the order in which they were made: `pick` goes by it.
        for world in (self.true, self.wide):
            in_order = sorted(world.items(), key=lambda item: int(item[0][1:]))
            world.clear()
            world.update(in_order)

    def program(self, outputs: Sequence[str], in_loss: Sequence[str]) -> Program:
        terms = [self._term(name) for name in in_loss if self.true[name].requires_grad]
        return Program(
            self.mesh,
            tuple(self.leaves),
            tuple(self.lines),
            tuple(outputs),
            " + ".join(terms),
        )

    def _term(self, name: str) -> str:
        value = self.true[name]
        if value.is_complex():
            return f"torch.view_as_real({name}).sin().sum()"
        single = "" if value.dtype == torch.float32 else ".to(torch.float32)"
        # A plain sum has fewer operations, and in strict mode each is a program.
        return f"{name}{single}.sum()" if self.chance(0.4) else f"{name}{single}.sin().sum()"

    def finished(self) -> Program:
        """With outputs and a loss."""
        last = [n for line in self.lines for n in made(line) if n not in self.local]
        ends = [name for name in last if name not in self.read] or last[-1:]
        some = [name for name in last if name in self.read and self.chance(0.08)]
        outputs = [name for name in ends if self.chance(0.7)] or ends[-1:]
        outputs = sorted({*outputs, *some[:3]}, key=lambda name: int(name[1:]))
        in_loss = [name for name in outputs if self.chance(0.9)] if self.gradients else []
        program = self.program(outputs, in_loss)
        return program if self.chance(0.3) else program.used_alone()


def largest(value: torch.Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() and value.dtype != torch.bool else 0.0
