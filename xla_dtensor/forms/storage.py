"""The data behind tensors: one array, shared by a tensor and all views of it.

A view holds its base's storage and the chain of view steps that lead to it, never data of its own:
reading it applies the chain, writing to it writes through the chain into the storage. That is
torch's aliasing, with immutable arrays underneath.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from xla_dtensor.base import epoch, executor, interrupts
from xla_dtensor.errors import DataDependentError, UnsupportedOpError
from xla_dtensor.runtime import arrays, processes
from xla_dtensor.runtime.abstract_array import AbstractArray

if TYPE_CHECKING:
    import jax

    from xla_dtensor.forms.form import Form
    from xla_dtensor.mesh import Frame


def _nobody() -> None:
    return None


class Pending:
    """What a storage holds in place of an array that a batch of operations has yet to compute.

    Attributes:
        batch: running it puts the array in place.
        index: the value's number in the batch; ``code``: as an operand there.
        storage: a weak reference to the storage that waits for it.
        error: why there will never be an array, once the batch has failed.
        says_all: whether ``error`` itself is what users are told.
    """

    __slots__ = ("batch", "code", "error", "index", "says_all", "storage")

    storage: Callable[[], Storage | None]
    error: BaseException | None

    batch: Any

    def __init__(self, batch: Any, index: int, code: int = 0) -> None:
        self.batch = batch
        self.index = index
        self.code = code
        self.storage = _nobody
        self.error = None
        self.says_all = False

    def fail(self, error: BaseException) -> None:
        """There will be no array. The batch goes on, and must not take this for one of the values
        that it computes next, which have the same numbers."""
        self.error = error
        self.batch = None


class GivenBack(RuntimeError):
    """Why a storage has no array: somebody has taken its memory away."""


# One counter for all storages: a tensor can move to another one (`x.data = y`), and what was
# computed from the first must not pass for the second's.
_versions = itertools.count(1)


class _Alive:
    """What a tensor holds as long as it sees a storage. It is referred to weakly in place of the
    tensor, which torch couldn't swap for another then (``module.half()``)."""

    __slots__ = ("__weakref__",)


class _Viewers:
    """Weak references to the tokens of the tensors that see a storage. Dead ones are dropped
    whenever their number has doubled.

    Args:
        unknown: whether there is a tensor without a token.
    """

    __slots__ = ("_full", "_tokens", "_unknown")

    def __init__(self, unknown: bool = False) -> None:
        self._tokens: list[weakref.ref[_Alive]] = []
        self._unknown = unknown
        self._full = 16

    # Called for every view, so without a lock: list.append is atomic, and the rest of the list
    # stays in place meanwhile.
    def add(self, tensor: Any) -> None:
        tensor._xla_alive = token = _Alive()
        tokens = self._tokens
        tokens.append(weakref.ref(token))
        if len(tokens) >= self._full:
            with _sharing_lock:
                for i in reversed(range(len(tokens))):
                    if tokens[i]() is None:
                        del tokens[i]
                self._full = max(16, 2 * len(tokens))

    def others(self, tensor: Any) -> bool:
        own = tensor._xla_alive
        return self._unknown or any(token() not in (None, own) for token in self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)


ONE_VIEWER = object()

# Two threads may make views of one tensor. Reentrant: the garbage collector, and with it any code,
# may run in between.
_sharing_lock = threading.RLock()


class Storage:
    """A jax array with a version, in a physical form.

    Attributes:
        array: the current value; replaced, never changed, by a write.
        value: the same, or a `Pending` until somebody asks for ``array``.
        form: the physical form of ``array`` (of the tensor that the storage was made for); changed
            by `reform` alone, which compiled steps rely on to hear of it.
        version: a number that no other storage has had, nor this one with another value: equal
            versions are the same memory with the same value. Views and caches compare it.
        recipe: inside a trace, computes the array outside of it, if it depends on no input of the
            step (a mask made from sizes); else None.
        counters: weak references to tensors on this storage whose version counters (torch's, which
            autograd compares) know nothing of each other; each of them counts every write.
        viewers: who sees this storage, see `is_shared`: None (nobody has so far), `ONE_VIEWER` (one
            tensor, whichever) or the `_Viewers`.
        refuses_writes: what a write would be, of a copy where torch has a view; None if writes are
            torch's.
        holds: what lives as long as the storage, and may itself refer to it: programs of compiled
            steps, see `Programs`; not there before there is one.
        memories: what torch's storages are of it (`tensors/memory.py`), by size; not there before
            somebody has asked.
    """

    __slots__ = (
        "__weakref__",
        "counters",
        "form",
        "holds",
        "memories",
        "recipe",
        "refuses_writes",
        "value",
        "version",
        "viewers",
    )

    recipe: Callable[[], Any] | None
    counters: tuple[weakref.ref[torch.Tensor], ...]
    refuses_writes: str | None
    holds: list[Any]
    memories: dict[int, Any]
    value: Any
    viewers: Any

    def __init__(self, array: jax.Array, form: Form) -> None:
        self.value = array
        self.form = form
        self.version = next(_versions)
        self.recipe = None
        self.counters = ()
        self.viewers = None
        self.refuses_writes = None
        if array.__class__ is Pending:
            array.storage = weakref.ref(self)
            return  # only a batch makes pending values, never a trace
        within = executor.enclosing()  # the default executors don't track storages
        if within is not None:
            within.created(self)

    @property
    def array(self) -> jax.Array:
        value = self.value
        while value.__class__ is Pending:
            if value.error is not None:
                if value.says_all:
                    raise type(value.error)(*value.error.args)
                raise RuntimeError(
                    f"this tensor of shape {list(self.form.shape)} has no value: it was made by "
                    "operations that were written down to run together (eagerly, or in a call of "
                    "a step compiled with watch='replay'), and running them has failed "
                    f"({type(value.error).__name__}: {value.error}); make it again. A gradient is "
                    "made again by backward() after optimizer.zero_grad()"
                ) from value.error
            value.batch.run()
            if self.value is value and value.error is None:
                raise AssertionError("a batch has run and left a value out: a bug in xla_dtensor")
            value = self.value  # another thread may have written something else down since
        return value

    @array.setter
    def array(self, value: jax.Array | Pending) -> None:
        self.value = value
        if value.__class__ is Pending:
            value.storage = weakref.ref(self)

    # An interrupt in between would leave an array that isn't in the storage's form.
    @interrupts.atomic
    def place(self, frame: Frame | None) -> None:
        """Copy the value of the default device to all devices of ``frame``. Each of several
        processes has such a value, and they have to be the same.

        Raises:
            DivergenceError: they aren't.
        """
        form = self.form.placed(frame)
        if form is not self.form:
            if processes.several():
                what = "puts on the devices of all processes"
                arrays.check_equal(self.array, what, always=True)
            self._move(arrays.put, form)

    @interrupts.atomic
    def join(self, frame: Frame, axes: tuple[str, ...]) -> None:
        """Make the values that the processes have of their own one tensor, which varies along
        ``axes`` of ``frame``; along the others it is taken to be the same."""
        form = self.form.placed(frame).with_varying(axes)
        if form is not self.form:
            self._move(arrays.put_own, form)

    def _move(self, put: Callable[[Any, Any], Any], form: Form) -> None:
        import jax

        executor.current().moving(self)
        with jax.enable_x64(True):
            array = put(self.array, form.sharding)
        batch = executor.enclosing_batch()
        if batch is not None:
            batch.replaces(self)
        self.array = array
        self.reform(form)

    def reform(self, form: Form) -> None:
        """Note the form that the value now has."""
        if form is not self.form:
            self.form = form
            epoch.forms.moved()

    def check_write(self) -> None:
        """Raise if `write` would. Who writes to several asks all first: all are written, or none.

        Raises:
            UnsupportedOpError: see ``refuses_writes``.
        """
        if self.refuses_writes is not None:
            executor.current().not_in_step(self.refuses_writes)  # eagerly it may be a view
            raise UnsupportedOpError(self.refuses_writes)

    # In `write` the executor comes first: a trace or batch has to note the storage as it was.
    def write(self, array: jax.Array | Pending, form: Form) -> None:
        """Replace the value; all tensors on this storage see it.

        Raises:
            UnsupportedOpError: see ``refuses_writes``.
        """
        if self.refuses_writes is not None:
            self.check_write()
        if array.__class__ is Pending:  # only a batch makes these, never a trace
            array.batch.replaces(self)
            array.storage = weakref.ref(self)
        else:
            if array.__class__ is AbstractArray:
                self.check_loss()
            executor.current().writing(self)
        self.value = array
        if form is not self.form:
            self.reform(form)
        self.version = next(_versions)
        self.recipe = None
        if self.counters:
            self.count_write()

    def check_loss(self) -> None:
        """Raise if this has data, which would be lost where nothing is computed."""
        if self.array.__class__ is not AbstractArray:
            raise DataDependentError(
                f"a tensor of shape {list(self.form.shape)}, which has data, would be written or "
                "moved inside of xd.abstract(), where nothing is computed, and its data be lost: "
                "make it inside of the block, too"
            )

    def put_back(self, value: Any, form: Form) -> None:
        """Undo writes: the storage has an earlier ``value`` again. That is a version of its own,
        since the last one may have been seen."""
        self.value = value
        self.reform(form)
        self.version = next(_versions)

    def give_up(self, error: BaseException, says_all: bool = False) -> None:
        """There will be no value, because of ``error``: with ``says_all``, that is all that users
        who ask for it are told."""
        pending = Pending(None, 0)
        pending.fail(error)
        pending.says_all = says_all
        self.array = pending

    def give_back(self) -> None:
        """Let the devices' memory go: who reads the value then gets an error. `refill` undoes it.

        Raises:
            UnsupportedOpError: see ``refuses_writes``.
        """
        self.check_write()
        batch = executor.enclosing_batch()
        if batch is not None:
            batch.replaces(self)
        self.give_up(
            GivenBack(
                f"the memory of this tensor of shape {list(self.form.shape)} was given back by "
                "untyped_storage().resize_(0); resize_(nbytes) makes it zeros again"
            ),
            says_all=True,
        )
        self.version = next(_versions)

    def refill(self) -> None:
        """Memory in place of what was given back: zeros, where torch promises nothing."""
        form = self.form
        array = arrays.full(form.array_shape, 0, form.jax_dtype, form.sharding)
        self.write(array, form)

    @property
    def is_given_back(self) -> bool:
        value = self.value
        return value.__class__ is Pending and isinstance(value.error, GivenBack)

    def introduce(self, tensor: Any) -> None:
        """A second tensor is about to be made on this storage, from ``tensor``. An operation's
        result isn't written down when it is made: most of them never share their memory."""
        if self.viewers is ONE_VIEWER:
            with _sharing_lock:
                if self.viewers is ONE_VIEWER:
                    viewers = _Viewers()
                    viewers.add(tensor)
                    self.viewers = viewers

    def add_viewer(self, tensor: Any) -> None:
        """A further tensor sees this storage, which it didn't when the storage was made."""
        if self.viewers.__class__ is not _Viewers:
            with _sharing_lock:
                if self.viewers.__class__ is not _Viewers:
                    self.viewers = _Viewers(unknown=self.viewers is ONE_VIEWER)
        self.viewers.add(tensor)

    def is_shared(self, tensor: Any) -> bool:
        """Whether tensors other than ``tensor`` see this storage, or may see it: the first one does
        if nobody has introduced it."""
        viewers = self.viewers
        return isinstance(viewers, _Viewers) and viewers.others(tensor)

    def share_writes(self, *tensors: torch.Tensor) -> None:
        """Let a write to any tensor on this storage count as one to each of ``tensors``, which
        torch doesn't know to share memory (it counts one to the tensor written, and its views)."""
        with _sharing_lock:
            alive = [reference for reference in self.counters if reference() is not None]
            known = {id(reference()) for reference in alive}
            new = [weakref.ref(tensor) for tensor in tensors if id(tensor) not in known]
            self.counters = (*alive, *new)

    def count_write(self) -> None:
        for reference in self.counters:
            tensor = reference()
            if tensor is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def next_version() -> int:
    """A number above the versions of all storages so far, and below those that are to come."""
    return next(_versions)


def put(storages: Iterable[Storage], arrays: Iterable[jax.Array]) -> list[Storage]:
    """Give many storages new values at once, in the forms that they have; returns those whose
    tensors have counters of their own to be told (`Storage.count_write`).

    For a compiled step, which has hundreds: a `Storage.write` each would take longer than its
    launch.
    """
    counted = []
    for storage, array, version in zip(storages, arrays, _versions, strict=False):
        storage.value = array
        storage.version = version
        if storage.counters:
            counted.append(storage)
    return counted
