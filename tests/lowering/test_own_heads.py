"""Grouped heads of which devices have more keys than their queries see, and attention cut anywhere
else: against CPU torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh

attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
R = Replicate()

# Mesh, heads of queries and keys, layout of queries, and of keys.
CASES: dict[str, tuple[str, tuple[int, int], list[Placement], list[Placement]]] = {
    "one key head": ("8", (8, 1), [Shard(1)], [R]),
    "a part of a group": ("8", (16, 4), [Shard(1)], [R]),
    "three for four": ("2x4", (12, 3), [Shard(0), Shard(1)], [Shard(0), R]),
    "groups in parts": ("2x4", (24, 6), [R, Shard(1)], [R, R]),
    "both, then queries": ("2x4", (16, 4), [Shard(1), Shard(1)], [Shard(1), R]),
    "queries, then both": ("2x4", (16, 4), [Shard(1), Shard(1)], [R, Shard(1)]),
    "shards of no head": ("2x4", (8, 2), [R, Shard(1)], [R, Shard(1)]),
    "heads and queries": ("2x4", (8, 2), [Shard(2), Shard(1)], [R, R]),
    "queries": ("2x4", (8, 2), [Shard(2), Shard(2)], [Shard(0), Shard(3)]),
    "uneven batch": ("2x4", (8, 2), [R, Shard(0)], [R, Shard(0)]),
}


def check(
    attend: Callable[..., torch.Tensor],
    shapes: Sequence[Sequence[int]],
    mesh: DeviceMesh,
    layouts: Sequence[Sequence[Placement]],
) -> None:
    """Attention and its gradients in a compiled step are CPU torch's."""
    torch.manual_seed(0)
    given = [torch.randn(*shape) for shape in shapes]
    leaves = [x.clone().requires_grad_() for x in given]
    expected = attend(*leaves)
    expected.sin().sum().backward()
    sharded = [
        distribute_tensor(x, mesh, p).requires_grad_() for x, p in zip(given, layouts, strict=True)
    ]

    @xd.compile
    def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
        out = attend(*tensors)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), tensors)]

    for actual, wanted in zip(step(*sharded), (expected, *(x.grad for x in leaves)), strict=True):
        torch.testing.assert_close(actual.cpu(), wanted.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("length", [16, 520], ids=["short", "flash"])
@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradients(name: str, length: int) -> None:
    mesh, (heads, keys), of_query, of_key = CASES[name]
    causal = functools.partial(attend, is_causal=True)
    shapes = [(2, n, length, 8) for n in (heads, keys, keys)]
    check(causal, shapes, make_mesh(mesh), [of_query, of_key, of_key])


def test_a_device_has_the_keys_of_its_queries_where_all_have_the_keys() -> None:
    """Nothing moves: heads stay where they are, though there are fewer keys than devices."""
    mesh = make_mesh("2x4")
    q = distribute_tensor(torch.randn(2, 8, 16, 8), mesh, [R, Shard(1)])
    k = distribute_tensor(torch.randn(2, 2, 16, 8), mesh, [R, R])
    assert attend(q, k, k).placements == (R, Shard(1))


# Shapes of queries, keys and values, and their layouts: what broadcasts, in any of them.
BROADCAST: dict[str, tuple[tuple[tuple[int, ...], list[Placement]], ...]] = {
    "keys have a batch": (
        ((4, 5, 8), [R, Shard(0)]),
        ((4, 4, 6, 8), [R, Shard(0)]),
        ((4, 4, 6, 8), [R, R]),
    ),
    "keys have none": (
        ((4, 4, 5, 8), [R, Shard(0)]),
        ((4, 6, 8), [R, R]),
        ((4, 6, 8), [R, Shard(0)]),
    ),
    "one of keys, all of values": (
        ((2, 8, 4, 8), [R, Shard(1)]),
        ((2, 1, 6, 8), [R, R]),
        ((2, 8, 6, 8), [R, R]),
    ),
    "queries alone": (
        ((8, 8), [Shard(0), R]),
        ((4, 6, 8), [R, R]),
        ((4, 6, 8), [R, Shard(0)]),
    ),
    "a batch more": (
        ((2, 4, 4, 5, 8), [Shard(1), Shard(1)]),
        ((4, 4, 6, 8), [Shard(1), R]),
        ((4, 4, 6, 8), [R, Shard(1)]),
    ),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_leading_dims_broadcast(name: str) -> None:
    """In inference mode the operation gets them as they are."""
    mesh = make_mesh("2x4")
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape, _ in BROADCAST[name]]
    layouts = [layout for _, layout in BROADCAST[name]]
    with torch.inference_mode():
        expected = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
        sharded = [distribute_tensor(x, mesh, p) for x, p in zip(given, layouts, strict=True)]
        actual = torch.nn.functional.scaled_dot_product_attention(*sharded, is_causal=True)
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [8, 264], ids=["short", "flash"])
def test_other_numbers_of_value_heads(length: int) -> None:
    """Then no device takes its own: torch takes such attention apart."""
    shapes = ((2, 8, length, 8), (2, 4, length, 8), (2, 2, length, 8))
    check(attend, shapes, make_mesh("2x4"), [[R, Shard(1)], [R, R], [R, R]])


def test_keys_in_uneven_shards() -> None:
    """XLA didn't compile the step: it saw behind the padding of keys that it brought together."""
    layouts = [[Shard(1), R], [Shard(1), Shard(2)], [Shard(0), Shard(0)]]
    attend = torch.nn.functional.scaled_dot_product_attention
    check(attend, [(8, 8, 4), (8, 5, 4), (8, 5, 6)], make_mesh("4x2"), layouts)
