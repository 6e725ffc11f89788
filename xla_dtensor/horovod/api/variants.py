"""Makes the variants of a collective (asynchronous, in place, grouped) from one function.

Horovod has up to eight functions per collective, which differ in how they are called and waited
for. Each such way is a `Variant` here; `collectives` says which collective has which of them.
"""

from __future__ import annotations

import functools
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from xla_dtensor.horovod.api.calls import begin, run, single, synchronize
from xla_dtensor.horovod.rank_number import PerRank
from xla_dtensor.horovod.world import Handle, HorovodRequest

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Variant(Generic[R]):
    """One way to call a collective.

    Attributes:
        type: what its functions return.
        grouped: whether they take a list of tensors, which are launched together.
        in_place: whether the results are written to the tensors.
        waits: whether they return results; else a handle.
    """

    type: Any
    grouped: bool = False
    in_place: bool = False
    waits: bool = True

    def of(
        self, collective: str, request: Callable[P, HorovodRequest], raises: str = ""
    ) -> Callable[P, R]:
        """The function of this variant; type checkers see the parameters of ``request``.

        Args:
            collective: the collective's name.
            request: makes the request from the function's arguments. Its docstring is that of the
                variant `WAITED`.
            raises: for the docstring, an error that is raised before anything is waited for.
        """
        name = self._name(collective)
        made: Any = request
        # A copy, since Python's TypeErrors about arguments name the function that they go to.
        own: Any = types.FunctionType(made.__code__, made.__globals__, name, made.__defaults__)
        own.__qualname__ = name
        own.__annotations__ = {**made.__annotations__, "return": self.type}
        own.__doc__ = made.__doc__ if self is WAITED else _docstring(self, collective, made, raises)

        @functools.wraps(own)
        def function(*args: P.args, **kwargs: P.kwargs) -> R:
            return self._carry_out(name, own(*args, **kwargs))

        public: Any = function  # its code's name is what tracebacks and profilers say
        public.__code__ = public.__code__.replace(co_name=name, co_qualname=name)
        return function

    def _carry_out(self, name: str, request: HorovodRequest) -> Any:
        tensors = request.tensors
        if self.grouped and (isinstance(tensors, torch.Tensor | PerRank) or not len(tensors)):
            raise ValueError(f"{name}: give a list of tensors, with at least one")
        unpack = list if self.grouped else single
        if self.in_place:
            request.targets = tensors
        elif self.waits:
            return run(request, unpack)
        handle = begin(request, unpack)
        return synchronize(handle) if self.waits else handle

    def _name(self, collective: str) -> str:
        before = "grouped_" if self.grouped else ""
        return before + collective + ("" if self.waits else "_async") + "_" * self.in_place


WAITED = Variant[Any](Any)
ASYNC = Variant[Handle](Handle, waits=False)
IN_PLACE = Variant[Any](Any, in_place=True)
ASYNC_IN_PLACE = Variant[Handle](Handle, in_place=True, waits=False)
GROUPED = Variant[list[Any]](list[Any], grouped=True)
GROUPED_ASYNC = Variant[Handle](Handle, grouped=True, waits=False)
GROUPED_IN_PLACE = Variant[list[Any]](list[Any], grouped=True, in_place=True)
GROUPED_ASYNC_IN_PLACE = Variant[Handle](Handle, grouped=True, in_place=True, waits=False)


# --- docstrings: what a variant differs in from a simpler one -------------------------------------

_TEMPLATE = """{summary}

Args:
{arguments}

Returns:
    {returned}

Raises:
{errors}

Example::

    import torch, xla_dtensor.horovod as hvd

    hvd.init()
    x = torch.ones(hvd.size(), device="xla") * hvd.rank()
{example}
"""


def _docstring(variant: Variant[Any], collective: str, request: Any, raises: str) -> str:
    parameters = [name for name in request.__annotations__ if name != "return"]
    simplest = f"grouped_{collective}" if variant.grouped else collective
    tensor = parameters[0]
    arguments = [f"{', '.join(parameters)}: as of `{simplest}`."]
    errors = [f"HorovodInternalError: as of `{collective}`."]
    if not variant.waits:
        waiting = simplest + "_" * variant.in_place
        summary = f"`{waiting}` that is not waited for, without a gradient."
        if variant.in_place:
            summary += f" `synchronize` returns ``{tensor}`` with the result."
        returned = "a handle for `poll`, and for `synchronize`, which raises the other errors."
        errors = ["ValueError: one of this name hasn't been waited for yet."]
    elif variant.in_place:
        summary = f"`{simplest}` into its {tensor}, without a gradient."
        returned = f"``{tensor}``."
    else:
        summary = f"`{collective}` of several tensors in one launch. Differentiable."
        arguments = ["tensors: as many on all ranks."]
        arguments.append(f"{', '.join(parameters[1:])}: as of `{collective}`.")
        returned = f"a list of what `{collective}` returns of each."
    if variant.grouped:
        errors.append("ValueError: there are no tensors.")
    return _TEMPLATE.format(
        summary=textwrap.fill(summary, 96),
        arguments=_indented(arguments),
        returned=returned,
        errors=_indented([*errors, raises] if raises else errors),
        example=textwrap.indent(_example(variant, collective, parameters), "    "),
    )


def _indented(entries: list[str]) -> str:
    return "\n".join(
        textwrap.fill(e, 96, initial_indent=" " * 4, subsequent_indent=" " * 8) for e in entries
    )


def _example(variant: Variant[Any], collective: str, parameters: list[str]) -> str:
    root = ", root_rank=0" if "root_rank" in parameters else ""
    given, found = ("[x]", "(y,)") if variant.grouped else ("x", "y")
    call = f"hvd.{variant._name(collective)}({given}{root})"
    if variant.in_place:
        end = "assert y is x"
    else:
        end = f"torch.testing.assert_close(y, hvd.{collective}(x{root}))"
    if variant.waits:
        return f"{found} = {call}\n{end}"
    return f"handle = {call}\n{found} = hvd.synchronize(handle)\n{end}"
