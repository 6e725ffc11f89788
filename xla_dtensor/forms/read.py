"""Reads tensors: the storage's array, or for a view the array that its view steps give."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from xla_dtensor.base import executor
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.forms import words
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.sharing import launching, looking_at
from xla_dtensor.forms.views import (
    Step,
    is_at_traced,
    leave_open,
    read_through,
    with_positions,
)
from xla_dtensor.runtime.abstract_array import AbstractArray
from xla_dtensor.runtime.jax_runtime import host_device
from xla_dtensor.runtime.kept.program import KeptProgram

_view_readers: Cache[Any, KeptProgram] = Cache("readers of views", 1024)
_logical_readers: Cache[Form, Any] = Cache("readers of logical values", 512)


def read(tensor: Any) -> Any:
    """The array of ``tensor`` in its physical form (on a trace: unpadded)."""
    storage = tensor._storage_
    trace = executor.trace()
    steps = tensor._steps
    if trace is not None:
        base = trace.array_of(storage, tensor)
        if not steps:
            return base
        return read_through(base, storage.form, steps)
    if not steps:
        return storage.array
    cache = tensor._xla_cache
    if cache is not None and cache[0] == storage.version:
        return cache[1]
    with launching():
        array = read_view(storage.form, steps, tensor._form, storage.array)
        tensor._xla_cache = (storage.version, array)
    return array


@contextmanager
def reading(tensor: Any, read: Callable[[Any], Any] = read) -> Iterator[Any]:
    """A block that copies the array of ``tensor`` to the host, which ``read`` gives: no compiled
    step of another thread takes it over meanwhile."""
    with ExitStack() as stack:
        with launching():
            array = read(tensor)
            stack.enter_context(looking_at(array))
        yield array


def logical_value(tensor: Any) -> Any:
    """The tensor's logical value as an array; inside a trace or outside."""
    form = tensor._form
    array = read(tensor)
    if executor.trace() is not None or (tuple(array.shape) == form.shape and not form.unreduced):
        return logical(array, form)
    if isinstance(array, AbstractArray):
        return AbstractArray(form.shape, form.jax_dtype)
    reader = _logical_readers.get_or_make(
        form, lambda: jax.jit(functools.partial(logical, form=form))
    )
    with jax.enable_x64(True):
        return reader(array)


def constant_recipe(tensor: Any) -> Any:
    """A function that gives the tensor's logical value, as an array of this machine's CPU, outside
    of the trace; None if it depends on what the step is given."""
    return recipe_of_view(tensor._storage_.recipe, tensor)


def recipe_of_view(recipe: Any, tensor: Any) -> Any:
    """What gives a tensor's logical value, where ``recipe`` gives its storage's (None: neither)."""
    steps = tensor._steps
    if recipe is None or not steps:
        return recipe
    if is_at_traced(steps) or tensor._form.varying or tensor._form.unreduced:
        return None
    # The view as it is now: `squeeze_` and the like change the tensor's steps later.
    return functools.partial(_read_recipe, recipe, tensor._storage_.form, steps, tensor._form)


def base_recipe(recipe: Any) -> Any:
    """The recipe of the storage behind that of a view."""
    while recipe.func is _read_recipe:
        recipe = recipe.args[0]
    return recipe


def _read_recipe(recipe: Any, form: Form, steps: tuple[Step, ...], own: Form) -> Any:
    with computing_constants():
        return read_through(recipe(), form, steps).astype(own.jax_dtype)


@contextmanager
def computing_constants() -> Iterator[None]:
    """A block that computes while a step is traced, and not as a part of it: on the host, as the
    step may be for devices that aren't here (`xd.abstract`)."""
    on_host = jax.default_device(host_device())
    # Not jax.ensure_compile_time_eval: what is computed in that, JAX's caches keep (0.10).
    with executor.running_at_once(), jax.core.eval_context(), jax.enable_x64(True), on_host:
        yield


def read_view(form: Form, steps: tuple[Step, ...], own: Form, array: Any) -> Any:
    """The array in ``own`` form of the view ``steps`` of ``array``, which is in ``form``."""
    if isinstance(array, AbstractArray):
        return AbstractArray(own.array_shape, own.jax_dtype, own.sharding)
    steps, positions = leave_open(steps)
    with jax.enable_x64(True):
        return view_reader(form, steps, own.at_start())(array, positions)


def view_reader(form: Form, steps: tuple[Step, ...], own: Form) -> KeptProgram:
    """The program of `read_view`, whose operands are the array and the positions that ``steps``
    leave open. ``own`` is at the start of its memory."""
    key = (form, steps, own)

    def make() -> KeptProgram:
        def function(array: Any, positions: tuple[Any, ...]) -> Any:
            value = read_through(array, form, with_positions(steps, positions))
            return own.physical(value.astype(own.jax_dtype))

        said = lambda: words.joined(["view", *key])
        return KeptProgram(function, said, out_shardings=own.sharding)

    return _view_readers.get_or_make(key, make)
