"""One body for three kinds of ranks: a case is written once, and runs on devices of one process
("devices"), in threads of `hvd.run` ("threads") and in processes ("processes").

Expected values are computed by CPU torch from what every rank has, which each can make by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import xla_dtensor.horovod as hvd
from xla_dtensor.horovod.world.rank_number import PerRank, RankNumber

DEVICES, THREADS, PROCESSES = "devices", "threads", "processes"
ALL = (DEVICES, THREADS, PROCESSES)
APART = (THREADS, PROCESSES)

KINDS = {
    "V": "values differ by rank",
    "R": "shapes differ by rank, or sparse",
    "E1": "an error, the same on all ranks",
    "E2": "an error because ranks differ",
    "D": "optimizer and state",
    "P": "process sets",
    "O": "objects",
    "J": "join",
    "T": "timing, timeline",
    "B": "lifecycle",
    "A": "Adasum",
    "G": "on GPUs only in Horovod",
    "X": "not in Horovod's tests",
}


@dataclass(frozen=True)
class Case:
    """A test of Horovod's, or one more.

    Attributes:
        name: Horovod's, without ``test_``.
        kind: one of `KINDS`.
        where: for which ranks it makes sense.
        body: is called once per rank, or once for all.
        fast: whether it is one of the few that every `make test` runs.
    """

    name: str
    kind: str
    where: tuple[str, ...]
    body: Callable[[], None]
    fast: bool


CASES: dict[str, Case] = {}


def case(
    kind: str, where: tuple[str, ...] = ALL, fast: bool = False, name: str = ""
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a case."""

    def register(body: Callable[[], None]) -> Callable[[], None]:
        own = name or body.__name__
        assert own not in CASES
        CASES[own] = Case(own, kind, where, body, fast)
        return body

    return register


# --- values --------------------------------------------------------------------------------------

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
)
FLOATS = (torch.float16, torch.float32, torch.float64)
# Each dtype with one number of dims, each number with several dtypes.
PAIRS = tuple((dtype, i % 3 + 1) for i, dtype in enumerate(DTYPES))
FLOAT_PAIRS = tuple((dtype, i % 3 + 1) for i, dtype in enumerate(FLOATS))


def data(
    rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """What a rank has: small integers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    low = 0 if dtype == torch.uint8 else -7
    return torch.randint(low, 8, tuple(shape), generator=generator).to(dtype)


def everyone(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0, ranks: Any = None
) -> torch.Tensor:
    """What all ranks have, or some, stacked."""
    ranks = range(hvd.size()) if ranks is None else ranks
    return torch.stack([data(rank, shape, dtype, seed) for rank in ranks])


def given(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = False
) -> Any:
    """What the caller has: a rank's tensor, or all ranks' per-device tensor."""
    made = hvd.per_rank(lambda rank: data(rank, shape, dtype, seed))
    return made.requires_grad_() if grad else made


def alone() -> bool:
    """Whether one process drives all ranks."""
    return not isinstance(hvd.rank(), int)


def values(value: Any) -> dict[int, torch.Tensor]:
    """By rank, of the ranks that are here, a result on the CPU."""
    value = value.tensor if isinstance(value, RankNumber) else value
    if not alone():
        return {hvd.rank(): value.detach().cpu()}
    if isinstance(value, PerRank):
        return dict(enumerate(value))
    if value.device.type == "cpu":
        return dict.fromkeys(range(hvd.size()), value.detach())
    found = value.detach().local_values()
    if len(found) == 1:
        found = found * hvd.size()
    return dict(enumerate(found))


def check(
    value: Any,
    expected: Callable[[int], torch.Tensor],
    ranks: Any = None,
    rtol: float = 0,
    atol: float = 0,
) -> None:
    """Compare what the ranks, or some of them, have got with what they should."""
    found = values(value)
    members = [rank for rank in found if ranks is None or rank in ranks]
    for rank in members:
        torch.testing.assert_close(found[rank], expected(rank), rtol=rtol, atol=atol)


def same(tensor: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """The same is expected on all ranks."""
    return lambda rank: tensor


def raises(error: Any, function: Callable[[], Any], *texts: str) -> None:
    """``function()`` raises ``error``, whose text has all of ``texts``."""
    try:
        function()
    except error as found:
        for text in texts:
            assert text in str(found), f"{text!r} isn't in {found}"
        return
    raise AssertionError(f"{error} wasn't raised")


# --- process sets --------------------------------------------------------------------------------


@dataclass
class Sets:
    """The even and the odd ranks, each a process set.

    Attributes:
        even, odd: the sets.
        own: for ``process_set=``: the caller's, or both where it is all ranks.
    """

    even: Any
    odd: Any
    own: Any

    def members(self, rank: int) -> list[int]:
        """The ranks of a rank's set."""
        return self.even.ranks if rank % 2 == 0 else self.odd.ranks

    def remove(self) -> None:
        hvd.remove_process_set(self.odd)
        hvd.remove_process_set(self.even)


def sets() -> Sets:
    """Register the two sets."""
    even = hvd.add_process_set(range(0, hvd.size(), 2))
    odd = hvd.add_process_set(range(1, hvd.size(), 2))
    own: Any = [even, odd]
    if not alone():
        own = even if even.included() else odd
    return Sets(even, odd, own)
