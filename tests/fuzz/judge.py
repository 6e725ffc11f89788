"""Whether numbers are CPU torch's, up to what rounding does to them.

A number may be off by ``TOLERANCE`` of the largest one of its tensor, or three times as far from
double precision as CPU torch's own (as in `tests/conformance`). Where it is further off, the
program is run again, in double precision and in its own, with noise of the size of a rounding error
on all that its lines compute or write, and on their gradients (Monte Carlo arithmetic): where that
alone moves the numbers as far, it is rounding.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.conformance.compare import ERRORS_OF_TORCH
from tests.fuzz.functions import DRAWS, NAMES
from tests.fuzz.program import Program, Run, collected, in_double

EPS = {
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-24,  # what came from float32 on the way
    torch.bfloat16: 2.0**-9,
    torch.complex64: 2.0**-24,
    torch.complex128: 2.0**-24,
}
TOLERANCE = 64  # times EPS
NOISY_RUNS, NOISE = 6, 8.0  # and how many times the movement by noise is allowed


def first_wrong(program: Program, got: Run, wanted: Run, exact: Run) -> tuple[str, str] | None:
    """The first result that isn't CPU torch's: its name, and how it differs."""
    noisy: Any = functools.cache(lambda: _movements(program, exact))
    rows = zip(got.results, wanted.results, exact.results, strict=True)
    for i, ((what, g), (_, w), (_, e)) in enumerate(rows):
        if w is None or g is None:
            if g is not w:
                return what, f"expected {w}, got {g}"
            continue
        if g.shape != w.shape or g.dtype != w.dtype:
            text = f"expected {w.dtype} of {list(w.shape)}, got {g.dtype} of {list(g.shape)}"
            return what, text
        if not w.numel():
            continue
        if w.dtype not in EPS:
            if not torch.equal(g, w) and torch.equal(w.to(e.dtype), e):
                return what, _told(g, w)
            continue
        error, allowed = distance(g, e), TOLERANCE * EPS[w.dtype] * _scale(e)
        if w.dtype != torch.bfloat16 and _coarse(program):
            allowed *= EPS[torch.bfloat16] / EPS[torch.float32]
        if error <= max(allowed, ERRORS_OF_TORCH * distance(w, e)):
            continue
        if error > NOISE * noisy()[i]:
            return what, _told(g, w)
    return None


def distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; infinite where one is a number and the other isn't."""
    value, exact = value.detach().to(exact.dtype), exact.detach()
    if not torch.equal(torch.isfinite(value), torch.isfinite(exact)):
        return float("inf")
    return float((value - exact).abs().nan_to_num(0.0).max())


def _scale(exact: torch.Tensor) -> float:
    return max(1e-3, float(exact.abs().nan_to_num(0.0).max()))


def _coarse(program: Program) -> bool:
    """Whether bfloat16 is on the way."""
    return "bfloat16" in program.text() or any("bfloat16" in x.dtype for x in program.leaves)


def _told(got: torch.Tensor, wanted: torch.Tensor) -> str:
    return f"expected {_numbers(wanted)}\ngot      {_numbers(got)}"


def _numbers(value: torch.Tensor) -> str:
    return f"{value.tolist()!r}"[:600]


def _movements(program: Program, exact: Run) -> list[float]:
    """How far noise of the size of rounding errors moves each result."""
    furthest = [0.0] * len(exact.results)
    generator = torch.Generator().manual_seed(0)
    for i in range(NOISY_RUNS):
        # Its own precision shows what is rounded inside of an operation.
        other = _with_noise(program, generator, wide=i % 2 == 0)
        for i, ((_, value), (_, e)) in enumerate(zip(other.results, exact.results, strict=True)):
            if value is not None and e is not None and e.numel() and e.dtype in EPS:
                furthest[i] = max(furthest[i], distance(value, e))
    return furthest


def _with_noise(program: Program, generator: torch.Generator, wide: bool) -> Run:
    leaves = [leaf.tensor(wide) for leaf in program.leaves]
    text = in_double if wide else str
    values = dict(zip((leaf.name for leaf in program.leaves), leaves, strict=True))
    eps = EPS[torch.bfloat16] if _coarse(program) else EPS[torch.float32]
    largest = 0.0  # gradient on the way: what cancels behind it was rounded as this

    def noise(value: torch.Tensor, at_least: float = 0.0) -> torch.Tensor:
        # What was added up is rounded as large numbers are, though the sum may be small.
        size = value.detach().abs()
        size = size + 0.25 * max(at_least, float(size.max())) if size.numel() else size
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return (eps * size * drawn).to(value.dtype)

    def with_noise(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        if gradient.numel():
            largest = max(largest, float(gradient.abs().max()))
        return gradient + noise(gradient, largest)

    def watch_gradient(value: torch.Tensor) -> None:
        if value.requires_grad:
            value.register_hook(with_noise)

    for leaf in leaves:
        watch_gradient(leaf)
    scope = {**NAMES, "mesh": program.mesh_shape}
    DRAWS.start(DRAWS.values)
    for line in program.lines:
        memories = {t.untyped_storage().data_ptr() for t in values.values()}
        versions = {name: value._version for name, value in values.items()}
        exec(text(line), scope, values)
        for name, value in values.items():
            if not (value.is_floating_point() or value.is_complex()):
                continue
            if name in versions:
                if value._version != versions[name] and not value._is_view():
                    value.data.add_(noise(value))
                    watch_gradient(value)
            elif value.untyped_storage().data_ptr() not in memories:
                values[name] = value + noise(value)
                watch_gradient(values[name])
    loss = eval(text(program.loss), scope, values) if program.loss else None
    if loss is not None:
        # It is rounded as what it adds up is, though that may cancel.
        added = eval(text(program.loss).replace(".sum()", ".abs().sum()"), scope, values)
        loss = loss + noise(added.detach())
        loss.backward()
    return collected(program, loss, [values[name] for name in program.outputs], leaves)
