"""Protocols of an executor's arguments: a call (overload and arguments), and its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from xla_dtensor.base.random import rng
from xla_dtensor.forms.form import Form


@dataclass(frozen=True)
class Slot:
    """Where leaf ``index`` of a call stands in its arguments."""

    index: int


class Call(Protocol):
    """One call of an overload, taken apart (`plans.call.Call`).

    Attributes:
        info: the overload (`plans.ops.OpInfo`).
        args, kwargs: the arguments with each leaf replaced by its `Slot`.
        leaves: the tensors (ours or the CPU's) and the numbers that may vary, in order.
        forms: of each leaf its `Form`, or the Python type of a number.
        stream: where random numbers come from.
    """

    info: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    forms: list[Any]
    stream: rng.RandomStream

    def filled_with(self) -> Any:
        """The number that a factory of constant tensors fills its tensor with; None for others."""


class Plan(Protocol):
    """How calls with one key are computed (`plans.plan.Plan`).

    Attributes:
        name: the overload's, qualified.
        run: a function of tracers (`plans.computation.Computation`). ``eager`` is the program of
            the call alone, ``part`` the call as a part of a larger program. All are None where the
            tensors have no values.
        results: how many arrays these give.
        result_forms: per result that aliases no argument, its form (None for an undefined one).
        mutated: the indices of the leaves that are written.
        base_forms: their storages' forms after the write.
        grown: per argument written None, or the form with which it gets memory of its own: ``out=``
            of another shape than the result's.
        grows: whether one of them does.
        conditions: what must hold of arguments' values.
        random: whether it draws random numbers.
        of_scalars: whether it computes scalars from scalars alone, and nothing else.
        only_computes: whether it writes to nothing, and nothing has to hold of its arguments.
        only_form: the form of its one result, if that is all that it gives, and it only computes.
        only_write: of what writes to one argument in place, and does nothing else, the form after.
        frame: the devices of its results; None: the default device.
        number_lists: per leaf that is a number of a list, which list.
        proven: whether it is known that the lowering takes what it gets.
        same: the first plan that computes the same.
        structure: arranges new tensors and mutated arguments as torch returns them.
        words: gives what it computes in words that are the same in every process, or None.
    """

    run: Any
    eager: Any
    part: Any
    results: int
    result_forms: list[Form | None]
    mutated: list[int]
    base_forms: list[Form]
    grown: list[Form | None]
    grows: bool
    conditions: tuple[Any, ...]
    random: bool
    of_scalars: bool
    only_computes: bool
    only_form: Form | None
    only_write: Form | None
    frame: Any
    number_lists: dict[int, int]
    proven: bool
    same: Plan
    structure: Callable[[list[Any], list[Any]], Any]
    words: Callable[[], str | None]

    @property
    def name(self) -> str: ...
