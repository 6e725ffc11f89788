"""Python's ``math`` for numbers that are inputs of a trace."""

from __future__ import annotations

import builtins
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base import interrupts
from xla_dtensor.base.numbers.printing_numbers import PrintedNumbers
from xla_dtensor.base.numbers.python_numbers import _Kind, computed, is_pythons, present_value
from xla_dtensor.base.torch_private import disable_current_modes, unseen

# Functions of Python's `math` whose arguments are numbers.
_MATH = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "copysign", "cos"),
    *("cosh", "degrees", "erf", "erfc", "exp", "exp2", "expm1", "fabs", "fmod", "gamma", "gcd"),
    *("hypot", "isfinite", "isinf", "isnan", "isqrt", "ldexp", "lgamma", "log", "log10", "log1p"),
    *("log2", "pow", "radians", "remainder", "sin", "sinh", "sqrt", "tan", "tanh"),
)


def _of_math(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    text = f"math.{name}({{}})"

    @functools.wraps(function)
    def of_numbers(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and any(map(is_pythons, args)):
            return computed(function, text.replace("{}", ", ".join(["{}"] * len(args))), *args)
        return function(*args, **kwargs)

    return of_numbers


def _of_types(function: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(function)
    def of_types(cls: Any, *args: Any, **kwargs: Any) -> bool:
        return function(cls.stands_for if type(cls) is _Kind else cls, *args, **kwargs)

    return of_types


def _as_printed(value: Any) -> Any:
    """A value for ``print``: a number as it is now, and a CPU tensor as one that nothing depends
    on."""
    if type(value) is torch.Tensor and value.device.type == "cpu":
        with unseen(), disable_current_modes():
            return value.detach().clone()
    return present_value(value)


def _of_json(iterencode: Callable[..., Any]) -> Callable[..., Any]:
    """What asks ``default`` for all that isn't JSON: for a symbolic number it is the number, or
    whoever catches its error would go another way for ever."""

    def default_of(default: Callable[[Any], Any], value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return int(value)
        return float(value) if isinstance(value, torch.SymFloat) else default(value)

    @functools.wraps(iterencode)
    def of_numbers(encoder: Any, *args: Any, **kwargs: Any) -> Any:
        own = encoder.default
        with_own = vars(encoder).get("default")
        encoder.default = functools.partial(default_of, own)
        try:
            return iterencode(encoder, *args, **kwargs)
        finally:
            if with_own is None:
                del encoder.default
            else:
                encoder.default = with_own

    return of_numbers


class MathOfNumbers:
    """While it is entered, the functions of Python's ``math`` take symbolic numbers, which C code
    can't compute with, ``json`` does, ``issubclass`` takes their types for those that they stand
    for, and what prints and logs them gets plain ones.

    Args:
        put_off: keeps what the user's code prints until the trace is through.
    """

    def __init__(self, put_off: Callable[[Callable[[], None]], None]) -> None:
        self._put_off = put_off

    def __enter__(self) -> None:
        self._printed = PrintedNumbers(_as_printed, self._put_off)
        self._printed.__enter__()
        self._iterencode = json.JSONEncoder.iterencode
        json.JSONEncoder.iterencode = _of_json(self._iterencode)  # type: ignore[method-assign]
        self._issubclass = builtins.issubclass
        builtins.issubclass = _of_types(self._issubclass)
        self._before = {name: getattr(math, name) for name in _MATH if hasattr(math, name)}
        for name, function in self._before.items():
            setattr(math, name, _of_math(function, name))

    def __exit__(self, *exc_info: object) -> None:
        json.JSONEncoder.iterencode = self._iterencode  # type: ignore[method-assign]
        builtins.issubclass = self._issubclass
        for name, function in self._before.items():
            setattr(math, name, function)
        self._printed.__exit__(*exc_info)


interrupts.atomic_methods(MathOfNumbers)
