"""Objects."""

from __future__ import annotations

import torch

import xla_dtensor.horovod as hvd
from tests.horovod.ranks import alone, case, raises, sets


def own(rank):
    return {"rank": rank, "text": "x" * (10 * rank), "tensor": torch.full((rank,), 1.5)}


def mine():
    return hvd.per_rank(own)


def equal(found, expected):
    assert found["rank"] == expected["rank"] and found["text"] == expected["text"]
    assert torch.equal(found["tensor"], expected["tensor"])


@case("O", fast=True)
def broadcast_object():
    for root in range(hvd.size()):
        equal(hvd.broadcast_object(mine(), root_rank=root), own(root))
    raises(hvd.HorovodInternalError, lambda: hvd.broadcast_object(1, hvd.size()), "root rank")


@case("P")
def broadcast_object_process_sets():
    pair = sets()
    for members in (pair.even, pair.odd):
        if alone() or members.included():
            root = members.ranks[-1]
            equal(hvd.broadcast_object(mine(), root, process_set=members), own(root))
    pair.remove()


@case("O", fast=True)
def allgather_object():
    found = hvd.allgather_object(mine())
    assert len(found) == hvd.size()
    for rank, each in enumerate(found):
        equal(each, own(rank))
    same = hvd.allgather_object("all the same")
    assert same == ["all the same"] * hvd.size()
    assert isinstance(mine(), hvd.PerRank) == alone()
