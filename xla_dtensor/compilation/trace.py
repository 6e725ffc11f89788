"""Tracing a training step: which values it reads, writes and leaves behind.

The step's Python runs once, on JAX tracers. Arrays that it touches become inputs of the program,
found by identity among the constants of the traced jaxpr; what it overwrote or left behind becomes
outputs. Nothing has to be declared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor import _context, rng
from xla_dtensor.errors import DataDependentError, MeshMismatchError
from xla_dtensor.form import Form
from xla_dtensor.mesh import Frame
from xla_dtensor.origin import user_line
from xla_dtensor.storage import Storage
from xla_dtensor.symbolic import NumberNode, input_number


@dataclass(frozen=True)
class Number:
    """A float of a Python object that is an input of the program.

    Attributes:
        read: its present value.
        name: how to call it in messages, ``"AdamW.param_groups[0]['lr']"``.
        array: the constant that stands for it in the traced jaxpr.
    """

    read: Callable[[], float]
    name: str
    array: Any


@dataclass(frozen=True)
class Guard:
    """A decision of the step's Python that holds only while a number has the same outcome."""

    compute: Callable[[list[float]], float]
    outcome: float
    text: str


class Captured:
    """A storage from outside of the trace that the step uses.

    Attributes:
        array, form: as they were before the trace.
        first_use: when the step first used it. Unlike the order of capture, this doesn't depend on
            whether an optimizer made it in this trace.
        fill_value: of state that the step's optimizer made in this trace, its initial value; None
            for storages that existed before.
        written: whether the step overwrites it.
    """

    __slots__ = ("_reference", "_strong", "array", "fill_value", "first_use", "form", "written")

    def __init__(self, storage: Storage, fill_value: Any = None) -> None:
        # New state may be a temporary; only a weak reference can tell.
        self._strong = storage if fill_value is None else None
        self._reference = weakref.ref(storage)
        self.array = storage.array
        self.form = storage.form
        self.written = False
        self.first_use: int | None = None
        self.fill_value = fill_value

    @property
    def storage(self) -> Storage | None:
        """The storage; None if it was a temporary of the optimizer."""
        return self._reference()

    def restore(self) -> None:
        """Undo what the trace did to the storage."""
        storage = self.storage
        if storage is not None:
            storage.restore(self.array, self.form)


class StepTrace:
    """The trace of one step; see `_context.Trace` for the methods that dispatch calls."""

    def __init__(self) -> None:
        self.captured: list[Captured] = []
        self._captured_by_id: dict[int, Captured] = {}
        self._uses = 0
        self.host_tensors: dict[int, tuple[torch.Tensor, Any]] = {}
        self.numbers: list[Number] = []
        self.guards: list[Guard] = []
        self.settings: dict[Callable[[], Any], tuple[Any, str]] = {}
        self.leaves: dict[int, tuple[weakref.ref[Any], torch.Tensor | None]] = {}
        self.frame: Frame | None = None
        self.rng_words = jnp.asarray(rng.words())
        self._rng_start = rng.position()[1]
        self._owned: dict[int, weakref.ref[Storage]] = {}
        self._array_ids: set[int] = set()
        self._recomputed: list[_Recomputation] = []
        self._latest: Any = None
        self.in_optimizer = 0
        self.random_operations_done = 0

    # --- what dispatch reports ---------------------------------------------------------------

    def created(self, storage: Storage) -> None:
        key = id(storage)

        def gone(_: Any) -> None:
            self._owned.pop(key, None)

        self._owned[key] = weakref.ref(storage, gone)
        if isinstance(storage.array, jax.core.Tracer):
            self._latest = storage.array
        if self._recomputed:
            self._recomputed[-1].made.add(key)

    def owns(self, storage: Storage) -> bool:
        """Whether the storage was made by the step."""
        reference = self._owned.get(id(storage))
        return reference is not None and reference() is storage

    def left_behind(self) -> list[Storage]:
        """The storages made by the step that still exist."""
        storages = [reference() for reference in list(self._owned.values())]
        return [s for s in storages if s is not None]

    def array_of(self, storage: Storage, tensor: Any = None) -> Any:
        if not self.owns(storage):
            self._use(storage)
            if tensor is not None:
                self.touched(tensor)
        array = storage.array
        if self._recomputed:
            array = self._recomputed[-1].barred(storage, array)
        return array

    def touched(self, tensor: Any) -> None:
        if not (tensor.requires_grad and tensor.is_leaf):
            return
        known = self.leaves.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self.leaves[id(tensor)] = (weakref.ref(tensor), tensor.grad)

    def writing(self, storage: Storage) -> None:
        if not self.owns(storage):
            self._use(storage).written = True

    def random_key(self) -> Any:
        key = rng.key_of(self.rng_words, rng.position()[1] - self._rng_start)
        rng.advance()
        return key

    def random_operations(self) -> int:
        """By how much the step moves the generator."""
        return rng.position()[1] - self._rng_start

    def host_tensor(self, tensor: torch.Tensor) -> Any:
        from xla_dtensor.transfer import to_numpy

        known = self.host_tensors.get(id(tensor))
        if known is None:
            with _context.active(None), jax.ensure_compile_time_eval(), jax.enable_x64(True):
                array = jnp.asarray(to_numpy(tensor))
            known = self.host_tensors[id(tensor)] = (tensor, array)
        return known[1]

    def refuse(self, what: str) -> None:
        raise DataDependentError(
            f"{what} needs a value that doesn't exist while the step is compiled"
            f"{user_line()}\nKeep the value on the devices (torch.where, a tensor in place of a "
            "number), return it from the step and look at it there, or move this line out of the "
            "compiled function"
        )

    # --- numbers ------------------------------------------------------------------------------

    def number(self, read: Callable[[], float], name: str) -> Any:
        """The number that ``read`` gives, as an input of the program (a ``torch.SymFloat``)."""
        value = float(read())
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            array = jnp.array(value, dtype=jnp.float64)
        index = len(self.numbers)
        self.numbers.append(Number(read, name, array))
        with jax.enable_x64(True):
            weak = jax._src.lax.lax._convert_element_type(array, weak_type=True)
        return input_number(value, weak, index, name, self._guard)

    def _guard(self, node: NumberNode, what: str, outcome: Any) -> None:
        self.guards.append(Guard(node.compute, float(outcome), f"{node.text} {what} {outcome}"))

    def depends_on(self, read: Callable[[], Any], text: str) -> None:
        if read not in self.settings:
            self.settings[read] = read(), text

    # --- recomputation ------------------------------------------------------------------------

    def begin_recomputation(self) -> None:
        self._recomputed.append(_Recomputation(self._latest))

    def end_recomputation(self) -> None:
        self._recomputed.pop()

    # --- internals ----------------------------------------------------------------------------

    def _use(self, storage: Storage) -> Captured:
        captured = self._captured_by_id.get(id(storage))
        # The id may be that of a temporary that is gone.
        if captured is None or captured.storage is not storage:
            captured = self._capture(storage)
        if captured.first_use is None:
            captured.first_use = self._uses
            self._uses += 1
        return captured

    def _capture(self, storage: Storage, fill_value: Any = None) -> Captured:
        frame = storage.form.frame
        if frame is not None:
            if self.frame is None:
                self.frame = frame
            elif self.frame.device_ids != frame.device_ids:
                raise MeshMismatchError(
                    f"the compiled step uses tensors of {self.frame.root!r} (devices "
                    f"{list(self.frame.device_ids)}) and of {frame.root!r} (devices "
                    f"{list(frame.device_ids)}); one XLA program runs on one set of devices: "
                    f"redistribute the tensor of shape {list(storage.form.shape)} to the first "
                    f"mesh before the step{user_line()}"
                )
        if id(storage.array) in self._array_ids:
            # Two storages share this array; as inputs of the program they must be two.
            with _context.active(None), jax.ensure_compile_time_eval():
                storage.array = jnp.copy(storage.array)
        self._array_ids.add(id(storage.array))
        captured = self._captured_by_id[id(storage)] = Captured(storage, fill_value)
        self.captured.append(captured)
        return captured

    def constant(self, form: Form, value: Any) -> Storage | None:
        """A new storage filled with ``value``, if it may be state that outlives the step.

        State that an optimizer makes in its first step would otherwise be a constant of the first
        program and an input of all later ones: two programs for the same step. So what optimizers
        fill is made outside of the trace and captured.
        """
        if not self.in_optimizer:
            return None
        with _context.active(None), jax.ensure_compile_time_eval(), jax.enable_x64(True):
            array = jnp.full(form.array_shape, value, dtype=form.jax_dtype, device=form.sharding)
            storage = Storage(array, form)
        self._capture(storage, fill_value=value)
        return storage

    def undo(self) -> None:
        """Give every storage, gradient and the generator its value from before the trace."""
        for captured in self.captured:
            captured.restore()
        for reference, grad in self.leaves.values():
            leaf = reference()
            if leaf is not None and leaf.grad is not grad:
                leaf.grad = grad
        rng.advance(-self.random_operations())


class _Recomputation:
    """One recomputation: what it reads from outside goes through a barrier, or XLA would merge the
    recomputed values with the first ones and keep those alive after all."""

    def __init__(self, latest: Any) -> None:
        self.made: set[int] = set()
        self._latest = latest
        self._barred: dict[int, tuple[Any, Any]] = {}

    def barred(self, storage: Storage, array: Any) -> Any:
        if id(storage) in self.made:
            return array
        known = self._barred.get(id(array))
        if known is None:
            if self._latest is None:
                result = jax.lax.optimization_barrier(array)
            else:
                # Tied to the newest value of the backward pass: not to be computed before it.
                result, _ = jax.lax.optimization_barrier((array, self._latest))
            known = self._barred[id(array)] = (array, result)
        return known[1]
