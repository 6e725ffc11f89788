"""Operations of `Kind.SLICED` where the compiler can't call functions on shards, as on TPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.parallel.harness import full
from tests.planning.tpus import needs_libtpu
from xla_dtensor.plans import shard_map_call


def fractional(x: Any, samples: Any) -> Any:
    return F.fractional_max_pool2d(x, 2, output_size=3, _random_samples=samples)


def sampled(x: Any, grid: Any) -> Any:
    return F.grid_sample(x, grid.tanh(), align_corners=False)


# By name: a function of tensors, their shapes, and whether the first is differentiated.
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], bool]] = {
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), [(4, 8, 8, 8)], True),
    "max_pool2d-unbatched": (lambda x: F.max_pool2d(x, 3, 2, 1), [(8, 8, 8)], True),
    "max_pool2d-uneven": (lambda x: F.max_pool2d(x, 3, 2, 1), [(3, 5, 8, 8)], True),
    "max_pool2d-channels-uneven": (lambda x: F.max_pool2d(x, 2), [(4, 5, 8, 8)], True),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), [(4, 8, 4, 4, 4)], True),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 3), [(4, 8, 8, 8)], True),
    "fractional_max_pool2d": (fractional, [(4, 8, 8, 8), (4, 8, 2)], True),
    "grid_sample": (sampled, [(8, 4, 8, 8), (8, 8, 8, 2)], True),
    "matrix_exp": (torch.linalg.matrix_exp, [(4, 8, 3, 3)], True),
    "ldl_factor": (lambda x: torch.linalg.ldl_factor(x @ x.mT)[0], [(4, 8, 3, 3)], False),
    "polygamma": (lambda x: torch.polygamma(2, x.abs() + 1), [(4, 8, 8)], True),
    "igamma": (lambda a, x: torch.igamma(a.abs(), x.abs()), [(4, 8, 8), (4, 8, 8)], False),
    "igammac": (lambda a, x: torch.igammac(a.abs(), x.abs()), [(4, 8, 8), (8, 8)], False),
    "zeta": (torch.special.zeta, [(4, 8, 8), (4, 8, 8)], False),
    "zeta-broadcast": (lambda s, q: torch.special.zeta(s * 4, q), [(4, 8, 1), (4, 8, 8)], False),
    "zeta-number": (lambda q: torch.special.zeta(3.0, q), [(4, 8, 8)], False),
    "chebyshev": (lambda x: torch.special.chebyshev_polynomial_t(x, 5), [(4, 8, 8)], False),
    "gcd": (lambda x, y: torch.gcd((x * 40).int(), (y * 40).int()), [(4, 8), (4, 8)], False),
}
LAYOUTS: list[tuple[Placement, Placement]] = [
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
]
CUT = {"max_pool2d", "grid_sample", "matrix_exp", "igamma", "gcd"}


@pytest.fixture
def calls(not_partitionable: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that are called with shards."""
    found: list[str] = []
    of = shard_map_call.cut_of

    def seen(answer: Any) -> Any:
        made = of(answer)
        if made is not None:
            found.append(answer.call.info.name)
        return made

    monkeypatch.setattr("xla_dtensor.plans.plan.cut_of", seen)
    return found


def run(function: Callable[..., Any], differentiated: bool, *tensors: Any) -> list[Any]:
    first = tensors[0].detach().requires_grad_(differentiated)
    out = function(first, *tensors[1:])
    if not differentiated:
        return [out]
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), first)]


@pytest.mark.one_in(15)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_on_the_cpu(
    name: str, layout: tuple[Placement, Placement], calls: list[str], mesh_2x4: Any
) -> None:
    function, shapes, differentiated = CASES[name]
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes]
    expected = run(function, differentiated, *values)
    tensors = [distribute_tensor(v, mesh_2x4, _of(layout, v)) for v in values]
    for step in (run, xd.compile(run)):
        found = step(function, differentiated, *tensors)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(full(other), one, equal_nan=True, rtol=1e-4, atol=1e-4)
    if name in CUT and layout == (Shard(0), Shard(1)):
        assert calls


def _of(layout: tuple[Placement, Placement], value: torch.Tensor) -> list[Placement]:
    return [p if not p.is_shard() or value.ndim > p.dim else Replicate() for p in layout]  # type: ignore[attr-defined]


@needs_libtpu
@pytest.mark.parametrize("name", ["max_pool2d", "max_pool3d", "grid_sample", "igamma", "zeta"])
def test_a_tpu_communicates_nothing(name: str) -> None:
    function, shapes, differentiated = CASES[name]
    with xd.abstract("v5e:2x4"):
        mesh = xd.init_device_mesh("xla", (2, 4))
        values = [
            distribute_tensor(torch.empty(shape), mesh, [Shard(0), Replicate()]) for shape in shapes
        ]
        found = xd.plan(lambda *tensors: run(function, differentiated, *tensors), *values)
    assert not found.collectives
