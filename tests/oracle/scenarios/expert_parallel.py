"""Expert parallelism on local tensors: each device has its own expert, tokens go there and back by
even all-to-alls; the router is replicated."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4

TOKENS, DIM, HIDDEN = 8, 4, 6


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((4,), ("ep",))
    x = oracle.local("x", (TOKENS, DIM), ("ep",), requires_grad=True)
    router = oracle.local("router", (DIM, 4), requires_grad=True)
    up = oracle.local("up", (DIM, HIDDEN), ("ep",), requires_grad=True)
    down = oracle.local("down", (HIDDEN, DIM), ("ep",), requires_grad=True)

    # Expert choice: each expert takes its two best tokens, so the splits are even.
    gates = (x @ router).softmax(-1)
    best = gates.topk(2, dim=0)
    chosen = best.indices.t().reshape(-1)
    oracle.dump("chosen", chosen)
    sent = x[chosen]
    received = funcol.all_to_all_single_autograd(sent, None, None, mesh)
    oracle.dump("received", received)
    hidden = torch.relu(received @ up) @ down
    returned = funcol.all_to_all_single_autograd(hidden, None, None, mesh)
    oracle.dump("returned", returned)
    y = torch.zeros_like(x).index_add(0, chosen, returned * best.values.t().reshape(-1, 1))
    oracle.dump("y", y)
    (y - x).square().mean().backward()
    for name, leaf in (("x", x), ("router", router), ("up", up), ("down", down)):
        oracle.dump_grad(f"grad.{name}", leaf)
    oracle.dump("grad.router.reduced", funcol.all_reduce(router.grad, "sum", mesh))
