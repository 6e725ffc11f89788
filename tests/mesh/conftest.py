"""torch's own meshes as the truth: CPU meshes over a fake process group of eight ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def fake_process_group() -> Iterator[None]:
    """Rank 0 of eight: what torch shows there is what an xla mesh shows (coordinate 0)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()
