"""Makes a program that fails as small as it gets, as long as it fails in the same way.

Not by Hypothesis, which draws a smaller sequence of choices and makes another program of it. Here a
line is put away and its result stays, as an input with the value that CPU torch gave it, so that
what comes before a fault goes at once; and a program that ends the process is tried in another one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.distributed.tensor import Replicate

from tests.fuzz import layouts_text
from tests.fuzz.functions import DRAWS, NAMES
from tests.fuzz.program import Leaf, Program, made, names, used

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails, seconds: float = 180) -> Program:
    """The smallest program found that still fails.

    Args:
        program: one that fails.
        fails: whether a program fails in the same way; False for one that CPU torch refuses.
        seconds: no new attempt after so many.
    """
    until = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for way in (_fewer_results, _fewer_lines, _simpler_leaves, _smaller_sizes):
            again = True
            while again:
                again = False
                for candidate in way(program):
                    if time.monotonic() > until:
                        return program
                    candidate = candidate.used_alone()
                    if _size(candidate) < _size(program) and _fails(candidate, fails):
                        program, changed, again = candidate, True, True
                        break
    return program


def _fails(program: Program, fails: Fails) -> bool:
    try:
        return fails(program)
    except Exception:  # CPU torch has refused it: another one is tried
        return False


def _size(program: Program) -> tuple[int, ...]:
    """What is to become smaller."""
    texts = [leaf.placements for leaf in program.leaves]
    cuts = sum(
        4 * t.count("Strided") + t.count("(") - t.count("Replicate") + 2 * t.count("Partial")
        for t in texts
    )
    numbers = sum(leaf.value.numel() for leaf in program.leaves)
    grads = sum(leaf.requires_grad for leaf in program.leaves)
    terms = len(names(program.loss)) + program.loss.count("(")
    return (
        len(program.lines) + len(program.outputs) + terms,
        len(program.leaves) + grads,
        cuts + numbers,
    )


def _fewer_results(program: Program) -> Iterator[Program]:
    if program.loss:
        terms = program.loss.split(" + ")
        yield replace(program, loss="")
        yield replace(program, outputs=())
        for term in terms:
            if len(terms) > 1:
                yield replace(program, loss=term)
        for i in range(len(terms)):
            yield replace(program, loss=" + ".join(terms[:i] + terms[i + 1 :]))
        yield replace(
            program, loss=program.loss.replace(".sin()", "").replace(".to(torch.float32)", "")
        )
    for name in program.outputs:
        yield replace(program, outputs=(name,))
        yield replace(program, outputs=tuple(n for n in program.outputs if n != name))


def _fewer_lines(program: Program) -> Iterator[Program]:
    values = _values(program)
    # What comes before a fault is the most: the later a line that becomes an input, the better.
    for i in reversed(range(len(program.lines))):
        line = program.lines[i]
        rest = program.lines[:i] + program.lines[i + 1 :]
        new = made(line)
        if not new:
            yield replace(program, lines=rest)
            continue
        for source in used(line):
            if len(new) == 1:
                yield _renamed(replace(program, lines=rest), new[0], source)
        whole = layouts_text.text([Replicate()] * len(program.mesh_shape))
        layouts = [whole, *(leaf.placements for leaf in program.leaves)]
        for layout in dict.fromkeys(layouts):
            leaves = [_as_leaf(name, values[name], layout) for name in new]
            yield replace(program, lines=rest, leaves=(*program.leaves, *leaves))


def _as_leaf(name: str, value: torch.Tensor, layout: str) -> Leaf:
    dtype, grad = str(value.dtype), value.requires_grad
    return Leaf(name, value.detach().clone(), dtype, layout, grad)


def _renamed(program: Program, old: str, new: str) -> Program:
    change = lambda text: re.sub(rf"\b{old}\b", new, text)
    lines = tuple(map(change, program.lines))
    outputs = tuple(dict.fromkeys(map(change, program.outputs)))
    return replace(program, lines=lines, outputs=outputs, loss=change(program.loss))


def _values(program: Program) -> dict[str, torch.Tensor]:
    """Each name's value when it was made, by CPU torch."""
    scope = {leaf.name: leaf.tensor() for leaf in program.leaves}
    kept: dict[str, torch.Tensor] = {}
    names_ = {**NAMES, "mesh": program.mesh_shape}
    DRAWS.start(DRAWS.values)
    for line in program.lines:
        exec(line, names_, scope)
        for name in made(line):
            value = scope[name]
            kept[name] = value.detach().clone().requires_grad_(value.requires_grad)
    return kept


def _with_leaf(program: Program, leaf: Leaf) -> Program:
    leaves = tuple(leaf if other.name == leaf.name else other for other in program.leaves)
    return replace(program, leaves=leaves)


def _simpler_leaves(program: Program) -> Iterator[Program]:
    for i, leaf in enumerate(program.leaves):
        placements = layouts_text.parsed(leaf.placements)
        for j, placement in enumerate(placements):
            if not placement.is_replicate():
                simpler = [*placements[:j], Replicate(), *placements[j + 1 :]]
                yield _with_leaf(program, replace(leaf, placements=layouts_text.text(simpler)))
        if leaf.requires_grad:
            yield _with_leaf(program, replace(leaf, requires_grad=False))
        rest = replace(program, leaves=program.leaves[:i] + program.leaves[i + 1 :])
        for other in program.leaves[:i]:
            if other.value.shape == leaf.value.shape and other.dtype == leaf.dtype:
                yield _renamed(rest, leaf.name, other.name)
    for i, line in enumerate(program.lines):
        if "redistribute(" in line:
            copy = f"{made(line)[0]} = {used(line)[0]}.clone()"
            yield replace(program, lines=(*program.lines[:i], copy, *program.lines[i + 1 :]))


def _smaller_sizes(program: Program) -> Iterator[Program]:
    sizes = sorted({n for leaf in program.leaves for n in leaf.value.shape if n > 1}, reverse=True)
    for size in sizes:
        for smaller in dict.fromkeys((1, 2, size // 2, size - 1)):
            if 0 < smaller < size:
                yield _cut(program, lambda leaf, n, s=size, to=smaller: to if n == s else n)
    for leaf in program.leaves:
        for dim, size in enumerate(leaf.value.shape):
            for smaller in dict.fromkeys((1, size // 2, size - 1)):
                if 0 < smaller < size:
                    value = leaf.value.narrow(dim, 0, smaller).clone()
                    yield _with_leaf(program, replace(leaf, value=value))


def _cut(program: Program, size: Callable[[Leaf, int], int]) -> Program:
    leaves = []
    for leaf in program.leaves:
        parts = tuple(slice(size(leaf, n)) for n in leaf.value.shape)
        leaves.append(replace(leaf, value=leaf.value[parts].clone()))
    return replace(program, leaves=tuple(leaves))
