"""Guards: whether all that a program was compiled for still holds in this call."""

from __future__ import annotations

import operator

from xla_dtensor.base import epoch
from xla_dtensor.base.torch_private import disable_function_of_subclasses
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.decided import changed_numbers
from xla_dtensor.compilation.program.gradients import grad_text, same_grad
from xla_dtensor.compilation.program.lowered import Lowered
from xla_dtensor.compilation.trace.numbers import ARITHMETIC, Changed, values_of
from xla_dtensor.tensors.base import grad_of, grad_of_tensor


class Guarded(Lowered):
    """What is compared before each call; see `Program`."""

    def mismatch(self, arguments: Arguments) -> str | None:
        """Why this program can't run now, or None."""
        self.changed_path, self.decided = None, None
        self.changed_numbers = self.changed_paths = frozenset()
        if self.stale is not None:
            return self.stale
        if not self.watch.untouched():
            difference = self._look_closer()
            if difference is not None:
                return difference
        if self._epoch != epoch.tensors.value:
            for outside in (*self._outside, *self._traced.others):
                changed = outside.changed()
                if changed is not None:
                    return changed
            self._epoch = epoch.tensors.value
        difference = self._grads_differ(arguments)
        if difference is not None:
            return difference
        for index, storage in self._traced.bound_arguments:
            if arguments.tensors[index]._storage_ is not storage:
                return "an argument, which was a tensor that the step uses anyway"
        for index, tensor in self._traced.bound_on_host:
            if arguments.tensors[index] is not tensor:
                return "an argument, which was a CPU tensor that the step uses anyway"
        if self._traced.free_arguments:
            own = self._own_storages()
            for index in self._traced.free_arguments:
                if id(arguments.tensors[index]._storage_) in own:
                    return "an argument, which is a tensor that the step uses anyway"
        met, before = self.watch.met(arguments), self._traced.met
        objects = arguments.objects() if self._traced.asked else ()
        if any(objects[i] is not value for i, value in self._traced.asked):
            return "the id() of an argument, which is another object"
        if (met or before) and not (
            len(met) == len(before) and all(map(operator.is_, met, before))
        ):
            return "which arguments are objects that the step finds elsewhere"
        difference = self._donated.mismatch(arguments)
        difference = difference or self._kept.mismatch(arguments)
        if difference is not None:
            return difference
        for read, (value, text) in self._settings.items():
            if read() != value:
                return f"{text}: from {value!r} to {read()!r}"
        try:
            self._prepared = self._prepare(arguments)
        except Changed as changed:
            return str(changed)
        numbers = self._prepared.numbers
        try:
            for decision in self._decisions:
                if decision.compute(numbers) != decision.outcome:
                    self.decided = decision
                    return decision.difference()
        except ARITHMETIC as error:
            return f"the step decided {decision.text}: {error}"
        for look, was, text in self._looked_at:
            if look(arguments, self._prepared.host) != was:
                return f"{text}, which is part of the program"
        return None

    def decides_otherwise(self, arguments: Arguments) -> bool:
        """Whether the numbers alone say that this program can't run, which is quickly asked where
        there are many programs."""
        if self._host is not None or not self._decisions:
            return False
        try:
            numbers = values_of(self._numbers, arguments)
            return any(d.compute(numbers) != d.outcome for d in self._decisions)
        except (Changed, LookupError, AttributeError, *ARITHMETIC):
            return False  # `mismatch` says why

    def _look_closer(self) -> str | None:
        """Compare by value what the step can read; None if nothing has changed."""
        now = self._traced.look_again()
        if not self._traced.carries(now):
            return "whether there is something that the step keeps from one call to the next"
        forgotten = self.watch.forgotten()
        if forgotten is not None:
            self.changed_path = forgotten
            return f"what the cache of {forgotten} holds"
        differences = self.watch.differences(now)
        if not differences:
            # By path: two objects of a kind may have changed places.
            places = {(place.path, place.container) for place in now.places}
            changed = [effect.place for effect in self.effects]
            changed += [carried.place for carried in self._traced.carried]
            if any((place.path, place.container) not in places for place in changed):
                return "something that the step changes, which is another object now"
            now.remember_caches(self.watch)
            self.watch = now
            return None
        before, after = differences[0]
        self.changed_numbers = changed_numbers(differences)
        self.changed_paths = frozenset(
            found.path for pair in differences for found in pair if found is not None
        )
        self.changed_path = (after or before).path  # type: ignore[union-attr]
        return (
            f"{self.changed_path}: from {before.text() if before else 'nothing'} to "
            f"{after.text() if after else 'nothing'}"
        )

    def _grads_differ(self, arguments: Arguments) -> str | None:
        leaves = self._leaf_tensors
        if leaves is not None:
            # torch asks each for a __torch_function__, which takes as long as reading .grad.
            with disable_function_of_subclasses():
                none = all(map(operator.is_, map(grad_of_tensor, leaves), self._no_grads))
            if none:
                return None  # none had a gradient, and none has
        grads = []
        for outside in self._leaves:
            leaf = outside.of(arguments)
            if leaf is not None:
                grad = grad_of(leaf)
                if not same_grad(grad, outside.grad):
                    return grad_text(leaf, outside.grad)
                if grad is not None:
                    grads.append(grad)
        if grads and self._sharing(grads, arguments) != self._grads_share:
            return "which memory the gradients are in"
        return None
