"""Random numbers of the devices."""

from __future__ import annotations

import torch

from tests.fuzz.draw import Draw, UnsuitableError, operation
from tests.fuzz.operations.writes import target


@operation(1.5)
def random_numbers(d: Draw) -> None:
    like = d.pick(lambda t: t.dtype in (torch.float32, torch.bfloat16) and t.numel())
    kind = d.choice(["rand", "randn", "bernoulli", "dropout", "dropout", "uniform_"])
    if kind == "uniform_":
        name = target(d)
        if d.true[name].dtype != torch.float32:
            raise UnsuitableError
        d.write(f"uniform_({name})", name)
        d.given.update(n for n in d.true if d.memory(n) == d.memory(name))
        return
    if kind == "dropout":
        d.away(like, 0.0)
        (new,) = d.let(f"dropout({like}, {d.choice([0.1, 0.25, 0.5])})")
    else:
        (new,) = d.let(f"{kind}({like})")
    d.given.add(new)
