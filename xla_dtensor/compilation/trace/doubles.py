"""Symbolic numbers for arguments that torch's C++ takes as doubles: ``eps``, ``p``, ``beta``.

A symbolic number goes through torch where the schema has a ``Scalar``. Where it has a ``float``,
torch asks for the value, and the value would be part of the program. So for the functions below,
of which we know what C++ does with the double, it gets a double that stands for the number: its
value, off by one part in a million, by which dispatch finds the number again. What C++ decides
by the value (``p == 0``) is decided here before, and so is part of what the program depends on;
where C++ hands on something computed (``1 - p``), a second double stands for that. A double that is
almost, but not quite, one that stands for a number is one that C++ has rounded: `Rounded` is
raised, and the step depends on the values of its numbers.

Functions that aren't here depend on the value of such a number, as any other use of it does.
"""

from __future__ import annotations

import ctypes
import math
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.base.numbers.python_numbers import (
    as_float,
    computed,
    is_number,
    is_pending,
    is_pythons,
    is_symbolic,
    present_value,
)
from xla_dtensor.base.torch_private import FUSED_OPTIMIZERS, count_of_function_modes, pytree
from xla_dtensor.dispatch import dispatch
from xla_dtensor.tensors.of_form import is_ours


def _same(number: Any, call: tuple[Any, ...]) -> Any:
    return number


def _rest(number: Any, call: tuple[Any, ...]) -> Any:
    return 1 - number


def _kept_scale(number: Any, call: tuple[Any, ...]) -> Any:
    """By what dropout multiplies what it keeps."""
    return 1.0 / (1.0 - number)


def _lower_power(times: int) -> Callable[..., Any]:
    """The exponent in the derivative of that order."""

    def lower(number: Any, call: tuple[Any, ...]) -> Any:
        for _ in range(times):
            number = number - 1
        return number

    return lower


def _share(number: Any, call: tuple[Any, ...]) -> Any:
    """Of each class, of logits ``[C]``, ``[N, C]`` or ``[N, C, ...]``."""
    logits = call[0]
    return number / logits.shape[0 if logits.ndim == 1 else 1]


def _function(function: Callable[[float], float], text: str) -> Callable[..., Any]:
    """A function of floats, for numbers too."""

    def of_both(number: Any, call: tuple[Any, ...]) -> Any:
        return computed(function, text, number) if is_number(number) else function(number)

    return of_both


_log = _function(math.log, "log({})")
_root = _function(lambda x: math.sqrt(abs(x)), "sqrt(abs({}))")
_single = _function(lambda x: ctypes.c_float(x).value, "float32({})")
# torch's formula for celu takes its alpha in single precision.
_inverse = _function(lambda x: 1.0 / ctypes.c_float(x).value, "(1 / float32({}))")

Derived = tuple[Callable[[Any, tuple[Any, ...]], Any], ...]


@dataclass(frozen=True)
class Double:
    """A parameter of a function.

    Attributes:
        name, position: of the parameter.
        bounds: values that C++ compares it with; at these it gets the value itself.
        exactly: values that it tests for alone: whether it is less doesn't matter.
        scalar: whether the schema has a ``Scalar``, of which an int gives other results.
        derived: what C++ hands on to operations: functions of the number and the positional
            arguments.
    """

    name: str
    position: int
    bounds: tuple[float, ...] = (0.0,)
    derived: Derived = (_same,)
    exactly: tuple[float, ...] = ()
    scalar: bool = False

    def concerns(self, value: Any) -> bool:
        """Whether an argument is a number that a double is to stand for."""
        if not is_pythons(value) or is_pending(value):  # C++ asks for one that isn't known yet
            return False
        return not (self.scalar and value.node.is_int())


_PROBABILITY = (0.0, 1.0)
_DROPOUT = (Double("p", 1, _PROBABILITY, (_same, _rest)),)
_POWERS = (0.0, 1.0, 2.0, 3.0, -1.0, -2.0, -3.0, 0.5, -0.5)

_FUNCTIONS: dict[str, tuple[Double, ...]] = {
    "layer_norm": (Double("eps", 4),),
    "native_layer_norm": (Double("eps", 4),),
    "rms_norm": (Double("eps", 3, (0.0,), (_same, _single)),),
    "group_norm": (Double("eps", 4),),
    "batch_norm": (Double("momentum", 6), Double("eps", 7)),
    "instance_norm": (Double("momentum", 6), Double("eps", 7)),
    "dropout": _DROPOUT,
    "feature_dropout": _DROPOUT,
    "native_dropout": (Double("p", 1, _PROBABILITY, (_same, _kept_scale)),),
    "cross_entropy_loss": (Double("label_smoothing", 5, _PROBABILITY, (_same, _rest, _share)),),
    "smooth_l1_loss": (Double("beta", 3),),
    "huber_loss": (Double("delta", 3),),
    "margin_ranking_loss": (Double("margin", 3),),
    "hinge_embedding_loss": (Double("margin", 2),),
    "cosine_embedding_loss": (Double("margin", 3),),
    "triplet_margin_loss": (Double("margin", 3), Double("eps", 5)),
    "cosine_similarity": (Double("eps", 3),),
    "pairwise_distance": (Double("eps", 3),),
    "poisson_nll_loss": (Double("eps", 4),),
    "scaled_dot_product_attention": (
        Double("dropout_p", 4, _PROBABILITY, (_same, _rest)),
        Double("scale", 6, (0.0,), (_same, _root)),
    ),
    "celu": (Double("alpha", 1, (0.0,), (_same, _inverse), scalar=True),),
    "lerp": (Double("weight", 2, _PROBABILITY, (_same, _rest), scalar=True),),
    "pow": (
        Double("exponent", 1, (), (_same, *map(_lower_power, (1, 2, 3, 4))), _POWERS, True),
        Double("self", 0, (0.0,), (_same, _log), (1.0, 2.0), True),
    ),
    "logit": (Double("eps", 1),),
    "nan_to_num": (Double("nan", 1), Double("posinf", 2), Double("neginf", 3)),
    "isclose": (Double("rtol", 2), Double("atol", 3)),
    "quantile": (Double("q", 1, _PROBABILITY),),
    "nanquantile": (Double("q", 1, _PROBABILITY),),
    "bernoulli": (Double("p", 1, _PROBABILITY),),
    "normal": (Double("mean", 0), Double("std", 1)),
}
_METHODS: dict[str, tuple[Double, ...]] = {
    "bernoulli_": (Double("p", 1, _PROBABILITY),),
    "normal_": (Double("mean", 1), Double("std", 2)),
    "exponential_": (Double("lambd", 1),),
    "__pow__": _FUNCTIONS["pow"][:1],
    "lerp_": _FUNCTIONS["lerp"],
    "pow_": _FUNCTIONS["pow"][:1],
}


class Rounded(Exception):
    """C++ has made something of a number that isn't known here."""


# The relative offset of a double that stands for a number, large enough to survive a cast to single
# precision, and the rounding error of that cast.
_OFF, _ROUNDING = 1.1 * 2.0**-20, 2.0**-23


class StandIns:
    """The doubles that stand for a trace's numbers.

    Attributes:
        numbers: the number that each stands for.
    """

    def __init__(self) -> None:
        self.numbers: dict[float, Any] = {}
        self._known: dict[Any, float] = {}

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def restore(self, value: Any) -> Any:
        """``value``, an operation's argument, with the numbers in place of what stands for them."""
        cls = type(value)
        if cls is float:
            found = self.numbers.get(value)
            if found is not None:
                return found
            for stand_in in self.numbers:
                if abs(value - stand_in) < abs(stand_in) * _ROUNDING:
                    raise Rounded(
                        f"a double that stands for {self.numbers[stand_in].node.text}, rounded"
                    )
            return value
        if cls is list or cls is tuple:
            items = list(map(self.restore, value))
            # The same object if nothing was replaced: callers compare with `is`.
            return value if all(map(operator.is_, items, value)) else cls(items)
        return value

    def in_place_of(self, number: Any, double: Double, call: tuple[Any, ...]) -> Any:
        """The double for a symbolic number, or its value, which the program then depends on."""
        number = as_float(number)
        if any(number == value for value in (*double.bounds, *double.exactly)):
            return float(number.node.value)
        below = [bool(number < bound) for bound in double.bounds]
        value = float(number.node.value)
        sizes = tuple(x.shape for x in call if isinstance(x, torch.Tensor))
        key = number.node.text, double, sizes
        if key in self._known:
            return self._known[key]
        stand_in = value * (1.0 + _OFF * (1.0 + 0.013 * len(self._known)))
        usable = math.isfinite(value) and below == [stand_in < bound for bound in double.bounds]
        if not usable or stand_in == value:
            return float(number)
        self._known[key] = stand_in
        for derive in double.derived:
            self.numbers[derive(stand_in, call)] = plain(derive(number, call))
        return stand_in


def plain(number: Any) -> Any:
    """A symbolic number as torch's operations take it."""
    if not is_symbolic(number):
        return number
    return torch.SymInt(number.node) if number.node.is_int() else torch.SymFloat(number.node)


def call_with_numbers(mode: Any, stand_ins: StandIns, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch's that is given symbolic numbers.

    Args:
        mode: sees the functions that torch's Python calls, where ``func`` is Python.
    """
    if isinstance(func, types.FunctionType):
        if func.__module__ not in _PYTHON or count_of_function_modes():
            return func(*args, **kwargs)  # so that other modes see the call, too
        with mode:
            return body_of(func)(*args, **kwargs)
    if func is torch.Tensor.new_tensor:
        like, *args = args
        options = {name: value for name, value in kwargs.items() if value is not None}
        return _tensor(
            torch.tensor, *args, **{"dtype": like.dtype, "device": like.device, **options}
        )
    if func in MAKERS:
        return _tensor(func, *args, **kwargs)
    fused = FUSED_OPTIMIZERS.get(func)
    if fused is not None and any(map(is_ours, args[0] if args else kwargs["self"])):
        # Past C++, which would ask for the numbers; nobody differentiates it.
        by_tensor = isinstance(kwargs["lr"], torch.Tensor)
        return dispatch(fused.tensor_lr if by_tensor else fused.default, args, kwargs)
    name = getattr(func, "__name__", "")
    found = _METHODS.get(name) or _FUNCTIONS.get(name, ())
    for double in found:
        position, key = double.position, double.name
        if position < len(args):
            if double.concerns(args[position]):
                stand_in = stand_ins.in_place_of(args[position], double, args)
                args = (*args[:position], stand_in, *args[position + 1 :])
        elif double.concerns(kwargs.get(key)):
            kwargs = {**kwargs, key: stand_ins.in_place_of(kwargs[key], double, args)}
    return func(*args, **kwargs)


# Modules of torch whose functions are Python around functions in C++.
_PYTHON = frozenset({"torch.nn.functional", "torch.functional", "torch._tensor"})


# The checks with which such a function asks whether to call __torch_function__ instead.
_ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*tensors: Any) -> bool:
    return False


# Not cached: a function that it calls may have been replaced in its module since.
def body_of(function: types.FunctionType) -> types.FunctionType:
    """The function as it is without a mode: it asks nobody else, and goes on to C++."""
    asks = dict.fromkeys(_ASKING, _never)
    body = types.FunctionType(
        function.__code__,
        {**function.__globals__, **asks},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


# Functions that make a tensor of numbers, also of lists of them.
MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})


def _tensor(func: Any, data: Any, *args: Any, **options: Any) -> Any:
    """``torch.tensor`` of numbers, symbolic ones among them."""
    if args or not is_put_together(data):
        return _of_constants(func, data, *args, **options)
    requires_grad = options.pop("requires_grad", False)
    options.pop("pin_memory", None)
    if options.get("dtype") is None:
        like = lambda value: value.node.value if is_pythons(value) else present_value(value)
        options["dtype"] = func(pytree.tree_map(like, data), device="cpu").dtype

    def made(part: Any) -> torch.Tensor:
        if isinstance(part, list | tuple):
            return torch.stack(list(map(made, part)))
        if isinstance(part, torch.Tensor):
            return part.detach().to(options.get("device", "cpu"), options["dtype"])
        return torch.full((), plain(part), **options)

    tensor = made(data)
    return tensor.requires_grad_() if requires_grad else tensor


def _of_constants(func: Any, data: Any, *args: Any, **options: Any) -> Any:
    """``torch.tensor`` of numbers that are part of the program: by a CPU tensor of the step's own.
    Otherwise C++ copies to the devices where no mode sees it, and its values wouldn't be known."""
    device = options.get("device")
    copies = func is torch.tensor or isinstance(data, list | tuple)
    if not copies or device is None or torch.device(device).type != "xla":
        return func(data, *args, **options)
    requires_grad = options.pop("requires_grad", False)
    options.pop("pin_memory", None)
    made = func(data, *args, **{**options, "device": "cpu"})
    if not isinstance(data, torch.Tensor):
        made = executor.current().made_of_constants(made)
    tensor = made.to(device)
    # functorch refuses the call, whatever it is given.
    return tensor.requires_grad_() if requires_grad else tensor


def is_put_together(data: Any) -> bool:
    """Whether `_tensor` makes a tensor of ``data`` by operations on its parts: numbers that are
    inputs, or CPU tensors of no dims, are among them."""
    if isinstance(data, torch.Tensor):
        return False
    leaves = pytree.tree_leaves(data)
    special = any(_is_tensor(x) or is_pythons(x) for x in leaves)
    return special and all(_is_number(x) or _is_tensor(x) for x in leaves)


def _is_tensor(value: Any) -> bool:
    """Whether it is a number on the CPU, which C++ would read behind the trace."""
    return type(value) is torch.Tensor and value.ndim == 0 and value.device.type == "cpu"


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float, complex) or is_pythons(value)
