"""Random products and moves on meshes of two, three and four axes, against CPU torch: as a
program, because four axes need 16 devices, and thousands of cases long.

    python -m tests.compilation.random_products --cases 5000 --mesh 2x2x2
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

OPERATIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "mm": (lambda x, w: x @ w, (24, 32), (32, 16)),
    "linear": (lambda x, w: torch.nn.functional.linear(x, w), (4, 6, 32), (16, 32)),
    "bmm": (torch.bmm, (4, 24, 8), (4, 8, 16)),
    "addmm": (lambda x, w: torch.addmm(torch.ones(16), x, w), (24, 32), (32, 16)),
    "einsum": (lambda x, w: torch.einsum("bsd,dhe->bshe", x, w), (8, 4, 16), (16, 4, 8)),
    "attention": (
        lambda q, k: torch.nn.functional.scaled_dot_product_attention(q, k, k),
        (4, 4, 8, 8),
        (4, 4, 8, 8),
    ),
    "causal": (
        lambda q, k: torch.nn.functional.scaled_dot_product_attention(
            q, k, k.sin(), is_causal=True, enable_gqa=True
        ),
        (4, 8, 8, 8),
        (4, 2, 8, 8),
    ),
    "sum": (torch.add, (4, 4, 8, 8), (4, 4, 8, 8)),  # no product: what moves is all there is
    "two in a row": (lambda x, w: (x @ w).tanh() @ w.t(), (24, 32), (32, 16)),
    "embedding": (
        lambda x, w: torch.nn.functional.embedding(x.detach().abs().long() % 32, w) + x[..., None],
        (8, 4),
        (32, 16),
    ),
}


# Of gradients through tanh in float32; what XLA mixes up is off by whole numbers.
TOLERANCE, TOLERANCES = 5e-5, {"two in a row": 1e-4}


def placements(rng: random.Random, ndim: int, together: tuple[int, ...]) -> list[Any]:
    """Random ones; mesh dims with the same number in ``together`` get the same."""
    drawn = [rng.choice([Replicate(), *map(Shard, range(ndim))]) for _ in range(len(together))]
    return [drawn[group] for group in together]


def check(
    mesh: Any, name: str, seed: int, together: tuple[int, ...], drawn_by: str | None = None
) -> None:
    """Forward and backward in a compiled step, with the layouts of operands, result and gradients
    drawn at random (by ``drawn_by``, or all that is given); and an operand moved eagerly.

    Raises:
        AssertionError: the numbers aren't CPU torch's.
    """
    import xla_dtensor as xd

    rng = random.Random(drawn_by or f"{name} {seed} {together}")
    function, *shapes = OPERATIONS[name]
    torch.manual_seed(seed)
    values = [torch.randint(-3, 4, shape).float() for shape in shapes]
    leaves = [v.clone().requires_grad_() for v in values]
    expected = function(*leaves)
    expected.tanh().sum().backward()

    where = [placements(rng, v.ndim, together) for v in values]
    sharded = [
        distribute_tensor(v, mesh, p).requires_grad_() for v, p in zip(values, where, strict=True)
    ]
    wanted = [placements(rng, len(shape), together) for shape in (expected.shape, *shapes)]
    moved = sharded[0].detach().redistribute(placements=wanted[1])
    torch.testing.assert_close(moved.cpu(), values[0], rtol=0, atol=0)

    @xd.compile
    def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
        out = function(*tensors).redistribute(placements=wanted[0])
        grads = torch.autograd.grad(out.tanh().sum(), tensors)
        return [
            out.detach(),
            *(g.redistribute(placements=p) for g, p in zip(grads, wanted[1:], strict=True)),
        ]

    out, *grads = step(*sharded)
    told = f"{name}, seed {seed}: {where} to {wanted}"
    tolerance = TOLERANCES.get(name, TOLERANCE)
    close = {"rtol": tolerance, "atol": tolerance, "msg": lambda text: f"{told}\n{text}"}
    torch.testing.assert_close(out.cpu(), expected.detach(), **close)
    for actual, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(actual.cpu(), leaf.grad, **close)


def groupings(ndim: int) -> list[tuple[int, ...]]:
    """Each mesh dim by itself, and all ways to have neighbours that stay together."""
    if ndim == 2:
        return [(0, 1)]
    if ndim == 3:
        return [(0, 1, 2), (0, 0, 1), (0, 1, 1)]
    return [(0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 1, 1), (0, 0, 1, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--mesh", default="2x2x2")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=OPERATIONS, nargs="+", default=list(OPERATIONS))
    options = parser.parse_args()
    shape = tuple(map(int, options.mesh.split("x")))
    os.environ["JAX_NUM_CPU_DEVICES"] = str(torch.Size(shape).numel())
    os.environ.setdefault("NPROC", "64")
    # XLA has much to say about layouts that nobody would choose.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import jax

    import xla_dtensor as xd
    from xla_dtensor.runtime import xla_flags

    xla_flags.add(*xla_flags.QUICK_COMPILES)
    names = tuple(f"d{i}" for i in range(len(shape)))
    mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=names)
    wrong = refused = 0
    kinds = [(name, group) for name in options.only for group in groupings(len(shape))]
    for case in range(options.cases):
        name, group = kinds[case % len(kinds)]
        try:
            check(mesh, name, options.first + case // len(kinds), group)
        except AssertionError as error:
            wrong += 1
            print(f"{group} {error}", flush=True)
        except jax.errors.JaxRuntimeError as error:
            refused += 1
            seed = options.first + case // len(kinds)
            print(f"{group} {name}, seed {seed}: {str(error).splitlines()[0]}", flush=True)
        if case % 100 == 99:
            xd.debug.clear_caches()
            print(f"{case + 1} cases, {wrong} wrong", file=sys.stderr, flush=True)
    print(f"{options.cases} cases on {options.mesh}, {wrong} wrong, {refused} not compiled")
    sys.exit(wrong + refused > 0)


if __name__ == "__main__":
    main()
