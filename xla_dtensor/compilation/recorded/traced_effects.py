"""What the Python of a trace has changed outside of the step, as recipes for later calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from xla_dtensor.compilation.call.recipes import BuiltObject, FixedObject
from xla_dtensor.compilation.objects.carried import has_history, is_state, tensors_in
from xla_dtensor.compilation.objects.flatten import MadeObjects
from xla_dtensor.compilation.objects.found import is_atom, same_atom
from xla_dtensor.compilation.objects.places import MISSING
from xla_dtensor.compilation.recorded.output_recipes import OutputRecipes
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.compilation.watch.effects import Effect, PlacesBefore, grows_by_tensors
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.errors import DataDependentError
from xla_dtensor.tensors.of_form import is_ours


class TracedEffects:
    """The effects of a trace.

    Args:
        surroundings: the places around the step, as they were before.
        carried: the names in messages of places that each call takes its values from.

    Attributes:
        all: what its Python changed.
        of_others: the names of the places that another thread has changed during the trace.
        replaced: those of places outside of it whose tensors it replaces by others.
        counted: those in which it puts other numbers, strings or ``None``.
        leave_others: whether any place holds something else afterwards than before. What was set
            and put back is no longer the same object (torch's settings, ``warnings.filters``).
    """

    def __init__(
        self, trace: StepTrace, surroundings: PlacesBefore, carried: frozenset[str]
    ) -> None:
        self._trace, self._carried = trace, carried
        self.all: list[Effect] = surroundings.effects()
        self.of_others = surroundings.others
        self.replaced: set[str] = set()
        self.counted: set[str] = set()
        self._taking_up: list[Effect] = []
        self.leave_others = any(
            effect.grows() or not all(_same(effect.before[k], v) for k, v in effect.after.items())
            for effect in self.all
        )

    def left_in_places(self, objects: MadeObjects) -> Iterator[Any]:
        """What the step's Python has put somewhere, taken apart."""
        for effect in self.all:
            for value in effect.after.values():
                yield from objects.flatten(value)[0]

    def convert(
        self, surroundings: PlacesBefore, watch: Watch, objects: MadeObjects, made: OutputRecipes
    ) -> None:
        """Keep what each call makes anew in place of what the step has left somewhere; its changes
        are undone.

        Raises:
            DataDependentError: calls can't repeat a change.
        """
        trace = self._trace
        built: dict[int, tuple[Any, Any]] = {}

        def is_new(value: Any) -> bool:
            return is_ours(value) and trace.owns(value._storage_)

        def convert(value: Any) -> Any:
            known = built.get(id(value))
            if known is None:
                known = built[id(value)] = value, _built(value, objects, made)
            return known[1]

        for effect in self.all:
            if effect.place.container in watch.reached.inside:
                raise DataDependentError(
                    f"the step changes {effect.place.path}, a {type(effect.place.owner).__name__} "
                    "that it finds in another place in every call (it puts another one there): "
                    "either change it, or replace it"
                )
            self._find_replaced(effect)
            if grows_by_tensors(effect, is_new):
                self._taking_up.append(effect)
            effect.convert(convert)
        surroundings.restore()
        for effect in self.all:
            effect.let_go()

    def append(self) -> bool:
        """Whether something is appended to a list from outside, which may be looked at or not."""
        return any(effect.appends() for effect in self.all)

    def settle(self, watch: Watch) -> None:
        """Now that it is known which code has run: of the lists from outside that have grown some
        aren't looked at.

        Raises:
            DataDependentError: a list or a set that is takes up tensors in every call.
        """
        appended = {place.container: place for place in watch.appended()}
        for i, effect in enumerate(self.all):
            place = appended.get(effect.place.container)
            if place is not None and effect.appends():
                self.all[i] = effect.as_appended(place)
            elif any(effect is each for each in self._taking_up):
                raise DataDependentError(
                    f"the step adds a tensor to {effect.place.path}, a "
                    f"{type(effect.place.owner).__name__} outside of it, which grows in every "
                    "call: a compiled step can't do that but where its code only appends to it; "
                    "return the tensor, and keep it outside"
                )
        self._taking_up = []

    def _goes_on(self, tensor: torch.Tensor) -> bool:
        """Whether a backward pass of the next call would come to what this one has computed."""
        if not tensor.requires_grad:
            return False
        made = is_ours(tensor) and self._trace.owns(tensor._storage_)
        return made or not tensor.is_leaf

    def _find_replaced(self, effect: Effect) -> None:
        """Note where a step has put other tensors in place of those that were there, for its next
        call.

        Raises:
            DataDependentError: the next call would go on with their history.
        """
        for key, before in effect.before.items():
            # MISSING for an element that a set no longer has.
            after, name = effect.after.get(key, MISSING), effect.place.label(key)
            tensors = tensors_in(before)
            carried = name in self._carried
            if not (is_state(before) and (carried or effect.place.guarded)):
                continue
            if effect.grows():  # the place itself is another one in every call
                continue
            if not tensors:
                if not carried and is_state(after, symbolic=True):
                    self.counted.add(name)
                continue
            used = [t for t in tensors if is_ours(t) and self._trace.computes_with(t)]
            if any(map(has_history, used)):
                raise DataDependentError(
                    f"the step computes with {name}, which has a history of an earlier call, and "
                    "replaces it: the backward pass would go on there; keep it without "
                    f"({name} = new.detach()), or give it as an argument and return the new one"
                )
            if used and any(self._goes_on(t) for t in tensors_in(after)):
                raise DataDependentError(
                    f"the step reads {name}, and leaves there a tensor that has a history (or "
                    "requires grad), which its next call would go on with: detach it "
                    f"({name} = new.detach()), or give it as an argument and return the new one"
                )
            if not carried and tensors_in(after):
                self.replaced.add(name)


def _same(before: Any, after: Any) -> bool:
    """Whether a place holds what it held, or the like of it."""
    if before is after:
        return True
    if type(before) is type(after) and type(after) in (list, tuple):
        return len(before) == len(after) and all(map(_same, before, after))
    return is_atom(before) and is_atom(after) and same_atom(before, after)


def _built(value: Any, objects: MadeObjects, made: OutputRecipes) -> Any:
    """How later calls make what the step leaves somewhere; the value itself where it is the
    same in each."""
    leaves, tree = objects.flatten(value)
    parts = list(map(made.result, leaves))
    if tree.is_leaf() and isinstance(parts[0], FixedObject):
        return value
    return BuiltObject(parts, tree)
