"""Adasum, against its formula in float64 (Maleki et al., 2020, arXiv:2006.02924)."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import xla_dtensor.horovod as hvd
from tests.horovod.ranks import APART, alone, case, check, data, given, raises, same


def pair(a, b):
    dot, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    of_a = 1 - dot / (2 * aa) if aa else 1.0
    of_b = 1 - dot / (2 * bb) if bb else 1.0
    return of_a * a + of_b * b


def reference(vectors):
    """Neighbours first, then pairs of pairs."""
    vectors = [np.asarray(v, np.float64) for v in vectors]
    while len(vectors) > 1:
        vectors = [pair(*vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
    return torch.from_numpy(vectors[0])


def agrees(made, dtype, rtol):
    vectors = [made(rank).to(dtype) for rank in range(hvd.size())]
    expected = reference([v.double().numpy() for v in vectors]).to(dtype)
    got = hvd.allreduce(hvd.per_rank(lambda rank: made(rank).to(dtype)), op=hvd.Adasum)
    scale = float(expected.abs().max()) or 1.0
    check(got, same(expected), rtol=rtol, atol=rtol * scale)
    return expected


def random(rank, shape=(13, 3)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@case("A", fast=True)
def adasum_of_any():
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 2e-3)):
        agrees(random, dtype, rtol)


@case("A")
def orthogonal():
    """They add up."""

    def one(rank):
        vector = torch.zeros(hvd.size() + 2)
        vector[rank] = rank + 1.0
        return vector

    expected = agrees(one, torch.float32, 1e-6)
    assert expected.tolist() == [*map(float, range(1, hvd.size() + 1)), 0, 0]


@case("A")
def parallel():
    """Equal ones give themselves."""
    expected = agrees(lambda rank: random(7), torch.float64, 1e-12)
    torch.testing.assert_close(expected, random(7))


@case("A")
def stability():
    """Of very small and very large ones, and of zeros."""
    for factor in (1e-25, 1e15):
        agrees(lambda rank, f=factor: random(rank) * f, torch.float32, 1e-5)
    agrees(lambda rank: random(rank) * (rank % 2), torch.float32, 1e-6)
    agrees(lambda rank: torch.zeros(4), torch.float32, 1e-6)


@case("A")
def stability_2():
    """Of parts that differ much in size from rank to rank."""
    agrees(lambda rank: random(rank) * 10.0 ** (-3 * rank), torch.float32, 1e-6)


@case("G")
def delta_optimizer():
    """Each rank steps by its own gradient, and Adasum combines what changes."""
    torch.manual_seed(3)
    model = nn.Linear(3, 2, bias=False)
    start = model.weight.detach().clone()
    if alone():
        model = model.to("xla")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        op=hvd.Adasum,
    )
    moments = [torch.zeros(2, 3) for _ in range(hvd.size())]
    for _ in range(2):
        optimizer.zero_grad()
        model(given([4, 3])).sum().backward()
        optimizer.step()
        changes = []
        for rank in range(hvd.size()):
            gradient = data(rank, [4, 3]).sum(0).expand(2, 3)
            moments[rank] = 0.9 * moments[rank] + gradient
            changes.append((-0.1 * moments[rank]).double().numpy())
        start = start + reference(changes).float()
        check(model.weight, same(start), rtol=1e-4, atol=1e-5)
    raises(AssertionError, optimizer.skip_synchronize, "Adasum")
    model(given([4, 3])).sum().backward()
    raises(AssertionError, optimizer.zero_grad, "zero_grad")


@case("E1", APART)
def adasum_of_three():
    if hvd.size() < 3:
        return
    three = hvd.add_process_set([0, 1, 2])
    if three.included():
        raises(
            hvd.HorovodInternalError,
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=three),
            "power of two",
        )
    hvd.remove_process_set(three)
