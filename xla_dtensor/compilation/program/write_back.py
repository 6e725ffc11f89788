"""After a launch: writes a program's outputs to storages, gradients and attributes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base import assertions, interrupts
from xla_dtensor.base.numbers.traced_number import fits
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compilation.call.buckets import cut_back
from xla_dtensor.compilation.call.recipes import Recipe
from xla_dtensor.compilation.call.run import Outputs, Run
from xla_dtensor.compilation.program.guards import Guards
from xla_dtensor.compilation.program.inputs import Inputs
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.compilation.watch.effects import Effect
from xla_dtensor.forms.storage import Storage, put
from xla_dtensor.tensors.base import set_grad_of, set_grad_of_tensor


class WriteBack:
    """What follows a launch of one program.

    Args:
        traced: the trace that it is compiled from.
        inputs, outputs, guards: of the program.
    """

    def __init__(self, traced: Traced, inputs: Inputs, outputs: Outputs, guards: Guards) -> None:
        self._traced, self._outputs, self._guards = traced, outputs, guards
        self._to_arguments = inputs.to_arguments
        # Storages that are the same in each call; many step counters may share one array.
        alone: list[tuple[int, Storage]] = []
        counters: list[tuple[int, tuple[Storage, ...]]] = []
        for source in traced.inputs.slots:
            for index, storages in source.writes if source.is_fixed else ():
                if len(storages) > 1:
                    counters.append((index, storages))
                else:
                    alone.append((index, storages[0]))
        self._places = [outputs.position[index] for index, _ in alone]
        self._storages = [storage for _, storage in alone]
        self._counters = counters
        pairs = [(s, outputs.forms[index]) for index, s in alone]
        pairs += [(s, outputs.forms[index]) for index, many in counters for s in many]
        self._new_forms = [(s, form) for s, form in pairs if s.form is not form]
        # In most steps the leaves are the same tensors in each call, so the program may hold
        # them, as `ExternalTensor.get` does.
        grads = [
            (o.get() if o.is_fixed else None, o, template) for o, template in traced.outputs.grads
        ]
        self._fixed_grads = [(leaf, t) for leaf, _, t in grads if isinstance(leaf, torch.Tensor)]
        self._other_grads = [(o, t) for leaf, o, t in grads if not isinstance(leaf, torch.Tensor)]
        # Tensors whose version torch must raise, so that autograd sees saved values overwritten.
        counted = [o for o in traced.outside if o.writes]
        fixed = [o.get() for o in counted if o.is_fixed]
        self._counted = [t for t in fixed if not t.is_inference()]
        self._counted_others = [o for o in counted if not o.is_fixed]
        # Not bound methods: a cycle would keep the program, and all that it refers to, alive until
        # Python looks for garbage.
        pieces: list[tuple[Callable[[WriteBack, Run], None], Any]] = [
            (WriteBack._put_states, self._storages or self._counters),
            (WriteBack._put_arguments, self._to_arguments),
            (WriteBack._put_gradients, traced.outputs.grads),
            (WriteBack._switch, traced.outputs.switched),
            (WriteBack._put_left, traced.outputs.left),
            (WriteBack._put_host, traced.outputs.host_writes),
            (WriteBack._put_host_grads, traced.outputs.host_grads),
            (WriteBack._count_writes, counted),
        ]
        self._pieces = [piece for piece, written in pieces if written]

    def put(self, run: Run) -> None:
        """Assign what the program has computed to what was there. None of this is expected to fail;
        if one thing does, the rest is done all the same: half a step would be worse."""
        run.with_retry(self._pieces, self)

    def has_lost(self) -> bool:
        """Whether an array that was written back is deleted."""
        return any(storage.value.is_deleted() for storage in self._storages)

    @interrupts.atomic
    def finish(self, run: Run) -> Any:
        """Do what else the step's Python has done; what it returns. The schedulers' steps come
        last: they are the user's code, and may fail.

        Raises:
            BaseException: something has failed in writing back, or what must hold of values
                doesn't, and everything else that the step does has happened.
        """
        outputs, padding = self._traced.outputs, run.arguments.padding
        if outputs.judges and outputs.gives_items:
            # The host waits for values in any case; Python is given none that mustn't be.
            run.succeeds(self._judge, True)
        for effect in self._traced.effects.all:
            run.with_retry([_repeat], effect)
        if self._traced.outputs.left or not self._is_steady:
            # The next call traces again: it finds this state in place of making it, and may come to
            # another program.
            self._guards.stale = "the call before made state that the step now finds in place"
            self._traced.outputs.left = []
        for number in outputs.to_check:
            run.succeeds(_compute, number)
        for show, values in outputs.printed if run.error is None else ():
            run.succeeds(_print, show, values)
        for scheduler, step, args, kwargs in self._traced.schedulers.calls:
            if run.error is None:
                run.succeeds(_step_scheduler, step, scheduler, args, kwargs)
        if run.error is not None:
            raise run.error
        results = [result.make(run) for result in outputs.results]
        left = run.objects
        if self._traced.cuts and padding is not None:
            results, left = cut_back(results, self._traced.cuts, padding), {}
        if outputs.judges and not outputs.gives_items:
            self._judge(False, run)
        return outputs.tree.build(results, left)

    def _judge(self, waits: bool, run: Run) -> None:
        """Look whether what must hold does: now, if the host ``waits`` anyway or indices were asked
        for; an assertion of the step's own alone is looked at when a value is read."""
        assert self._traced.outputs.judged is not None
        sums = run.array(self._traced.outputs.judged)
        waits = waits or self._traced.trace.must_hold.of_indices is not None
        look = assertions.judge if waits else assertions.later
        look(sums, self._traced.outputs.judges)

    # --- one piece after the other --------------------------------------------------------------

    def _put_states(self, run: Run) -> None:
        counted = put(self._storages, map(run.arrays.__getitem__, self._places))
        for index, storages in self._counters:
            put(storages, itertools.repeat(run.array(index)))
        for storage, form in self._new_forms:
            storage.reform(form)
        for storage in counted:
            storage.count_write()

    def _put_arguments(self, run: Run) -> None:
        for index, source in self._to_arguments:
            storage = source.storage(run.arguments)
            storage.write(run.array(index), self._outputs.forms[index])

    def _put_gradients(self, run: Run) -> None:
        for leaf, template in self._fixed_grads:
            set_grad_of_tensor(leaf, None if template is None else template.make(run))
        for outside, template in self._other_grads:
            leaf = outside.of(run.arguments)
            if leaf is not None:
                set_grad_of(leaf, None if template is None else template.make(run))

    def _switch(self, run: Run) -> None:
        for outside, requires_grad in self._traced.outputs.switched:
            leaf = outside.of(run.arguments)
            if leaf is not None:
                leaf.requires_grad_(requires_grad)

    def _put_left(self, run: Run) -> None:
        for storage, index in self._traced.outputs.left:
            storage.write(run.array(index), self._outputs.forms[index])

    def _put_host(self, run: Run) -> None:
        """Write back to CPU tensors what the host's program has made of them."""
        with torch.no_grad():
            for target, read in self._traced.outputs.host_writes:
                target.read(run.arguments).copy_(read(run.arguments, run.prepared.host))

    def _put_host_grads(self, run: Run) -> None:
        for leaf, read in self._traced.outputs.host_grads:
            grad = None if read is None else read(run.arguments, run.prepared.host)
            set_grad_of_tensor(leaf.read(run.arguments), grad)

    def _count_writes(self, run: Run) -> None:
        """Tell autograd."""
        if self._counted:
            torch.autograd.graph.increment_version(self._counted)
        for outside in self._counted_others:
            tensor = outside.of(run.arguments)
            if tensor is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    @functools.cached_property
    def _is_steady(self) -> bool:
        """Whether the next call finds what this one found, as far as optimizers' state goes."""
        # Code that reads ``state`` (a hook, say) may behave differently once it is filled.
        read = "state" in self._guards.watch.names.attributes
        hooks = self._traced.hooks
        return all(
            not stepped.replaced_state(hooks.settable)
            and (not stepped.made_state() or (stepped.is_steady() and not read))
            for stepped in hooks.stepped.values()
        )


def _made(value: Any, run: Run) -> Any:
    return value.make(run) if isinstance(value, Recipe) else value


def _repeat(effect: Effect, run: Run) -> None:
    effect.repeat(lambda value: _made(value, run), run.arguments)


def _print(show: Callable[..., Any], values: list[Any], run: Run) -> None:
    show(*(_made(value, run) for value in values))


def _compute(number: Recipe, run: Run) -> None:
    value = number.make(run)
    if isinstance(value, int) and not fits(value):
        raise OverflowError(f"{number!r}: {value} has more than the 64 bits that the devices have")
    if isinstance(value, complex):
        raise TypeError(f"{number!r}: {value} is complex, and a float on the devices")


def _step_scheduler(step: Any, scheduler: Any, args: Any, kwargs: Any, run: Run) -> None:
    if args or kwargs:
        args, kwargs = pytree.tree_map(lambda value: _made(value, run), (args, kwargs))
    step(scheduler, *args, **kwargs)
