"""What tests of dispatch share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import xla_dtensor as xd
from xla_dtensor.lowering.partitioned import per_slice
from xla_dtensor.lowering.workarounds import Feature
from xla_dtensor.plans import shard_map_call


@pytest.fixture
def not_partitionable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As for a TPU: the compiler can't call functions on shards, so `Kind.SLICED` is cut."""
    for module in (shard_map_call, per_slice):
        monkeypatch.setattr(module, "CALLS_PER_SHARD", Feature("as for a TPU", ("none",)))
    xd.debug.clear_caches("plans")
    yield
    xd.debug.clear_caches("plans")
