"""Aliasing and in-place operations on sharded tensors, against CPU torch.

`play` runs a function of a few tensors on the CPU and on sharded tensors, in several layouts, and
compares all that it returns. The function writes to the tensors as it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.ops.harness import close

pytestmark = pytest.mark.one_in(3)  # each variant compiles programs of its own

R = Replicate()
# Mesh, and the layout of a tensor of two or more dims. (6, 4) and the like are uneven on these.
LAYOUTS: list[tuple[str, tuple[Placement, ...]]] = [
    ("8", (Shard(0),)),
    ("8", (Shard(1),)),
    ("2x4", (Shard(0), Shard(1))),
    ("2x4", (_StridedShard(0, split_factor=4), Shard(0))),
    ("2x2x2", (Shard(1), Partial(), Shard(0))),
    ("1", (Shard(0),)),
]


def play(
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    layouts: list[tuple[str, tuple[Placement, ...]]] = LAYOUTS,
) -> None:
    """Compare what ``function`` of tensors of ``shapes`` returns with CPU torch."""
    torch.manual_seed(0)
    values = [
        torch.randn(s, dtype=dtype) if dtype.is_floating_point or dtype.is_complex
        else torch.randint(-9, 9, s, dtype=dtype)
        for s in shapes
    ]  # fmt: skip
    wanted = _flat(function(*(v.clone() for v in values)))
    for mesh_name, placements in layouts:
        mesh = make_mesh(mesh_name)
        tensors = [distribute_tensor(v, mesh, _fitting(placements, v.ndim)) for v in values]
        results = _flat(function(*tensors))
        assert len(results) == len(wanted)
        for i, (result, want) in enumerate(zip(results, wanted, strict=True)):
            what = f"result {i} with {placements} on {mesh_name}"
            if not isinstance(want, torch.Tensor):
                assert result == want, what
                continue
            assert type(result) is xd.XLAShardedTensor, what
            assert (result.dtype, result.shape) == (want.dtype, want.shape), what
            assert result.stride() == want.stride(), what
            assert result.requires_grad == want.requires_grad, what
            close(result.detach().cpu(), want.detach(), what=what)


def _flat(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in _flat(item)]
    return [result]


def _fitting(placements: tuple[Placement, ...], ndim: int) -> list[Placement]:
    return [R if getattr(p, "dim", -1) >= ndim else p for p in placements]


def scaled(x: torch.Tensor) -> torch.Tensor:
    """A gradient that differs from element to element."""
    return (x * x * torch.arange(1.0, x.numel() + 1, device=x.device).view(x.shape)).sum()


# Views of a (6, 4) tensor.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x[:],
    "row": lambda x: x[2],
    "last_column": lambda x: x.select(1, -1),
    "rows": lambda x: x[1:4],
    "columns": lambda x: x[:, 1:3],
    "steps": lambda x: x[1::2, ::3],
    "transposed": lambda x: x.t(),
    "transposed_part": lambda x: x.t()[1:3],
    "flat": lambda x: x.view(-1),
    "flat_part": lambda x: x.view(-1)[3:17:2],
    "regrouped": lambda x: x.view(2, 3, 4)[1],
    "permuted": lambda x: x.view(2, 3, 2, 2).permute(3, 1, 0, 2),
    "unsqueezed": lambda x: x.unsqueeze(1),
    "squeezed": lambda x: x[:, :1].squeeze(1),
    "unflattened": lambda x: x.unflatten(0, (3, 2))[:, 1],
    "narrowed": lambda x: x.narrow(0, 3, 2),
    "diagonal": lambda x: x.diagonal(),
    "off_diagonal": lambda x: x.diagonal(-2),
    "part": lambda x: x.split(4)[1],
    "sized_part": lambda x: x.split([1, 3], 1)[1],
    "chunk": lambda x: x.chunk(4)[1],
    "unbound": lambda x: x.unbind(1)[2],
    "windows": lambda x: x.unfold(0, 2, 2),
    "as_strided": lambda x: x.as_strided((3, 2), (8, 2), 1),
    "as_strided_of_view": lambda x: x[2:].as_strided((2, 3), (4, 1), 9),
    "as_complex": lambda x: torch.view_as_complex(x.view(6, 2, 2)),
    "real_part": lambda x: torch.view_as_complex(x.view(6, 2, 2)).real,
    "imaginary_part": lambda x: torch.view_as_complex(x.view(6, 2, 2)).imag,
    "back_from_complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(6, 2, 2)))[1:],
    "detached": lambda x: x.detach()[1],
    "data": lambda x: x.data[:, 2],
    "alias_by_dtype": lambda x: x.to(x.dtype)[1],
    "movedim": lambda x: x.movedim(0, 1),
    "reshaped": lambda x: x.reshape(3, 8),
    "expanded_as_itself": lambda x: x.expand(6, 4),
    "swapped_back": lambda x: x.t().contiguous().t() if x.t().is_contiguous() else x.t().t(),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", list(VIEWS))
def test_views_alias_both_ways(name: str) -> None:
    view_of = VIEWS[name]

    def function(x: torch.Tensor) -> Any:
        view = view_of(x)
        x.mul_(2)  # seen in the view
        seen = view.clone()
        view.add_(1)  # seen in the base
        base = x.clone()
        x[1] = 7
        other = view_of(x)  # another view of the same memory
        other.mul_(3)
        return seen, base, x, view, other

    play(function, (6, 4))


# Torch refuses writes to one of several views that require grad.
ONE_OF_SEVERAL = ("part", "sized_part", "chunk", "unbound")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [n for n in VIEWS if n not in ("detached", "data")])
def test_gradients_through_in_place_on_views(name: str) -> None:
    view_of = VIEWS[name]

    def function(x: torch.Tensor) -> Any:
        leaf = x.requires_grad_()
        base = leaf * 2
        view = view_of(base)
        if name in ONE_OF_SEVERAL:
            with pytest.raises(RuntimeError, match="returns multiple views"):
                view.mul_(3)
            return base
        view.mul_(3)
        scale = leaf.view(-1)[: view.numel()].view(view.shape)
        view.mul_(scale)
        scaled(base).backward()
        return base, leaf.grad

    play(function, (6, 4), layouts=LAYOUTS[2:5])


def test_gradient_of_a_view_after_the_base_is_written() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x, y = x.requires_grad_(), y.requires_grad_()
        base = x.clone()
        view = base[1:3]
        base.mul_(y)
        scaled(view).backward()
        return view, x.grad, y.grad

    play(function, (6, 4), (6, 4))


def test_views_of_views_share_one_memory() -> None:
    def function(x: torch.Tensor) -> Any:
        a = x[1:5]
        b = a.t()[1:]
        c = b.reshape(-1)  # a copy: b isn't contiguous
        d = b[:, ::2]
        d.zero_()
        a[0].add_(5)
        c.fill_(100)
        return x, a, b, c, d

    play(function, (6, 4))


def test_rank_changing_views_of_a_longer_chain() -> None:
    def function(x: torch.Tensor) -> Any:
        heads = x.view(3, 5, 2, 4).transpose(1, 2)
        heads[:, 1].mul_(2)
        first, second = heads.chunk(2, -1)
        first.sub_(second)
        heads.select(2, 3).fill_(-1)
        return x, heads, first, second

    play(function, (3, 5, 8))


def set_slice(x: torch.Tensor, y: torch.Tensor) -> None:
    x[:, 1:3] = y


SETS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], tuple[int, ...]]] = {
    "slice": (set_slice, (6, 2)),
    "slice_broadcast": (set_slice, (2,)),
    "row": (lambda x, y: x.__setitem__(3, y), (4,)),
    "step": (lambda x, y: x.__setitem__(slice(None, None, 2), y), (3, 4)),
    "ellipsis": (lambda x, y: x.__setitem__((..., -1), y), (6,)),
    "all": (lambda x, y: x.__setitem__(slice(None), y), (6, 4)),
    "mask": (lambda x, y: x.__setitem__(x > 0, 9.0), (1,)),
    "mask_0d": (lambda x, y: x.__setitem__(x > 0, y[0]), (1,)),
    "row_mask": (lambda x, y: x.__setitem__(x[:, 0] > 0, y), (4,)),
    "integers": (lambda x, y: x.__setitem__(torch.tensor([0, 2, 5]), y), (3, 4)),
    "integer_list": (lambda x, y: x.__setitem__((slice(None), [3, 0]), y), (6, 2)),
    "two_lists": (lambda x, y: x.__setitem__(([1, 4], [0, 3]), y), (2,)),
    "number": (lambda x, y: x.__setitem__((1, 2), 5), (1,)),
    "bool_row": (lambda x, y: x.__setitem__(torch.tensor([True, False] * 3), 0), (1,)),
}


@pytest.mark.parametrize("name", list(SETS))
def test_setitem(name: str) -> None:
    set_item, shape = SETS[name]

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        view = x.t()
        set_item(x, y)
        return x, view

    play(function, (6, 4), shape)


@pytest.mark.parametrize("name", ["slice", "row", "mask_0d", "integers", "two_lists"])
def test_setitem_gradients(name: str) -> None:
    set_item, shape = SETS[name]

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x, y = x.requires_grad_(), y.requires_grad_()
        z = x * 1
        set_item(z, y)
        scaled(z).backward()
        return z, x.grad, y.grad

    play(function, (6, 4), shape, layouts=LAYOUTS[2:5])


def test_setitem_of_elements_that_a_sharded_mask_selects() -> None:
    def function(x: torch.Tensor) -> Any:
        mask = x > 0.5
        x[mask] = x[mask] * 10
        return x, x[mask]

    play(function, (6, 4))


@pytest.mark.parametrize(
    "write",
    [
        lambda view: view.add_(1),
        lambda view: view.copy_(torch.ones(4)),
        lambda view: view[:, 1].mul_(2),
    ],
)
def test_writes_to_expanded_tensors_are_refused(
    mesh_2x4: DeviceMesh, write: Callable[[torch.Tensor], Any]
) -> None:
    for base in (torch.ones(1, 4), distribute_tensor(torch.ones(1, 4), mesh_2x4, [R, Shard(1)])):
        with pytest.raises(RuntimeError, match="single memory location"):
            write(base.expand(3, 4))
        close(base.cpu(), torch.ones(1, 4))


def test_reads_of_expanded_tensors_follow_their_base() -> None:
    def function(x: torch.Tensor) -> Any:
        wide = x[:1].expand(5, 4)
        x.add_(1)
        return wide, wide * 2, wide.sum(0)

    play(function, (6, 4))


def test_versions_count_writes() -> None:
    def function(x: torch.Tensor) -> Any:
        view, detached, copy = x[1:], x.detach(), x.clone()
        versions = [x._version]
        x.add_(1)
        versions.append(x._version)
        view.mul_(2)
        versions.append(x._version)
        detached[0] = 3
        versions.append(x._version)
        copy.zero_()
        x.data.add_(1)
        return [*versions, x._version, view._version, detached._version, copy._version]

    play(function, (6, 4))


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x[1:].zero_()])
def test_saved_tensor_written_in_place_is_refused(
    mesh_2x4: DeviceMesh, write: Callable[[torch.Tensor], Any]
) -> None:
    def backward(leaf: torch.Tensor) -> None:
        x = leaf.requires_grad_() * 1
        y = x.exp() * x
        write(x)
        y.sum().backward()

    for leaf in (torch.ones(6, 4), distribute_tensor(torch.ones(6, 4), mesh_2x4, [Shard(0), R])):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(leaf)


def test_in_place_on_a_leaf_is_refused_with_gradients_only(mesh_2x4: DeviceMesh) -> None:
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh_2x4, [Shard(0), R]))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight.add_(1)
    with pytest.raises(RuntimeError, match="view of a leaf Variable"):
        weight[0].add_(1)
    with torch.no_grad():
        weight.mul_(2)
        weight[0].add_(1)
        weight.data[1] = 5
        weight.t()[3].copy_(torch.arange(6))
    want = torch.full((6, 4), 2.0)
    want[0], want[1] = 3, 5
    want[:, 3] = torch.arange(6)
    assert weight.requires_grad and weight.is_leaf
    assert weight.placements == (Shard(0), R)
    close(weight.detach().cpu(), want)


def test_detach_and_data_share_memory_and_no_history() -> None:
    def function(x: torch.Tensor) -> Any:
        leaf = x.requires_grad_()
        y = leaf * 2
        y.detach().add_(1)
        z = y * 3
        leaf.data.mul_(10)
        z.sum().backward()
        return y, z, leaf, leaf.grad, y.detach().requires_grad

    play(function, (6, 4))


def test_setting_data_replaces_the_value(mesh_2x4: DeviceMesh) -> None:
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh_2x4, [Shard(0), R]))
    weight.data = distribute_tensor(torch.ones(6, 4), mesh_2x4, [R, Shard(1)])
    close(weight.detach().cpu(), torch.ones(6, 4))
    (weight * 3).sum().backward()
    assert weight.grad is not None
    close(weight.grad.cpu(), torch.full((6, 4), 3.0))


DTYPE_WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "int_into_float": lambda x, y: x.add_(y.long()),
    "double_into_float": lambda x, y: x.mul_(y.double()),
    "bfloat16_into_float": lambda x, y: x.sub_(y.bfloat16()),
    "copy_int": lambda x, y: x.copy_(y.int()),
    "copy_bool": lambda x, y: x.copy_(y > 0),
    "float_into_bfloat16": lambda x, y: x.bfloat16().add_(y),
    "copy_into_int": lambda x, y: x.long().copy_(y * 10),
    "set_int_slice": lambda x, y: (x * 10).int().__setitem__(slice(1, 3), y[1:3] * 10),
    "mul_bool": lambda x, y: x.mul_(y > 0),
    "number_into_int": lambda x, y: (x * 10).long().add_(3),
    "complex_mul": lambda x, y: x.to(torch.complex64).mul_(y),
    "floor_div": lambda x, y: (x * 10).long().floor_divide_(3),
    "comparison": lambda x, y: x.gt_(y),
}


@pytest.mark.parametrize("name", list(DTYPE_WRITES))
def test_dtypes_of_in_place_operations(name: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        result = DTYPE_WRITES[name](x, y)
        return (x,) if result is None else (x, result)

    play(function, (6, 4), (6, 4), layouts=LAYOUTS[2:4])


@pytest.mark.parametrize("number", [0.5, 1j])
def test_in_place_results_that_the_dtype_cannot_hold(mesh_2x4: DeviceMesh, number: Any) -> None:
    for x in (torch.ones(6), distribute_tensor(torch.ones(6), mesh_2x4, [Shard(0), R])):
        x = x.long() if number == 0.5 else x
        with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
            x.mul_(number)


def test_out_variants() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        sums, products = torch.empty_like(x), torch.empty_like(x)
        returned = torch.add(x, y, alpha=2, out=sums)
        torch.mul(x, y, out=products[:])  # through a view
        matrix = x.new_empty(6, 6)
        torch.mm(x, y.t(), out=matrix)
        exponents = torch.exp(x, out=torch.zeros_like(x, dtype=torch.float64))
        joined = torch.cat([x, y], out=x.new_empty(12, 4))
        largest = x.new_empty(6), torch.empty_like(x[:, 0], dtype=torch.int64)
        torch.max(x, 1, out=largest)
        total = torch.sum(x, 0, out=x.new_empty(4))
        return returned is sums, sums, products, matrix, exponents, joined, *largest, total

    play(function, (6, 4), (6, 4))


def test_out_keeps_the_layout_of_the_given_tensor(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(6, 4), mesh_2x4, [Shard(0), R])
    out = distribute_tensor(torch.zeros(6, 4), mesh_2x4, [R, Shard(1)])
    torch.add(x, 1, out=out)
    assert out.placements == (R, Shard(1))
    close(out.cpu(), torch.full((6, 4), 2.0))


def test_in_place_keeps_the_layout_of_the_given_tensor(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(6, 4), mesh_2x4, [Shard(0), R])
    y = distribute_tensor(torch.ones(6, 4), mesh_2x4, [R, Shard(1)])
    x.add_(y)
    x[1:3].mul_(y[:2])
    F.relu_(x)
    assert x.placements == (Shard(0), R)
    close(x.cpu(), torch.full((6, 4), 2.0))


def test_random_writes_land_in_views() -> None:
    def function(x: torch.Tensor) -> Any:
        before = x.clone()
        x[1:3].uniform_(5, 6)
        x[4].normal_(100, 0.1)
        x[5].bernoulli_(1.0)
        changed = (x[1:3] >= 5).all() & (x[1:3] <= 6).all() & (x[4] > 90).all()
        return changed, x[5], x[0] - before[0], x[3] - before[3]

    play(function, (6, 4))


@pytest.mark.parametrize(
    ("of_complex", "view"),
    [
        (True, torch.view_as_real),
        (True, lambda c: c.real),
        (True, lambda c: c.conj()),
        (False, torch.view_as_complex),
        (False, lambda x: x.view(torch.int32)),
    ],
    ids=["view_as_real", "real", "conj", "view_as_complex", "view"],
)
def test_as_strided_of_other_numbers_than_the_memorys(of_complex: bool, view: Any) -> None:
    """Its positions would be the memory's, of another dtype; it gave that without a word."""
    x = torch.randn(4, 4, 2)
    shown = view((torch.view_as_complex(x) if of_complex else x).clone().to("xla"))
    with pytest.raises(xd.UnsupportedOpError, match=r"clone\(\) it first"):
        shown.as_strided([2], [4], 1)
    copy = shown.clone()
    assert torch.equal(copy.as_strided([2], [4], 1).cpu(), copy.cpu().as_strided([2], [4], 1))


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x.t(), lambda x: x[1:, ::2], lambda x: x.t().contiguous().t()]
)
def test_as_strided_copy_is_about_memory(
    view: Callable[[torch.Tensor], torch.Tensor], out: bool
) -> None:
    x = torch.arange(20.0).reshape(4, 5)

    def copied(x: torch.Tensor) -> torch.Tensor:
        given = {"out": torch.empty(0, device=x.device)} if out else {}
        return torch.as_strided_copy(view(x), (2, 3), (3, 1), **given)

    assert torch.equal(copied(x.to("xla")).cpu(), copied(x))
