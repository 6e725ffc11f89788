"""`Plan`: how calls with one key are computed. Made at the first such call, kept in a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xla_dtensor import rules
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.execution.interfaces import Slot
from xla_dtensor.forms import words
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.views import leave_open
from xla_dtensor.lowering import changes as lowering_changes
from xla_dtensor.plans.call import Call
from xla_dtensor.plans.computation import Computation, Write
from xla_dtensor.plans.conditions import conditions_of
from xla_dtensor.plans.lower import lowered_function
from xla_dtensor.plans.meta import meta_results, metas_of_fresh
from xla_dtensor.plans.result_forms import (
    grown_forms,
    output_forms,
    place_of,
    refuse_meta_write,
    refuse_overlap,
    written_form,
)
from xla_dtensor.plans.result_placements import Answer, pins
from xla_dtensor.plans.shard_map_call import cut_of
from xla_dtensor.runtime.kept.program import Submit

_sames: Cache[Any, Plan] = Cache("computations of plans", 2048)
lowering_changes.listen(_sames.clear)
rules.changes.listen(_sames.clear)


def _without_strides(part: Any) -> Any:
    """What a part of a call's key says of the values."""
    if not isinstance(part, Form):
        return part
    return part.shape, part.jax_dtype, part.memory, part.frame, part.varying


class Plan:
    """How calls with one key, of an overload that computes something, are computed.

    Attributes:
        run: takes the leaves (arrays, numbers) and the bases of mutated views (arrays with the
            positions that these leave open); returns the arrays
            of all results, then of all mutated storages: a `Computation`. ``eager`` is its
            executable, ``part`` itself inside of others. All are None where the tensors have no
            value.
        results: how many arrays these are.
        proven: whether it is known that the lowering takes what it gets.
        result_forms: per result that aliases no argument, its form (None for an undefined one).
        mutated: the leaf indices of the arguments written, in schema order.
        base_forms: their storages' forms after the write.
        grown: per argument written None, or the form with which it gets memory of its own: ``out=``
            of another shape than the result's.
        grows: whether one of them does.
        conditions: what must hold of arguments' values.
        random: whether the executable takes the generator's state first.
        same: the first plan that computes the same, this one or another: of tensors of one device
            that differ in their strides alone, as those that are cut from what grows.
        of_scalars: whether it computes scalars from scalars alone, and nothing else.
        only_computes: whether it writes to nothing, and nothing has to hold of its arguments.
        only_form: the form of its one result, if that is all that it gives, and it only computes.
        only_write: of what writes to one argument in place, and does nothing else, the form after.
        frame: the devices of its results; None: the default device.
        number_lists: per leaf that is a number of a list, which list.
        structure: arranges new tensors and mutated arguments as torch returns them.
        words: gives what it computes in words that are the same in every process, or None.
    """

    __slots__ = (
        "base_forms",
        "conditions",
        "eager",
        "frame",
        "grown",
        "grows",
        "info",
        "mutated",
        "number_lists",
        "of_scalars",
        "only_computes",
        "only_form",
        "only_write",
        "part",
        "proven",
        "random",
        "result_forms",
        "results",
        "run",
        "same",
        "structure",
        "words",
    )

    run: Any
    eager: Any
    part: Any
    words: Callable[[], str | None]

    def __init__(self, call: Call, tensors: list[Any]) -> None:
        info = call.info
        self.info = info
        lowered = lowered_function(info)
        self.mutated = mutated_leaves(call)
        self.conditions = conditions_of(call)
        metas = meta_results(call)
        fresh = [m for m, _ in metas_of_fresh(call, metas)]
        for meta in fresh:
            if meta is not None:
                meta.offset = 0  # a fresh result has memory of its own
        place = place_of(call)
        answer = None if place.mesh is None else Answer(call, place.mesh, fresh)
        self.result_forms = output_forms(place, fresh, answer)
        self.structure = _structure(call, metas)
        bases = [tensors[i] for i in self.mutated]
        self.grown = grown_forms(call, metas, bases, place)
        self.grows = any(self.grown)
        refuse_overlap(call, [call.forms[i] for i in self.mutated])
        self.base_forms = [
            written_form(base, place.axes, place.frame, info) if grown is None else grown
            for base, grown in zip(bases, self.grown, strict=True)
        ]
        self.results = len(self.base_forms) + sum(form is not None for form in self.result_forms)
        self.proven = False
        given = (f for f in (*self.result_forms, *self.base_forms) if f is not None)
        self.frame = next((form.frame for form in given if form.frame is not None), None)
        self.number_lists = _number_lists(call)
        self.only_computes = None not in self.result_forms and not (
            self.mutated or self.conditions or place.valueless
        )
        is_one = info.returns_mutated == (None,) and not info.returns_lists[0]
        self.only_form = self.result_forms[0] if is_one and self.only_computes else None
        in_place = len(self.mutated) == 1 and not (
            self.result_forms or self.grows or self.conditions or place.valueless
        )
        self.only_write = self.base_forms[0] if in_place else None
        self.same = self
        if place.valueless:
            refuse_meta_write(info, [base._storage_.form for base in bases])
            self.run = self.eager = self.part = None
            self.words = lambda: None
            self.random = self.of_scalars = False
            return
        computation = lowered, self.result_forms, self._writes(call, bases), pins(answer)
        self.run = Computation(call, *computation, place.frame, cut_of(answer))
        self.part = self.run.part()
        self.random = self.run.random
        forms = [*call.forms, *self.result_forms, *self.base_forms]
        self.of_scalars = not self.random and all(
            f.shape == () and not f.varying for f in forms if isinstance(f, Form)
        )
        # Only with a lowering: torch's decompositions may depend on strides.
        has_strides = self.frame is not None or bool(self.mutated) or info.lowering is None
        key = call.key  # not the call, which has tensors
        self.words = lambda: _words(self, key, has_strides)
        self.eager = self.run.compiled(self.words)
        if not has_strides:
            of_values = tuple([_without_strides(part) for part in key])
            self.same = _sames.get(of_values) or _sames.put(of_values, self)

    def _writes(self, call: Call, bases: list[Any]) -> list[Write]:
        """What is written to the arrays behind ``bases``, the tensors that the call writes to."""
        return [
            Write(
                call.forms[i] if grown is None else grown,
                leave_open(base._steps)[0] if grown is None else (),
                base._storage_.form,
                after,
            )
            for i, base, grown, after in zip(
                self.mutated, bases, self.grown, self.base_forms, strict=True
            )
        ]

    def begin(self, submit: Submit, state: Any, leaves: list[Any], bases: list[Any]) -> None:
        """Begin to load or compile ``eager``, in another thread, for such operands."""
        self.eager.begin(submit, state, leaves, bases)

    @property
    def name(self) -> str:
        """The overload's, qualified."""
        return str(self.info.name)


def _words(plan: Plan, key: tuple[Any, ...], has_strides: bool) -> str | None:
    """What a plan computes, in words that are the same in every process.

    Args:
        key: of the call that it was made for.
        has_strides: whether those count.
    """
    if plan.frame is not None or not plan.run.is_lowering:
        return None
    info, *rest = key
    forms = [form and words.of_values(form) for form in (*plan.result_forms, *plan.base_forms)]
    given = [
        part if has_strides or not isinstance(part, Form) else words.of_values(part)
        for part in rest
    ]
    return words.joined([info.name, forms, given])


def mutated_leaves(call: Call) -> list[int]:
    """The indices of the leaves that the call writes to, in schema order."""
    result = []
    for name in call.info.mutated:
        value = call.args[name] if isinstance(name, int) else call.kwargs.get(name)
        # A written argument is a tensor, or a list of tensors.
        slots = value if value.__class__ is list else [value]
        result += [slot.index for slot in slots if slot.__class__ is Slot]
    return result


def _number_lists(call: Call) -> dict[int, int]:
    result: dict[int, int] = {}
    for which, argument in enumerate((*call.args, *call.kwargs.values())):
        if (
            argument.__class__ is list
            and argument
            and argument[0].__class__ is Slot
            and call.forms[argument[0].index].__class__ is not Form
        ):
            result.update((slot.index, which) for slot in argument)
    return result


def _structure(call: Call, metas: list[Any]) -> Callable[[list[Any], list[Any]], Any]:
    """A function that arranges results as the schema returns them."""
    aliases = call.info.returns_mutated
    if not aliases:
        return lambda results, mutated: None
    if len(aliases) == 1 and aliases[0] is None and not call.info.returns_lists[0]:
        return lambda results, mutated: results[0]
    if len(aliases) == 1 and aliases[0] is not None and not call.info.returns_lists[0]:
        return lambda results, mutated: mutated[0]
    counts = [
        None if alias is not None else len(meta) if isinstance(meta, list) else -1
        for meta, alias in zip(metas, aliases, strict=True)
    ]

    def arrange(results: list[Any], mutated: list[Any]) -> Any:
        remaining = iter(results)
        out = []
        for count, alias in zip(counts, aliases, strict=True):
            if alias is not None:
                out.append(mutated[alias])
            elif count == -1:
                out.append(next(remaining))
            else:
                assert count is not None
                out.append([next(remaining) for _ in range(count)])
        return out[0] if len(out) == 1 else tuple(out)

    return arrange
