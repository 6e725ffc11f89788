"""Arguments whose length varies from call to call: padded to the next of a few sizes.

A program is for one shape. So a compiled step pads the arguments that its user names, takes their
true lengths as inputs, and cuts what it returns back. Which dims of the results are the padded ones
is known by their sizes in a second trace, with other sizes of the same buckets.
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Buckets:
    """The sizes that a dim of an argument of a compiled step is padded to (`compile`).

    Args:
        dim: of the argument; negative ones count from the end.
        sizes: a call's argument is padded to the first of them that is large enough.
        fill: what the rest is filled with.
        length: the parameter of the step that is given the true length, as an input of the program.
            Default: ``n_`` and the argument's name, if the step has a parameter of that name.
        cut: which dims of the results are cut back to the true length, as a dict from a result's
            number (of the leaves of what the step returns) to a dim or several. Default: those that
            have the bucket's size, and with another bucket the other one's; a trace more per
            program finds them.

    Raises:
        ValueError: no sizes, or one that is no positive int.

    Example::

        import torch, xla_dtensor as xd

        def mean(tokens, n):
            mask = torch.arange(tokens.shape[0], device=tokens.device) < n
            return torch.where(mask, tokens, 0.0).sum() / n

        step = xd.compile(mean, buckets={"tokens": xd.Buckets(0, (4, 8), length="n")})
        means = [step(torch.arange(1.0, k + 1).to("xla")).item() for k in range(1, 8)]
        assert means == [1, 1.5, 2, 2.5, 3, 3.5, 4] and step.compilations == 2
    """

    dim: int
    sizes: Sequence[int]
    fill: float = 0
    length: str | None = None
    cut: Mapping[int, int | Sequence[int]] | None = None

    def __post_init__(self) -> None:
        sizes = tuple(sorted(set(self.sizes)))
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"Buckets(sizes={self.sizes!r}): positive ints, at least one")
        object.__setattr__(self, "sizes", sizes)


class Length(int):
    """The true length of an argument, which is an input from the first call on."""


@dataclass(frozen=True)
class _Padded:
    """One padded dim of one call.

    Attributes:
        name: of the argument.
        buckets: of the dim.
        length, size: before and after.
    """

    name: str
    buckets: Buckets
    length: int
    size: int

    @property
    def other(self) -> int:
        """Another size, to trace with."""
        sizes = self.buckets.sizes
        at = sizes.index(self.size)
        return sizes[at - 1] if at else sizes[1] if len(sizes) > 1 else self.size // 2 or 2


class Padding:
    """What has been padded of one call's arguments.

    Attributes:
        dims: each dim.
        tensors: the padded tensors, with the names of their arguments.
        given: the arguments before.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given = args, kwargs
        self.dims: list[_Padded] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []

    def is_named(self) -> bool:
        """Whether the user has said for all which dims of the results are cut."""
        return all(padded.buckets.cut is not None for padded in self.dims)


# Dims of results: the number of the result, the dim, and which of `Padding.dims` it may be.
Cuts = list[tuple[int, int, list[int]]]


class BucketedArguments:
    """The arguments of a function of which some are padded.

    Args:
        function: the step.
        buckets: as of `compile`.

    Raises:
        TypeError: it has no such parameter.
        ValueError: two buckets for one dim.
    """

    def __init__(self, function: Callable[..., Any], buckets: Mapping[str, Any]) -> None:
        called = function.forward if isinstance(function, nn.Module) else function
        self._signature = inspect.signature(called)
        self._buckets: dict[str, list[Buckets]] = {}
        if not isinstance(buckets, Mapping):
            raise TypeError(
                f"xd.compile(buckets={buckets!r}): a dict says of which parameter, and of which of "
                f"its dims, {{'tokens': {{1: (512, 1024)}}}}; the step's parameters are "
                f"{list(self._signature.parameters)}"
            )
        for name, given in buckets.items():
            self._check(name, "pads the argument")
            found = _listed(given)
            for each in found:
                if each.length is not None:
                    self._check(each.length, f"gives the length of {name!r} to the parameter")
            if len(found) == 1 and found[0].length is None:
                known = self._signature.parameters.get(f"n_{name}")
                found = [replace(found[0], length=None if known is None else f"n_{name}")]
            self._buckets[name] = found

    def _check(self, name: str, what: str) -> None:
        parameter = self._signature.parameters.get(name)
        if parameter is None or parameter.kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            raise TypeError(
                f"xd.compile(buckets=...) {what} {name!r}, which the step doesn't have: its "
                f"parameters are {list(self._signature.parameters)}"
            )

    def padded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], pad: bool = True, other: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any], Padding]:
        """One call's arguments with those that have buckets padded, and the lengths.

        Args:
            pad: whether to pad; else only the lengths are added, plain numbers.
            other: to another size than the call's, which needn't hold all of it.

        Raises:
            TypeError: one of them is no tensor, or a length is given.
            ValueError: one is longer than its largest bucket; lengths differ that are one.
        """
        bound = self._signature.bind_partial(*args, **kwargs)
        padding = Padding(args, kwargs)
        lengths: dict[str, int] = {}
        for name, buckets in self._buckets.items():
            tensor = bound.arguments.get(name)
            if tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"argument {name!r} has buckets, and is a {type(tensor).__name__}")
            dims = [_dim_of(each, name, tensor) for each in buckets]
            if len(set(dims)) < len(dims):
                raise ValueError(f"argument {name!r}: two buckets for one dim")
            for each, dim in zip(buckets, dims, strict=True):
                length = tensor.shape[dim]
                given = each.length
                if given is not None and lengths.setdefault(given, length) != length:
                    raise ValueError(
                        f"{given!r} is the length of several arguments, which are "
                        f"{lengths[given]} and {length} (of {name!r}) long"
                    )
                if pad:
                    padded = _Padded(name, each, length, _size_for(name, each, length))
                    padding.dims.append(padded)
                    size = padded.other if other else padded.size
                    tensor = _resized(tensor, dim, size, each.fill)
            if pad:
                bound.arguments[name] = tensor
                padding.tensors.append((name, tensor))
        for length_name, length in lengths.items():
            if length_name in bound.arguments:
                raise TypeError(
                    f"{length_name!r} is given by the step's buckets, not by its caller"
                )
            bound.arguments[length_name] = Length(length) if pad else length
        in_order = {
            n: bound.arguments[n] for n in self._signature.parameters if n in bound.arguments
        }
        bound.arguments = in_order
        return bound.args, bound.kwargs, padding


def _listed(given: Any) -> list[Buckets]:
    if isinstance(given, Buckets):
        return [given]
    if isinstance(given, Mapping):
        return [Buckets(dim, sizes) for dim, sizes in given.items()]
    return list(given)


def _dim_of(buckets: Buckets, name: str, tensor: torch.Tensor) -> int:
    if not -tensor.ndim <= buckets.dim < tensor.ndim:
        raise ValueError(
            f"argument {name!r} has buckets for dim {buckets.dim}, and is {list(tensor.shape)}"
        )
    return buckets.dim % tensor.ndim


def _size_for(name: str, buckets: Buckets, length: int) -> int:
    at = bisect.bisect_left(buckets.sizes, length)
    if at == len(buckets.sizes):
        raise ValueError(
            f"argument {name!r} is {length} long in dim {buckets.dim}, and the largest of its "
            f"buckets is {buckets.sizes[-1]}: give xd.compile(buckets=...) a larger one, or call "
            "the step with less of it"
        )
    return buckets.sizes[at]


def _resized(tensor: torch.Tensor, dim: int, size: int, fill: float) -> torch.Tensor:
    length = tensor.shape[dim]
    if length == size:
        return tensor
    if length > size:
        return _placed_like(tensor, tensor.narrow(dim, 0, size))
    pads = [0, 0] * (tensor.ndim - 1 - dim) + [0, size - length]
    return _placed_like(tensor, torch.constant_pad_nd(tensor, pads, fill))


def _placed_like(tensor: Any, resized: Any) -> Any:
    """``resized`` with the placements of the tensor that it was made of: torch's rules gather a dim
    that gets another size."""
    if not isinstance(tensor, DTensor) or tensor.placements == resized.placements:
        return resized
    if any(placement.is_partial() for placement in tensor.placements):
        return resized
    return resized.redistribute(placements=tensor.placements)


# --- results -------------------------------------------------------------------------------------


def refuse_writes(traced: Any, arguments: Any) -> None:
    """Raise if a step writes to an argument that is padded: it would write to the copy.

    Raises:
        ValueError: it does.
    """
    for name, tensor in arguments.padding.tensors:
        storage = getattr(tensor, "_storage_", None)
        for source in traced.inputs.slots:
            own = source.argument is not None and source.storage(arguments) is storage
            if source.writes and (own or any(s is storage for s in source.storages)):
                raise ValueError(
                    f"the step writes to its argument {name!r}, which has buckets: what is written "
                    "is the padded copy; return the new value instead"
                )
        if any(target.read(arguments) is tensor for target, _ in traced.outputs.host_writes):
            raise ValueError(f"the step writes to its argument {name!r}, which has buckets")


def shapes_of(traced: Any, arguments: Any) -> list[tuple[int, ...] | None]:
    """The shapes of a trace's results; None of what is no tensor."""
    return [result.shape(arguments) for result in traced.outputs.results]


def cuts_of(
    padding: Padding,
    shapes: list[tuple[int, ...] | None],
    others: list[tuple[int, ...] | None] | None,
) -> Cuts:
    """Which dims of the results are cut.

    Args:
        shapes: of the results.
        others: those with `_Padded.other` sizes; None if the user has said it all.

    Raises:
        ValueError: a dim depends on the padded ones, and it isn't known how.
    """
    named: dict[tuple[int, int], list[int]] = {}
    for position, padded in enumerate(padding.dims):
        for result, dims in (padded.buckets.cut or {}).items():
            for dim in (dims,) if isinstance(dims, int) else dims:
                shape = shapes[result] if result < len(shapes) else None
                if shape is None or not -len(shape) <= dim < len(shape):
                    raise ValueError(
                        f"the buckets of {padded.name!r} cut dim {dim} of result {result}, and the "
                        f"step's results are {shapes}"
                    )
                if shape[dim] != padded.size:
                    raise ValueError(
                        f"the buckets of {padded.name!r} cut dim {dim} of result {result}, which "
                        f"isn't {padded.size} long: it is {list(shape)}"
                    )
                named.setdefault((result, dim % len(shape)), []).append(position)
    found: Cuts = [(result, dim, positions) for (result, dim), positions in named.items()]
    if others is None:
        return found
    if len(others) != len(shapes):
        raise ValueError(f"the step returns other results for other lengths{_SAY}")
    for result, (shape, other) in enumerate(zip(shapes, others, strict=True)):
        if shape is None or other is None or shape == other:
            continue
        if len(shape) != len(other):
            raise ValueError(f"result {result} has {len(shape)} dims or {len(other)}{_SAY}")
        for dim, (size, changed) in enumerate(zip(shape, other, strict=True)):
            if size == changed or (result, dim) in named:
                continue
            positions = [
                i
                for i, padded in enumerate(padding.dims)
                if padded.buckets.cut is None and (padded.size, padded.other) == (size, changed)
            ]
            if not positions:
                sizes = ", ".join(f"{p.name!r} {p.size} or {p.other}" for p in padding.dims)
                raise ValueError(
                    f"dim {dim} of result {result} is {size} or {changed} long where the padded "
                    f"arguments are ({sizes}){_SAY}"
                )
            found.append((result, dim, positions))
    return found


_SAY = (
    ": it isn't known what of it is padding; return what has the argument's length, or say it: "
    "Buckets(cut={result: dim}), and cut={} to get all of it"
)


def check_lengths(cuts: Cuts, padding: Padding) -> None:
    """Raise if it isn't known which length a result has.

    Raises:
        ValueError: of two arguments of one size the lengths differ.
    """
    for result, dim, positions in cuts:
        candidates = [padding.dims[i] for i in positions]
        if len({padded.length for padded in candidates}) > 1:
            lengths = ", ".join(f"{p.name!r} is {p.length}" for p in candidates)
            raise ValueError(
                f"dim {dim} of result {result} has the padded size of several arguments, whose "
                f"lengths differ ({lengths}){_SAY}"
            )


def cut_back(results: list[Any], cuts: Cuts, padding: Padding) -> list[Any]:
    """One call's results without what is padding."""
    results = list(results)
    for result, dim, positions in cuts:
        padded = padding.dims[positions[0]]
        if padded.length != padded.size:
            results[result] = _resized(results[result], dim, padded.length, 0)
    return results
