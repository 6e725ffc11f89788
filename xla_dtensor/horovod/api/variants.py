"""Makes the variants of a collective (asynchronous, in place, grouped) from one function.

Horovod has up to eight functions per collective, which differ in how they are called and waited
for. Each such way is a `Variant` here; `collectives` says which collective has which of them.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.horovod.api.calls import begin, run, single, synchronize
from xla_dtensor.horovod.collectives.requests import Handle, HorovodRequest
from xla_dtensor.horovod.world.rank_number import PerRank


@dataclass(frozen=True)
class Variant:
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

    def of(self, asked: Callable[..., HorovodRequest], raises: str = "") -> Any:
        """The function of this variant.

        Args:
            asked: makes the request from the function's arguments (`parameters`). Its docstring is
                that of the variant `WAITED`.
            raises: for the docstring, an error that is raised before anything is waited for.
        """
        name, signature = self._name(asked.__name__), self._signature(asked)
        first = next(iter(signature.parameters))
        taken = _taken(name, signature)

        def function(*args: Any, **kwargs: Any) -> Any:
            given = taken(*args, **kwargs)
            tensors = given.pop(first)
            request = asked(tensors, **given)
            if self.grouped:
                if isinstance(tensors, torch.Tensor | PerRank) or not len(tensors):
                    raise ValueError(f"{name}: give a list of tensors, with at least one")
                request.tensors = tensors
            return self._carry_out(request)

        public: Any = function
        public.__module__ = "xla_dtensor.horovod.api.collectives"
        public.__name__ = public.__qualname__ = name
        public.__signature__ = signature
        public.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        public.__annotations__["return"] = self.type
        public.__doc__ = (
            asked.__doc__
            if self is WAITED
            else _docstring(self, asked.__name__, list(signature.parameters), raises)
        )
        # Its code's name is what tracebacks and profilers say.
        public.__code__ = public.__code__.replace(co_name=name, co_qualname=name)
        return function

    def _signature(self, asked: Callable[..., HorovodRequest]) -> inspect.Signature:
        signature = inspect.signature(asked)
        first, *others = signature.parameters.values()
        if self.grouped:
            first = first.replace(name="tensors", annotation="Sequence[Any]")
        if self.in_place or not self.waits:  # as in Horovod, whose asynchronous forms have none
            others = [parameter for parameter in others if parameter.name != "compression"]
        return signature.replace(parameters=[first, *others], return_annotation=self.type)

    def _carry_out(self, request: HorovodRequest) -> Any:
        unpack = list if self.grouped else single
        if self.in_place:
            request.targets = request.tensors
        elif self.waits:
            return run(request, unpack)
        handle = begin(request, unpack)
        return synchronize(handle) if self.waits else handle

    def _name(self, collective: str) -> str:
        before = "grouped_" if self.grouped else ""
        return before + collective + ("" if self.waits else "_async") + "_" * self.in_place


WAITED = Variant(Any)
ASYNC = Variant(Handle, waits=False)
IN_PLACE = Variant(Any, in_place=True)
ASYNC_IN_PLACE = Variant(Handle, in_place=True, waits=False)
GROUPED = Variant(list[Any], grouped=True)
GROUPED_ASYNC = Variant(Handle, grouped=True, waits=False)
GROUPED_IN_PLACE = Variant(list[Any], grouped=True, in_place=True)
GROUPED_ASYNC_IN_PLACE = Variant(Handle, grouped=True, in_place=True, waits=False)


def _taken(name: str, signature: inspect.Signature) -> Callable[..., dict[str, Any]]:
    """Returns its arguments by name. A function of that name, since Python's errors about arguments
    say it."""
    made: dict[str, Any] = {}
    exec(f"def {name}({', '.join(signature.parameters)}): return locals()", made)
    values = [p.default for p in signature.parameters.values()]
    made[name].__defaults__ = tuple(v for v in values if v is not inspect.Parameter.empty)
    return made[name]


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


def _docstring(variant: Variant, collective: str, parameters: Sequence[str], raises: str) -> str:
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


def _example(variant: Variant, collective: str, parameters: Sequence[str]) -> str:
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
