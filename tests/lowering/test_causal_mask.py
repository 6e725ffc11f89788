"""The blocks of splash attention's causal mask, next to NumPy's triangle."""

from __future__ import annotations

import numpy as np
import pytest

from xla_dtensor.lowering.attention.causal_mask import causal_mask


@pytest.mark.parametrize("shape", [(12, 12), (8, 12), (12, 8)])
@pytest.mark.parametrize("block", [(4, 4), (2, 4), (4, 2), (1, 1)])
def test_blocks_are_the_triangles(shape: tuple[int, int], block: tuple[int, int]) -> None:
    mask, whole = causal_mask(shape), np.tri(*shape, dtype=bool)
    for i in range(0, shape[0], block[0]):
        for j in range(0, shape[1], block[1]):
            part = slice(i, i + block[0]), slice(j, j + block[1])
            np.testing.assert_array_equal(mask[part], whole[part])


def test_only_the_diagonal_is_compared() -> None:
    """JAX asks for each block several times: of long sequences that took a minute."""
    mask, compared = causal_mask((64, 64)), []
    own = mask.mask_function
    mask.mask_function = lambda rows, columns: compared.append(rows) or own(rows, columns)
    for i in range(0, 64, 8):
        for j in range(0, 64, 8):
            mask[i : i + 8, j : j + 8]
    assert len(compared) == 8
