"""`KeptProgram`: a jitted function whose executable other processes find by what it computes.

JAX's cache on disk is asked with the lowered program, and to trace and to lower an eager program
takes ten times as long as to load it. Here it is found by words that say what it computes, which
are there before anything is traced, with a digest of all else that it depends on (`environment`).

What is kept is a pickle, as in JAX's cache: whoever can write to the folder can run code here.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from xla_dtensor.base import jax_private
from xla_dtensor.runtime import processes, program_cache
from xla_dtensor.runtime.kept import environment
from xla_dtensor.runtime.kept.environment import trace_context
from xla_dtensor.runtime.kept.files import KeptFiles

MAX_BYTES = 2**29
# Errors of JAX and pickle: of an executable that can't be written down; of one that can't be read.
_NOT_WRITTEN = (
    *(ValueError, NotImplementedError, AttributeError, TypeError),
    *(pickle.PicklingError, jax.errors.JaxRuntimeError),
)
_NOT_READ = (*_NOT_WRITTEN, pickle.UnpicklingError, EOFError, KeyError, IndexError, ImportError)

Submit = Callable[[Callable[[], Any]], "Future[Any]"]


class KeptProgram:
    """A jitted function of arrays of the default device.

    Args:
        function: a function of arrays, numbers, and lists and tuples of them.
        words: gives what it computes in words that are the same in every process and of nothing
            else, or None if nobody can say; then JAX's way is taken.
        options: of ``jax.jit``.
    """

    def __init__(
        self, function: Callable[..., Any], words: Callable[[], str | None], **options: Any
    ) -> None:
        self._plain, self._words, self._options = function, words, options
        self._begun: tuple[_Place | None, Future[Any]] | None = None
        # JAX's settings for which the executable was made, and it; None in its place: JAX's way.
        self._known: tuple[Any, Any] | None = None

    @cached_property
    def jitted(self) -> Any:
        """The function by JAX alone."""
        return jax.jit(self._plain, **self._options)

    def begin(self, submit: Submit, *args: Any) -> None:
        """Begin to load it, or to compile it, in another thread.

        Args:
            submit: has something done there.
            args: of its first call, or their shapes and dtypes.
        """
        if self._begun is not None or self._known is not None:
            return
        place = self._place(args)
        if place is None:
            job = self.jitted.lower(*args).compile
        elif place.is_there:
            job = place.load
        else:
            job = partial(place.compile, self.jitted.lower(*args))
        self._begun = place, submit(job)

    def __call__(self, *args: Any) -> Any:
        known = self._known or self._settle(args)
        if known[1] is not None and known[0] == trace_context():
            try:
                return known[1](*args)
            except (TypeError, ValueError):
                pass  # other arrays than those it was made of: of another device, not committed
        return self.jitted(*args)

    def _settle(self, args: tuple[Any, ...]) -> tuple[Any, Any]:
        if self._begun is None:
            place = self._place(args)
            found = place and place.load()
        else:
            (place, job), self._begun = self._begun, None
            try:
                found = job.result()
            except RuntimeError:
                # A listener of JAX's events may use tensors, which such a thread refuses. It is
                # done in this one then; if it fails here, too, the next call tries again.
                found = place and place.load()
        if place is None:
            found = None
        elif found is None:
            found = place.compile(self.jitted.lower(*args))
        self._known = trace_context(), found
        return self._known

    def _place(self, args: tuple[Any, ...]) -> _Place | None:
        """Where the executable for such operands is kept; None where none is."""
        files, device = _files(), jax.local_devices()[0]
        around = None if files is None else environment.words(device)
        words = None if around is None else self._words()
        if files is None or words is None:
            return None
        leaves, tree = jax.tree.flatten((args, {}))
        described = [_described(leaf, device) for leaf in leaves]
        if None in described:
            return None
        about = f"{around}\n{words}\n{tree}\n{described}"
        return _Place(files, hashlib.sha256(about.encode()).hexdigest(), device)


class _Place:
    """An executable on disk.

    Args:
        files: all of them.
        name: its own.
        device: for which it is.
    """

    def __init__(self, files: KeptFiles, name: str, device: Any) -> None:
        self._files, self._name, self._device = files, name, device

    @property
    def is_there(self) -> bool:
        """Whether it seems to be kept."""
        return self._files.has(self._name)

    def load(self) -> Any:
        """The ``jax.stages.Compiled``; None if there is none."""
        content = self._files.read(self._name)
        if content is None:
            return None
        device = self._device
        try:
            with jax.enable_x64(True):
                return serialize_executable.deserialize_and_load(
                    *pickle.loads(content), device.client, [device]
                )
        except _NOT_READ:  # of a compiler that says it is the same, and isn't
            return None

    def compile(self, lowered: Any) -> Any:
        """The ``jax.stages.Compiled`` of what was lowered, which is kept unless it calls functions
        of JAX's, as LAPACK's: those are there once something has been lowered that does."""
        if "custom_call" in lowered.as_text():
            return lowered.compile()
        with program_cache.not_kept():  # what that gives back can't be written down
            compiled = lowered.compile()
        jax_private.forget_partitioning(compiled)
        if jax_private.is_portable(compiled):
            try:
                content = pickle.dumps(serialize_executable.serialize(compiled))
            except _NOT_WRITTEN:
                return compiled
            self._files.write(self._name, content)
        return compiled


def folder() -> Path | None:
    """Where this process keeps what it knows of eager programs; None if nowhere."""
    where = program_cache.own_folder
    if where is None or processes.several() or jax.config.jax_default_device is not None:
        return None
    return where / "eager"


def _files() -> KeptFiles | None:
    where = folder()
    return None if where is None else KeptFiles(where / "programs", ".gz", MAX_BYTES, looks=256)


def _described(leaf: Any, device: Any) -> str | None:
    """What an executable depends on of an operand; None of one for which none is kept."""
    if type(leaf) in (int, float, complex):
        return type(leaf).__name__
    if isinstance(leaf, jax.core.Tracer):
        return None
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding
        kind = device.default_memory().kind
        if leaf.committed or sharding.device_set != {device} or sharding.memory_kind != kind:
            return None
    elif not isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct):
        return None
    return f"{leaf.dtype}{leaf.shape}{getattr(leaf, 'weak_type', False)}"
