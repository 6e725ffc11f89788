"""After a launch: what the program has computed is put into storages, gradients and attributes."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from xla_dtensor.base import assertions
from xla_dtensor.compilation.call.recipes import (
    Built,
    Computed,
    Existing,
    GivenBack,
    GivenContainer,
    Gradient,
    Host,
    Seen,
    Template,
)
from xla_dtensor.compilation.call.run import Run
from xla_dtensor.compilation.objects.kinds_of_code import Stream
from xla_dtensor.compilation.program.guarded import Guarded
from xla_dtensor.compilation.watch.effects import Effect
from xla_dtensor.forms.storage import put
from xla_dtensor.tensors.base import set_grad_of
from xla_dtensor.tensors.of_form import new_tensor


class WriteBack(Guarded):
    """What follows a launch; see `Program`."""

    def _put(self, run: Run) -> None:
        """Assign what the program has computed to what was there. None of this is expected to fail;
        if one thing does, the rest is done all the same: half a step would be worse."""
        for piece in (
            *(self._put_states, self._put_arguments, self._put_gradients, self._put_left),
            *(self._put_host, self._count_writes),
        ):
            run.insist(piece)

    def _put_states(self, run: Run) -> None:
        arrays, place_of = run.arrays, self._place_of
        counted = put(self._written_storages, map(arrays.__getitem__, self._written_places))
        for index, storages in self._written_counters:
            put(storages, itertools.repeat(arrays[place_of[index]]))
        for storage, form in self._new_forms:
            storage.reform(form)
        for storage in counted:
            storage.count_write()

    def _put_arguments(self, run: Run) -> None:
        for index, source in self._written_arguments:
            storage = source.storage(run.arguments)
            storage.write(run.arrays[self._place_of[index]], self._forms[index])

    def _count_writes(self, run: Run) -> None:
        """Tell autograd."""
        if self._counted:
            torch.autograd.graph.increment_version(self._counted)
        for outside in self._counted_others:
            tensor = outside.of(run.arguments)
            if tensor is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    def _put_gradients(self, run: Run) -> None:
        for outside, template in self._traced.grads:
            leaf = outside.of(run.arguments)
            if leaf is not None:
                set_grad_of(leaf, None if template is None else self._tensor(template, run))
        for outside, requires_grad in self._traced.switched:
            leaf = outside.of(run.arguments)
            if leaf is not None:
                leaf.requires_grad_(requires_grad)

    def _put_left(self, run: Run) -> None:
        for storage, index in self._traced.left:
            storage.write(run.arrays[self._place_of[index]], self._forms[index])

    def _finish(self, run: Run) -> None:
        """What else the step's Python has done. The schedulers' steps come last: they are the
        user's code, and may fail."""
        for effect in self._traced.effects:
            run.insist(functools.partial(self._repeat, effect))
        if self._traced.left or not self._is_steady:
            # The next call traces again: it finds this state in place of making it, and may come to
            # another program.
            self.stale = "the call before made state that the step now finds in place"
            self._traced.left = []
        for scheduler, step, args, kwargs in self._traced.schedulers.calls:
            if run.error is None:
                run.succeeds(functools.partial(_step_scheduler, step, scheduler, args, kwargs))

    def _put_host(self, run: Run) -> None:
        """Write back to CPU tensors what the host's program has made of them."""
        with torch.no_grad():
            for target, source in self._traced.host_writes:
                value = self._traced.host.reader(source)(run.arguments, run.prepared.host)
                target.read(run.arguments).copy_(value)

    def _judge(self, run: Run) -> None:
        """Look whether what must hold does: now, where indices were asked for; an assertion of the
        step's own alone doesn't make the host wait, and is looked at when a value is read."""
        assert self._traced.judged is not None
        sums = run.arrays[self._place_of[self._traced.judged]]
        look = assertions.judge if self._traced.trace.checks_indices else assertions.later
        look(sums, self._traced.judges)

    @functools.cached_property
    def _is_steady(self) -> bool:
        """Whether the next call finds what this one found, as far as optimizers' state goes."""
        # By hooks, say, which come upon it in the next call.
        read = "state" in self.watch.names.attributes
        return all(
            not stepped.replaced_state()
            and (not stepped.made_state() or (stepped.is_steady() and not read))
            for stepped in self._traced.hooks.stepped.values()
        )

    def _built(self, value: Any, run: Run) -> Any:
        """What the step leaves somewhere in this call."""
        if not isinstance(value, Built):
            return value
        if id(value) not in run.made:
            parts = [self._result(part, run) for part in value.parts]
            run.made[id(value)] = value.tree.build(parts, run.objects)
        return run.made[id(value)]

    def _repeat(self, effect: Effect, run: Run) -> None:
        effect.repeat(lambda value: self._built(value, run), run.arguments)

    def _result(self, result: Any, run: Run) -> Any:
        arguments = run.arguments
        if isinstance(result, Template):
            return self._tensor(result, run)
        if isinstance(result, Seen):
            seen = run.made.get(id(result))
            if seen is None:
                base = result.of
                if isinstance(base, Template):
                    base = self._tensor(base, run)
                elif isinstance(base, int):
                    base = arguments.tensors[base]
                seen = run.made[id(result)] = result.made(base)
            return seen
        if isinstance(result, Existing):
            return result.value
        if isinstance(result, Gradient):
            return result.leaf.of(arguments).grad
        if isinstance(result, Computed):
            return result.node.compute(run.prepared.numbers)
        if isinstance(result, Host):
            if id(result) not in run.made:
                run.made[id(result)] = self._on_host(result, run)
            return run.made[id(result)]
        if isinstance(result, GivenContainer):
            found = arguments.containers[result.index]
            return found.iterator if type(found) is Stream else found
        assert isinstance(result, GivenBack)
        return arguments.tensors[result.index]

    def _on_host(self, result: Host, run: Run) -> torch.Tensor:
        """A CPU tensor of this call's; those that share memory under torch do so here."""
        like = result.tensor
        if like is not None:
            memory = like.untyped_storage()
            if memory._cdata not in run.made:
                run.made[memory._cdata] = memory.clone()
            where = like.storage_offset(), like.shape, like.stride()
            return torch.empty(0, dtype=like.dtype).set_(run.made[memory._cdata], *where)
        made = self._traced.host.reader(result.source)(run.arguments, run.prepared.host)
        if result.of is None:
            return made
        whole = result.of.read(run.arguments)
        if made.untyped_storage()._cdata == whole.untyped_storage()._cdata:
            return made
        # What the step writes to is a copy in the host's program.
        whole, start = whole.view(made.dtype), made.storage_offset()
        return whole.as_strided(made.shape, made.stride(), whole.storage_offset() + start)

    def _tensor(self, template: Template, run: Run) -> Any:
        tensor = run.made.get(id(template))
        if tensor is None:
            form = self._forms[template.index]
            array = run.arrays[self._place_of[template.index]]
            tensor = run.made[id(template)] = new_tensor(array, form)
            tensor._storage_.refuses_writes = template.refuses
            if template.is_leaf:
                tensor.requires_grad_()
                if template.is_parameter:
                    tensor = run.made[id(template)] = torch.nn.Parameter(tensor.detach())
                if template.grad is not None:
                    tensor.grad = self._tensor(template.grad, run)
        return tensor


def _step_scheduler(step: Any, scheduler: Any, args: Any, kwargs: Any, run: Run) -> None:
    step(scheduler, *args, **kwargs)
