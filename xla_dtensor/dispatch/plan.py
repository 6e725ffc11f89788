"""How one kind of call is executed: made on the first call with a key, reused for every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.base import rng
from xla_dtensor.dispatch.call import Call, Slot, fill
from xla_dtensor.dispatch.checks import check_castable, checked
from xla_dtensor.dispatch.lower import flatten_results, lowered_function
from xla_dtensor.dispatch.meta import fill_kwargs, meta_results, metas_of_fresh
from xla_dtensor.dispatch.result_forms import (
    grown_forms,
    output_forms,
    place_of,
    refuse_meta_write,
    refuse_overlap,
    written_form,
)
from xla_dtensor.dispatch.result_placements import Answer, Pins, pins
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.per_device import coordinate, over_devices, union
from xla_dtensor.forms.views import write_through
from xla_dtensor.lowering.kinds import Kind, is_
from xla_dtensor.mesh import Frame


class Plan:
    """A computing call.

    Attributes:
        run: takes the leaves (arrays, numbers) and the bases of mutated views; returns the arrays
            of all results, then of all mutated storages. ``run.eager`` is its executable. Both are
            None where the tensors have no value.
        result_forms: per result that aliases no argument, its form (None for an undefined one).
        mutated: the leaf indices of the arguments written, in schema order.
        base_forms: their storages' forms after the write.
        grown: per argument written None, or the form with which it gets memory of its own: ``out=``
            of another shape than the result's.
        random: whether the executable takes the generator's state first.
        of_scalars: whether it computes scalars from scalars alone, and nothing else.
        structure: arranges new tensors and mutated arguments as torch returns them.
    """

    __slots__ = (
        "base_forms",
        "eager",
        "grown",
        "info",
        "mutated",
        "of_scalars",
        "random",
        "result_forms",
        "run",
        "structure",
    )

    run: Any
    eager: Any

    def __init__(self, call: Call, tensors: list[Any]) -> None:
        info = call.info
        self.info = info
        lowered = lowered_function(info)
        self.mutated = mutated_leaves(call)
        metas = meta_results(call)
        fresh = [m for m, _ in metas_of_fresh(call, metas)]
        for meta in fresh:
            if meta is not None:
                meta.offset = 0  # memory of its own
        place = place_of(call)
        answer = None if place.mesh is None else Answer(call, place.mesh, fresh)
        self.result_forms = output_forms(place, fresh, answer)
        self.structure = _structure(call, metas)
        bases = [tensors[i] for i in self.mutated]
        self.grown = grown_forms(call, metas, bases, place)
        refuse_overlap(info, [call.forms[i] for i in self.mutated])
        before = [b._storage_.form for b in bases]
        self.base_forms = [
            written_form(base, place.axes, place.frame, info) if grown is None else grown
            for base, grown in zip(bases, self.grown, strict=True)
        ]
        if place.valueless:
            refuse_meta_write(info, before)
            self.run = self.eager = None
            self.random = self.of_scalars = False
            return
        self.run, self.eager, self.random = _functions(
            call,
            lowered,
            self.result_forms,
            bases,
            before,
            self.base_forms,
            self.grown,
            self.mutated,
            pins(answer),
            place.frame,
        )
        forms = [*call.forms, *self.result_forms, *self.base_forms]
        self.of_scalars = not self.random and all(
            f.shape == () and not f.varying for f in forms if isinstance(f, Form)
        )


def _functions(
    call: Call,
    lowered: Any,
    result_forms: list[Form | None],
    bases: list[Any],
    before: list[Form],
    after: list[Form],
    grown: list[Form | None],
    mutated: list[int],
    pinned: Pins | None,
    frame: Frame | None,
) -> tuple[Callable[..., Any], Any, bool]:
    # The functions live as long as the plan: they must not hold the call, which holds its tensors.
    info, forms = call.info, list(call.forms)
    args, kwargs = call.args, call.kwargs
    writes_expected = len(bases)
    steps = [b._steps if new is None else () for b, new in zip(bases, grown, strict=True)]
    own_forms = [forms[i] if new is None else new for i, new in zip(mutated, grown, strict=True)]

    unread = is_(Kind.LIKE, info.name)
    stand_in = lambda form: jnp.zeros(form.shape, form.jax_dtype)

    def on_one_device(keys: Any, leaves: Any, pad: bool) -> list[Any]:
        values = [
            leaf if not isinstance(form, Form) else stand_in(form) if unread else form.logical(leaf)
            for leaf, form in zip(leaves, forms, strict=True)
        ]
        if pinned is not None:
            values = list(map(_pin, values, pinned.leaves))
        fresh, writes = lowered(keys, fill(list(args), values), fill_kwargs(kwargs, values))
        out: list[Any] = []
        for i, (value, form) in enumerate(zip(fresh, result_forms, strict=False)):
            if form is None:
                continue
            if value is None:  # masked out, which torch's meta kernel hasn't looked at
                value = jnp.zeros(form.shape, form.jax_dtype)
            value = checked(value, form.shape, form.jax_dtype, info)
            if pinned is not None:
                value = _pin(value, pinned.results[i])
            out.append(form.physical(value) if pad else value)
        for j, value in enumerate(writes[:writes_expected]):
            if not random:  # numbers drawn for an integer tensor are whole
                check_castable(value, own_forms[j])
            value = checked(value, own_forms[j].shape, own_forms[j].jax_dtype, info)
            if pinned is not None:
                value = _pin(value, pinned.written)
            out.append(value)
        return out

    varying = [f.varying if isinstance(f, Form) and not unread else () for f in forms]
    axes = union(frame, varying)
    any_sharded = any(isinstance(form, Form) and form.is_sharded for form in forms)

    def on_devices(keys: Any, leaves: Any, pad: bool) -> list[Any]:
        def one(index: Any, *own_leaves: Any) -> list[Any]:
            # Each device draws numbers of its own where it varies.
            own_keys = lambda: jax.random.fold_in(keys(), index)
            return on_one_device(own_keys, own_leaves, pad)

        assert frame is not None
        mapped = over_devices(one, [axes, *varying], frame, any_sharded)
        return mapped(coordinate(frame, axes), *leaves)

    def run(keys: Any, leaves: Any, base_arrays: Any, pad: bool) -> list[Any]:
        out = (on_devices if axes else on_one_device)(keys, leaves, pad)
        first = len(out) - writes_expected
        for j, base in enumerate(base_arrays):
            value = out[first + j]
            if steps[j]:
                placed = before[j].placed(after[j].frame)
                value = write_through(base, placed, steps[j], value, axes)
            out[first + j] = after[j].physical(value) if pad else value
        if pad:
            # A result that is an argument as it came would share its buffer, and writes to one
            # donate buffers.
            given = {id(leaf) for leaf in leaves}
            out = [jnp.copy(value) if id(value) in given else value for value in out]
        return out

    shardings = [f.sharding for f in result_forms if f is not None] + [f.sharding for f in after]

    def eager(state: Any, leaves: Any, base_arrays: Any) -> list[Any]:

        count = [0]

        def keys() -> Any:
            count[0] += 1
            return rng.key_of(state, count[0] - 1)

        return run(keys, leaves, base_arrays, True)

    sharded = any(s is not None for s in shardings)
    jitted = jax.jit(eager, out_shardings=shardings) if sharded else jax.jit(eager)
    random = bool(info.lowering is not None and info.lowering.random) or (
        info.lowering is None and torch.Tag.nondeterministic_seeded in info.func.tags
    )
    return run, jitted, random


def _pin(value: Any, sharding: Any) -> Any:
    return value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)


def mutated_leaves(call: Call) -> list[int]:
    """The indices of the leaves that the call writes to, in schema order."""
    result = []
    for name in call.info.mutated:
        value = call.args[name] if isinstance(name, int) else call.kwargs.get(name)
        result += [slot.index for slot in flatten_results(value) if isinstance(slot, Slot)]
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
