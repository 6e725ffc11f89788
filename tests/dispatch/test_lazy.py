"""Eager operations wait to be launched together: whatever happens between writing down and reading,
the values are CPU torch's."""

from __future__ import annotations

import contextlib
import gc
import io
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.parallel.harness import full
from xla_dtensor.execution import batch, lazy, pieces
from xla_dtensor.execution.batch_program import Conversion
from xla_dtensor.forms.storage import Pending

R = Replicate()
pytestmark = pytest.mark.usefixtures("small_batches")

LAYOUTS: dict[str, Any] = {
    "one device": None,
    "replicated": [R, R],
    "by rows": [Shard(0), R],
    "uneven": [Shard(1), Shard(0)],
}


def place(value: torch.Tensor, layout: str, mesh: DeviceMesh) -> Any:
    if LAYOUTS[layout] is None:
        return value.clone().to("xla")
    return distribute_tensor(value.clone(), mesh, LAYOUTS[layout])


def waits(tensor: Any) -> bool:
    return tensor._storage_.value.__class__ is Pending


def test_what_nobody_reads_waits() -> None:
    x = torch.ones(3).to("xla")
    y = x + 1
    assert waits(y) and not waits(x)
    assert y.sum().item() == 6 and not waits(y)


def _overwrite(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    x.fill_(7)
    return [y, x]


def _overwrite_by_view(x: torch.Tensor) -> list[torch.Tensor]:
    y, view = x + 1, x[1]
    view.mul_(3)
    x[2:, 1] = view[0]
    return [y, x, view, x.t().clone()]


def _views_of_results(x: torch.Tensor) -> list[torch.Tensor]:
    y = (x * 2).t()
    row = y[1]
    y.add_(1)
    return [row, y[:, 1:3], y.reshape(-1), row + row]


def _same_twice(x: torch.Tensor) -> list[torch.Tensor]:
    y = x + x
    y += y
    y = y + 0
    return [y, y.view(-1), y * y]


def _detached(x: torch.Tensor) -> list[torch.Tensor]:
    y = (x * 3).detach()
    z = y.clone()
    y.zero_()
    return [y, z]


def _exchange(x: torch.Tensor) -> list[torch.Tensor]:
    y, z = x + 1, x + 2
    y.data, z.data = z.data, y.data
    y.add_(10)
    return [y, z]


def _gone(x: torch.Tensor) -> list[torch.Tensor]:
    temporary = x.exp()
    result = temporary.log()
    del temporary
    gc.collect()
    return [result]


def _moved(x: torch.Tensor) -> list[torch.Tensor]:
    y = x - 1
    host = y.cpu()
    y.copy_(host * 2)
    return [y, y + host.to(y.device) if type(y) is torch.Tensor else y + y]


def _out(x: torch.Tensor) -> list[torch.Tensor]:
    out = torch.empty_like(x)
    torch.add(x, 1, out=out)
    y = out * 2
    torch.mul(x, 2, out=out)
    return [out, y]


def _numbers(x: torch.Tensor) -> list[torch.Tensor]:
    y = x
    for i in range(5):
        y = y * (i + 0.5) + i
    return [y, y.int() * 3 + 2, (y > 1) & True]


def _positions(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone()
    for i in range(1, 3):
        y[i] = y[i - 1] * 2
        y[:, i : i + 1] += 1
    return [y, *(row + 1 for row in y)]


PROGRAMS: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    f.__name__[1:]: f
    for f in (
        _overwrite,
        _overwrite_by_view,
        _views_of_results,
        _same_twice,
        _detached,
        _exchange,
        _gone,
        _out,
        _numbers,
        _positions,
    )
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_on_the_cpu(name: str, layout: str, mesh_2x4: DeviceMesh) -> None:
    value = torch.arange(20.0).reshape(4, 5) / 7
    expected = PROGRAMS[name](value.clone())
    for _ in range(2):  # made, found again
        ours = PROGRAMS[name](place(value, layout, mesh_2x4))
        for result, want in zip(ours, expected, strict=True):
            torch.testing.assert_close(full(result), want)


OPERATIONS: list[Callable[[random.Random, list[Any]], Any]] = [
    lambda r, ts: r.choice(ts) + r.choice(ts),
    lambda r, ts: r.choice(ts) * r.choice([0.5, 2, -1.5]),
    lambda r, ts: r.choice(ts).add_(r.choice(ts)),
    lambda r, ts: r.choice(ts).t().contiguous().t(),
    lambda r, ts: r.choice(ts)[r.randrange(4)].add_(1) and None,
    lambda r, ts: r.choice(ts)[:, r.randrange(3) :].mul_(0.5) and None,
    lambda r, ts: r.choice(ts).fill_(r.random()),
    lambda r, ts: torch.tanh(r.choice(ts)),
    lambda r, ts: ts.__setitem__(r.randrange(len(ts)), r.choice(ts).clone()),
    lambda r, ts: r.choice(ts).sum(0, keepdim=True) + r.choice(ts),
    lambda r, ts: r.choice(ts).copy_(r.choice(ts)),
    lambda r, ts: full(r.choice(ts)) is None,  # reads
    lambda r, ts: ts.pop(r.randrange(len(ts))) if len(ts) > 3 else None,
]


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int, layout: str, mesh_2x4: DeviceMesh) -> None:
    start = [torch.randn(4, 5, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def go(tensors: list[Any]) -> list[torch.Tensor]:
        r = random.Random(seed)
        for _ in range(40):
            result = None
            operation = r.choice(OPERATIONS)
            with contextlib.suppress(RuntimeError):  # `and None` of several elements
                result = operation(r, tensors)
            if isinstance(result, torch.Tensor) and result.shape == (4, 5):
                tensors.append(result)
            del tensors[6:]
        return [full(t) if t.device.type == "xla" else t.clone() for t in tensors]

    expected = go([t.clone() for t in start])
    ours = go([place(t, layout, mesh_2x4) for t in start])
    for result, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 4))


@pytest.mark.parametrize("read_the_loss", [True, False])
def test_training(read_the_loss: bool, mesh_2x4: DeviceMesh) -> None:
    batches = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(3))

    def train(model: nn.Module, place: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        losses = []
        for x in batches:
            optimizer.zero_grad()
            loss = model(place(x)).pow(2).mean()
            losses.append(loss.detach())
            if read_the_loss:
                losses[-1].item()
            loss.backward()
            optimizer.step()
        return [*losses, *(p.detach() for p in model.parameters())]

    mesh = mesh_2x4["dp"]
    model = xd.replicate(_model(), device_mesh=mesh)
    ours = train(model, lambda x: distribute_tensor(x, mesh, [Shard(0)]))
    for result, want in zip(ours, train(_model(), lambda x: x), strict=True):
        torch.testing.assert_close(full(result), want, rtol=1e-4, atol=1e-5)


def test_random_numbers_are_the_strict_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> list[torch.Tensor]:
        torch.manual_seed(5)
        x = torch.randn(3, 4, device="xla")
        y = F.dropout(x, 0.5) + torch.rand(4, device="xla")
        torch.manual_seed(6)
        generator = torch.Generator("xla").manual_seed(9)
        z = torch.randn(4, device="xla", generator=generator) * torch.rand(4, device="xla")
        return [t.cpu() for t in (x, y, z, torch.rand(2, device="xla", generator=generator))]

    ours = [draw(), draw()]
    monkeypatch.setattr(xd.config, "eager", "strict")
    for one in ours:
        for result, want in zip(one, draw(), strict=True):
            torch.testing.assert_close(result, want)


def test_a_compiled_step_overwrites_what_is_waited_for(mesh_2x4: DeviceMesh) -> None:
    """It takes over its memory."""
    value = torch.arange(8.0)
    x = distribute_tensor(value, mesh_2x4, [Shard(0), R])

    @xd.compile
    def step() -> None:
        x.mul_(2)

    step()
    before = x + 1
    step()
    after = x + 1
    step()
    torch.testing.assert_close(full(before), value * 2 + 1)
    torch.testing.assert_close(full(after), value * 4 + 1)
    torch.testing.assert_close(full(x), value * 8)


def test_a_compiled_step_is_given_what_waits() -> None:
    step = xd.compile(lambda a: a * 2)
    x = torch.ones(3).to("xla")
    for i in range(3):
        assert torch.equal(step(x + i).cpu(), torch.full((3,), 2.0 + 2 * i))


def test_another_threads_step_overwrites_what_is_waited_for() -> None:
    x = torch.arange(4.0).to("xla")
    step = xd.compile(lambda: x.add_(10))
    step()
    waiting = x * 2
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert torch.equal(waiting.cpu(), (torch.arange(4.0) + 10) * 2)
    assert torch.equal(x.cpu(), torch.arange(4.0) + 20)


def test_threads() -> None:
    """What one thread has written down others may read, and write."""
    x = torch.arange(6.0).to("xla")
    y = x + 1
    assert waits(y)
    seen: list[torch.Tensor] = []

    def work() -> None:
        z = y * 2
        y.add_(100)
        seen.append(z)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(seen[0].cpu(), (torch.arange(6.0) + 1) * 2)
    assert torch.equal(y.cpu(), torch.arange(6.0) + 101)


def test_many_threads() -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            x = torch.full((5,), float(number)).to("xla")
            want = torch.full((5,), float(number))
            for i in range(60):
                x, want = torch.tanh(x) * 2 + i % 3, torch.tanh(want) * 2 + i % 3
                if i % 17 == number:
                    torch.testing.assert_close(x.cpu(), want)
            torch.testing.assert_close(x.cpu(), want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# Failures --------------------------------------------------------------------------------------


def _fails(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let a launch of several operations fail, and of those called ``names`` their own."""

    def no_memory(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    monkeypatch.setattr(lazy, "fused", lambda *args: no_memory)
    monkeypatch.setattr(lazy, "Pieces", lambda *args: no_memory)
    batch.executables.clear()
    pieces.cut_batches.clear()
    run = lazy.one_by_one

    def one_by_one(entries: Any, *args: Any) -> Any:
        for entry in entries:
            if entry.operation.name in names:
                monkeypatch.setattr(entry.operation, "eager", no_memory)
        return run(entries, *args)

    monkeypatch.setattr(lazy, "one_by_one", one_by_one)


def test_a_launch_that_fails_is_done_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch)
    x = torch.arange(4.0).to("xla")
    y = (x + 1) * 3
    x.mul_(y)
    assert torch.equal(y.cpu(), (torch.arange(4.0) + 1) * 3)
    assert torch.equal(x.cpu(), torch.arange(4.0) * (torch.arange(4.0) + 1) * 3)


def test_an_operation_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would have written has its earlier value; what needs it has none; the rest is
    there, and the next operations work."""
    _fails(monkeypatch, "aten::atan2.default")
    x, z = torch.arange(4.0).to("xla"), torch.ones(4).to("xla")
    good = x + 1
    bad = torch.atan2(x, good)  # the line
    x.add_(bad)
    other = z * 5
    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory") as error:
        good.cpu()
    (note,) = error.value.__notes__
    assert "aten::atan2.default" in note and "bad = torch.atan2(x, good)  # the line" in note
    assert torch.equal(good.cpu(), torch.arange(4.0) + 1)
    assert torch.equal(other.cpu(), torch.full((4,), 5.0))
    assert torch.equal(x.cpu(), torch.arange(4.0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has no value"):
            bad.cpu()
    assert torch.equal((z + 1).cpu(), torch.full((4,), 2.0))


def test_what_has_no_value_is_no_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the next batch have the numbers that those of the failed one had."""
    _fails(monkeypatch, "aten::atan2.default")
    x = torch.ones(4).to("xla")
    bad = torch.atan2(x, x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory"):
        bad.cpu()
    other = x * 100
    with pytest.raises(RuntimeError, match="has no value"):
        bad + 1
    with pytest.raises(RuntimeError, match="has no value"):
        bad.add_(1)
    assert torch.equal(other.cpu(), torch.full((4,), 100.0))


def test_what_was_written_in_between_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write leaves what was there before it, whoever wrote that."""
    _fails(monkeypatch, "aten::atan2.default")
    loaded, added, made = (torch.ones(4).to("xla") for _ in range(3))
    loaded.add_(1)
    loaded.copy_(torch.full((4,), 7.0))  # straight from the host
    bad = torch.atan2(made, made)
    loaded.add_(bad)
    added.add_(1)
    added.mul_(bad)
    new = made * 5
    new.sub_(bad)
    with pytest.raises(jax.errors.JaxRuntimeError):
        made.add_(1).cpu()
    for tensor, value in ((loaded, 7.0), (added, 2.0), (new, 5.0), (made, 2.0)):
        assert torch.equal(tensor.cpu(), torch.full((4,), value))


def test_a_refused_draw_takes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(5)
        with contextlib.suppress(RuntimeError):
            torch.multinomial(torch.ones(3).to("xla"), 5)
        first = torch.rand(2, device="xla")
        return torch.cat([first, torch.rand(2, device="xla")]).cpu()

    ours = draw()
    monkeypatch.setattr(xd.config, "eager", "strict")
    torch.testing.assert_close(ours, draw())


def test_what_a_lowering_refuses_is_refused_at_its_line() -> None:
    """Though nothing is computed yet."""

    @xd.lowering.lowers("lazy_test::refuses")
    def refuses(x: Any) -> Any:
        raise NotImplementedError("not this one")

    library = torch.library.Library("lazy_test", "FRAGMENT")
    library.define("refuses(Tensor x) -> Tensor")
    library.impl("refuses", lambda x: torch.empty_like(x), "Meta")
    x = torch.ones(2).to("xla")
    with pytest.raises(NotImplementedError, match="not this one"):
        torch.ops.lazy_test.refuses(x + 1)
    assert torch.equal((x + 1).cpu(), torch.full((2,), 2.0))


def test_shapes_are_refused_at_their_line() -> None:
    x = torch.ones(2, 3).to("xla")
    y = x + 1
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        y @ y
    assert waits(y)


# Where batches end -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_loop_is_few_programs(compiles: Callable[[], int], mesh_2x4: DeviceMesh) -> None:
    """64 steps of a cell, each of its own position, forward and backward."""
    torch.manual_seed(0)
    values = torch.randn(8, 64, 6), torch.randn(6, 6) / 3, torch.zeros(8, 6)

    def go(x: Any, w: Any, h: Any) -> Any:
        states = []
        for t in range(64):
            gate = torch.sigmoid(x[:, t] @ w + h)
            h = gate * torch.tanh(x[:, t] + h @ w) + (1 - gate) * h
            states.append(h)
        return torch.stack(states, 1)

    for layout in ("one device", "by rows"):
        placed = [place(values[0], layout, mesh_2x4)]
        placed += [place(v, "one device" if layout == "one device" else "replicated", mesh_2x4)
                   for v in values[1:]]  # fmt: skip
        with torch.no_grad():
            torch.testing.assert_close(full(go(*placed)), go(*values), rtol=1e-4, atol=1e-4)
            full(go(*placed))  # the first time meets operations that torch composes by Python
            compiles()
            full(go(*placed))
            assert compiles() == 0
            batch.executables.clear()
            pieces.cut_batches.clear()
            full(go(*placed))
        assert compiles() <= 3


def test_layers_share_a_program(compiles: Callable[[], int]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(200)))
    x = torch.randn(4, 6)
    want = layers(x)
    layers.to("xla")
    x = x.to("xla")
    compiles()
    with torch.no_grad():
        torch.testing.assert_close(layers(x).cpu(), want, rtol=1e-3, atol=1e-3)
    assert compiles() <= 4


def test_tokens_one_by_one(compiles: Callable[[], int]) -> None:
    """A buffer that is filled in place, read at every token."""
    torch.manual_seed(0)
    table, out = torch.randn(11, 6), torch.randn(6, 11)

    def generate(table: Any, out: Any, tokens: Any) -> Any:
        for t in range(24):
            hidden = F.embedding(tokens[:, : 24 + 1], table).cumsum(1)[:, t]
            tokens[:, t + 1] = (hidden @ out).argmax(-1)
        return tokens

    want = generate(table, out, torch.zeros(2, 25, dtype=torch.long))
    start = torch.zeros(2, 25, dtype=torch.long).to("xla")
    compiles()
    ours = generate(table.to("xla"), out.to("xla"), start)
    assert torch.equal(ours.cpu(), want)
    assert compiles() <= 10


def test_a_long_chain_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes round, and nothing is read; it is launched nevertheless."""
    monkeypatch.setattr(lazy, "ENOUGH", 20)
    monkeypatch.setattr(lazy, "MOST", 40)
    x = torch.zeros(2).to("xla")
    counts = []
    for i in range(100):
        x = torch.cat([x, x[:1]]) if i % 2 else x + 1  # each of another shape
        counts.append(len(lazy._threads.batch))
    assert 30 < max(counts) < 44
    assert x.shape == (52,)


def test_inputs_are_held_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits keeps its inputs alive, also those that the program has let go."""
    size = 40 * 1000
    monkeypatch.setattr(lazy, "HELD", 10 * size)
    sums, held = [], []
    for i in range(50):
        x = torch.full((10, 1000), float(i)).to("xla")
        storage = weakref.ref(x._storage_.array)
        sums.append(x.sum())
        del x
        held = [array for array in [*held, storage] if array() is not None]
        assert len(held) <= 12
    assert torch.stack(sums).cpu().tolist() == [10_000.0 * i for i in range(50)]


def test_large_tensors_of_one_device_stay_there(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), R])
    y = x + 1
    large = torch.zeros(300, 300, device="xla") + 1
    small = torch.zeros(3, device="xla") + 1
    z = x * 2
    assert torch.equal(full(y) + full(z), torch.full((8,), 4.0))
    assert len(large._storage_.array.devices()) == 1
    assert small.sum().item() == 3


def test_other_layouts_wait_too(mesh_2x4: DeviceMesh) -> None:
    value = torch.arange(16.0).reshape(4, 4)
    x = distribute_tensor(value, mesh_2x4, [Shard(0), Shard(1)])
    y = (x @ x).redistribute(placements=[R, Shard(0)])
    local = y.to_local() * 2
    again = xd.XLAShardedTensor.from_local(local, mesh_2x4, [R, Shard(0)], run_check=False)
    assert waits(y) and waits(again)
    torch.testing.assert_close(full(again), value @ value * 2)
    partial = xd.XLAShardedTensor.from_local(x.to_local(), mesh_2x4, [Shard(0), Partial()])
    parts = value[:, :1] + value[:, 1:2] + value[:, 2:3] + value[:, 3:]
    torch.testing.assert_close(full(partial), parts)
    assert any(isinstance(c, Conversion) for c in _conversions())


def _conversions() -> list[Any]:
    from xla_dtensor.movement.relayout import conversions

    return list(conversions.values())


def test_synchronize_begins_what_waits() -> None:
    y = torch.ones(3).to("xla") + 1
    torch.xla.synchronize()
    assert not waits(y)


def test_the_end_of_a_backward_pass_begins_it() -> None:
    x = torch.ones(3).to("xla").requires_grad_()
    loss = (x * x).sum()
    loss.backward()
    assert x.grad is not None and not waits(x.grad) and not waits(loss)


def test_a_mode_that_looks_at_each_operation_launches_each() -> None:
    x = torch.ones(3).to("xla")
    y = x + 1
    seen = []

    def work() -> None:
        seen.append(y * 2)
        assert not waits(seen[0])

    xd.explain(work, file=io.StringIO())
    assert torch.equal(seen[0].cpu(), torch.full((3,), 4.0))
