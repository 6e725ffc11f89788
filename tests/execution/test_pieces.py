"""What one device computes is several programs, which other batches have as well."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xla_dtensor as xd
from xla_dtensor.execution import pieces

pytestmark = pytest.mark.usefixtures("small_batches")


def _forget() -> None:
    """What was compiled."""
    pieces.programs.clear()
    pieces.cut_batches.clear()


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))


def _trained(model: nn.Module, x: torch.Tensor, after: Callable[[], Any] = lambda: None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after()
    return losses


def test_the_second_step_compiles_next_to_nothing(compiles: Callable[[], int]) -> None:
    """Momentum begins in the first; the passes are the same."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(_block() for _ in range(3))), torch.randn(4, 8)
    want = _trained(model, x)
    torch.manual_seed(0)
    model = nn.Sequential(*(_block() for _ in range(3))).to("xla")
    counts: list[int] = []
    compiles()
    found = _trained(model, x.to("xla"), lambda: counts.append(compiles()))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    assert counts[0] > 8 and counts[1] <= 2 and counts[2:] == [0, 0]


def test_layers_have_programs_in_common(compiles: Callable[[], int]) -> None:
    """Six compile what three do."""
    counts = []
    x = torch.randn(4, 8).to("xla")
    for layers in (3, 6):
        _forget()
        model = nn.Sequential(*(_block() for _ in range(layers))).to("xla")
        compiles()
        model(x).sum().backward()
        counts.append(compiles())
    assert counts[1] <= counts[0]


def test_a_cache_that_grows(compiles: Callable[[], int]) -> None:
    """Each token compiles what has its length, however many layers there are."""
    torch.manual_seed(0)
    layers = [torch.randn(3, 8, 8) / 3 for _ in range(5)]

    def token(x: Any, weights: list[Any], kept: list[Any]) -> Any:
        for layer, (to_query, to_key, out) in enumerate(weights):
            query, key = (x @ w for w in (to_query, to_key))
            kept[layer] = torch.cat([kept[layer], key], 1)
            seen = F.scaled_dot_product_attention(query, kept[layer], kept[layer])
            x = x + F.gelu(seen @ out)
        return x

    def generated(device: str, after: Callable[[], Any]) -> Any:
        weights = [w.to(device).unbind() for w in layers]
        kept = [torch.zeros(1, 1, 8, device=device) for _ in layers]
        x = torch.ones(1, 1, 8, device=device)
        for _ in range(6):
            x = token(x, weights, kept)
            x.sum().item()
            after()
        return x.cpu()

    want = generated("cpu", lambda: None)
    counts: list[int] = []
    compiles()
    torch.testing.assert_close(generated("xla", lambda: counts.append(compiles())), want)
    assert all(count <= 4 for count in counts[2:]), counts


def test_keys_and_values_grow_by_one_program(compiles: Callable[[], int]) -> None:
    """They are other parts of one product, and are joined to what was kept in the same way."""

    def generated(device: str, after: Callable[[], Any]) -> Any:
        torch.manual_seed(0)
        to_all = (torch.randn(8, 24) / 3).to(device)
        keys = values = torch.zeros(1, 2, 1, 4, device=device)
        x = torch.ones(1, 1, 8, device=device)
        for _ in range(8):
            parts = (x @ to_all).split(8, dim=2)
            query, key, value = (part.view(1, 1, 2, 4).transpose(1, 2) for part in parts)
            keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
            seen = F.scaled_dot_product_attention(query, keys, values)
            x = x + seen.transpose(1, 2).reshape(1, 1, 8).tanh()
            x.sum().item()
            after()
        return torch.cat([keys, values]).cpu()

    want = generated("cpu", lambda: None)
    counts: list[int] = []
    compiles()
    torch.testing.assert_close(generated("xla", lambda: counts.append(compiles())), want)
    assert all(count <= 2 for count in counts[3:]), counts


def _program(seed: int, device: str) -> list[torch.Tensor]:
    """Products, integers, views, writes, numbers and things that grow, in any order."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    floats = [torch.randn(4, 4, generator=generator).to(device) for _ in range(3)]
    whole = [torch.randint(0, 9, (4, 4), generator=generator).to(device) for _ in range(2)]
    for _ in range(draw.randint(20, 60)):
        x, y = draw.choice(floats), draw.choice(floats)
        n, m = draw.choice(whole), draw.choice(whole)
        what = draw.randrange(11)
        if what == 0:
            floats.append(torch.tanh(x @ y))
        elif what == 1:
            floats.append(F.linear(x, y).sigmoid())
        elif what == 2:
            floats.append(torch.cat([x[:2], y[2:]]))
        elif what == 3:
            whole.append((n + m * draw.randint(1, 5)) % 11)
        elif what == 4:
            floats.append(torch.where(n > m, x, y * draw.uniform(0.5, 1.0)))
        elif what == 5:
            whole.append(torch.cat([n[:1], m[1:]]).roll(1, 0))
        elif what == 6:
            floats.append(x.clone())
            floats[-1][draw.randrange(4)].mul_(0.5)
        elif what == 7:
            whole.append(n.clone())
            whole[-1][:, draw.randrange(4)] = m[:, 0]
        elif what == 8:
            floats.append((x * n / 9).softmax(-1))
        elif what == 9:
            x.add_(y.tanh().t(), alpha=draw.uniform(0.1, 0.2)).clamp_(-2, 2)
        else:
            floats.append(x[n[0] % 4])
    return floats + whole


@pytest.mark.one_in(7)
@pytest.mark.parametrize("seed", range(25))
def test_random_programs(seed: int) -> None:
    found = [value.cpu() for value in _program(seed, "xla")]
    torch.testing.assert_close(found, _program(seed, "cpu"), rtol=1e-4, atol=1e-5)


def test_random_numbers_are_those_of_single_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> torch.Tensor:
        torch.manual_seed(3)
        x = torch.ones(6, 6, device="xla")
        for _ in range(4):
            x = F.dropout(x @ x, 0.3) / 9 + torch.randn_like(x)
        return x.cpu()

    together = drawn()
    monkeypatch.setattr(xd.config, "eager", "strict")
    torch.testing.assert_close(together, drawn())


def test_exact_operations_are_the_same_together_and_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They run one by one until they have come often."""
    monkeypatch.setattr(pieces, "OFTEN", 3)
    _forget()
    alone: list[bool] = []
    run = pieces.one_by_one

    def one_by_one(*args: Any) -> Any:
        alone[-1] = True
        return run(*args)

    monkeypatch.setattr(pieces, "one_by_one", one_by_one)
    want = torch.arange(12).reshape(3, 4)
    x = want.to("xla")
    x.cpu()
    for _ in range(6):
        alone.append(False)
        x, want = [(v * 3 + 5).cumsum(1) % 1000 - v.amax(0) for v in (x, want)]
        assert torch.equal(x.cpu(), want)
    assert alone[:3] == [True] * 3 and not alone[-1]


def test_what_fails_between_others() -> None:
    """A program that doesn't run: one by one shows which operation it is, and the rest is there."""
    x = torch.ones(4, 4, device="xla")
    pieces.programs.clear()

    def no_memory(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces._Program, "__call__", no_memory)
        y = ((x @ x + 1) @ x).relu() * 2
        z = x.long() + 1
        assert torch.equal(y.cpu(), torch.full((4, 4), 40.0))
    assert torch.equal(z.cpu(), torch.full((4, 4), 2))


def test_a_compilation_that_fails_is_tried_again() -> None:
    _forget()
    x = torch.full((3, 3), 2.0, device="xla")
    failed: list[Any] = []

    def fail(*args: Any) -> None:
        failed.append(True)
        raise jax.errors.JaxRuntimeError("no memory to compile in")

    for times in range(3):
        with pytest.MonkeyPatch.context() as patched:
            if not times:
                patched.setattr(jax.stages.Lowered, "compile", fail)
            y = ((x @ x + 1).relu() * 2) @ x - 1
            assert torch.equal(y.cpu(), torch.full((3, 3), 155.0))
    assert failed


def test_finalizers_wait_for_no_compilation() -> None:
    """What a collection finds may read a tensor, in a thread that compiles as in any other."""
    done: list[torch.Tensor] = []

    class Meter:
        def __init__(self) -> None:
            self.itself, self.total = self, torch.ones(3).to("xla")

        def __del__(self) -> None:
            done.append(self.total.cpu())

    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            for _ in range(50):
                Meter()
            stop.wait(0.002)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    threshold = gc.get_threshold()
    gc.set_threshold(100)
    try:
        for n in range(5, 15):
            x = torch.rand(n, n, device="xla")
            y = ((x @ x).tanh() * 3 + 1) @ x
            for _ in range(3):
                y = (y @ x).sigmoid() @ x
            y.sum().item()
    finally:
        gc.set_threshold(*threshold)
        stop.set()
        thread.join()
    assert done and gc.isenabled()


def test_listeners_wait_for_no_compilation() -> None:
    _forget()
    steps, seen = torch.tensor(5.0).to("xla"), []
    steps.cpu()

    def listen(name: str, seconds: float, **kwargs: Any) -> None:
        if "backend_compile" in name:
            seen.append(steps.item())

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        x = torch.full((7, 7), 0.5, device="xla")
        y = ((x @ x).tanh() * 3 + 1) @ x
        want = ((x.cpu() @ x.cpu()).tanh() * 3 + 1) @ x.cpu()
        torch.testing.assert_close(y.cpu(), want)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert set(seen) == {5.0}


@pytest.mark.parametrize("error", [KeyboardInterrupt, jax.errors.JaxRuntimeError])
def test_a_compilation_that_ends_early(error: type[BaseException]) -> None:
    """What was to be computed has no value after Ctrl-C, and can be done again."""
    _forget()
    x = torch.full((5, 5), 2.0, device="xla")
    x.cpu()

    def stop(*args: Any) -> Any:
        raise error("no more")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces._Program, "begin", stop)
        y = (x @ x).relu() + (x @ x @ x).tanh()
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                y.cpu()
        else:
            assert torch.equal(y.cpu(), torch.full((5, 5), 21.0))
    again = (x @ x).relu() + (x @ x @ x).tanh()
    assert torch.equal(again.cpu(), torch.full((5, 5), 21.0))


def test_values_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of products holds a few arrays, not one of each piece."""
    x = torch.eye(64).to("xla")
    x.cpu()
    alive: list[int] = []
    run = pieces._Program.__call__

    def call(self: Any, *args: Any) -> Any:
        alive.append(len(jax.live_arrays()))
        return run(self, *args)

    monkeypatch.setattr(pieces._Program, "__call__", call)
    gc.collect()
    y = x
    for _ in range(40):
        y = (y @ x).tanh()
    y.cpu()
    assert len(alive) >= 40
    assert max(alive) - min(alive) <= 3


def test_threads_share_programs() -> None:
    _forget()
    values = [torch.full((6, 6), 0.1 * i) for i in range(6)]
    found: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        x = values[i].to("xla")
        for _ in range(5):
            x = (x @ x).tanh() + x.cumsum(0)
        found[i] = x.cpu()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(values):
        for _ in range(5):
            x = (x @ x).tanh() + x.cumsum(0)
        torch.testing.assert_close(found[i], x)


@pytest.mark.parametrize("mode", ["lazy", "strict"])
def test_strides_are_no_matter(
    mode: str, compiles: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cut from something longer is computed by the program that there is. Its results have
    torch's strides nevertheless."""
    monkeypatch.setattr(xd.config, "eager", mode)
    counts = []
    for length in (5, 6, 7):
        whole = torch.arange(3.0 * length).reshape(3, length)
        ours = whole.to("xla")[:, -2:]
        ours.cpu(), compiles()
        found, want = [(x.clone() * 2 + x, x + 1) for x in (ours, whole[:, -2:])]
        torch.testing.assert_close([v.cpu() for v in found], list(want))
        assert [v.stride() for v in found] == [v.stride() for v in want]
        counts.append(compiles())
    assert counts[0] and counts[1] <= 2 and counts[2] == counts[1], counts


def test_what_is_compiled_ahead_is_what_is_called() -> None:
    """Of random states, numbers, views, what other pieces give, and of what runs one by one: for
    the same kinds of operands."""
    _forget()
    threads: list[threading.Thread] = []

    def listen(name: str, seconds: float, **kwargs: Any) -> None:
        if "backend_compile" in name:
            threads.append(threading.current_thread())

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        x, n = torch.rand(4, 8, device="xla"), torch.arange(8, device="xla")
        y = F.dropout(x @ x.t(), 0.5) * 2.5 + x.sum()
        z = (y @ x * 3)[:, n % 4].to(torch.float64) @ torch.ones(8, 2, device="xla").double()
        (z.t() @ z + 1j).abs().cpu()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(threads) >= 3 and threading.main_thread() not in threads


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The operations of each program that is launched."""
    names: list[list[str]] = []
    run = pieces._Program.__call__

    def call(self: Any, *args: Any) -> Any:
        names.append([entry.operation.name for entry in self._entries])
        return run(self, *args)

    monkeypatch.setattr(pieces._Program, "__call__", call)
    return names


def test_what_nobody_needs_is_not_computed(launched: list[list[str]]) -> None:
    x = torch.rand(6, 6, device="xla")
    x.cpu()
    launched.clear()
    dropped = x
    for _ in range(5):
        dropped = (dropped @ x).tanh()
    kept = (x @ x).relu()
    del dropped
    torch.testing.assert_close(kept.cpu(), (x.cpu() @ x.cpu()).relu())
    assert launched == [["aten::mm.default", "aten::relu.default"]]


def test_a_view_is_computed_where_it_is_read(launched: list[list[str]]) -> None:
    """In both programs, without memory of its own: a product takes a transposed tensor as it is."""
    x = torch.rand(6, 6, device="xla")
    x.cpu()
    launched.clear()
    turned = x.t()
    y = ((x @ turned).relu() @ turned).exp() + turned[1:2]
    want = ((x.cpu() @ x.cpu().t()).relu() @ x.cpu().t()).exp() + x.cpu().t()[1:2]
    torch.testing.assert_close(y.cpu(), want)
    assert launched == [
        ["a view", "aten::mm.default", "aten::relu.default"],
        ["a view", "aten::mm.default", "aten::exp.default", "a view", "aten::add.Tensor"],
    ]


def test_a_users_code_runs_if_nobody_needs_it() -> None:
    """It may do something besides."""
    done: list[float] = []

    @xd.jax_function
    def told(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: done.append(float(value)), x.sum())
        return x * 2

    x = torch.ones(4, 4, device="xla")
    y = (x @ x).relu()
    told(y)
    z = (y @ x).relu()
    z.cpu()
    jax.effects_barrier()
    assert done == [64.0]
