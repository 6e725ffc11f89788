"""The program of a seed."""

from __future__ import annotations

import random

import torch

import tests.fuzz.operations  # noqa: F401  (registers them)
from tests.fuzz.draw import MESHES, OPERATIONS, Draw, UnsuitableError, largest
from tests.fuzz.functions import DRAWS
from tests.fuzz.program import Program, on_cpu


def draw(seed: int, mesh: str | None = None) -> Program:
    """The program of a seed.

    Args:
        seed: any number.
        mesh: the mesh in place of the one that the seed draws.
    """
    DRAWS.start(None)  # not those that another program has left
    for attempt in range(50):
        rng = random.Random(f"fuzz {seed} {attempt}")
        drawn = Draw(f"program {seed} {attempt}", mesh or MESHES[rng.randrange(len(MESHES))])
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            dtype = rng.choices(
                ("torch.float32", "torch.bfloat16", "torch.complex64", "torch.int64"),
                (12, 1.5, 1, 0.7),
            )[0]
            try:
                drawn.leaf(drawn.shape(), dtype)
            except UnsuitableError:
                continue
        if not drawn.leaves:
            continue
        # Each program has some kinds of operations only: they meet more often so.
        kinds = {n: o for n, o in OPERATIONS.items() if rng.random() < 0.5}
        wanted = rng.choice((4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 10, 11, 12, 14, 16, 20, 24, 30))
        while len(drawn.lines) < wanted and drawn.step(kinds) is not None:
            pass
        if len(drawn.lines) < 4:
            continue
        program = drawn.finished()
        if suits(program):
            return program
    raise RuntimeError(f"no program for seed {seed}")


def suits(program: Program) -> bool:
    """CPU torch runs it, and what it gives are numbers."""
    try:
        run = on_cpu(program, wide=True)
        on_cpu(program)
    except RuntimeError:
        return False
    values = [value for _, value in run.results if value is not None]
    return all(bool(torch.isfinite(value).all()) and largest(value) < 1e4 for value in values)
