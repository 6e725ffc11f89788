"""Sparse tensors, whose places differ by rank."""

from __future__ import annotations

import torch
from torch import nn

import xla_dtensor.horovod as hvd
from tests.horovod.ranks import APART, case, check, given, raises, same, sets


def places(rank):
    return torch.tensor([[rank, rank + 1, 7]])


def one(rank):
    return torch.sparse_coo_tensor(
        places(rank), torch.ones(3) * (rank + 1), (12,), check_invariants=True
    )


@case("R", fast=True)
def async_sparse_allreduce():
    whole = torch.stack([one(r).to_dense() for r in range(hvd.size())])
    tensor = hvd.per_rank(one)
    for op, expected in ((hvd.Sum, whole.sum(0)), (hvd.Average, whole.mean(0))):
        handles = [hvd.sparse_allreduce_async(tensor, name=f"s{i}", op=op) for i in range(3)]
        for handle in handles:
            got = hvd.synchronize(handle)
            assert got.is_sparse
            check(got.to_dense(), same(expected), rtol=1e-6)
    raises(NotImplementedError, lambda: hvd.sparse_allreduce_async(tensor, op=hvd.Max), "sparse")


@case("P")
def async_sparse_allreduce_process_sets():
    pair = sets()
    for members in (pair.even, pair.odd):
        if members.included():
            handle = hvd.sparse_allreduce_async(
                hvd.per_rank(one), name="s", op=hvd.Sum, process_set=members
            )
            expected = torch.stack([one(r).to_dense() for r in members.ranks]).sum(0)
            check(handle().to_dense(), same(expected), ranks=members.ranks)
    pair.remove()


def embedding(sparse_as_dense):
    """A step of an embedding whose gradient is sparse; each rank looks other rows up."""
    torch.manual_seed(3)
    model = nn.Embedding(10, 2, sparse=True)
    start = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        sparse_as_dense=sparse_as_dense,
    )
    model(torch.tensor([hvd.rank(), 5])).sum().backward()
    assert model.weight.grad.is_sparse
    optimizer.step()
    gradient = torch.zeros(10, 2)
    for rank in range(hvd.size()):
        for row in (rank, 5):
            gradient[row] += 1
    check(model.weight, same(start - gradient / hvd.size()), rtol=1e-6)


@case("R", APART)
def sparse_embeddings():
    for sparse_as_dense in (False, True):
        embedding(sparse_as_dense)


@case("X")
def sparse_tensors_are_the_hosts():
    raises((NotImplementedError, RuntimeError), lambda: given([4]).to("xla").to_sparse(), "sparse")
