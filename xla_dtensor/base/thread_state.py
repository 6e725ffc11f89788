"""Whether operations are being traced in this thread, and by whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

tracing = threading.RLock()
"""Held while a step is traced: hooks, and torch's flag that it compiles, are the process's. So
there is one trace at a time, and who computes by that flag waits."""

# What `Trace.refuse` is told where a tensor's value is wanted.
ITEM = ".item() (also float(), int(), bool(), `if tensor:`)"


class Batch(Protocol):
    """Operations that are written down, to run as one (`xla_dtensor.execution.batch`).

    Attributes:
        is_step: whether it is all of a compiled step.
    """

    is_step: bool

    def add(self, plan: Any, call: Any) -> Any:
        """Write a call down; what stands for its arrays."""

    def cut(self) -> None:
        """An operation is written down, and its results are in their storages."""

    def replaces(self, storage: Any) -> None:
        """``storage`` is about to be given another value."""

    def run(self) -> None:
        """Compute what has been written down."""

    def begin_recomputation(self) -> None:
        """``torch.utils.checkpoint`` starts to run a block again, in backward."""

    def end_recomputation(self) -> None:
        """It is done with it."""

    def in_optimizer(self) -> AbstractContextManager[None]:
        """A block in which an optimizer makes its step."""


class Trace(Protocol):
    """What is told about storages while operations run on JAX tracers instead of executables.

    Attributes:
        scalars: what has been computed from scalars: (their arrays, the results), by the plan and
            the identity of the arrays.
        stand_ins: the doubles that stand for numbers (`compilation.doubles.StandIns`), or None.
        python_numbers: the numbers that Python code has been given, by weak references.
        assertions: what must hold of indices, each as (a summary, what judges by it); None where
            nobody asks.
        asserted: likewise what the program says itself (``torch._assert_async``).
        wide: float32 scalars in double precision; None where they are computed as they are.
        positions: makes views at positions that are inputs (`dispatch.positions.Positions`); None
            where positions are part of the program.
    """

    scalars: dict[Any, Any]
    stand_ins: Any
    python_numbers: list[Any]
    positions: Any

    @property
    def assertions(self) -> list[Any] | None: ...

    @property
    def asserted(self) -> list[Any] | None: ...

    @property
    def wide(self) -> WideScalars | None: ...

    def created(self, storage: Any) -> None:
        """A storage was made inside the trace."""

    def owns(self, storage: Any) -> bool:
        """Whether the storage was made inside the trace."""

    def array_of(self, storage: Any, tensor: Any = None) -> Any:
        """The array of a storage, which is about to be used (through ``tensor``)."""

    def touched(self, tensor: Any) -> None:
        """A view of ``tensor`` is being made."""

    def writing(self, storage: Any) -> None:
        """A storage is about to get a new value."""

    def scope(self) -> Any:
        """A context in which what is traced has the name of the module that it is for."""

    def random_key(self) -> Any:
        """A fresh JAX PRNG key for a random operation."""

    def host_tensor(self, tensor: Any) -> Any:
        """The array of a CPU tensor that takes part in an operation."""

    def constant(self, form: Any, value: Any) -> Any:
        """A storage for a new tensor filled with ``value``, or None to compute it as usual."""

    def depends_on(self, read: Callable[[], Any], text: str) -> None:
        """The Python that is traced decides by what ``read`` gives; ``text`` names it."""

    def reads_grad(self, tensor: Any) -> None:
        """Python looks at ``tensor.grad``."""

    def sets_grad(self, tensor: Any) -> None:
        """Python is about to assign to ``tensor.grad``."""

    def backward(self, outputs: Any, keeps_graph: bool, to_leaves: bool) -> None:
        """A backward pass begins: from ``outputs``, to all leaves or to given tensors."""

    def begin_recomputation(self) -> None:
        """``torch.utils.checkpoint`` starts to run a block again, in backward."""

    def end_recomputation(self) -> None:
        """It is done with it."""

    def item(self, tensor: Any) -> Any:
        """The value of a tensor of one element in Python, or raise because there is none."""

    def refuse(self, what: str) -> None:
        """Raise because ``what`` needs a value that doesn't exist while tracing."""


class WideScalars:
    """float32 scalars that are computed in double precision: which is which, by identity."""

    __slots__ = ("_narrow", "_wide")

    def __init__(self) -> None:
        # (the key's array, so that its id stays its own, and the other one)
        self._wide: dict[int, tuple[Any, Any]] = {}
        self._narrow: dict[int, tuple[Any, Any]] = {}

    def widened(self, array: Any) -> Any:
        """A float32 scalar in double precision; anything else as it is."""
        if getattr(array, "dtype", None) != "float32":
            return array
        known = self._wide.get(id(array))
        if known is None:
            known = self._wide[id(array)] = array, array.astype("float64")
        return known[1]

    def narrowed(self, array: Any) -> Any:
        """The float32 scalar of one in double precision, always the same one."""
        known = self._narrow.get(id(array))
        if known is None:
            narrow = array.astype("float32")
            known = self._narrow[id(array)] = array, narrow
            self._wide[id(narrow)] = narrow, array
        return known[1]


class RandomNumbers:
    """The random operations of a step that is being traced.

    Attributes:
        seed, start: the generator's state when the trace began.
        counter: its present count of operations.
        latest: the highest that the count has been: a recomputation goes back, and forth again.
        refuse: raises because of what is described.
    """

    __slots__ = ("counter", "latest", "refuse", "seed", "start")

    def __init__(self, seed: int, start: int, refuse: Callable[[str], None]) -> None:
        self.seed, self.start, self.refuse = seed, start, refuse
        self.counter = self.latest = start

    def advance(self, operations: int = 1) -> None:
        """Count ``operations`` random operations."""
        self.counter += operations
        self.latest = max(self.latest, self.counter)


class _ThreadState(threading.local):
    trace: Trace | None = None
    batch: Batch | None = None
    function: str | None = None
    formula: bool = False


_state = _ThreadState()


def current() -> Trace | None:
    """The trace that is active in this thread."""
    return _state.trace


def random_numbers() -> RandomNumbers | None:
    """The random operations of the step that is traced in this thread."""
    return getattr(_state.trace, "random", None)


def batch() -> Batch | None:
    """The batch in which this thread's operations are written down, in place of running."""
    return _state.batch


def is_in_step() -> bool:
    """Whether this thread's operations become one program: a trace, or a step's batch."""
    return _state.trace is not None or (_state.batch is not None and _state.batch.is_step)


def set_batch(batch: Batch | None) -> None:
    """Make ``batch`` the one of this thread."""
    _state.batch = batch


class active:
    """Make ``trace`` the active one for a block (None suspends tracing)."""

    def __init__(self, trace: Trace | None) -> None:
        self._trace = trace

    def __enter__(self) -> Trace | None:
        self._outer = _state.trace
        _state.trace = self._trace
        return self._trace

    def __exit__(self, *exc_info: object) -> None:
        _state.trace = self._outer


class inside_function:
    """Let the thread know, for a block, that it is in the forward or backward called ``name`` of a
    `DFunction` (None: in none, as far as the block's code can tell)."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._outer = _state.function
        _state.function = self._name

    def __exit__(self, *exc_info: object) -> None:
        _state.function = self._outer


def function() -> str | None:
    """The forward or backward of a `DFunction` that this thread is in."""
    return _state.function


class in_formula:
    """Let the thread know, for a block, that it is in the formula of one of torch's optimizers,
    which does nothing with a tensor's value in Python but compute with it."""

    def __enter__(self) -> None:
        self._outer = _state.formula
        _state.formula = True

    def __exit__(self, *exc_info: object) -> None:
        _state.formula = self._outer


def is_in_formula() -> bool:
    """Whether this thread is in the formula of one of torch's optimizers."""
    return _state.formula
