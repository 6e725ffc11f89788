"""Indices out of range, and weights that are none, raise what CPU torch raises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from tests.dispatch.out_of_range import CALLS, LAYOUTS, OTHER_TEXTS, R, X, i, place
from tests.parallel.harness import full
from xla_dtensor.execution import value_checks

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    with xd.config.override(checks="all"):
        yield


@pytest.mark.one_in(8)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_raises_as_the_cpu(name: str, layout: str, mesh_2x4: DeviceMesh) -> None:
    x, wrong, right, call = CALLS[name]
    with pytest.raises((IndexError, RuntimeError)) as theirs:
        call(x, wrong)
    ours, index, good = (place(t, LAYOUTS[layout], mesh_2x4) for t in (x, wrong, right))
    with pytest.raises(theirs.type) as error:
        # At once, or if the index is still to be computed, when a value is read.
        full(call(ours, index))
    text = OTHER_TEXTS.get(name, str(theirs.value).splitlines()[0])
    assert text in str(error.value)
    shape = index.flatten().shape if name in OTHER_TEXTS else index.shape
    assert "aten::" in str(error.value) and str(list(shape)) in str(error.value)
    for _ in range(2):  # the second time it is known to be right
        torch.testing.assert_close(full(call(ours, good)), call(x, right))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("zero", [0, False])
def test_a_divisor_that_is_a_number(zero: int, compiled: bool) -> None:
    x = torch.tensor([4, -3, 7])
    divide = lambda x: x // zero
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        divide(x)
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError \(aten::floor_divide"):
        (xd.compile(divide) if compiled else divide)(x.to("xla"))
    assert torch.equal((x.to("xla") / zero).cpu(), x / zero)


def test_a_divisor_that_changes_stays_an_input() -> None:
    x, of = torch.tensor([4, -3, 7]), {"n": 2}
    step = xd.compile(lambda x: x // of["n"])
    for n in (2, 3, 4, 5):
        of["n"] = n
        assert torch.equal(step(x.to("xla")).cpu(), x // n)
    assert step.traces == 2


def test_writes_nothing() -> None:
    x = X.to("xla")
    with pytest.raises(IndexError):
        x[i(12).to("xla")] = 7.0
    assert torch.equal(x.cpu(), X)


def test_an_index_that_is_overwritten() -> None:
    """What was right isn't any more, in the same memory."""
    x, index = X.to("xla"), i(1, 2).to("xla")
    x[index]
    index += 9
    with pytest.raises(IndexError, match="index 11 is out of bounds"):
        x[index].cpu()
    index -= 9
    assert torch.equal(x[index].cpu(), X[1:3])


def test_another_table_for_the_same_index() -> None:
    index = i(5, 9).to("xla")
    F.embedding(index, X.to("xla"))
    with pytest.raises(IndexError, match="index out of range in self"):
        F.embedding(index, X[:6].contiguous().to("xla"))


def test_a_cpu_index() -> None:
    with pytest.raises(IndexError, match="index 12 is out of bounds"):
        X.to("xla")[i(12)]


def test_views_as_indices() -> None:
    """A view's own elements count, not those of its base."""
    index = i(0, 99, 3).to("xla")
    assert torch.equal(X.to("xla")[index[::2]].cpu(), X[i(0, 3)])
    with pytest.raises(IndexError, match="index 99"):
        X.to("xla")[index[1:]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_that_were_right_before(layout: str, mesh_2x4: DeviceMesh) -> None:
    """Of one array that is looked at again only what was right is known: the same view of it, and
    not after a write."""
    x = X.to("xla")
    index = place(i(0, 3, 5, 99), LAYOUTS[layout], mesh_2x4)
    for _ in range(2):
        assert torch.equal(full(F.embedding(index[:3], x)), X[i(0, 3, 5)])
        with pytest.raises(IndexError, match="index out of range"):
            full(F.embedding(index[1:], x))
    index[2] = 98
    with pytest.raises(IndexError, match="index out of range"):
        full(F.embedding(index[:3], x))


def test_varying(mesh_2x4: DeviceMesh) -> None:
    """One device's index out of range is enough."""
    good = xd.from_device_values([i(d) for d in range(8)], mesh_2x4)
    F.embedding(good, X.to("xla"))
    bad = xd.from_device_values([i(d + (d == 5) * 10) for d in range(8)], mesh_2x4)
    with pytest.raises(IndexError, match="index out of range"):
        F.embedding(bad, X.to("xla"))


def test_an_index_that_waits_to_be_computed() -> None:
    """What is wrong is said when a value is read, whichever, once, with the line; what an earlier
    operation had to say comes first."""
    x, index = X.to("xla"), i(1, 2).repeat(600).to("xla")
    x[index + 9]
    F.embedding(index + 10, x)
    with pytest.raises(IndexError, match=r"index 11 is out of bounds[^$]*x\[index \+ 9\]"):
        x.cpu()
    assert torch.equal(x.cpu(), X)


@pytest.mark.usefixtures("strict_eager")
def test_strictly_it_is_said_at_once() -> None:
    x, index = X.to("xla"), i(1, 2).to("xla")
    with pytest.raises(IndexError, match="index 11 is out of bounds"):
        x[index + 9]


def test_a_short_index_is_looked_at_at_once() -> None:
    """Though it is still to be computed: nothing is written by half."""
    x, index = X.to("xla"), i(1, 2).to("xla")
    with pytest.raises(IndexError, match="index 11 is out of bounds"):
        x[index + 9]
    with pytest.raises(RuntimeError, match="out of bounds"):
        x.scatter_(0, (index + 9)[:, None], 1.0)
    assert torch.equal(x.cpu(), X)


def test_an_index_that_is_a_sum(mesh_2x4: DeviceMesh) -> None:
    """Its parts are in range, or out of it; what counts is what they make together."""
    parts = xd.from_device_values([i(6) for _ in range(2)], mesh_2x4["dp"])
    total = xd.XLAShardedTensor.from_local(parts, mesh_2x4["dp"], [xd.Partial()])
    with pytest.raises(IndexError, match="index out of range"):
        F.embedding(total, X.to("xla")).cpu()
    assert F.embedding(total, torch.ones(13, 2).to("xla")).shape == (1, 2)


@pytest.mark.parametrize(
    "weights", [[1.0, float("nan")], [1.0, -1.0], [1.0, float("inf")], [0.0, 0.0]]
)
def test_multinomial(weights: list[float]) -> None:
    with pytest.raises(RuntimeError) as theirs:
        torch.multinomial(torch.tensor(weights), 1)
    with pytest.raises(RuntimeError) as ours:
        torch.multinomial(torch.tensor(weights).to("xla"), 1)
    assert str(theirs.value) in str(ours.value)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("read", ["item", "cpu", "print", "synchronize", "shards"])
def test_many_indices(
    read: str, layout: str, mesh_2x4: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than a few the devices look, and it is raised when a value is read next."""
    monkeypatch.setattr(value_checks, "AWAITED", 3)
    monkeypatch.setattr(value_checks, "ON_HOST", 3)
    x = place(X, LAYOUTS[layout], mesh_2x4)
    found = F.embedding(place(i(1, 2, 3, 12), LAYOUTS[layout], mesh_2x4), x)
    other = place(torch.tensor([1.0]), LAYOUTS[layout], mesh_2x4)
    with pytest.raises(IndexError, match="index out of range in self") as error:
        if read == "item":
            other.item()
        elif read == "cpu":
            full(other)
        elif read == "print":
            repr(other if layout == "one device" else other.tolist())
        elif read == "synchronize":
            torch.xla.synchronize()  # type: ignore[attr-defined]
        elif layout == "one device":
            other.local_values()
        else:
            other.local_shards  # noqa: B018  (a property that reads)
    assert "test_conditions.py" in str(error.value) and "F.embedding" in str(error.value)
    assert other.item() == 1  # it is raised once
    assert found.shape == (4, 4)
    F.embedding(place(i(1, 2, 3, 9), LAYOUTS[layout], mesh_2x4), x)
    assert other.item() == 1


def test_off() -> None:
    with xd.config.override(checks="off"):
        assert torch.equal(F.embedding(i(12).to("xla"), X.to("xla")).cpu(), X[9:])
    with pytest.raises(IndexError):
        F.embedding(i(12).to("xla"), X.to("xla")).sum().item()


def test_padding_and_empty() -> None:
    """No elements, none that is wrong."""
    empty = torch.tensor([], dtype=torch.int64)
    assert F.embedding(empty.to("xla"), X.to("xla")).shape == (0, 4)
    assert X.to("xla").index_fill(0, empty.to("xla"), 1.0).shape == (10, 4)


def test_assert_async(mesh_2x4: DeviceMesh) -> None:
    for layout in LAYOUTS.values():
        torch._assert_async(place(torch.tensor(1.0), layout and [R, R], mesh_2x4), "fine")
        with pytest.raises(RuntimeError, match="not fine"):
            torch._assert_async(place(torch.tensor(False), layout and [R, R], mesh_2x4), "not fine")
    for value in (torch.tensor(0), torch.tensor([1, 1]), torch.tensor([])):
        with pytest.raises(RuntimeError) as theirs:
            torch._assert_async(value)
        with pytest.raises(RuntimeError) as ours:
            torch._assert_async(value.to("xla"))
        assert str(ours.value) == str(theirs.value)


def test_printing_a_large_tensor_reads_values_too() -> None:
    """What waits to be judged is judged then, as where a small one is printed."""
    table = torch.ones(10, 4, device="xla")
    index = torch.full((value_checks.ON_HOST + 1,), 99).to("xla") + 0
    F.embedding(index, table)
    with pytest.raises(IndexError, match="index out of range in self"):
        repr(torch.ones(2000, device="xla"))
