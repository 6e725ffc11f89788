"""Checkpoints under torch's fake process group, which pretends to be one of several ranks: this
process has all shards, and writes and reads them all."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.conftest import make_mesh

VALUES = {"even": torch.arange(128.0).reshape(16, 8).sin(), "uneven": torch.arange(30.0).cos()}
LAYOUTS: dict[str, Any] = {"even": [Shard(0), Shard(1)], "uneven": [Replicate(), Shard(0)]}


@pytest.fixture(params=[0, 3], ids=["first", "fourth"])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", rank=request.param, world_size=8, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def state(made: Any) -> dict[str, Any]:
    mesh = make_mesh("2x4")
    tensors = {k: distribute_tensor(made(v), mesh, LAYOUTS[k]) for k, v in VALUES.items()}
    return tensors | {"plain": made(torch.ones(3)), "step": 7}


def check(folder: Path) -> None:
    found = state(torch.zeros_like)
    found["step"] = 0
    dcp.load(found, checkpoint_id=folder)
    for name, value in (VALUES | {"plain": torch.ones(3)}).items():
        assert torch.equal(found[name].cpu(), value), name
    assert found["step"] == 7


@pytest.mark.parametrize("later", [False, True], ids=["save", "async_save"])
def test_all_shards_are_written(rank: int, later: bool, tmp_path: Path) -> None:
    if later:
        dcp.async_save(state(torch.clone), checkpoint_id=tmp_path).result()
    else:
        dcp.save(state(torch.clone), checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert len(metadata.state_dict_metadata["even"].chunks) == 8
    check(tmp_path)


def test_a_group_that_is_given(rank: int, tmp_path: Path) -> None:
    group = dist.new_group(list(range(8)), backend="fake")
    dcp.save(state(torch.clone), checkpoint_id=tmp_path, process_group=group)
    check(tmp_path)


def test_read_without_it(tmp_path: Path) -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        dcp.save(state(torch.clone), checkpoint_id=tmp_path)
    finally:
        dist.destroy_process_group()
    with pytest.warns(UserWarning, match="torch.distributed is"):
        check(tmp_path)
