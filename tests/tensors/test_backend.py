"""The one late binding: what the tensor classes call."""

from __future__ import annotations

import inspect

import pytest
import torch

from xla_dtensor.movement import backend as offered
from xla_dtensor.tensors import backend


def test_the_floor_above_offers_it_all():
    wanted = {name for name in vars(backend.Backend) if not name.startswith("_")}
    assert wanted == set(offered.__all__)
    for name in wanted:
        positional = list(inspect.signature(getattr(backend.Backend, name)).parameters)[1:]
        own = list(inspect.signature(getattr(offered, name)).parameters)
        assert len(own) >= len(positional), name


@pytest.mark.parametrize("name", sorted(offered.__all__))
def test_it_is_found_by_name(name: str) -> None:
    torch.ones(1, device="xla")  # loads it
    assert getattr(backend.backend(), name) is getattr(offered, name)
