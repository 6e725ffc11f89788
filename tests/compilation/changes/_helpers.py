"""A user's module of helpers, with globals of its own, that a step calls into."""

from __future__ import annotations

import functools
import os
from builtins import eval as value_of
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

import xla_dtensor as xd

SCALE = 2.0
SCALE_LIST = [2.0]
CONFIG = SimpleNamespace(inner=SimpleNamespace(scale=2.0))
F = SimpleNamespace(relu=torch.relu)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def scaled_by_helper(x: torch.Tensor) -> torch.Tensor:
    return scaled(x)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x * 2


helper = plain


def calls_helper(x: torch.Tensor) -> torch.Tensor:
    return helper(x)


NAME = ["SCA", "LE"]


def evaluating(evaluate: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * evaluate("".join(NAME))


def evaluated(x: torch.Tensor, evaluate: Any = eval) -> torch.Tensor:
    return x * evaluate("".join(NAME))


def evaluated_by_import(x: torch.Tensor) -> torch.Tensor:
    return x * value_of("".join(NAME))


def looking(everything: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * everything()["".join(NAME)]


def parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for _ in range(2):
        yield x * SCALE


def cached(x: torch.Tensor) -> torch.Tensor:
    return _times(x, SCALE_LIST[0])


def _times(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


def wraps(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@wraps
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Scaler:
    scale = 2.0

    def __init__(self) -> None:
        self.own = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    @property
    def double(self) -> float:
        return self.own * 2

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @classmethod
    def by_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.scale


SCALER = Scaler()
_static = Scaler.__dict__["static"]


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * SCALE


def reset() -> None:
    """Everything as it was at import."""
    global SCALE, helper
    SCALE, helper = 2.0, plain
    SCALE_LIST[:] = [2.0]
    CONFIG.inner.scale, F.relu, Scaler.scale, Scaler.static = 2.0, torch.relu, 2.0, _static
    SCALER.own = 2.0
    os.environ["XLA_DTENSOR_TEST_SCALE"] = "2"
    xd.config.expert_capacity = None
