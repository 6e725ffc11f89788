"""Local tensors written in place and through views: a value that varies written into one that
doesn't, masks and indices from the device's coordinate."""

from __future__ import annotations

import torch

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    oracle.mesh((2, 2), ("a", "b"))
    a, b = oracle.axis_index("a"), oracle.axis_index("b")
    oracle.dump("a", a)
    oracle.dump("rank", a * 2 + b)
    same = oracle.local("same", (4, 3))
    along_a = oracle.local("along_a", (4, 3), ("a",))
    along_b = oracle.local("along_b", (3,), ("b",))
    oracle.dump("outer", along_a * along_b)

    base = same.clone()
    view = base[1:3]
    view.mul_(along_b)
    oracle.dump("base", base)
    base.add_(along_a)
    oracle.dump("view", view)
    base[0] = along_b
    base.t()[2].zero_()
    oracle.dump("base.written", base)

    buffer = torch.zeros(4, 3, device=same.device)
    buffer.copy_(along_a)
    buffer[:, 0] += b
    oracle.dump("buffer", buffer)
    oracle.dump("row", same[a * 2 + b])
    oracle.dump("row.selected", same.index_select(0, (a * 2 + b).reshape(1)))
    oracle.dump("where", torch.where(a == 0, same, along_a))
    oracle.dump("masked", same.masked_fill((b == 1), 0.0))
    oracle.dump("sorted", along_a.sort(dim=0).values)
    oracle.dump("indices", along_a.argsort(dim=0))

    leaf = oracle.local("leaf", (4, 3), requires_grad=True)
    out = leaf.clone()
    out[1] = out[1] * along_b
    out.mul_(along_a)
    out.sum().backward()
    oracle.dump_grad("grad", leaf)
