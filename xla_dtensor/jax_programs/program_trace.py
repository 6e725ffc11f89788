"""The executor of torch code inside of a JAX program: its operations run on the program's tracers.

JAX decides what becomes of them: they may be those of ``jax.jit``, of a transformation, or arrays.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import jax
import torch

from xla_dtensor.base import executor, thread_state, torch_private
from xla_dtensor.base.jax_private import let_64_bit_equations_lower, varying_axes
from xla_dtensor.base.random import rng
from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.torch_private.dispatch_keys import included
from xla_dtensor.compilation.code.host_random import MaybeAnotherThread, none_drawn
from xla_dtensor.errors import DataDependentError, RandomNumbersError, UnsupportedOpError
from xla_dtensor.execution.interfaces import Plan
from xla_dtensor.execution.tracing import TracingProgram
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.storage import Pending, Storage
from xla_dtensor.runtime.abstract_array import AbstractArray
from xla_dtensor.tensors.of_form import is_ours

_GONE = (
    "this tensor was made while a JAX program was traced (by xd.jax), and has no value outside of "
    "it: return what is needed later from the function; a module's state that changes belongs in a "
    "buffer, which mutable=True returns"
)


class ProgramTrace(TracingProgram):
    """Runs torch code for a JAX program.

    Args:
        words: the random stream's state (`base.random.rng.words_at`), as an array; None where the
            caller has given no key.
        drawn: how many random operations have come before.
    """

    def __init__(self, words: Any, drawn: int = 0) -> None:
        super().__init__()
        self.scalars: dict[Any, Any] = {}
        self.python_numbers: list[Any] = []
        self.random = thread_state.RandomNumbers(0, 0, self.refuse)
        self.random.advance(drawn)
        self._words = words
        # By name, the tensors in whose place the code has others.
        self.replaced: Sequence[tuple[str, torch.Tensor]] = ()

    # --- storages -----------------------------------------------------------------------------

    def array_of(self, storage: Storage, tensor: Any = None) -> Any:
        if self.owns(storage):
            array = storage.array
        else:
            self._refuse_old(tensor, lambda old: is_ours(old) and old._storage_ is storage)
            array = _outside(storage)
        if self._recomputed:
            array = self._recomputed[-1].barred(storage, array)
        return array

    def writing(self, storage: Storage) -> None:
        if not self.owns(storage):
            raise UnsupportedOpError(
                f"a JAX program writes to a tensor of shape {list(storage.form.shape)} from "
                "outside of it, which would happen when it is traced, not when it runs: pass it as "
                f"an argument and return it, or make it a buffer of the module{user_line()}"
            )

    # --- operations ---------------------------------------------------------------------------

    def _traced(self, plan: Plan, leaves: list[Any], bases: list[Any]) -> list[Any]:
        found = [varying_axes(x) for x in leaves if isinstance(x, jax.core.Tracer)]
        axes = frozenset().union(*found)
        if axes:  # in somebody's shard_map: a loop or a cond takes no mixture
            leaves = [_varying(x, axes) for x in leaves]
            bases = [
                base if base is None else (_varying(base[0], axes), *base[1:]) for base in bases
            ]
        return super()._traced(plan, leaves, bases)

    # --- values -------------------------------------------------------------------------------

    def random_key(self) -> Any:
        if self._words is None:
            raise RandomNumbersError(
                "random numbers in a JAX program come from a key: give one, rng=jax.random.key(0), "
                f"to the function that xd.jax.from_module returned, or to xd.jax.call{user_line()}"
            )
        key = rng.key_of(self._words, self.random.counter)
        self.random.advance()
        return key

    def _refuse_old(self, tensor: Any, is_its: Callable[[torch.Tensor], bool]) -> None:
        """Raise for a tensor from outside that would be a constant, and mustn't be one."""
        name = next((name for name, old in self.replaced if is_its(old)), None)
        if name is not None:
            raise UnsupportedOpError(
                f"the module reaches the memory of its {name!r} by another way than its attributes "
                "(a closure, a dict or a list in a list, a view that it has kept): there is what "
                "the module holds, not what the JAX program is given for it; read it as an "
                f"attribute where it is used{user_line()}"
            )
        if tensor is not None and tensor.requires_grad:
            raise UnsupportedOpError(
                f"a JAX program computes with a tensor of shape {list(tensor.shape)} that requires "
                "grad and is none of its arguments or parameters: it would be a constant, and get "
                "no gradient; register it as a parameter of the module, pass it as an argument, or "
                f"detach() it{user_line()}"
            )

    def host_tensor(self, tensor: torch.Tensor) -> Any:
        self._refuse_old(tensor, functools.partial(share_memory, tensor))
        return to_numpy(tensor)

    def refuse(self, what: str, way: str = "") -> NoReturn:
        way = way or (
            "Keep the value on the devices (torch.where, a tensor in place of a number), or return "
            "it and look at it outside of the JAX program"
        )
        raise DataDependentError(
            f"{what} needs a value that doesn't exist while JAX traces{user_line()}\n{way}"
        )


def _outside(storage: Storage) -> Any:
    """The array of a storage that the program finds: a constant of it."""
    if isinstance(storage.value, Pending):
        with jax.core.eval_context(), executor.running_at_once():
            array = storage.array  # computed now, not by the program
    else:
        array = storage.array
    if isinstance(array, jax.core.Tracer | AbstractArray):
        raise DataDependentError(
            f"a JAX program uses a tensor of shape {list(storage.form.shape)} from outside of it "
            f"that has no value there: pass it as an argument{user_line()}"
        )
    return storage.form.fetched(array) if storage.form.memory is not None else array


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have memory in common; of the host's as far as their bounds tell."""
    if is_ours(a) and is_ours(b):
        return a._storage_ is b._storage_
    if {a.device.type, b.device.type} != {"cpu"} or not (a.numel() and b.numel()):
        return False
    spans = []
    for tensor in (a, b):
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        spans.append((begin, begin + (last + 1) * tensor.element_size()))
    (begin, end), (other, other_end) = spans
    return begin < other_end and other < end


def _varying(leaf: Any, axes: frozenset[str]) -> Any:
    missing = axes - varying_axes(leaf) if isinstance(leaf, jax.Array) else None
    return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf


@contextmanager
def tracing(trace: ProgramTrace) -> Iterator[None]:
    """A block whose torch operations ``trace`` runs. What it has made has no value afterwards."""
    let_64_bit_equations_lower()
    with ExitStack() as stack:
        stack.enter_context(thread_state.tracing)
        stack.enter_context(executor.running(trace))
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # A body of `torch.cond` runs in a kernel, below what tells autograd of views: the gradient
        # of a write through one (`y[0] = z`) would be lost.
        stack.enter_context(included(torch_private.DispatchKey.ADInplaceOrView))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_nothing_drawn_on_the_host())
        stack.callback(torch_private.set_compiling, torch_private.set_compiling(True))
        try:
            yield
        finally:
            give_up(trace.left_behind())
            trace.scalars.clear()
            trace._latest = None


def give_up(storages: Iterable[Storage]) -> None:
    """Let storages hold nothing that belongs to a trace that is over."""
    for storage in storages:
        storage.give_up(DataDependentError(_GONE), says_all=True)
        storage.recipe = None


@contextmanager
def _nothing_drawn_on_the_host() -> Iterator[None]:
    """Refuse code that draws from generators of the host, of which each run of the program would
    have the same numbers. With several threads nobody knows who did: it warns."""
    before = torch.get_rng_state()
    try:
        with none_drawn([]):
            yield
    except MaybeAnotherThread:
        warnings.warn(f"{_DRAWN}, or by another thread meanwhile", RuntimeWarning, stacklevel=2)
    if not torch.equal(before, torch.get_rng_state()):
        if threading.active_count() > 1:
            warnings.warn(f"{_DRAWN}, or by another thread meanwhile", RuntimeWarning, stacklevel=2)
            return
        torch.set_rng_state(before)
        raise RandomNumbersError(_DRAWN)


_DRAWN = (
    "random numbers were drawn on the host while a JAX program was traced, and would be constants "
    "of it: draw them on the device of its tensors (torch.rand(..., device=x.device)), which takes "
    "them from rng=; they were drawn by the program"
)
