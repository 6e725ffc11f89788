"""Writes by a mask whose values are the same at every masked position: they need no count, so they
run on the devices and in compiled steps. Judged by CPU torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.movement import data_dependent

R, S = Replicate(), Shard
X = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
MASKS = {"all": X > 0.3, "rows": torch.arange(6) % 4 > 1, "middle": X[0] > 0, "none": X > 100}
Place = Callable[[torch.Tensor], Any]


def write_zero(x: Any, m: Any, v: Any) -> None:
    x[m["all"]] = 0


def write_number(x: Any, m: Any, v: Any) -> None:
    x[x > 0.5] = 2.5


def write_scalar_tensor(x: Any, m: Any, v: Any) -> None:
    x[m["all"]] = v["scalar"]


def write_rows(x: Any, m: Any, v: Any) -> None:
    x[m["rows"]] = v["row"]


def write_rows_one(x: Any, m: Any, v: Any) -> None:
    x[m["rows"]] = v["row"].reshape(1, 5, 4)


def write_inner(x: Any, m: Any, v: Any) -> None:
    x[:, m["middle"]] = v["column"]


def write_none(x: Any, m: Any, v: Any) -> None:
    x[m["none"]] = v["scalar"]


def write_to_view(x: Any, m: Any, v: Any) -> None:
    x[1:5][m["rows"][1:5]] = v["scalar"]


def write_beside_slice(x: Any, m: Any, v: Any) -> None:
    x[m["rows"], 1:3] = v["scalar"]


def write_after_ellipsis(x: Any, m: Any, v: Any) -> None:
    x[..., m["rows"][:4]] = v["scalar"]


def accumulate(x: Any, m: Any, v: Any) -> None:
    x.index_put_((m["rows"],), v["row"], accumulate=True)


def fill(x: Any, m: Any, v: Any) -> None:
    x.masked_fill_(m["rows"][:, None, None], v["scalar"])


def fill_number(x: Any, m: Any, v: Any) -> None:
    x.masked_fill_(m["middle"], -1.5)


WRITES = [
    write_zero,
    write_number,
    write_scalar_tensor,
    write_rows,
    write_rows_one,
    write_inner,
    write_none,
    write_to_view,
    write_beside_slice,
    write_after_ellipsis,
    accumulate,
    fill,
    fill_number,
]
# Those whose values' gradients torch has in a shape that is known.
WITHOUT_GRADIENTS_OF_VALUES = (accumulate,)
PLACEMENTS = {
    "shards": [S(0), S(1)],
    "uneven": [S(1), S(1)],
    "last": [R, S(2)],
    "partial": [S(0), Partial()],
}


def run(write: Any, place: Place, compiled: bool, of_values: bool) -> list[torch.Tensor]:
    """The result, and the gradients of the input and of the values."""
    x = place(X).requires_grad_()
    masks = {name: place(mask) for name, mask in MASKS.items()}
    values = {
        "scalar": place(torch.tensor(7.0)),
        "row": place(torch.linspace(0, 1, 20).reshape(5, 4)),
        "column": place(torch.linspace(0, 1, 6)[:, None]),
    }
    if of_values:
        for value in values.values():
            value.requires_grad_()
    weight = place(torch.linspace(-1, 1, 120).reshape(6, 5, 4))

    def step() -> Any:
        y = x.clone()
        write(y, masks, values)
        (y * weight).sum().backward()
        return y.detach()

    out = (xd.compile(step) if compiled else step)()
    return [out, x.grad, *(v.grad for v in values.values() if v.grad is not None)]


def on_cpu(tensors: list[Any]) -> list[torch.Tensor]:
    return [
        t.full_tensor().cpu() if isinstance(t, xd.XLAShardedTensor) else t.cpu() for t in tensors
    ]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("placements", [None, *PLACEMENTS])
@pytest.mark.parametrize("write", WRITES)
def test_write(write: Any, placements: str | None, compiled: bool, mesh_2x4: DeviceMesh) -> None:
    def place(t: torch.Tensor) -> Any:
        if placements is None:
            return t.to("xla")
        wanted = PLACEMENTS[placements]
        if t.dtype == torch.bool or t.ndim < 3:
            wanted = [p if isinstance(p, Shard) and p.dim < t.ndim else R for p in wanted]
        return distribute_tensor(t, mesh_2x4, wanted)

    of_values = write not in WITHOUT_GRADIENTS_OF_VALUES
    expected = run(write, torch.clone, False, of_values)
    found = on_cpu(run(write, place, compiled, of_values))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_on_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is read on the host, and a mask of another shape raises as in torch."""
    x, mask = X.to("xla"), MASKS["all"].to("xla")
    with monkeypatch.context() as patch:
        patch.setattr(data_dependent, "to_cpu", lambda tensor: pytest.fail("read on the host"))
        x[mask] = 1
    for y in (x, X.clone()):
        with pytest.raises(IndexError, match=r"shape of the mask .* at index 0 does not match"):
            y[torch.ones(5, dtype=torch.bool)] = 0


def test_values_per_position() -> None:
    """Values that differ from position to position need the count: of a mask that a compiled step
    is given there is none."""
    values = torch.arange(float(MASKS["rows"].sum()))[:, None, None].expand(-1, 5, 4).contiguous()
    expected = X.clone()
    expected[MASKS["rows"]] = values
    x, mask, v = X.to("xla"), MASKS["rows"].to("xla"), values.to("xla")

    def step(mask: torch.Tensor) -> None:
        x[mask] = v

    with pytest.raises(xd.DataDependentError, match=r"values that broadcast, x\[mask\] = 0"):
        xd.compile(step)(mask)
    assert torch.equal(x.cpu(), X)
    step(mask)
    assert torch.equal(x.cpu(), expected)
    x.copy_(X)
    xd.compile(lambda: step(mask))()
    assert torch.equal(x.cpu(), expected)


def test_changed_mask() -> None:
    """Another mask, and another value, of the same step."""
    step = xd.compile(lambda x, mask, value: x.clone().index_put_((mask,), value))
    for i in range(3):
        mask, value = i - 1 < X, torch.tensor(float(i))
        expected = X.clone().index_put_((mask,), value)
        found = step(X.to("xla"), mask.to("xla"), value.to("xla"))
        assert torch.equal(found.cpu(), expected)
    assert len(step.compiled_programs()) == 1


REPEATS = torch.tensor([2, 0, 3, 1])


@pytest.mark.parametrize("placements", [None, [R, R], [S(0), R], [R, S(0)]])
def test_repeat_interleave(placements: Any, mesh_2x4: DeviceMesh) -> None:
    """With its size given it compiles, also with repeats that change."""
    place = lambda t: (
        t.to("xla") if placements is None else distribute_tensor(t, mesh_2x4, placements)
    )
    source = torch.randn(4, 3)

    @xd.compile
    def step(x: Any, repeats: Any) -> Any:
        x = x.detach().requires_grad_()
        y = torch.repeat_interleave(x, repeats, 0, output_size=6)
        (y * y).sum().backward()
        return y.detach(), x.grad

    for repeats in (REPEATS, REPEATS.flip(0), torch.tensor([0, 0, 0, 6])):
        x = source.clone().requires_grad_()
        y = torch.repeat_interleave(x, repeats, 0, output_size=6)
        (y * y).sum().backward()
        found, grad = on_cpu(list(step(place(source), place(repeats))))
        torch.testing.assert_close(found, y.detach())
        torch.testing.assert_close(grad, x.grad)
    with pytest.raises(RuntimeError, match="allocated size does not match required size"):
        torch.repeat_interleave(place(source), place(REPEATS), 0, output_size=5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_repeat_interleave_by_counts_of_each_device(compiled: bool, mesh_2x4: DeviceMesh) -> None:
    """With its size given, each device repeats by its own counts; whether they fit is looked at of
    each."""
    counts = [torch.tensor([2, 0, 3, 1]), torch.tensor([0, 5, 0, 1])]
    sources = [torch.randn(4, 3), torch.randn(4, 3)]
    x = xd.from_device_values(sources, mesh_2x4["dp"]).requires_grad_()

    def step(repeats: torch.Tensor) -> Any:
        y = x.repeat_interleave(repeats, 0, output_size=6)
        (grad,) = torch.autograd.grad((y * y).sum(), x)
        return y.detach(), grad

    run = xd.compile(step) if compiled else step
    y, grad = run(xd.from_device_values(counts, mesh_2x4["dp"]))
    for rank, (own, source) in enumerate(zip(counts, sources, strict=True)):
        at = rank * 4  # the devices of a row have the same
        source = source.clone().requires_grad_()
        expected = source.repeat_interleave(own, 0, output_size=6)
        (expected * expected).sum().backward()
        assert torch.equal(y.local_values()[at], expected)
        torch.testing.assert_close(grad.local_values()[at], source.grad)
    wrong = xd.from_device_values([counts[0], torch.tensor([0, 4, 0, 1])], mesh_2x4["dp"])
    with pytest.raises(RuntimeError, match="allocated size does not match required size"):
        run(wrong)[0].local_values()


def test_bincount() -> None:
    """Its size depends on values: of a compiled step's arguments it is refused, with what works
    instead."""
    x = torch.tensor([1, 4, 1]).to("xla")
    assert torch.bincount(x, minlength=3).tolist() == [0, 2, 0, 0, 1]
    with pytest.raises(xd.DataDependentError, match=r"scatter_add\(0, x, torch.ones_like\(x\)\)"):
        xd.compile(lambda x: torch.bincount(x, minlength=3))(x)
    assert xd.compile(lambda: torch.bincount(x, minlength=3))().tolist() == [0, 2, 0, 0, 1]
    counts = xd.compile(
        lambda n: torch.zeros(n, dtype=torch.int64, device=x.device).scatter_add(
            0, x, torch.ones_like(x)
        )
    )
    assert counts(5).tolist() == [0, 2, 0, 0, 1]


@pytest.mark.parametrize("compiled", [False, True])
def test_varying(compiled: bool, mesh_2x4: DeviceMesh) -> None:
    """Each device writes where its own mask says."""
    values = [torch.arange(4.0) + d for d in range(8)]

    def write(x: Any) -> Any:
        y = x.clone()
        y[y > 5] = 0
        return y

    ours = xd.from_device_values(values, mesh_2x4)
    found = (xd.compile(write) if compiled else write)(ours).local_values()
    for one, value in zip(found, values, strict=True):
        assert torch.equal(one, write(value))
