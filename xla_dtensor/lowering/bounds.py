"""Which argument values an operation refuses, as CPU torch does: indices out of range, and others.

torch looks at them while it computes, and raises. The lowerings compute something for any
(`indexing.py`); whoever executes them may ask here what to look for:

    @bounds("gather")
    def gather(args):
        return [("index", Indices(RuntimeError, 0, size, text))]

A function is of all overloads of an op, in-place and ``out=``, too. It takes the arguments by
name, tensors as anything with ``shape`` and ``dtype``, numbers that a plan doesn't look at as their
types, and names those that have conditions (``("indices", 2)``: the third of a list). Types and
texts of errors are those of CPU torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xla_dtensor.base.tables.registry import Registry
from xla_dtensor.lowering.registry import changes

Where = str | tuple[str, int]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Indices:
    """Integers from ``low`` to below ``high``.

    Attributes:
        error: what is raised.
        text: its message; ``{value}`` is an integer that is none of these.
        ignored: one that may be something else.
        below: the message for those below ``low``, where it is another one.
    """

    error: type[Exception]
    low: int
    high: int
    text: str
    ignored: int | None = None
    below: str | None = None

    def summary(self, np: Any, values: Any) -> tuple[Any, Any]:
        """The least and the greatest; ``np`` is NumPy or its like in JAX."""
        if self.ignored is not None:
            values = np.where(values == self.ignored, min(max(self.low, 0), self.high), values)
        return values.min(), values.max()

    def judge(self, least: int, greatest: int) -> Exception | None:
        """What to raise, or None."""
        if least < self.low:
            return self.error((self.below or self.text).format(value=least))
        if greatest >= self.high:
            return self.error(self.text.format(value=greatest))
        return None


@dataclass(frozen=True)
class Probabilities:
    """Weights of which a number is drawn per row."""

    def summary(self, np: Any, values: Any) -> tuple[Any, Any]:
        """Whether one is no weight, and whether a row has none."""
        values = values.astype("float32")
        wrong = ~((values >= 0) & np.isfinite(values))
        return wrong.any().astype(int), (~(values.sum(-1) > 0)).any().astype(int)

    def judge(self, wrong: int, empty: int) -> Exception | None:
        """What to raise, or None."""
        if wrong:
            return RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if empty:
            return RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
        return None


@dataclass(frozen=True)
class Summands:
    """Numbers that make ``total`` together, along the last dim.

    Attributes:
        negative, otherwise: the messages where one is below 0, and where the sum is another.
    """

    total: int
    negative: str
    otherwise: str

    def summary(self, np: Any, values: Any) -> tuple[Any, Any]:
        """The least, and the sum: where each device has its own counts, the one farthest off."""
        sums = values.sum(-1).reshape(-1)
        return values.min(), sums[np.abs(sums - self.total).argmax()]

    def judge(self, least: int, total: int) -> Exception | None:
        """What to raise, or None."""
        if least < 0:
            return RuntimeError(self.negative)
        if total != self.total:
            return RuntimeError(self.otherwise)
        return None


@dataclass(frozen=True)
class Divisors:
    """Integers to divide integers by."""

    def summary(self, np: Any, values: Any) -> tuple[Any, Any]:
        """Whether one is 0; the other says nothing."""
        zero = (values == 0).any().astype(int)
        return zero, zero

    def judge(self, zero: int, _: int) -> Exception | None:
        """What to raise, or None."""
        return RuntimeError("ZeroDivisionError") if zero else None


Condition = Indices | Probabilities | Summands | Divisors
Bounds = Callable[[Arguments], list[tuple[Where, Condition]]]

BOUNDS: Registry[Bounds] = Registry("bounds", changes)


def bounds(*names: str) -> Callable[[Bounds], Bounds]:
    """Register the decorated function for ops of these names, without namespace and overload."""

    def register(function: Bounds) -> Bounds:
        for name in names:
            BOUNDS.add(name, function)
        return function

    return register


def bounds_of(name: str) -> Bounds | None:
    """The function for the overload of this qualified name, or None."""
    namespace, _, rest = name.partition("::")
    op = rest.partition(".")[0]
    return BOUNDS.get(op.removesuffix("_")) if namespace == "aten" else None


_IN_SELF = "index out of range in self"
_OF_DIM = "index {{value}} is out of bounds for dimension {dim} with size {size}"


def _at(args: Arguments) -> tuple[int, int]:
    """The indexed dim of ``self``, and its size."""
    shape = args["self"].shape or (1,)
    dim = args["dim"] % len(shape)
    return dim, shape[dim]


@bounds("embedding")
def embedding(args: Arguments) -> list[tuple[Where, Condition]]:
    return [("indices", Indices(IndexError, 0, args["weight"].shape[0], _IN_SELF))]


@bounds("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(args: Arguments) -> list[tuple[Where, Condition]]:
    rows = args["weight"].shape[0]
    text = f"An index of the input is {{value}}, which is not in the valid range [0, {rows})"
    return [("indices", Indices(RuntimeError, 0, rows, text))]


@bounds("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(args: Arguments) -> list[tuple[Where, Condition]]:
    shape = args["self"].shape
    classes = shape[1] if len(shape) > 1 else shape[0]
    text = "Target {value} is out of bounds."
    return [("target", Indices(IndexError, 0, classes, text, ignored=args["ignore_index"]))]


@bounds("gather", "scatter", "scatter_add", "scatter_reduce")
def along_dim(args: Arguments) -> list[tuple[Where, Condition]]:
    dim, size = _at(args)
    return [("index", Indices(RuntimeError, 0, size, _OF_DIM.format(dim=dim, size=size)))]


@bounds("index_select", "index_reduce")
def in_self(args: Arguments) -> list[tuple[Where, Condition]]:
    return [("index", Indices(IndexError, 0, _at(args)[1], _IN_SELF))]


@bounds("index_add")
def index_add(args: Arguments) -> list[tuple[Where, Condition]]:
    dim, size = _at(args)
    if len(args["self"].shape) <= 1:
        return [("index", Indices(IndexError, 0, size, _IN_SELF))]
    return [("index", Indices(RuntimeError, 0, size, _OF_DIM.format(dim=dim, size=size)))]


@bounds("index_copy")
def index_copy(args: Arguments) -> list[tuple[Where, Condition]]:
    dim, size = _at(args)
    text = "index_copy_(): " + _OF_DIM.format(dim=dim, size=size)
    return [("index", Indices(IndexError, 0, size, text))]


@bounds("index_fill")
def index_fill(args: Arguments) -> list[tuple[Where, Condition]]:
    dim, size = _at(args)
    return [("index", Indices(IndexError, -size, size, _OF_DIM.format(dim=dim, size=size)))]


@bounds("index", "index_put", "_index_put_impl")
def advanced(args: Arguments) -> list[tuple[Where, Condition]]:
    if args.get("unsafe"):
        return []
    found: list[tuple[Where, Condition]] = []
    for dim, (part, size) in enumerate(zip(args["indices"], args["self"].shape, strict=False)):
        if part is not None and part.dtype.itemsize > 1:  # no mask
            text = _OF_DIM.format(dim=dim, size=size)
            found.append((("indices", dim), Indices(IndexError, -size, size, text)))
    return found


@bounds("take", "put")
def flat(args: Arguments) -> list[tuple[Where, Condition]]:
    size = 1
    for n in args["self"].shape:
        size *= n
    text = f"out of range: tried to access index {{value}} on a tensor of {size} elements."
    return [("index", Indices(IndexError, -size, size, text))]


@bounds("one_hot")
def one_hot(args: Arguments) -> list[tuple[Where, Condition]]:
    classes = args.get("num_classes", -1)
    if classes < -1:
        return []
    if classes == -1:  # as many as it takes
        classes = sys.maxsize
    above = "Class values must be smaller than num_classes."
    below = "Class values must be non-negative."
    return [("self", Indices(RuntimeError, 0, classes, above, below=below))]


@bounds("repeat_interleave")
def repeat_interleave(args: Arguments) -> list[tuple[Where, Condition]]:
    total = args.get("output_size")
    if "repeats" not in args or total is None:
        return []
    otherwise = "allocated size does not match required size"
    return [("repeats", Summands(total, "repeats can not be negative", otherwise))]


@bounds("segment_reduce")
def segment_reduce(args: Arguments) -> list[tuple[Where, Condition]]:
    lengths = args.get("lengths")
    if lengths is None or args.get("unsafe"):
        return []
    total = args["data"].shape[len(lengths.shape) - 1]
    what = "Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1)"
    otherwise = f"segment_reduce(): {what} when !unsafe."
    return [("lengths", Summands(total, "lengths contains negative value!", otherwise))]


@bounds("multinomial")
def multinomial(args: Arguments) -> list[tuple[Where, Condition]]:
    return [("self", Probabilities())]


@bounds("floor_divide", "remainder", "fmod")
def divided(args: Arguments) -> list[tuple[Where, Condition]]:
    of_integers = all(_is_integer(args[name]) for name in ("self", "other"))
    return [("other", Divisors())] if of_integers else []


@bounds("div")
def rounded(args: Arguments) -> list[tuple[Where, Condition]]:
    return divided(args) if args.get("rounding_mode") else []


def _is_integer(described: Any) -> bool:
    if not hasattr(described, "dtype"):
        return issubclass(described if isinstance(described, type) else type(described), int)
    return not (described.dtype.is_floating_point or described.dtype.is_complex)
