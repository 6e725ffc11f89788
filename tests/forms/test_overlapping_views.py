"""Writes through views in which an element of the base is several times, against CPU torch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.errors import UnsupportedOpError

View = Callable[[torch.Tensor], torch.Tensor]
Write = Callable[[torch.Tensor], object]

START = torch.arange(24.0).view(4, 6)

# No two elements of these share memory, but on the way there some do.
PARTS: dict[str, View] = {
    "a window": lambda x: x.unfold(0, 2, 1).select(0, 1),
    "of every window one": lambda x: x.unfold(1, 3, 1)[..., 1],
    "windows of windows": lambda x: x.unfold(0, 2, 1).unfold(1, 3, 2)[1, 1, :, 1:],
    "every other window": lambda x: x.unfold(1, 2, 1)[:, ::2].transpose(0, 2),
    "a diagonal of windows": lambda x: x[1].unfold(0, 3, 1).diagonal(),
    "a strided row": lambda x: x.as_strided((5, 3), (2, 1), 1)[3],
    "a strided column": lambda x: x.as_strided((5, 3), (2, 1))[:, 2],
    "a row of an expanded": lambda x: x.expand(3, 4, 6)[1],
    "a part of an expanded": lambda x: x[:, :1].expand(4, 3)[1:, 2],
    "windows of an expanded": lambda x: x[0].expand(2, 6).unfold(1, 3, 2)[1, 1],
    "windows of other numbers": lambda x: (
        x.unfold(1, 2, 1).view(torch.int32)[:, 2].view_as(x[:2].t())
        if x.dtype == torch.float64
        else x.unfold(1, 2, 1)[:, 2].view(torch.int32)
    ),
}

WRITES: dict[str, Write] = {
    "add_": lambda v: v.add_(100),
    "mul_ by a tensor": lambda v: v.mul_(torch.full_like(v, 3)),
    "fill_": lambda v: v.fill_(7),
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(torch.ones_like(v).cumsum(0)),
    "copy_ from the CPU": lambda v: v.copy_(torch.ones(v.shape).cumsum(0)),
    "masked_fill_": lambda v: v.masked_fill_(v > 8, -1),
    "index_put_": lambda v: v.index_put_(
        (torch.tensor([1], device=v.device),), torch.ones_like(v[:1])
    ),
    "index_fill_": lambda v: v.index_fill_(0, torch.tensor([1, 0], device=v.device), 5),
    "out=": lambda v: torch.add(torch.ones_like(v), 1, out=v),
    "foreach": lambda v: torch._foreach_mul_([v], 2),
    "set": lambda v: v.__setitem__(slice(1, 2), 4),
    "what is there": lambda v: v.add_(0),
}


def changed(start: torch.Tensor, view: View, write: Write) -> torch.Tensor:
    write(view(start))
    return start


def on(mesh: DeviceMesh, value: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(value, mesh, [Shard(0), Shard(1)])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("view", list(PARTS))
def test_what_was_written_stays(mesh_2x4: DeviceMesh, view: str) -> None:
    writes = WRITES
    if view == "windows of other numbers":
        writes = {"fill_": lambda v: v.fill_(7)}
    for name, write in writes.items():
        expected = changed(START.clone(), PARTS[view], write)
        actual = changed(on(mesh_2x4, START), PARTS[view], write)
        assert torch.equal(actual.full_tensor().cpu(), expected), name


@pytest.mark.one_in(2)
@pytest.mark.parametrize("view", list(PARTS)[:-1])
def test_gradients_go_through(mesh_2x4: DeviceMesh, view: str) -> None:
    for name in ("mul_ by a tensor", "fill_", "copy_", "masked_fill_", "set"):

        def gradient(leaf: torch.Tensor, write: Write = WRITES[name]) -> torch.Tensor:
            leaf.requires_grad_()
            y = changed(leaf * 1, PARTS[view], write)
            (y * y).sum().backward()
            assert leaf.grad is not None
            return leaf.grad

        expected = gradient(START.clone())
        assert torch.equal(gradient(on(mesh_2x4, START)).full_tensor().cpu(), expected), name


def test_in_compiled_steps(mesh_2x4: DeviceMesh) -> None:
    """Of an argument, of what is captured, and of what is made there; in the second call, too."""
    captured = on(mesh_2x4, START)
    views = [PARTS[name] for name in ("a window", "a strided row", "a row of an expanded")]

    @xd.compile
    def step(given: torch.Tensor) -> torch.Tensor:
        made = given + 1
        for x in (given, captured, made):
            for view in views:
                view(x).mul_(2)
        return made

    given, expected = on(mesh_2x4, START), START.clone()
    of_captured = START.clone()
    for _ in range(2):
        of_made = expected + 1
        for x in (expected, of_captured, of_made):
            for view in views:
                view(x).mul_(2)
        made = step(given)
        for ours, theirs in ((given, expected), (captured, of_captured), (made, of_made)):
            assert torch.equal(ours.full_tensor().cpu(), theirs)


def test_per_device_tensors(mesh_2x4: DeviceMesh) -> None:
    x = on(mesh_2x4, torch.arange(32.0).view(8, 4))
    local = x.to_local()
    local.unfold(0, 2, 1)[1].add_(100)  # rows 1 and 2 of four... of each device
    expected = torch.arange(32.0).view(8, 4)
    expected[[1, 2, 5, 6]] += 100
    assert torch.equal(x.full_tensor().cpu(), expected)


NAN = float("nan")


def test_bits_are_kept(mesh_2x4: DeviceMesh) -> None:
    """Not a number differs from itself, and -0.0 is 0.0: neither passes for written, or not."""
    start = torch.tensor([NAN, 0.0, NAN, -1.0, -0.0, 2.0])
    x = distribute_tensor(start.clone(), mesh_2x4, [Replicate(), Replicate()])
    for tensor in (start, x):
        tensor.unfold(0, 3, 1)[1].neg_()
        tensor.unfold(0, 2, 1)[:, 0].copy_(-tensor[:5])
    assert torch.equal(x.full_tensor().cpu().view(torch.int32), start.view(torch.int32))


def test_parts_of_elements(mesh_2x4: DeviceMesh) -> None:
    """The halves of one number, written through two of its places at once."""

    def halves(x: torch.Tensor) -> None:
        x.unfold(0, 2, 1).view(torch.int16)[:, 1:3].add_(1)

    def parts(x: torch.Tensor) -> None:
        torch.view_as_real(x.unfold(0, 2, 1))[1:4, 0, 1].mul_(3)
        x.expand(2, 6)[1].imag.add_(2)

    whole = torch.arange(6, dtype=torch.int32) * 70001
    complexes = torch.complex(torch.arange(6.0), -torch.arange(6.0))
    for start, write in ((whole, halves), (complexes, parts)):
        x = distribute_tensor(start.clone(), mesh_2x4, [Shard(0), Replicate()])
        write(start)
        write(x)
        assert torch.equal(x.full_tensor().cpu(), start)


SHARED: dict[str, View] = {
    "unfold": lambda x: x.unfold(1, 2, 1),
    "as_strided": lambda x: x.as_strided((5, 3), (2, 1), 1),
    "strides that meet": lambda x: x.as_strided((3, 3), (2, 4)),
}


@pytest.mark.parametrize("view", list(SHARED))
def test_elements_that_share_memory_get_one_value(mesh_2x4: DeviceMesh, view: str) -> None:
    """torch writes them in an order of its own; ours are refused, unless the order is no matter."""
    fills: dict[str, Write] = {
        name: WRITES[name] for name in ("fill_", "zero_", "masked_fill_", "index_fill_", "set")
    }
    fills["by a mask"] = lambda v: v.__setitem__(v > 8, -1)
    for name, write in fills.items():
        expected = changed(START.clone(), SHARED[view], write)
        actual = changed(on(mesh_2x4, START), SHARED[view], write)
        assert torch.equal(actual.full_tensor().cpu(), expected), name
    x = on(mesh_2x4, START)
    for name in ("add_", "copy_", "copy_ from the CPU", "index_put_", "out=", "foreach"):
        with pytest.raises(UnsupportedOpError, match="share memory"):
            WRITES[name](SHARED[view](x))
    with pytest.raises(UnsupportedOpError, match="several elements of the source"):
        torch.as_strided_scatter(x, torch.ones_like(x[:, :2]), (4, 2), (1, 1))
    assert torch.equal(x.full_tensor().cpu(), START)


def test_expanded_tensors_are_refused_where_torch_does(mesh_2x4: DeviceMesh) -> None:
    def outcome(x: torch.Tensor, write: Write) -> object:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Use of .* on expanded tensors is deprecated")
            try:
                write(x.expand(2, 4, 6))
            except RuntimeError as error:
                assert "more than one element of the written-to tensor" in str(error)
                return RuntimeError
        return x.cpu().tolist()

    for name, write in WRITES.items():
        if name == "index_put_":  # torch lets one do it, and says that it will not
            continue
        expected = outcome(START.clone(), write)
        x = distribute_tensor(START.clone(), mesh_2x4, [Shard(0), Shard(1)])
        assert outcome(x, write) == expected, name


def test_expanded_tensors_without_elements_are_written(mesh_2x4: DeviceMesh) -> None:
    for start in (torch.ones(0, 3), torch.ones(0, 1)):
        ours = distribute_tensor(start, mesh_2x4, [Shard(0), Replicate()])
        for x in (start, ours, start.to("xla")):
            assert x.expand(4, 8, 0, 3).mul_(0.25).shape == (4, 8, 0, 3)


def test_strides_that_do_not_meet_are_written(mesh_2x4: DeviceMesh) -> None:
    """Strides that look as if their elements overlapped, and don't."""

    def program(x: torch.Tensor) -> torch.Tensor:
        x.as_strided((3, 2), (2, 3)).mul_(torch.arange(6.0).view(3, 2).to(x.device))
        return x

    x = distribute_tensor(START.clone(), mesh_2x4, [Shard(0), Replicate()])
    assert torch.equal(program(x).full_tensor().cpu(), program(START.clone()))


# Random chains ---------------------------------------------------------------------------------


def _random_view(chance: random.Random, x: torch.Tensor) -> View:
    """A view of ``x``: of half of them, elements share memory."""
    dim = chance.randrange(x.ndim)
    length = x.shape[dim]
    kind = chance.choice(["unfold", "unfold", "strided", "expand", "select", "slice", "turn"])
    if kind == "unfold":
        size, step = chance.randint(1, min(length, 4)), chance.randint(1, 3)
        return lambda x: x.unfold(dim, size, step)
    if kind == "strided" and x.is_contiguous():
        sizes = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
        strides = [chance.randint(1, 4) for _ in sizes]
        room = x.numel() - 1 - sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        if room >= 0:
            offset = x.storage_offset() + chance.randint(0, room)
            return lambda x: x.as_strided(sizes, strides, offset)
    if kind == "expand":
        copies = chance.randint(2, 3)
        return lambda x: x.unsqueeze(dim).expand(*x.shape[:dim], copies, *x.shape[dim:])
    if kind == "select" and x.ndim > 1:
        index = chance.randrange(-length, length)
        return lambda x: x.select(dim, index)
    if kind == "slice":
        start, step = chance.randrange(length), chance.randint(1, 2)
        return lambda x: x[(slice(None),) * dim + (slice(start, None, step),)]
    return lambda x: x.transpose(0, -1)


def _random_program(chance: random.Random, start: torch.Tensor) -> Write:
    writes: list[tuple[list[View], str]] = []
    for _ in range(2):
        view, chain = start, []
        for _ in range(chance.randint(2, 5)):
            chain.append(_random_view(chance, view))
            view = chain[-1](view)
        writes.append((chain, chance.choice([n for n in WRITES if n != "set"])))

    def program(x: torch.Tensor) -> list[str]:
        refused = []
        for chain, name in writes:
            view = x
            for step in chain:
                view = step(view)
            try:
                WRITES[name](view)
            except (RuntimeError, IndexError) as error:
                refused.append(f"{name}: {error}")
        return refused

    return program


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 12, 99])
def test_random_chains(mesh_2x4: DeviceMesh, first: int) -> None:
    compared = 0
    for seed in range(first, first + (12 if not first else 60)):
        chance = random.Random(seed)
        start = START.clone() if chance.random() < 0.7 else START.to(torch.int32)
        program = _random_program(chance, start)
        x = distribute_tensor(
            start.clone(), mesh_2x4, chance.choice([[Shard(0), Shard(1)], [Replicate(), Shard(0)]])
        )
        refused = program(x)
        if any("share memory" in text for text in refused):
            continue  # where torch's order decides
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Use of .* on expanded tensors is deprecated")
            theirs = program(start)
        assert len(refused) >= len(theirs), seed
        if len(refused) == len(theirs):
            assert torch.equal(x.full_tensor().cpu(), start), seed
            compared += 1
    assert compared > 4
