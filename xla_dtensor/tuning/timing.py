"""Times configurations on the devices that are here."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch

from xla_dtensor.tuning.configuration import Configuration
from xla_dtensor.tuning.trial import Trial

_ROUNDS, _STEPS = 3, 5
"""How often each is made again, and how many of its steps are timed then."""
_NEAR = 1.5
"""Of the fastest's time: who takes longer in a round isn't in the next."""

Make = Callable[[Configuration], tuple[Callable[..., Any], tuple[Any, ...]]]


def timed(trials: Mapping[int, Trial], make: Make) -> dict[int, Trial]:
    """The same, each that fits with the median of its steps, or with why it couldn't be run.

    They take turns, as something else may slow the machine down for a while; and none is kept
    meanwhile, as together they may need more memory than there is.

    Args:
        trials: by any numbers.
        make: a configuration's step, and its arguments.
    """
    found = dict(trials)
    times: dict[int, list[float]] = {i: [] for i, trial in trials.items() if trial.fits}
    in_turn = list(times)
    for _ in range(_ROUNDS):
        for i in in_turn:
            try:
                times[i] += _seconds(*make(trials[i].configuration))
            except Exception as error:  # no memory, say
                reason = f"{type(error).__name__}: {error}"
                found[i] = dataclasses.replace(trials[i], error=reason)
                del times[i]
        medians = {i: statistics.median(each) for i, each in times.items()}
        in_turn = [i for i, each in medians.items() if each <= _NEAR * min(medians.values())]
    found |= {i: dataclasses.replace(trials[i], measured=each) for i, each in medians.items()}
    return found


def _seconds(step: Callable[..., Any], batch: tuple[Any, ...]) -> list[float]:
    """How long a few steps take."""
    times = []
    for _ in range(_STEPS + 2):  # the first two make state, and compile
        begin = perf_counter()
        _wait(step(*batch))
        times.append(perf_counter() - begin)
    return times[2:]


def _wait(result: Any) -> None:
    torch.xla.synchronize()
    for each in result if isinstance(result, tuple | list) else (result,):
        if isinstance(each, torch.Tensor):
            each.detach().flatten()[:1].cpu()
