"""The batches of several data-parallel ranks in one process, without torchtitan itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.ecosystem.torchtitan.data import AllRanks, RankLoaders, RankValues, build_loaders


class Loader:
    """A rank's dataloader, as torchtitan's."""

    def __init__(self, config: Any, dp_rank: int, dp_world_size: int) -> None:
        self.rank, self.count, self.at = dp_rank, dp_world_size, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 3:
            self.at += 1
            labels = torch.tensor([self.rank, self.at])
            yield {"input": labels * 10}, labels

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": self.at, "world_size": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state[f"dp_rank_{self.rank}"]


class Config:
    """The config that builds one."""

    _owner = Loader

    def build(self, **kwargs: Any) -> Any:
        return Loader(self, **kwargs)


@pytest.fixture
def mesh() -> Any:
    """Four ranks of two devices."""
    return make_mesh("4x2")["dp"]


def loaders(mesh: Any) -> RankLoaders:
    """The loaders of all ranks."""
    options = {"dp_rank": AllRanks(mesh), "dp_world_size": 4}
    return build_loaders(Config.build, (Config(),), options)


def of_ranks(tensor: Any) -> list[torch.Tensor]:
    """What the first of each rank's two devices has."""
    return tensor.local_values()[::2]


def test_each_rank_has_its_own(mesh: Any) -> None:
    """A batch is every rank's, and each device gets its rank's."""
    made = loaders(mesh)
    inputs, labels = next(iter(made))
    assert labels.numel() == 2 and labels.shape == (2,) and labels.dtype == torch.int64
    on_devices = labels.to(torch.device("xla", 0))
    assert on_devices.varying == ("dp",)
    assert [v.tolist() for v in of_ranks(on_devices)] == [[r, 1] for r in range(4)]
    assert of_ranks(inputs["input"].to("xla"))[3].tolist() == [30, 10]
    assert build_loaders(Config.build, (Config(),), {"dp_rank": 2, "dp_world_size": 4}).rank == 2


def test_counting_on_the_host(mesh: Any) -> None:
    """As the trainer counts the labels that aren't ignored."""
    values = [torch.tensor([1, -100]), *[torch.tensor([1, 2])] * 3]
    labels: Any = RankValues.of(values, mesh)
    total: Any = torch.tensor(0, dtype=torch.int64)
    for _ in range(2):
        total += (labels != -100).sum()
    assert [v.item() for v in total.values] == [2, 4, 4, 4]
    assert int(total) == 14
    ratio = torch.ones((), device="xla") * 8 / total
    assert [v.item() for v in of_ranks(ratio)] == [4, 2, 2, 2]
    loss = xd.distribute_tensor(torch.tensor(8.0), mesh, [xd.Replicate()])  # as full_dtensor's
    assert [v.item() for v in of_ranks(loss / total)] == [4, 2, 2, 2]
    assert [v.item() for v in of_ranks(total.to("xla"))] == [2, 4, 4, 4]
    with pytest.raises(xd.PerDeviceValueError, match="has to be a tensor"):
        total.item()
    with pytest.raises(xd.PerDeviceValueError, match="has to be a tensor"):
        bool(total > 2)
    view = torch.zeros(2)[0]
    with pytest.raises(xd.PerDeviceValueError, match="view"):
        view += total


def test_going_on(mesh: Any) -> None:
    """The state has each rank's, and each takes its own."""
    made = loaders(mesh)
    next(iter(made))
    again = loaders(mesh)
    again.load_state_dict(made.state_dict())
    assert [labels.values[2].tolist() for _, labels in again] == [[2, 2], [2, 3]]


def test_ranks_that_differ(mesh: Any) -> None:
    """One program computes all: shapes that differ are refused, and so are other values."""
    from xla_dtensor.ecosystem.torchtitan.data import together

    with pytest.raises(xd.UnsupportedOpError, match=r"shapes \[\[2\], \[3\]\]"):
        together([torch.zeros(2), torch.zeros(3)], mesh)
    with pytest.raises(xd.UnsupportedOpError, match="structure"):
        together([{"a": 1}, {"b": 1}], mesh)
    with pytest.raises(xd.PerDeviceValueError, match=r"have \[1, 2\]"):
        together([1, 2], mesh)
    assert together(["c4", "c4"], mesh) == "c4"
