"""The random number generator of the "xla" device.

One generator for all devices of the process: a seed and a counter of random operations. The key of
an operation is a function of both, and XLA's partitionable threefry makes each number a function of
the key and its logical position, so neither the mesh nor the placements change the numbers. Threads
share the generator: no two of their operations draw the same numbers, and which draws which depends
on who comes first.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from xla_dtensor.base import thread_state

DEFAULT_SEED = 67280421310721  # torch's own default generator seed

_lock = threading.RLock()
_seed = DEFAULT_SEED
_counter = 0


def manual_seed(seed: int) -> None:
    """Start the stream of ``seed`` (any Python integer, taken modulo 2**64)."""
    global _seed, _counter
    traced = thread_state.random_numbers()
    if traced is not None:
        traced.refuse("a new seed")
    with _lock:
        _seed, _counter = int(seed) % 2**64, 0


def initial_seed() -> int:
    """The seed of the current stream."""
    return _seed


def words() -> np.ndarray:
    """The generator's state as four uint32 words (seed, counter), low word first."""
    seed, counter = position()
    return np.array(
        [seed & 0xFFFFFFFF, seed >> 32, counter & 0xFFFFFFFF, counter >> 32], dtype=np.uint32
    )


def take(operations: int = 1) -> np.ndarray:
    """The state for the next ``operations`` random operations, which no other thread gets."""
    global _counter
    with _lock:
        state = words()
        _counter += operations
    return state


def give_back(state: np.ndarray, operations: int = 1) -> None:
    """Undo a `take` of operations that have failed, unless somebody has drawn or set the state
    since: then these numbers are lost."""
    global _counter
    with _lock:
        counter = int(state[2]) | int(state[3]) << 32
        seed = int(state[0]) | int(state[1]) << 32
        if (_seed, _counter) == (seed, counter + operations):
            _counter = counter


def advance(operations: int = 1) -> None:
    """Count ``operations`` random operations."""
    global _counter
    traced = thread_state.random_numbers()
    if traced is not None:
        traced.advance(operations)
        return
    with _lock:
        _counter += operations


def position() -> tuple[int, int]:
    """The seed and the number of random operations so far: of the step that is traced in this
    thread, or of all."""
    traced = thread_state.random_numbers()
    if traced is not None:
        return traced.seed, traced.counter
    with _lock:
        return _seed, _counter


def key_of(state: Any, offset: int = 0) -> Any:
    """The JAX key of the random operation ``offset`` operations after ``state`` (see `words`)."""
    import jax
    import jax.numpy as jnp

    state = jnp.asarray(state, dtype=jnp.uint32)
    key = jax.random.wrap_key_data(state[:2], impl="threefry2x32")
    low = state[2] + jnp.uint32(offset)
    carry = (low < state[2]).astype(jnp.uint32)
    return jax.random.fold_in(jax.random.fold_in(key, low), state[3] + carry)


def get_state() -> torch.Tensor:
    """The state as a CPU uint8 tensor of 16 bytes."""
    with _disable_current_modes():  # torch saves and restores it under fake tensors, too
        return torch.from_numpy(words().view(np.uint8).copy())


def set_state(state: torch.Tensor) -> None:
    """Restore a state from `get_state`.

    Raises:
        ValueError: ``state`` isn't one.
    """
    global _seed, _counter
    if state.dtype is not torch.uint8 or state.numel() != 16:
        raise ValueError(
            f"an xla RNG state is a uint8 tensor of 16 elements (torch.xla.get_rng_state()), "
            f"got {state.dtype} with {state.numel()}"
        )
    with _disable_current_modes():
        w = state.detach().cpu().contiguous().numpy().view(np.uint32).astype(np.uint64)
    seed, counter = int(w[0] | (w[1] << np.uint64(32))), int(w[2] | (w[3] << np.uint64(32)))
    traced = thread_state.random_numbers()
    if traced is not None:
        if seed != traced.seed or not traced.start <= counter <= traced.latest:
            # Each call of the step has its own; only going back to one of them is possible.
            traced.refuse("set_rng_state() with a state from outside of the step")
        traced.counter = counter
        return
    with _lock:
        _seed, _counter = seed, counter
