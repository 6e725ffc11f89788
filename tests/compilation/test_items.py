"""Items of what a compiled step computes (``loss.item()``), and lists that it only appends to: the
next calls do what CPU torch does, by one program."""

from __future__ import annotations

import copy
import io
import logging
import math
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.base.torch_private import pytree

CALLS = 4


class State:
    """What a step keeps between its calls."""

    def __init__(self) -> None:
        self.total, self.count, self.ema, self.best = 0.0, 0, None, 1.5
        self.losses: list[Any] = []
        self.kept: deque[Any] = deque(maxlen=2)
        self.table: dict[Any, Any] = {"loss": [], "accuracy": []}
        self.later: defaultdict[str, list[Any]] = defaultdict(list)
        self.latest = {"loss": 0.0}


Body = Callable[[State, torch.Tensor, torch.Tensor], Any]


def plain(value: Any) -> Any:
    """Numbers, and tensors as numbers, with Python's containers around them."""
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.detach().cpu().tolist()
    if isinstance(value, State):
        value = vars(value)
    return pytree.tree_map(plain, value) if isinstance(value, dict | list | tuple) else value


def close(one: Any, other: Any) -> None:
    ones, tree = pytree.tree_flatten(one)
    others, other_tree = pytree.tree_flatten(other)
    assert tree == other_tree
    for a, b in zip(ones, others, strict=True):
        assert type(a) is type(b)
        assert a == (pytest.approx(b, rel=1e-5, abs=1e-6) if isinstance(a, float) else b)


def trained(body: Body, device: str, own: State) -> Callable[[torch.Tensor], Any]:
    """A training step that ends with ``body``."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> Any:
        y = model(x)
        loss = y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        result = body(own, loss, y)
        optimizer.step()
        return result

    return step


def values(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, generator=generator).to(device) for _ in range(CALLS)]


def compared(body: Body, change: Callable[[int, State], None] = lambda call, own: None) -> int:
    """How often the compiled step is traced that does in each call what CPU torch's does; between
    the calls the user makes a ``change``."""
    one, other = State(), State()
    expected = trained(body, "cpu", one)
    step = xd.compile(trained(body, "xla", other))
    for call, (x, on_cpu) in enumerate(zip(values("xla"), values("cpu"), strict=True)):
        close(plain(step(x)), plain(expected(on_cpu)))
        close(plain(other), plain(one))
        for own in (one, other):
            change(call, own)
    traces: int = step.traces
    return traces


# --- numbers -----------------------------------------------------------------------------------


def _meter(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.total += loss.item() * y.shape[0]
    own.count += y.shape[0]
    return own.total / own.count


def _ema(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.ema = loss.item() if own.ema is None else 0.9 * own.ema + 0.1 * loss.item()
    return own.ema


def _counted(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.count += (y > 0).sum().item()
    return own.count, own.count / y.numel(), own.count // 2, -own.count % 5


def _in_a_loop(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    parts = [row.sum().item() for row in y]
    return sum(parts) / len(parts), [round(part, 3) for part in parts]


def _clipped(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    norm = sum(row.norm().item() ** 2 for row in y) ** 0.5
    return y * (0.5 / (norm + 1e-6)), norm


def _of_math(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    perplexity = math.exp(loss.item())
    return perplexity, y * math.sqrt(loss.item()), y * perplexity, math.floor(perplexity)


def _before_a_write(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    count = torch.zeros((), device=y.device)
    before = count.add_(loss.detach()).item()
    count.add_(1)
    return before, count.item()


def _a_new_tensor(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.tensor([loss.item(), 2.0], device=y.device) * 3, torch.full((2,), loss.item())[0]


def _as_a_dict(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.latest["loss"] = loss.item()
    return {"loss": loss.item(), "accuracy": (y > 0).float().mean().item(), "n": y.shape[0]}


NUMBERS: dict[str, tuple[Body, int]] = {
    "returned": (lambda own, loss, y: loss.item(), 1),
    "returned_twice": (lambda own, loss, y: (loss.item(), loss, loss.item() + 1), 1),
    "of_one_element": (lambda own, loss, y: y[:1, :1].item(), 1),
    "integer": (lambda own, loss, y: y.argmax().item(), 1),
    "half_precision": (lambda own, loss, y: loss.bfloat16().item(), 1),
    "meter": (_meter, 1),
    "ema": (_ema, 2),  # the first call finds None
    "counted": (_counted, 1),
    "in_a_loop": (_in_a_loop, 1),
    "clipped": (_clipped, 1),
    "math": (_of_math, 1),
    "before_a_write": (_before_a_write, 1),
    "dict": (_as_a_dict, 1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    body, traces = NUMBERS[name]
    assert compared(body) == traces


@pytest.mark.parametrize("name", ["meter", "clipped", "counted"])
def test_numbers_of_a_mesh(name: str, mesh_2x4: DeviceMesh) -> None:
    body, _ = NUMBERS[name]
    one, other = State(), State()
    expected = [body(one, x.sum(), x) for x in values("cpu")]
    step = xd.compile(lambda x: body(other, x.sum(), x))
    for x, result in zip(values("cpu"), expected, strict=True):
        given = distribute_tensor(x, mesh_2x4, [Shard(0), Shard(1)])
        close(plain(step(given)), plain(result))
    close(plain(other), plain(one))


def test_a_scheduler_is_given_one() -> None:
    def trainer(device: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

        def step(x: torch.Tensor) -> None:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step(loss.detach() if x.shape[0] == 6 else loss.item())

        return step, scheduler

    step, scheduler = trainer("xla")
    expected, its_scheduler = trainer("cpu")
    step = xd.compile(step)
    for rows in (6, 6, 6, 5, 5, 5):
        x = torch.randn(rows, 4)
        step(x.to("xla"))
        expected(x)
        assert scheduler.get_last_lr() == its_scheduler.get_last_lr()
        assert scheduler.best == pytest.approx(its_scheduler.best)
    assert step.traces == 2


def test_python_raises_when_the_step_has_run() -> None:
    own = SimpleNamespace(calls=torch.zeros((), device="xla"), total=0.0)

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        own.calls += 1
        return x * (1 / x.sum().item())

    step(torch.ones(2, device="xla"))
    with pytest.raises(ZeroDivisionError):
        step(torch.zeros(2, device="xla"))
    assert own.calls.item() == 2
    assert step(torch.ones(2, device="xla")).tolist() == [0.5, 0.5]

    @xd.compile
    def kept(x: torch.Tensor) -> None:
        own.calls += 1
        own.total += 1 / x.sum().item()

    kept(torch.ones(2, device="xla"))
    with pytest.raises(ZeroDivisionError):
        kept(torch.zeros(2, device="xla"))
    assert own.calls.item() == 5 and own.total == 0.5


def _cached(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.table[loss.item()] = 1


NEEDED: dict[str, Body] = {
    "if": lambda own, loss, y: 1 if loss.item() > 0.5 else 2,
    "min": lambda own, loss, y: min(own.best, loss.item()),
    "isnan": lambda own, loss, y: math.isnan(loss.item()),
    "float": lambda own, loss, y: float(loss),
    "int": lambda own, loss, y: int(loss.item()),
    "bool": lambda own, loss, y: bool(loss.item()),
    "bool_tensor": lambda own, loss, y: (loss > 0).item(),
    "text": lambda own, loss, y: f"{loss.item():.2f}",
    "position": lambda own, loss, y: y[y.argmax().item() % 2],
    "size": lambda own, loss, y: y.new_zeros((y > 0).sum().item()),
    "range": lambda own, loss, y: list(range((y > 0).sum().item())),
    "key": _cached,
    "cpu_tensor": lambda own, loss, y: torch.tensor(loss.item()),
    "numpy": lambda own, loss, y: torch.from_numpy(__import__("numpy").array([loss.item()])),
    "floor_on_devices": lambda own, loss, y: y * math.floor(loss.item()),
}


@pytest.mark.parametrize("name", NEEDED)
def test_what_needs_one_at_once_is_refused(name: str) -> None:
    own = State()
    before = copy.deepcopy(own)
    step = xd.compile(trained(NEEDED[name], "xla", own))
    with pytest.raises(xd.DataDependentError, match=r"while the step is compiled\n  at .*\.py:\d+"):
        step(values("xla")[0])
    close(plain(own), plain(before))


# --- what is printed ---------------------------------------------------------------------------

LOGGER = logging.getLogger("items")


def _in_a_variable(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.count += 1
    text = f"{own.count:3d}: {loss.item():.2e}"
    print(text)


def _logged(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.count += 1
    LOGGER.warning("step %d, loss %.3f", own.count, loss.item())
    LOGGER.warning(f"step {own.count}, loss {loss.item():.3f}")
    LOGGER.warning("loss %(loss).3f", {"loss": loss.item()})


def _of_all_kinds(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.count += 1
    print("loss", round(loss.item(), 3), own.count, "of", y.shape, sep="; ", end=".\n")
    print("{:.3f} {}".format(loss.item(), own.count), str(round(loss.item(), 2)))  # noqa: UP032
    print("%s" % round(loss.item(), 3), "%s: %s" % (own.count, round(loss.item(), 2)))  # noqa: UP031
    print(f"{loss.item() * 2:>10.3f}", file=sys.stdout)
    return round(loss.item(), 3)


PRINTED: dict[str, Body] = {
    "print": lambda own, loss, y: print(f"loss {loss.item():.3f}"),
    "number": lambda own, loss, y: print(round(loss.item(), 3)),
    "variable": _in_a_variable,
    "kinds": _of_all_kinds,
    "logged": _logged,
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed(
    name: str, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(PRINTED[name], "cpu", State())
    step = xd.compile(trained(PRINTED[name], "xla", State()))
    texts = []
    for run, given in ((expected, values("cpu")), (step, values("xla"))):
        for x in given:
            run(x)
        texts.append((capsys.readouterr().out, [record.getMessage() for record in caplog.records]))
        caplog.clear()
    assert texts[0] == texts[1] and texts[0] != ("", [])
    assert step.traces == 1


def _beside_a_time(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    print(f"{time.perf_counter()} {loss.item()}")


def _beside_an_int(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.count += 1
    print("%d: %s" % (own.count, loss.item()))  # noqa: UP031


UNPRINTED: dict[str, Body] = {
    "padded": lambda own, loss, y: print(f"{loss.item()}".rjust(20)),
    "padded_by_a_format": lambda own, loss, y: print(f"{loss.item()!r:>20}"),
    "padded_by_percent": lambda own, loss, y: print("%20s" % loss.item()),  # noqa: UP031
    "cut": lambda own, loss, y: print(f"{loss.item()}"[:3]),
    "in_a_list": lambda own, loss, y: print([f"{loss.item()}"]),
    "as_a_width": lambda own, loss, y: print(f"{1:>{y.argmax().item()}}"),
    "by_percent": lambda own, loss, y: print("%.3f" % loss.item()),  # noqa: UP031
    "elsewhere": lambda own, loss, y: print(f"{loss.item()}", file=io.StringIO()),
    "kept": lambda own, loss, y: own.losses.append(f"{loss.item()}"),
    "beside_a_time": _beside_a_time,
    "by_the_print_of_before": lambda own, loss, y: PRINT(f"{loss.item()}"),
}
PRINT = print


def test_an_int_in_such_a_text_is_never_that_of_the_trace(capsys: pytest.CaptureFixture) -> None:
    step = xd.compile(trained(_beside_an_int, "xla", State()))
    for count, x in enumerate(values("xla"), 1):
        try:
            step(x)
        except xd.DataDependentError:
            assert capsys.readouterr().out == ""
            return
        assert capsys.readouterr().out.startswith(f"{count}: ")


@pytest.mark.parametrize("name", UNPRINTED)
def test_text_that_is_made_at_once_is_refused(name: str, capsys: pytest.CaptureFixture) -> None:
    step = xd.compile(trained(UNPRINTED[name], "xla", State()))
    with pytest.raises(xd.DataDependentError, match="while the step is compiled"):
        step(values("xla")[0])
    assert capsys.readouterr().out == ""


# --- lists -------------------------------------------------------------------------------------


def _losses(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.losses.append(loss.item())
    own.losses.append(loss.detach())
    own.losses.append({"loss": loss.item(), "rows": (y.shape[0], loss.item() / 2)})
    return loss.detach()


def _of_a_table(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.table["loss"].append(loss.item())
    own.table["accuracy"].append((y > 0).float().mean().item())


def _by_a_name(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    for name in ("loss", "accuracy"):
        own.table[name].append(loss.item())


def _made_on_demand(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.later["loss"].append(loss.item())


def _recent(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.kept.append(loss.item())
    own.count += 1
    own.kept.append((own.count, "step"))


def _by_another_name(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    append = own.losses.append
    append(loss.item())
    append(3)
    own.losses.extend([loss.item() / 2, "end"])


def _named_in_a_result(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.losses.append(loss.item())
    return {"losses": loss.item()}


LISTS: dict[str, tuple[Body, int]] = {
    "losses": (_losses, 1),
    "of_a_table": (_of_a_table, 1),
    "by_a_name": (_by_a_name, 1),
    "made_on_demand": (_made_on_demand, 2),
    "by_a_text": (lambda own, loss, y: own.table[f"{'loss'!s}"].append(loss.item()), 1),
    "recent": (_recent, 1),
    "by_another_name": (_by_another_name, 1),
    "named_in_a_result": (_named_in_a_result, 1),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str) -> None:
    body, traces = LISTS[name]

    def change(call: int, own: State) -> None:
        if call == 1:  # what is there is the user's to change
            own.losses.clear()
            own.kept.appendleft(7)
            own.table["loss"].insert(0, "epoch")

    assert compared(body, change) == traces


class _Meter:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def update(self, value: float) -> None:
        self.seen.append(value)


class _ReadingMeter(_Meter):
    def mean(self) -> float:
        return sum(self.seen) / max(len(self.seen), 1)


def _alias(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    same = own.losses
    own.losses.append(loss.item())
    return len(same)


def _given_on(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    def last(values: list) -> Any:
        return values[-1] if values else 0

    own.losses.append(1.0)
    return last(own.losses) + loss.item()


def _by_getattr(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.losses.append(2)
    return len(getattr(own, "losses"))  # noqa: B009


def _by_vars(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.losses.append(2)
    return sum(len(value) for value in vars(own).values() if type(value) is list)


def _copied(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.losses.append(2)
    return len(copy.deepcopy(own).losses)


def _replaced(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.losses = []
    own.losses.append(loss.item())


def _of_a_slot(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.table["loss"].append(2)
    return sum(map(len, own.table.values()))


def _matched(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.losses.append(2)
    match own:
        case State(losses=found):
            return len(found)


def _formatted(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.losses.append(2)
    return len("{0.losses}".format(own))  # noqa: UP030, UP032


def _saved(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
    own.losses.append(2)
    buffer = io.BytesIO()
    torch.save(own.losses, buffer)
    return len(buffer.getvalue()) > 0


LOOKED_AT: dict[str, Body] = {
    "matched": _matched,
    "formatted": _formatted,
    "saved": _saved,
    "length": lambda own, loss, y: (own.losses.append(1), len(own.losses))[1],
    "last": lambda own, loss, y: (own.losses.append(1), own.losses[-1])[1],
    "alias": _alias,
    "given_on": _given_on,
    "by_getattr": _by_getattr,
    "by_vars": _by_vars,
    "copied": _copied,
    "replaced": _replaced,
    "of_a_table": _of_a_slot,
    "iterated": lambda own, loss, y: (own.losses.append(1), sum(own.losses))[1],
    "popped": lambda own, loss, y: (own.losses.append(1), own.losses.pop())[1],
}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_list_that_is_looked_at_is_no_such_list(name: str) -> None:
    """Each call is as torch's, or refused."""
    body = LOOKED_AT[name]
    one, other = State(), State()
    expected = trained(body, "cpu", one)
    step = xd.compile(trained(body, "xla", other))
    for x, on_cpu in zip(values("xla"), values("cpu"), strict=True):
        before = copy.deepcopy(other)
        try:
            found = step(x)
        except xd.DataDependentError:
            close(plain(other), plain(before))
            return
        close(plain(found), plain(expected(on_cpu)))
        close(plain(other), plain(one))


def test_a_namespace_shows_its_lists() -> None:
    own = SimpleNamespace(losses=[])

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        own.losses.append(1)
        return x * len(f"{own}")

    expected = [len("namespace(losses=[1])"), len("namespace(losses=[1, 1])")]
    for length in expected:
        try:
            found = step(torch.ones(1, device="xla"))
        except xd.DataDependentError:
            return
        assert found.item() == length


class _SizedMeter(_Meter):
    def __len__(self) -> int:
        return len(self.seen)


@dataclass
class _Record:
    seen: list[Any] = field(default_factory=list)

    def update(self, value: float) -> None:
        self.seen.append(value)


def test_classes_that_could_look_at_their_list() -> None:
    for meter in (_Meter, _ReadingMeter, _SizedMeter, _Record):
        own = meter()

        @xd.compile
        def step(x: torch.Tensor, own: Any = own) -> None:
            own.update(x.sum().item())

        for n in range(3):
            step(torch.full((2,), float(n), device="xla"))
        assert own.seen == [0.0, 2.0, 4.0] and step.traces == 1


def test_tensors_that_such_a_class_takes_up() -> None:
    own = _Record()

    @xd.compile
    def step(x: torch.Tensor) -> None:
        own.update(x * 2)

    for n in range(3):
        step(torch.full((1,), float(n), device="xla"))
    assert [tensor.item() for tensor in own.seen] == [0.0, 2.0, 4.0] and step.traces == 1


def test_a_class_that_looks_at_its_list_meanwhile() -> None:
    own, seen = _SizedMeter(), []

    @xd.compile
    def step(x: torch.Tensor, looks: bool) -> torch.Tensor:
        own.update(1.0)
        return x * len(own) if looks else x * 0

    for looks in (False, False, True, True, False):
        before = len(own.seen)
        try:
            seen.append(step(torch.ones(1, device="xla"), looks).item())
        except xd.DataDependentError:
            assert len(own.seen) == before
            break
        assert seen[-1] == (len(own.seen) if looks else 0) and len(own.seen) == before + 1


def test_records_that_are_shown_as_a_whole() -> None:
    own = _Record()

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        own.update(1.0)
        return x * sum(len(value) for value in asdict(own).values())

    for count in (1, 2):
        try:
            found = step(torch.ones(1, device="xla"))
        except xd.DataDependentError:
            return
        assert found.item() == count


@pytest.mark.parametrize("full", [[None, None], [None], [1, None]])
def test_a_full_deque_of_constants_is_refused(full: list[Any]) -> None:
    kept = deque(full, maxlen=len(full))

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(None)
        return x + 1

    with pytest.raises(xd.DataDependentError, match="kept, a full deque"):
        step(torch.ones(2, device="xla"))


# --- random programs ---------------------------------------------------------------------------


def _random_body(seed: int) -> Body:
    """A program of items, numbers in state, and lists."""
    draw = random.Random(seed)
    lines: list[Callable[[State, list[Any], torch.Tensor], None]] = []

    def item(own: State, found: list[Any], y: torch.Tensor) -> None:
        found.append(y[draws[0] % 6].sum().item())

    def integer(own: State, found: list[Any], y: torch.Tensor) -> None:
        found.append(y[draws[1] % 6].argmax().item())

    def add(own: State, found: list[Any], y: torch.Tensor) -> None:
        found.append(found[draws[2] % len(found)] + 2 * found[draws[3] % len(found)])

    def total(own: State, found: list[Any], y: torch.Tensor) -> None:
        own.total += found[draws[4] % len(found)]
        found.append(own.total)

    def count(own: State, found: list[Any], y: torch.Tensor) -> None:
        own.count += 1
        found.append(found[draws[5] % len(found)] / own.count)

    def scaled(own: State, found: list[Any], y: torch.Tensor) -> None:
        found.append((y * found[draws[6] % len(found)]).mean().item())

    def kept(own: State, found: list[Any], y: torch.Tensor) -> None:
        own.losses.append(found[draws[7] % len(found)])
        own.kept.append(found[-1])

    def latest(own: State, found: list[Any], y: torch.Tensor) -> None:
        own.latest["loss"] = found[draws[8] % len(found)] - own.latest["loss"]

    draws = [draw.randrange(100) for _ in range(9)]
    choices = (item, integer, add, total, count, scaled, kept, latest)
    lines += [item, *draw.choices(choices, k=8)]

    def body(own: State, loss: torch.Tensor, y: torch.Tensor) -> Any:
        found: list[Any] = [loss.item()]
        for line in lines:
            line(own, found, y)
        return found

    return body


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    assert compared(_random_body(seed)) <= 2


class _Shown:
    """A meter as torch's ImageNet example has it."""

    def __init__(self) -> None:
        self.value = self.total = 0.0
        self.count = 0

    def update(self, value: float) -> None:
        self.value, self.total, self.count = value, self.total + value, self.count + 1

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.total / self.count:.3f})"


def test_an_object_that_shows_numbers(capsys: pytest.CaptureFixture) -> None:
    def step(own: _Shown, x: torch.Tensor) -> None:
        own.update(x.sum().item())
        print("loss", own, own.count)
        print("\t".join([f"loss {own}", str(own)]))
        LOGGER.warning("loss %s", own)

    texts = []
    meters = {"cpu": _Shown(), "xla": _Shown()}
    compiled = xd.compile(lambda x: step(meters["xla"], x))
    for run, device in ((lambda x: step(meters["cpu"], x), "cpu"), (compiled, "xla")):
        for n in range(3):
            run(torch.full((2,), float(n), device=device))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "loss 4.000 (2.000) 3" in texts[0]
    assert compiled.traces == 1


def test_assertions_come_before_numbers(capsys: pytest.CaptureFixture) -> None:
    @xd.compile
    def step(x: torch.Tensor) -> float:
        torch._assert_async(x.sum() > 0, "not positive")
        print(f"{x.sum().item()}")
        return x.mean().item()

    for value in (1.0, -1.0, 2.0, -1.0):
        x = torch.full((2,), value, device="xla")
        if value > 0:
            assert step(x) == value
            assert capsys.readouterr().out == f"{2 * value}\n"
        else:
            with pytest.raises(RuntimeError, match="not positive"):
                step(x)
            assert capsys.readouterr().out == ""


@pytest.mark.parametrize("catches", [False, True])
def test_what_a_scheduler_sets_is_refused_behind_it(catches: bool) -> None:
    parameter = nn.Parameter(torch.ones(2, device="xla"))
    optimizer = torch.optim.SGD([parameter], 0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    reads: dict[str, Callable[[], Any]] = {
        "lr": lambda: {"lr": optimizer.param_groups[0]["lr"]},
        "last_lr": scheduler.get_last_lr,
        "epoch": lambda: vars(scheduler)["last_epoch"],
    }

    def step(read: Callable[[], Any]) -> Any:
        parameter.sum().backward()
        optimizer.step()
        scheduler.step()
        if not catches:
            return read()
        try:
            return read()
        except Exception:
            return None

    for read in reads.values():
        with pytest.raises(xd.DataDependentError, match="put"):
            xd.compile(lambda read=read: step(read))()
    assert xd.compile(lambda: step(lambda: scheduler.T_max))() == 9


def test_objects_beside_a_number_are_shown_as_they_are(capsys: pytest.CaptureFixture) -> None:
    table = {"k": [1]}

    @xd.compile
    def step(x: torch.Tensor) -> None:
        print(table, x.sum().item(), ["\u2e28", "\ufdd0"])
        table["k"][0] += 1

    for k in (1, 2, 3):
        step(torch.ones(2, device="xla"))
        assert capsys.readouterr().out.startswith(f"{{'k': [{k}]}} 2.0 [")


def test_a_refusal_that_is_caught_stays_one() -> None:
    @xd.compile
    def step(x: torch.Tensor) -> int:
        try:
            return 1 if x.sum() > 2 else 2
        except Exception:
            return 3

    with pytest.raises(xd.DataDependentError, match="while the step is compiled"):
        step(torch.ones(2, device="xla"))


def test_types_of_items_matter() -> None:
    own = State()

    @xd.compile
    def step(x: torch.Tensor) -> None:
        if type(x.sum().item()) is float:
            own.count += 1

    with pytest.raises(xd.DataDependentError, match=r"type\(\) of numbers"):
        step(torch.ones(2, device="xla"))


WIDE: dict[str, tuple[Body, type[Exception]]] = {
    "wraps": (lambda own, n, y: y * (n.item() * 4 / 8.0), OverflowError),
    "wraps_in_a_square": (lambda own, n, y: y * (n.item() * n.item() * 1e-9), OverflowError),
    "constant": (lambda own, n, y: y * ((n.item() + 10**20) / 1e20), xd.DataDependentError),
    "complex": (lambda own, n, y: y * ((-n.item()) ** 0.5), TypeError),
}


@pytest.mark.parametrize("name", WIDE)
def test_numbers_that_devices_do_not_have(name: str) -> None:
    body, error = WIDE[name]
    step = xd.compile(lambda n, y: body(State(), n, y))
    with pytest.raises(error):
        step(torch.tensor(2**62, device="xla"), torch.ones(2, device="xla"))


def test_what_a_put_off_scheduler_has_is_not_read() -> None:
    parameter = nn.Parameter(torch.ones(2, device="xla"))
    optimizer = torch.optim.SGD([parameter], 0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    @xd.compile
    def step() -> float:
        loss = parameter.square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
        return scheduler.best

    with pytest.raises(xd.DataDependentError, match="reads best"):
        step()


def test_a_number_in_an_unknown_place_is_refused() -> None:
    held = np.empty(1, object)

    @xd.compile
    def step(x: torch.Tensor) -> None:
        held[0] = x.sum().item()

    with pytest.raises(xd.DataDependentError, match="where compiled steps don't look"):
        step(torch.ones(2, device="xla"))
    assert "a compiled step that failed" in f"{held[0]:.3f}"
    with pytest.raises(xd.DataDependentError, match="was left"):
        held[0] + 1


def test_replicas_alone_have_one_item(mesh_2x4: DeviceMesh) -> None:
    from xla_dtensor import from_device_values

    step = xd.compile(lambda x: x.item())
    varying = from_device_values([torch.tensor(float(n)) for n in range(8)], mesh_2x4)
    with pytest.raises(xd.DataDependentError):
        step(varying)
    same = distribute_tensor(torch.tensor(3.0), mesh_2x4, [Replicate(), Replicate()])
    assert step(same) == 3.0
