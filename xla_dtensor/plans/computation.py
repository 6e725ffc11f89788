"""The function of arrays that a plan runs: compiled on its own, or as part of a larger program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.base import jax_private
from xla_dtensor.base.random import rng
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.per_device import coordinate, over_devices, union
from xla_dtensor.forms.views import Step, with_positions, write_through
from xla_dtensor.lowering import is_own
from xla_dtensor.lowering.context import Target, at
from xla_dtensor.lowering.workarounds import DOUBLE_COMPLEX
from xla_dtensor.mesh import Frame
from xla_dtensor.plans.call import Call, fill
from xla_dtensor.plans.checks import check_castable, checked
from xla_dtensor.plans.meta import fill_kwargs
from xla_dtensor.plans.result_placements import Pins
from xla_dtensor.plans.shard_map_call import ShardMapCall, platform_of
from xla_dtensor.runtime.kept.program import KeptProgram


class Write(NamedTuple):
    """A write to an argument.

    Attributes:
        own: the form of the argument; of one that gets memory of its own, that of the result.
        steps: the views on the way to it from its storage, without their positions.
        before, after: the storage's forms.
    """

    own: Form
    steps: tuple[Step, ...]
    before: Form
    after: Form


class Computation:
    """An overload's lowering on arrays in given forms.

    Args:
        call: whose forms and arguments it is for.
        lowered: the overload as a function of logical values.
        result_forms: of the results that alias no argument, None for undefined ones.
        pinned: shardings to ask of XLA, if it must be told.
        frame: the devices.
        cut: how to call it on shards, if XLA can't cut it.

    Attributes:
        random: whether it draws random numbers.
        is_lowering: whether it runs no code but the package's.
    """

    def __init__(
        self,
        call: Call,
        lowered: Callable[..., Any],
        result_forms: list[Form | None],
        writes: list[Write],
        pinned: Pins | None,
        frame: Frame | None,
        cut: ShardMapCall | None = None,
    ) -> None:
        # It lives as long as the plan, and must not hold the call, which holds its tensors.
        self._info, self._forms = call.info, list(call.forms)
        self._args, self._kwargs = call.args, call.kwargs
        if call.info.lowering is not None:
            of = [f.jax_dtype for f in (*result_forms, *(w.own for w in writes)) if f is not None]
            name = call.info.name.rpartition("::")[2].partition(".")[0].strip("_")
            wraps = name in _WRAPPING or (name in _DIVISIONS and np.int64 in of)
            fits = wraps or not any(t.kind in "iu" and t != np.uint64 for t in of)
            self._args = _for_jax(call.args, fits)
            self._kwargs = {n: _for_jax(value, fits) for n, value in call.kwargs.items()}
        self._lowered, self._pinned, self._frame = lowered, pinned, frame
        self._cut = cut
        devices = 1 if frame is None else len(frame.device_ids)
        self._place = Target(platform_of(frame), devices=devices)
        self._result_forms, self._writes = result_forms, writes
        self.reads_nothing = call.info.makes_like
        self._varying = [
            f.varying if isinstance(f, Form) and not self.reads_nothing else () for f in self._forms
        ]
        self._axes = union(frame, self._varying)
        lowering = call.info.lowering
        self.random: bool = (
            lowering.random
            if lowering is not None
            else torch.Tag.nondeterministic_seeded in call.info.func.tags
        )
        # Only the package's lowerings may be traced once and reused: torch's decompositions call
        # operations that the trace may note, and a user's `jax_function` may differ next time.
        self.is_lowering = lowering is not None and is_own(lowering.function)
        self._known: Any = None

    def in_trace(self, trace: Any, leaves: list[Any], base_arrays: list[Any]) -> list[Any]:
        """The same in the trace of a step. Of arrays alone it is traced once: layers alike then
        have their equations from the first one, which takes a fraction of the time."""
        if (
            not self.is_lowering
            or self.random
            or self._axes
            or trace.wide is not None  # remembers tracers
            or any(base is not None for base in base_arrays)
            or not all(isinstance(leaf, jax.Array) for leaf in leaves)
        ):
            return self(trace.random_key, leaves, base_arrays, False)
        if self._known is None:
            # Its equations, not a call of it, go into each trace, so that the program is the same
            # with and without.
            self._known = jax.jit(self._of_arrays, inline=jax_private.inlined())
        found: list[Any] = self._known(leaves)
        return found

    @property
    def is_of_values(self) -> bool:
        """Whether `of_values` can compute it: by the package's lowering or torch's decomposition,
        and no code of the user's."""
        of_torch = self._info.lowering is None and self._info.name.startswith("aten::")
        return (self.is_lowering or of_torch) and not (self.random or self._axes or self._cut)

    def of_values(self, values: list[Any], base_arrays: list[Any]) -> list[Any]:
        """The logical values of the results that are there, then of the storages written, of those
        of the leaves; on no mesh."""
        if self.reads_nothing:
            values = list(map(self._logical, values, self._forms))
        with at(Target("cpu")):
            fresh, written = self._lowered(_no_keys, *self._filled(values))
        out = [
            self._value(value, form)
            for value, form in zip(fresh, self._result_forms, strict=False)
            if form is not None
        ]
        for value, write, base in zip(written, self._writes, base_arrays, strict=True):
            value = checked(value, write.own.shape, write.own.jax_dtype, self._info)
            out.append(self._into_base(value, write, base))
        return out

    def _filled(self, values: list[Any]) -> tuple[Any, Any]:
        return fill(list(self._args), values), fill_kwargs(self._kwargs, values)

    def _of_arrays(self, leaves: list[Any]) -> list[Any]:
        return self._on_one_device(_no_keys, leaves, False)

    def __call__(
        self, keys: Callable[[], Any], leaves: Any, base_arrays: Any, pad: bool
    ) -> list[Any]:
        """The arrays of all results, then of all storages written.

        Args:
            keys: gives a fresh PRNG key.
            leaves: the call's arrays and numbers.
            base_arrays: of each write through a view the storage's array, and the positions that
                the view's steps leave open.
            pad: whether to return arrays in their physical forms, each with a buffer of its own.
        """
        compute = self._on_devices if self._axes else self._on_one_device
        out = compute(keys, leaves, pad)
        first = len(out) - len(self._writes)
        for j, (write, base) in enumerate(zip(self._writes, base_arrays, strict=True)):
            value = self._into_base(out[first + j], write, base)
            out[first + j] = write.after.physical(value) if pad else value
        if pad:
            # A result that is an argument as it came would share its buffer, and writes to one
            # donate buffers.
            given = {id(leaf) for leaf in leaves}
            out = [jnp.copy(value) if id(value) in given else value for value in out]
        return out

    def _into_base(self, value: Any, write: Write, base: Any) -> Any:
        if not write.steps:
            return value
        array, positions = base
        placed = write.before.placed(write.after.frame)
        steps = with_positions(write.steps, positions)
        return write_through(array, placed, steps, value, self._axes)

    def compiled(self, words: Callable[[], str | None]) -> KeptProgram:
        """A program of its own, which takes the generator's state in place of ``keys``.

        Args:
            words: gives what it computes, as of a `KeptProgram`.
        """
        forms = [*filter(None, self._result_forms), *(write.after for write in self._writes)]
        shardings = [form.sharding for form in forms]
        if all(sharding is None for sharding in shardings):
            return KeptProgram(self._alone, words)
        return KeptProgram(self._alone, words, out_shardings=shardings)

    def part(self) -> Any:
        """A part of a larger program (`Operation.part`): JAX traces it once for all of them."""
        return jax.jit(self._inside)

    def _alone(self, state: Any, leaves: Any, base_arrays: Any) -> list[Any]:
        return self(_keys(state, 0), leaves, base_arrays, True)

    def _inside(self, state: Any, leaves: Any, base_arrays: Any) -> list[Any]:
        # In a larger program, as in a compiled step, layouts constrain only that program's outputs.
        state, offset = state or (None, None)
        return self(_keys(state, 0 if offset is None else offset), leaves, base_arrays, False)

    def _on_devices(self, keys: Callable[[], Any], leaves: Any, pad: bool) -> list[Any]:
        """On each device by itself, where tensors differ from device to device."""

        def one(index: Any, *own_leaves: Any) -> list[Any]:
            # Random numbers of a per-device tensor differ between devices.
            own_keys = lambda: jax.random.fold_in(keys(), index)
            return self._on_one_device(own_keys, own_leaves, pad)

        assert self._frame is not None
        sharded = any(isinstance(form, Form) and form.is_sharded for form in self._forms)
        mapped = over_devices(one, [self._axes, *self._varying], self._frame, sharded)
        return mapped(coordinate(self._frame, self._axes), *leaves)

    def _on_one_device(self, keys: Callable[[], Any], leaves: Any, pad: bool) -> list[Any]:
        values = list(map(self._logical, leaves, self._forms))
        if self._pinned is not None:
            values = list(map(self._pinned.leaf, values, itertools.count()))
        fresh, written = self._call(keys, values)
        out: list[Any] = []
        for i, (value, form) in enumerate(zip(fresh, self._result_forms, strict=False)):
            if form is not None:
                value = self._result(value, form, i)
                out.append(form.physical(value) if pad else value)
        for value, write in zip(written, self._writes, strict=False):
            if not self.random:  # random floats for an integer tensor are whole
                check_castable(value, write.own)
            value = checked(value, write.own.shape, write.own.jax_dtype, self._info)
            if self._pinned is not None:
                value = self._pinned.write(value)
            out.append(value)
        return out

    def _call(self, keys: Callable[[], Any], values: list[Any]) -> Any:
        def lowered(keys: Callable[[], Any], values: list[Any]) -> Any:
            return self._lowered(keys, *self._filled(values))

        # On per-device tensors alone each device is by itself already.
        by_itself = self._axes and not any(
            isinstance(form, Form) and form.is_sharded for form in self._forms
        )
        if self._cut is not None and not by_itself:
            return self._cut.call(lowered, keys if self.random else None, values), []
        with at(self._place):
            return lowered(keys, values)

    def _logical(self, leaf: Any, form: Any) -> Any:
        if not isinstance(form, Form):
            return leaf
        return jnp.zeros(form.shape, form.jax_dtype) if self.reads_nothing else form.logical(leaf)

    def _value(self, value: Any, form: Form) -> Any:
        if value is None:  # masked out by `output_mask`, which torch's meta kernel ignores
            value = jnp.zeros(form.shape, form.jax_dtype)
        return checked(value, form.shape, form.jax_dtype, self._info)

    def _result(self, value: Any, form: Form, index: int) -> Any:
        value = self._value(value, form)
        if form.jax_dtype == np.complex128 and any(form.dim_axes):
            text = (
                f"{self._info.name} gives complex128 of shape {list(form.shape)}, {form!r}, which "
                "this backend doesn't compile; use complex64"
            )
            value = DOUBLE_COMPLEX.only(text, lambda x: x, value)
        return value if self._pinned is None else self._pinned.result(value, index)


def _for_jax(value: Any, fits: bool) -> Any:
    """Arguments as JAX takes them: it has Python integers for signed ones of 64 bits, and torch has
    them up to 2**64.

    Args:
        fits: whether torch takes those, too: arithmetic on integers wraps, all else refuses.
    """
    if isinstance(value, list | tuple):
        return type(value)(_for_jax(item, fits) for item in value)
    if value.__class__ is not int or value < 2**63:
        return value
    if not fits:
        raise RuntimeError("value cannot be converted to type int64_t without overflow")
    return np.uint64(value)


_DIVISIONS = frozenset({"floor_divide", "remainder", "fmod"})  # 2**63 would wrap to 0
_WRAPPING = frozenset(
    {
        *("add", "sub", "rsub", "mul", "pow"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"),
        *("lshift", "rshift", "and", "or", "xor"),
    }
)


def _no_keys() -> NoReturn:
    raise AssertionError("an operation that isn't random draws a random number")


def _keys(state: Any, offset: Any) -> Callable[[], Any]:
    """Gives the keys of an operation ``offset`` random operations after ``state``."""
    count = itertools.count()
    return lambda: rng.key_of(state, offset + next(count))
