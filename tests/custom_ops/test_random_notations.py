"""Random notations on random meshes: a `DFunction` with that rule gives what one device would.

The rules alone, without XLA, are tested on more cases in `tests/rules/test_properties.py`.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from tests.conftest import make_mesh
from xla_dtensor import DFunction, DistributedOp

FAST, ALL = 12, 500
MESHES = ("8", "2x4", "4x2", "2x2x2")
LETTERS = "abcd"
SIZE = 8  # every mesh dim, and all of them together, divide it


class Einsum(DFunction):
    """The product of the tensors, of which the letters say how; ``backward`` is autograd's."""

    _op_name = "random.Einsum"

    @staticmethod
    def forward(ctx, equation, *tensors):
        ctx.equation = equation
        ctx.save_for_backward(*tensors)
        return torch.einsum(equation, *tensors)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            own = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            out = torch.einsum(ctx.equation, *own)
        return None, *torch.autograd.grad(out, own, grad)


class GlobalEinsum(Einsum):
    view = "global"


def draw(rng: random.Random) -> tuple[list[str], str, set[str]]:
    """Terms of one to three inputs, the result's, and the letters that may not be sharded."""
    terms = [
        "".join(rng.sample(LETTERS, rng.randint(1, 3))) for _ in range(rng.choice((1, 2, 2, 2, 3)))
    ]
    used = sorted(set("".join(terms)))
    out = rng.sample(used, rng.randint(0, min(3, len(used))))
    return terms, "".join(out), {x for x in used if rng.random() < 0.2}


def place(rng: random.Random, mesh, ndim: int) -> list[Placement]:
    options = [Replicate(), *(Shard(d) for d in range(ndim))]
    return [rng.choice(options) for _ in range(mesh.ndim)]


def check(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    mesh = make_mesh(rng.choice(MESHES))
    terms, out, whole = draw(rng)

    def spaced(term: str) -> str:
        return " ".join(x + "!" * (x in whole) for x in term)

    rule = ", ".join(map(spaced, terms)) + " -> " + spaced(out)
    DistributedOp("random.Einsum", rule=rule, override=True)
    equation = ",".join(terms) + "->" + out
    tensors = [
        torch.randn((SIZE,) * len(t), dtype=torch.float64, requires_grad=True) for t in terms
    ]
    layouts = [place(rng, mesh, t.ndim) for t in tensors]
    dist = [
        distribute_tensor(t.detach(), mesh, p).requires_grad_()
        for t, p in zip(tensors, layouts, strict=True)
    ]
    want = torch.einsum(equation, *tensors)
    weight = torch.randn_like(want)
    gradients = torch.autograd.grad((want * weight).sum(), tensors)
    function = GlobalEinsum if rng.random() < 0.25 else Einsum
    got = function.apply(equation, *dist)
    about = f"seed {seed}: {rule} of {layouts} on {mesh}"
    for p in got.placements:
        # A letter that may not be sharded isn't, and a reduced one makes a sum.
        assert not (isinstance(p, Shard) and out[p.dim] in whole), about
        assert not isinstance(p, Partial) or set("".join(terms)) - set(out) - whole, about
    found = torch.autograd.grad((got * weight.to("xla")).sum(), dist)
    for g, e in zip((got, *found), (want, *gradients), strict=True):
        torch.testing.assert_close(
            g.full_tensor().detach().cpu(), e.detach(), msg=lambda m: f"{about}: {m}"
        )


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(FAST))
def test_random_notation(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(FAST, ALL, 40))
def test_more_random_notations(block: int) -> None:
    for seed in range(block, min(block + 40, ALL)):
        check(seed)
