"""Compares results with CPU torch's, and names the kinds of failure."""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance.layouts import leaves

# From best to worst. `precision` are numbers that torch's tolerance refuses and one a hundred
# times as wide accepts: they fail all the same.
PASS, UNSUPPORTED, ERROR, SHAPE, PRECISION, WRONG = CLASSES = (
    "pass",
    "unsupported",
    "error",
    "shape/dtype",
    "precision",
    "wrong",
)


# Times CPU torch's own error against double precision that a result may be off.
ERRORS_OF_TORCH = 3.0


class Mismatch(Exception):
    """A result that is not CPU torch's."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class EntryTimeout(BaseException):
    """An entry took too long."""


def classify(error: BaseException) -> str:
    if isinstance(error, Mismatch):
        return error.kind
    return UNSUPPORTED if isinstance(error, NotImplementedError) else ERROR


def plain(value: torch.Tensor) -> torch.Tensor:
    """As an ordinary dense CPU tensor."""
    value = value.detach().cpu().resolve_conj().resolve_neg()
    return torch.zeros(value.shape, dtype=value.dtype) if torch._is_zerotensor(value) else value


def compare(
    actual: Any, wanted: Any, tolerance: tuple[float, float] | None, what: str, values: bool = True
) -> None:
    """Raise `Mismatch` unless ``actual`` is what CPU torch returned."""
    ours, theirs = leaves(actual), leaves(wanted)
    if len(ours) != len(theirs):
        raise Mismatch(SHAPE, f"{what}: {len(ours)} results, torch has {len(theirs)}")
    for i, (a, w) in enumerate(zip(ours, theirs, strict=True)):
        _compare_one(a, w, tolerance, f"{what} {i}", values)


def _compare_one(
    actual: Any, wanted: Any, tolerance: tuple[float, float] | None, what: str, values: bool
) -> None:
    if not isinstance(wanted, torch.Tensor):
        same = actual == wanted or (actual != actual and wanted != wanted)
        if isinstance(wanted, float) and not same:
            same = abs(actual - wanted) <= 1e-5 + 1e-5 * abs(wanted)
        if values and not (same or isinstance(wanted, torch.device)):
            raise Mismatch(WRONG, f"{what}: {actual!r}, torch has {wanted!r}")
        return
    if not isinstance(actual, torch.Tensor):
        raise Mismatch(SHAPE, f"{what}: a {type(actual).__name__}, torch has a tensor")
    if actual.shape != wanted.shape:
        raise Mismatch(SHAPE, f"{what}: shape {[*actual.shape]}, torch has {[*wanted.shape]}")
    if actual.dtype != wanted.dtype:
        raise Mismatch(SHAPE, f"{what}: {actual.dtype}, torch has {wanted.dtype}")
    if actual.device.type != "xla":
        raise Mismatch(SHAPE, f"{what}: a {type(actual).__name__} on {actual.device}")
    if not values:
        actual.detach().cpu()
        return
    a, w = plain(actual), plain(wanted)
    if w.layout is not torch.strided:
        a, w = a.to_dense(), w.to_dense()
    rtol, atol = tolerance or (None, None)
    try:
        torch.testing.assert_close(
            a, w, rtol=rtol, atol=atol, equal_nan=True, check_stride=False, check_layout=False
        )
    except AssertionError as error:
        text = " ".join(str(error).split())[:300]
        raise Mismatch(_severity(a, w), f"{what} {[*w.shape]}: {text}") from None


def as_exact(
    actual: Any, wanted: Any, exact: Any, tolerance: tuple[float, float] | None, kind: str
) -> bool:
    """Whether ``actual`` is as good as CPU torch's ``wanted``, judged by ``exact``, which CPU torch
    computes in double precision: within torch's tolerance of it, or with an error of the order of
    ``wanted``'s own (other orders of summation differ by as much). Only floating-point results may
    differ."""
    triples = list(zip(leaves(actual), leaves(wanted), leaves(exact), strict=False))
    if kind not in (PRECISION, WRONG) or len(leaves(actual)) != len(triples):
        return False
    for a, w, e in triples:
        if not isinstance(w, torch.Tensor) or w.dtype == e.dtype:
            try:
                compare(a, w, tolerance, "")
            except Mismatch:
                return False
            continue
        a, w, e = plain(a), plain(w), plain(e)
        if _within(a, e, tolerance):
            continue
        # A large difference counts as one of precision only where torch's number is off, too.
        if kind == WRONG and _within(w, e, tolerance):
            return False
        if _error(a, e) > ERRORS_OF_TORCH * _error(w, e):
            return False
    return True


def _within(
    value: torch.Tensor, exact: torch.Tensor, tolerance: tuple[float, float] | None
) -> bool:
    rtol, atol = tolerance or (None, None)
    try:
        torch.testing.assert_close(
            value, exact.to(value.dtype), rtol=rtol, atol=atol, equal_nan=True, check_stride=False
        )
    except AssertionError:
        return False
    return True


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error among the finite numbers; infinite if others differ."""
    value = value.to(exact.dtype)
    finite = torch.isfinite(value) & torch.isfinite(exact)
    if not torch.equal(value[~finite].nan_to_num(), exact[~finite].nan_to_num()):
        return float("inf")
    return float((value - exact)[finite].abs().max()) if finite.any() else 0.0


def _severity(actual: torch.Tensor, wanted: torch.Tensor) -> str:
    if not (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
        return WRONG
    exact = torch.complex128 if wanted.dtype.is_complex else torch.float64
    a, w = actual.to(exact), wanted.to(exact)
    finite = torch.isfinite(w)
    scale = float(w[finite].abs().max()) if finite.any() else 0.0
    limit = 100 * torch.finfo(wanted.dtype).eps * 10  # of the largest number: 1.2e-4 for float32
    near = torch.isclose(a, w, rtol=limit, atol=limit * scale + 1e-12, equal_nan=True)
    return PRECISION if bool(near.all()) else WRONG
