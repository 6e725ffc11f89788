"""The random number generator of the "xla" device.

One stream for all devices of the process, and one for each ``torch.Generator(device="xla")``: a
seed and a counter of random operations. The key of an operation is a function of both, and XLA's
partitionable threefry makes each number a function of the key and its logical position, so neither
the mesh nor the placements change the numbers. Threads share a stream: no two of their operations
draw the same numbers, and which draws which depends on who comes first.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from xla_dtensor.base import executor
from xla_dtensor.base.random import threefry
from xla_dtensor.base.torch_private import disable_current_modes

DEFAULT_SEED = 67280421310721  # torch's own default generator seed


class RandomStream:
    """A stream of random numbers: a seed, and a count of the operations that drew from it.

    Args:
        seed: which stream, any Python integer, taken modulo 2**64.
    """

    def __init__(self, seed: int = DEFAULT_SEED) -> None:
        self._lock = threading.RLock()
        self._seed, self._counter = int(seed) % 2**64, 0

    @property
    def seed(self) -> int:
        """The seed, not negative."""
        return self._seed

    def restart(self, seed: int, counter: int = 0) -> None:
        """Go to the place after ``counter`` operations of the stream of ``seed``."""
        with self._lock:
            self._seed, self._counter = int(seed) % 2**64, counter

    def position(self) -> tuple[int, int]:
        """The seed and the number of random operations so far."""
        with self._lock:
            return self._seed, self._counter

    def advance(self, operations: int) -> None:
        """Count ``operations`` random operations."""
        with self._lock:
            self._counter += operations

    def take(self, operations: int = 1) -> np.ndarray:
        """The state for the next ``operations`` random operations, which no other thread gets."""
        with self._lock:
            state = words_at(self._seed, self._counter)
            self._counter += operations
        return state

    def give_back(self, state: np.ndarray, operations: int = 1) -> None:
        """Undo a `take` of operations that have failed, unless somebody has drawn or set the state
        since: then these numbers are lost."""
        with self._lock:
            seed, counter = _position(state)
            if (self._seed, self._counter) == (seed, counter + operations):
                self._counter = counter


default = RandomStream()
"""What operations draw from that are given no ``generator=``."""


def manual_seed(seed: int) -> None:
    """Start the default stream of ``seed`` (any Python integer, taken modulo 2**64)."""
    traced = executor.current().random
    if traced is not None:
        traced.refuse("a new seed")
    default.restart(seed)


def fresh_seed() -> int:
    """A seed that nobody knows yet; of several processes, the same in all."""
    return _source_of_seeds()


def _own_seed() -> int:
    return secrets.randbits(53)


_source_of_seeds: Callable[[], int] = _own_seed


def share_seeds(share: Callable[[Callable[[], int]], int]) -> None:
    """Let several processes have the same fresh seeds: ``share(make)`` gives what one of them has
    made."""
    global _source_of_seeds
    _source_of_seeds = lambda: share(_own_seed)


def initial_seed() -> int:
    """The seed of the default stream."""
    return default.seed


def words() -> np.ndarray:
    """The default stream's state as four uint32 words (seed, counter), low word first."""
    return words_at(*position())


def advance(operations: int = 1) -> None:
    """Count ``operations`` random operations."""
    traced = executor.current().random
    if traced is not None:
        traced.advance(operations)
        return
    default.advance(operations)


def position() -> tuple[int, int]:
    """The seed and the number of random operations so far: of the step that is traced in this
    thread, or of all."""
    traced = executor.current().random
    if traced is not None:
        return traced.seed, traced.counter
    return default.position()


def words_at(seed: int, counter: int) -> np.ndarray:
    """A place in a stream as four uint32 words (seed, counter), low word first."""
    return np.array(
        [seed & 0xFFFFFFFF, seed >> 32, counter & 0xFFFFFFFF, counter >> 32], dtype=np.uint32
    )


def _position(state: Any) -> tuple[int, int]:
    w = [int(word) for word in state[:4]]
    return w[0] | w[1] << 32, w[2] | w[3] << 32


def operations_between(first: np.ndarray, second: np.ndarray) -> int | None:
    """How many operations of one stream are between two states; None if they aren't of one, or
    the second comes before the first."""
    (seed, start), (other, end) = _position(first), _position(second)
    return end - start if seed == other and 0 <= end - start < 2**32 else None


def keyed(state: np.ndarray, operations: int = 0) -> np.ndarray:
    """The state of the same stream so many operations later, and two words more: the key of the
    operation there (`key_of`). A program that computes it takes 50 ms longer to compile."""
    seed, counter = _position(state)
    seeded = threefry.folded((seed & 0xFFFFFFFF, seed >> 32), (counter + operations) & 0xFFFFFFFF)
    key = threefry.folded(seeded, counter + operations >> 32)
    return np.array([*words_at(seed, counter + operations), *key], np.uint32)


def tensor_of_state(state: np.ndarray) -> torch.Tensor:
    """Words as a CPU uint8 tensor of 16 bytes."""
    with disable_current_modes():  # torch saves and restores it under fake tensors, too
        return torch.from_numpy(state.view(np.uint8).copy())


def position_in(state: torch.Tensor) -> tuple[int, int]:
    """The seed and count that `tensor_of_state` has put into a tensor.

    Raises:
        ValueError: ``state`` isn't one.
    """
    if state.dtype is not torch.uint8 or state.numel() != 16:
        raise ValueError(
            f"an xla RNG state is a uint8 tensor of 16 elements (torch.xla.get_rng_state()), "
            f"got {state.dtype} with {state.numel()}"
        )
    with disable_current_modes():
        return _position(state.detach().cpu().contiguous().numpy().view(np.uint32))


def key_of(state: Any, offset: Any = 0) -> Any:
    """The JAX key of a random operation.

    Args:
        state: see `words`; with or without the key of the operation there (`keyed`).
        offset: how many operations come between.

    Raises:
        RandomNumbersError: the platform isn't known to compute them right, and doesn't.
    """
    import jax
    import jax.numpy as jnp

    threefry.check_platform()
    state = jnp.asarray(state, dtype=jnp.uint32)
    if offset.__class__ is int and not offset and len(state) == 6:
        return jax.random.wrap_key_data(state[4:], impl="threefry2x32")
    key = jax.random.wrap_key_data(state[:2], impl="threefry2x32")
    low = state[2] + jnp.uint32(offset)
    carry = (low < state[2]).astype(jnp.uint32)
    return jax.random.fold_in(jax.random.fold_in(key, low), state[3] + carry)


def get_state() -> torch.Tensor:
    """The default stream's state as a CPU uint8 tensor of 16 bytes."""
    return tensor_of_state(words())


def set_state(state: torch.Tensor) -> None:
    """Restore a state from `get_state`.

    Raises:
        ValueError: ``state`` isn't one.
    """
    seed, counter = position_in(state)
    traced = executor.current().random
    if traced is not None:
        if seed != traced.seed or not traced.start <= counter <= traced.latest:
            # Each call of the step has its own; only going back to one of them is possible.
            traced.refuse("set_rng_state() with a state from outside of the step")
        traced.counter = counter
        return
    default.restart(seed, counter)
