"""Reads tensors: the storage's array, or for a view the array that its view steps give."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from xla_dtensor.base import executor
from xla_dtensor.base.tables.cache import Cache
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

_view_readers: Cache[tuple[Form, tuple[Step, ...], Form], Any] = Cache("readers of views", 1024)
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
    """A function that computes the tensor's array outside of the trace, or None if its value
    depends on what the step is given."""
    recipe = tensor._storage_.recipe
    if recipe is None or not tensor._steps:
        return recipe
    if is_at_traced(tensor._steps):
        return None
    return functools.partial(_read_recipe, recipe, tensor)


def _read_recipe(recipe: Any, tensor: Any) -> Any:
    # A step is being traced: without this JAX would make the reading a part of it.
    with executor.running_at_once(), jax.ensure_compile_time_eval():
        return read_view(tensor._storage_.form, tensor._steps, tensor._form, recipe())


def read_view(form: Form, steps: tuple[Step, ...], own: Form, array: Any) -> Any:
    """The array in ``own`` form of the view ``steps`` of ``array``, which is in ``form``."""
    if isinstance(array, AbstractArray):
        return AbstractArray(own.array_shape, own.jax_dtype, own.sharding)
    steps, positions = leave_open(steps)
    own = own.at_start()
    key = (form, steps, own)
    reader = _view_readers.get(key)
    if reader is None:

        def function(array: Any, positions: tuple[Any, ...]) -> Any:
            value = read_through(array, form, with_positions(steps, positions))
            return own.physical(value.astype(own.jax_dtype))

        reader = _view_readers.put(key, jax.jit(function, out_shardings=own.sharding))
    with jax.enable_x64(True):
        return reader(array, positions)
