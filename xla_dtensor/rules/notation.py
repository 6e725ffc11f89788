"""Einsum notation for computation ops: ``"b s h, h o -> b s o"``.

Each term names the dims of one tensor. A letter that several terms share is one dim of the
computation. An output is reduced over every letter that it has not, and a shard of one leaves it
partial: also if it comes of inputs alone that have not got the letter either.

- ``h!``   must not be sharded (softmax over ``h``);
- ``1``    a dim of size one that is not sharded;
- ``...``  any number of dims, aligned from the right as broadcasting does (``...!`` unsharded).

Letters are separated by spaces, or are single characters if no term has a space ("mk,kn->mn").
A dim of size one whose letter is larger elsewhere broadcasts, and is not sharded.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch.distributed.tensor import Partial, Placement, Shard

from xla_dtensor.rules.alternatives import Alternative, Merged, merge
from xla_dtensor.rules.merging import REPLICATE, TensorInfo

ELLIPSIS = "..."
ONE = "1"
LINEAR_REDUCTIONS = ("sum", "avg")
"""The reductions that a linear function commutes with."""
COMBINING = ("sum", "product", "max", "min")
"""What parts of any size combine by; an average weighs every device the same."""

Term = tuple[str, ...]


@dataclass(frozen=True)
class Notation:
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    unsharded: frozenset[str] = frozenset()
    reduction: str = "sum"
    multilinear: bool = False
    """Linear in each input on its own: a partial input gives a partial output."""

    @cached_property
    def letters(self) -> list[str]:
        """The shardable letters: of the outputs first those all inputs share, then the reduced,
        then each input's own. A tie between alternatives goes to the earlier letter."""
        seen = dict.fromkeys(x for term in self.inputs for x in term)
        seen |= dict.fromkeys(x for term in self.outputs for x in term)
        letters = [x for x in seen if x != ONE and x not in self.unsharded]

        def rank(letter: str) -> int:
            if not any(letter in term for term in self.outputs):
                return 1
            return 0 if all(letter in term for term in self.inputs) else 2

        return sorted(letters, key=rank)

    def __str__(self) -> str:
        def term(letters: Term) -> str:
            return " ".join(x + "!" * (x in self.unsharded) for x in letters)

        return " -> ".join(", ".join(map(term, side)) for side in (self.inputs, self.outputs))


@lru_cache(maxsize=4096)
def parse(text: str, reduction: str = "sum", multilinear: bool = False) -> Notation:
    """Read a notation that has no ellipsis (see `expand_ellipsis`)."""
    if reduction not in COMBINING:
        raise ValueError(f"parts do not combine by {reduction!r}, but by {', '.join(COMBINING)}")
    unsharded: set[str] = set()

    def letters(found: list[str]) -> Term:
        unsharded.update(x[:-1] for x in found if x.endswith("!"))
        names = tuple(x.removesuffix("!") for x in found)
        if ELLIPSIS in names:
            raise ValueError(f"what the ellipsis of {text!r} stands for depends on the inputs")
        twice = {x for x in names if x != ONE and names.count(x) > 1}
        if twice:
            raise ValueError(f"letter {min(twice)!r} names two dims of one tensor: {text!r}")
        return names

    inputs, outputs = (tuple(letters(term) for term in side) for side in _tokens(text))
    known = {x for term in inputs for x in term} | {ONE}
    made = sorted({x for term in outputs for x in term} - known)
    unsharded.update(made)  # a dim that no input has is made by the op
    return Notation(inputs, outputs, frozenset(unsharded), reduction, multilinear)


def validate(text: str) -> None:
    """Raise ValueError if `text` is no notation, whatever its ellipses stand for."""
    ndims = [len(term) for term in _tokens(text)[0]]  # an ellipsis standing for one dim
    parse(expand_ellipsis(text, ndims))


def _tokens(text: str) -> list[list[list[str]]]:
    """The letters of every term of the inputs and of the outputs."""
    if text.count("->") != 1:
        raise ValueError(f"a notation has one '->' between inputs and outputs: {text!r}")
    sides = [[term.strip() for term in side.split(",")] for side in text.split("->")]
    spaced = any(re.search(r"\s", term) for side in sides for term in side)
    token = r"\S+" if spaced else r"(?:\.\.\.|.)!?"
    return [[re.findall(token, term) for term in side] for side in sides]


def expand_ellipsis(text: str, ndims: Sequence[int]) -> str:
    """Name the dims that each ``...`` stands for, given the number of dims of each input."""
    if ELLIPSIS not in text:
        return text
    inputs, outputs = _tokens(text)
    if len(inputs) != len(ndims):
        raise ValueError(f"{text!r} has {len(inputs)} inputs, not {len(ndims)}")
    hidden = [
        ndim - len(term) + 1 if _ellipsis(term) is not None else 0
        for term, ndim in zip(inputs, ndims, strict=True)
    ]
    if min(hidden) < 0:
        at = hidden.index(min(hidden))
        raise ValueError(f"{' '.join(inputs[at])!r} of {text!r} does not fit {ndims[at]} dims")

    def named(term: list[str], count: int) -> list[str]:
        at = _ellipsis(term)
        if at is None:
            return term
        mark = term[at].removeprefix(ELLIPSIS)
        return term[:at] + [f"_{i}{mark}" for i in range(count, 0, -1)] + term[at + 1 :]

    sides = [
        [named(term, count) for term, count in zip(inputs, hidden, strict=True)],
        [named(term, max(hidden, default=0)) for term in outputs],
    ]
    if all(len(term) <= 1 for side in sides for term in side):
        # Without a space in any term letters are read one by one, so their names are that short.
        short: dict[str, str] = {ONE: ONE}
        for x in (x for side in sides for term in side for x in term):
            short.setdefault(x.removesuffix("!"), string.ascii_letters[len(short) - 1])
        sides = [
            [[short[x.removesuffix("!")] + "!" * x.endswith("!") for x in term] for term in side]
            for side in sides
        ]
    return " -> ".join(", ".join(map(" ".join, side)) for side in sides)


def _ellipsis(term: list[str]) -> int | None:
    return next((i for i, x in enumerate(term) if x.removesuffix("!") == ELLIPSIS), None)


def letter_sizes(notation: Notation, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The size of every letter; two sizes other than one for a letter are an error."""
    if len(shapes) != len(notation.inputs):
        raise ValueError(f"{notation} has {len(notation.inputs)} inputs, not {len(shapes)}")
    sizes: dict[str, int] = {}
    for term, shape in zip(notation.inputs, shapes, strict=True):
        if len(term) != len(shape):
            raise ValueError(f"{' '.join(term)!r} of {notation} does not fit shape {tuple(shape)}")
        for letter, size in zip(term, shape, strict=True):
            if sizes.setdefault(letter, size) == 1:
                sizes[letter] = size
            elif size not in (1, sizes[letter]) and letter != ONE:
                raise ValueError(
                    f"letter {letter!r} of {notation} is bound to {sizes[letter]} and to {size}"
                )
    return sizes


def alternatives(notation: Notation, shapes: Sequence[Sequence[int]]) -> list[Alternative]:
    """What one mesh dim may do: shard one letter wherever it occurs, or keep one input partial."""
    sizes = letter_sizes(notation, shapes)
    result = []
    for letter in notation.letters:

        def place(term: Term, size: int | None, letter: str = letter) -> Placement:
            if letter not in term or (size == 1 and sizes[letter] != 1):
                return REPLICATE
            return Shard(term.index(letter))

        inputs = tuple(
            place(term, dict(zip(term, shape, strict=True)).get(letter))
            for term, shape in zip(notation.inputs, shapes, strict=True)
        )
        outputs = tuple(
            place(term, None) if letter in term else Partial(notation.reduction)
            for term in notation.outputs
        )
        result.append(Alternative(outputs, inputs))
    if notation.multilinear:
        result += linear_in_each(len(notation.inputs), len(notation.outputs))
    return result


def linear_in_each(n_inputs: int, n_outputs: int = 1) -> list[Alternative]:
    """One input partial, the others whole, the outputs partial."""
    return [
        Alternative(
            (Partial(op),) * n_outputs,
            tuple(Partial(op) if i == j else REPLICATE for j in range(n_inputs)),
        )
        for op in LINEAR_REDUCTIONS
        for i in range(n_inputs)
    ]


def infer_forward(
    notation: Notation, inputs: Sequence[TensorInfo], mesh_shape: Sequence[int]
) -> Merged:
    """From the inputs' shardings: those they are used in, and the outputs'."""
    options = alternatives(notation, [info.shape for info in inputs])
    return merge(options, inputs, len(notation.outputs), mesh_shape)
