"""``Tensor.is_set_to``: whether two tensors are one view of one memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x,
        lambda x: x.data,
        lambda x: x.detach(),
        lambda x: x[:],
        lambda x: x[0],
        lambda x: x[:1],
        lambda x: x.T,
        lambda x: x.view(3, 2),
        lambda x: x.clone(),
        lambda x: torch.ones(2, 3, device=x.device),
    ],
)
def test_as_on_the_cpu(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    right, found = torch.ones(2, 3), torch.ones(2, 3, device="xla")
    assert found.is_set_to(other(found)) is right.is_set_to(other(right))
    assert found[0].is_set_to(other(found)[0]) is right[0].is_set_to(other(right)[0])


def test_of_another_device() -> None:
    assert not torch.ones(2, device="xla").is_set_to(torch.ones(2))
