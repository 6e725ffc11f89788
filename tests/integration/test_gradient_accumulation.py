"""A leaf that is used first by what all devices share, then by what differs, or the other way."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh

COMPILED = pytest.mark.parametrize("compiled", ["eager", "one_step", "steps"])


@pytest.mark.one_in(3)
@COMPILED
@pytest.mark.parametrize("order", list(itertools.permutations(["shared", "dp", "tp"])))
def test_plain_leaf(order: tuple[str, ...], compiled: str) -> None:
    """The leaf has met no mesh; its gradients vary along no dim, along one, along the other."""
    mesh = make_mesh("2x4")
    leaf = torch.ones(3, device="xla", requires_grad=True)
    factors = {
        "shared": torch.tensor(2.0, device="xla"),
        "dp": xd.collectives.axis_index(mesh, "dp").float(),
        "tp": 10 * xd.collectives.axis_index(mesh, "tp").float(),
    }

    def use(name: str) -> Callable[[], None]:
        return lambda: (leaf * factors[name]).sum().backward()

    parts = tuple(map(use, order))

    def step() -> None:
        for part in parts:
            part()

    uses = [xd.compile(step)] if compiled == "one_step" else list(parts)
    if compiled == "steps":
        uses = list(map(xd.compile, parts))
    for times in (1, 2):
        for one in uses:
            one()
        assert leaf.grad is not None and leaf.grad.varying == ("dp", "tp")
        found = leaf.grad.local_values()
        for device in range(8):
            expected = times * (2.0 + device // 4 + 10 * (device % 4))
            torch.testing.assert_close(found[device], torch.full((3,), expected))


@pytest.mark.parametrize("first", ["shared", "varying"])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_sharded_leaf(first: str, placement: Shard | Replicate) -> None:
    """On a submesh: its gradient differs between the other submeshes."""
    mesh = make_mesh("2x4")
    leaf = distribute_tensor(torch.ones(8), mesh["tp"], [placement]).requires_grad_()
    own = xd.collectives.axis_index(mesh, "dp").float()
    uses = [lambda: (leaf * 2).sum().backward(), lambda: (leaf * own).sum().backward()]
    for use in uses if first == "shared" else uses[::-1]:
        use()
    assert leaf.grad is not None and leaf.grad.placements == (placement,)
    values = leaf.grad.to_local().local_values()
    for device in range(8):
        assert (values[device] == 2 + device // 4).all()
