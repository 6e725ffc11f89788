"""Checks that a backend computes Threefry, the function behind JAX's random numbers, correctly.

A backend of which nobody knows may lack some of its steps, and wrong random numbers look like right
ones. So on such a backend the first random operation of a process asks for known answers, once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xla_dtensor.errors import RandomNumbersError

KNOWN_RIGHT = frozenset({"cpu", "gpu", "cuda", "rocm", "tpu"})
"""JAX's names of the platforms on which JAX's own tests have found it right."""

# Random123's known answers for Threefry-2x32 with 20 rounds: key, counter, result.
VECTORS = (
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
)

# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", table 2 and section 4.2.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

_SHAPE = 3, 40  # of the random bits that are compared


def _mixed(key: Any, x: Any, y: Any, word: Callable[[Any], Any] = lambda value: value) -> Any:
    """Threefry-2x32 with 20 rounds.

    Args:
        key: two words.
        x, y: the counters. All are uint32, or integers.
        word: the lower 32 bits of an integer.
    """
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = word(x + keys[0]), word(y + keys[1])
    for block in range(5):
        for turn in _ROTATIONS[block % 2]:
            x = word(x + y)
            y = x ^ word(y << turn | y >> 32 - turn)
        x = word(x + keys[(block + 1) % 3])
        y = word(y + keys[(block + 2) % 3] + (block + 1))
    return x, y


def threefry(key: tuple[int, int], counters: np.ndarray) -> np.ndarray:
    """Threefry-2x32 with 20 rounds by numpy.

    Args:
        key: two words.
        counters: uint32, of the shape ``[2, n]``.

    Returns:
        the results, likewise.
    """
    return np.stack(_mixed(np.array(key, np.uint32).reshape(2, 1), *counters))


def folded(key: tuple[int, int], number: int) -> tuple[int, int]:
    """What ``jax.random.fold_in`` makes of a key and 32 bits, in Python's integers: 4 us, where
    numpy takes a hundred."""
    x, y = _mixed(key, 0, number, lambda value: value & 0xFFFFFFFF)
    return x, y


@functools.cache
def written_out() -> Any:
    """JAX's generator, with the same numbers, as operations on elements: an ``impl=`` of
    ``jax.random``. For CPUs JAX has it as a loop over arrays, which takes XLA three times as long
    to compile, and eleven times as long to run."""
    import jax.numpy as jnp
    from jax import lax
    from jax.extend.random import define_prng_impl, threefry_prng_impl

    def of_positions(key: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
        wide = np.uint64 if math.prod(shape) > 2**32 else np.uint32
        steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        iotas = [lax.broadcasted_iota(wide, shape, dim) for dim in range(len(shape))]
        position = sum(
            (i * wide(n) for i, n in zip(iotas, steps, strict=True)), jnp.zeros(shape, wide)
        )
        high = (position >> wide(32)).astype(np.uint32) if wide is np.uint64 else np.uint32(0)
        x, y = _mixed(key, high, position.astype(np.uint32))
        return x, y

    def random_bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
        # XLA would compute the hundred operations again in each loop that uses the numbers.
        x, y = lax.optimization_barrier(of_positions(key, shape))
        if width == 64:
            return x.astype(np.uint64) << np.uint64(32) | y.astype(np.uint64)
        return (x ^ y).astype(f"uint{width}")

    return define_prng_impl(
        key_shape=(2,),
        seed=threefry_prng_impl.seed,
        split=lambda key, shape: jnp.stack(of_positions(key, shape), -1),
        random_bits=random_bits,
        fold_in=lambda key, data: jnp.stack(_mixed(key, np.uint32(0), data.astype(np.uint32))),
        name="threefry2x32, written out",
        tag="fry'",
    )


def bits(key: tuple[int, int], count: int) -> np.ndarray:
    """``count`` words of random bits by numpy, as JAX's partitionable generator makes them: each
    from its own position.

    Args:
        key: two words.
        count: fewer than 2**32.
    """
    positions = np.stack([np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32)])
    x, y = threefry(key, positions)
    return x ^ y


def known_answers() -> tuple[np.ndarray, np.ndarray]:
    """What the default device makes of `VECTORS` and as random bits, and what is right."""
    import jax
    import jax.numpy as jnp
    from jax.extend.random import threefry_2x32

    def program(keys: jax.Array, counters: jax.Array) -> jax.Array:
        found = [threefry_2x32(key, counter) for key, counter in zip(keys, counters, strict=True)]
        key = jax.random.wrap_key_data(keys[-1], impl="threefry2x32")
        return jnp.concatenate([*found, jax.random.bits(key, _SHAPE, "uint32").ravel()])

    keys, counters, results = (np.array(words, np.uint32) for words in zip(*VECTORS, strict=True))
    with jax.threefry_partitionable(True):
        compiled = jax.jit(program).lower(keys, counters).compile()
    got = np.asarray(compiled(keys, counters))  # runs now, whatever step is being traced
    right = bits(VECTORS[-1][0], int(np.prod(_SHAPE)))
    return got, np.concatenate([results.ravel(), right])


def platform() -> str:
    """JAX's name of the platform that random numbers are made on."""
    import jax

    return jax.default_backend()


_checked: set[str] = set()


def check_platform() -> None:
    """Raise if this process's platform computes Threefry wrong. Asked where programs with random
    numbers are traced, so a call of one that is compiled pays nothing.

    Raises:
        RandomNumbersError: it does.
    """
    name = platform()
    if name not in KNOWN_RIGHT and name not in _checked:
        check(name, known_answers)
        _checked.add(name)


def check(name: str, compute: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
    """Raise if a platform computes Threefry wrong.

    Args:
        name: JAX's name of the platform.
        compute: gives what it computes, and what is right (`known_answers`).

    Raises:
        RandomNumbersError: they differ, or ``compute`` raises.

    Example::

        import numpy as np
        from xla_dtensor.base.random import threefry

        threefry.check("npu", lambda: (np.ones(2), np.ones(2)))
    """
    cause: Exception | None = None
    try:
        got, right = compute()
    except Exception as error:  # whatever a backend raises that can't compile it
        cause = error
        first = (str(error).splitlines() or [""])[0]
        what = f"the program that tries it fails ({type(error).__name__}: {first})"
    else:
        wrong = np.flatnonzero(got != right)
        if not wrong.size:
            return
        at = wrong[0]
        what = (
            f"{wrong.size} of {right.size} known answers are wrong, the first {int(got[at]):#010x} "
            f"in place of {int(right[at]):#010x}"
        )
    raise RandomNumbersError(
        f"random numbers on the platform {name!r}: it doesn't compute Threefry, which they are "
        f"made by: {what}. Make them on the CPU and distribute them, "
        'distribute_tensor(torch.rand(..., device="cpu"), mesh, placements), and set dropout to 0, '
        "which isn't available here. python -m xla_dtensor.debug.device says what else this "
        "platform can't do"
    ) from cause
