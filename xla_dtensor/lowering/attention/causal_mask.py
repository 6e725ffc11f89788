"""The causal mask of the splash attention kernel, for long sequences."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def causal_mask(shape: tuple[int, int]) -> Any:
    """JAX's ``CausalMask``, without comparing what a block's ends tell.

    Before the kernel is traced JAX asks for each block of the mask, and whether all or none of it
    is seen: 131072 positions are 65,536 blocks, of which 256 are on the diagonal. Compared element
    by element they took over a minute.

    Args:
        shape: the numbers of queries and of keys.
    """
    return _kind()(shape)


@functools.cache
def _kind() -> Any:
    # Pallas takes a second to import.
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import CausalMask

    class BlockwiseCausalMask(CausalMask):
        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            rows, columns = index
            shape = rows.stop - rows.start, columns.stop - columns.start
            if rows.start >= columns.stop - 1:
                return _filled(True, shape)
            if columns.start >= rows.stop:
                return _filled(False, shape)
            return super().__getitem__(index)

    return BlockwiseCausalMask


@functools.lru_cache(maxsize=8)
def _filled(value: bool, shape: tuple[int, int]) -> np.ndarray:
    return np.full(shape, value)
