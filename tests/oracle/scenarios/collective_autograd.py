"""Gradients of the collectives; each device's loss is its own."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("a", "b"))
    for key, group in (("a", (mesh, 0)), ("b", mesh["b"]), ("both", mesh._flatten("ab"))):
        cases = {
            "sum": lambda x, g: funcol.all_reduce(x, "sum", g),
            "gather0": lambda x, g: funcol.all_gather_tensor_autograd(x, 0, g),
            "gather1": lambda x, g: funcol.all_gather_tensor_autograd(x, 1, g),
            "scatter0": lambda x, g: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, g),
            "scatter1": lambda x, g: funcol.reduce_scatter_tensor_autograd(x, "sum", 1, g),
            "exchange": lambda x, g: funcol.all_to_all_single_autograd(x, None, None, g),
        }
        for case, collective in cases.items():
            name = f"{key}.{case}"
            x = oracle.local(f"{name}.x", (4, 4), ("a", "b"), requires_grad=True)
            y = collective(x.sin(), group)
            oracle.dump(f"{name}.y", y)
            weight = oracle.local(f"{name}.weight", tuple(y.shape), ("a", "b"))
            loss = (y * y * weight).sum()
            oracle.dump(f"{name}.loss", loss)
            loss.backward()
            oracle.dump_grad(f"{name}.grad", x)
    # The input is the same everywhere, what is done with it isn't: so is its gradient.
    x = oracle.local("same", (4, 4), requires_grad=True)
    y = funcol.all_reduce(x, "sum", mesh["a"])
    (y * oracle.local("same.weight", (4, 4), ("a", "b"))).sum().backward()
    oracle.dump_grad("same.grad", x)
    # A collective that nothing comes back through.
    x = oracle.local("stopped", (4,), ("a", "b"), requires_grad=True)
    with torch.no_grad():
        mean = funcol.all_reduce(x, "avg", mesh["b"])
    ((x - mean) ** 2).sum().backward()
    oracle.dump_grad("stopped.grad", x)
