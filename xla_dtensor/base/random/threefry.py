"""Whether a backend computes Threefry right, the function that every random number is made by.

A backend of which nobody knows may lack some of its steps, and wrong random numbers look like right
ones. So on such a backend the first random operation of a process asks for known answers, once.
"""

from __future__ import annotations

from collections.abc import Callable

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


def threefry(key: tuple[int, int], counters: np.ndarray) -> np.ndarray:
    """Threefry-2x32 with 20 rounds by numpy.

    Args:
        key: two words.
        counters: uint32, of the shape ``[2, n]``.

    Returns:
        the results, likewise.
    """
    keys = np.array([*key, key[0] ^ key[1] ^ _PARITY], np.uint32)
    x, y = counters[0] + keys[0], counters[1] + keys[1]
    for block in range(5):
        for turn in map(np.uint32, _ROTATIONS[block % 2]):
            x = x + y
            y = x ^ (y << turn | y >> (np.uint32(32) - turn))
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + np.uint32(block + 1)
    return np.stack([x, y])


def folded(key: tuple[int, int], number: int) -> tuple[int, int]:
    """What ``jax.random.fold_in`` makes of a key and 32 bits, in Python's integers: 3 us, where
    numpy takes a hundred."""
    mask = 0xFFFFFFFF
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = key[0], (number + key[1]) & mask
    for block in range(5):
        for turn in _ROTATIONS[block % 2]:
            x = (x + y) & mask
            y = x ^ ((y << turn | y >> (32 - turn)) & mask)
        x = (x + keys[(block + 1) % 3]) & mask
        y = (y + keys[(block + 2) % 3] + block + 1) & mask
    return x, y


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
