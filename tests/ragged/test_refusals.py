"""What numbers of rows on the devices can't do raises, and says what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol

import xla_dtensor as xd

DEVICES, ROWS = 4, 6


@pytest.fixture
def mesh() -> Any:
    return xd.init_device_mesh("xla", (DEVICES,), mesh_dim_names=("ep",))


def exchanged(x: Any, counts: Any, mesh: Any) -> Any:
    arrived = funcol.all_to_all_single(counts, None, None, mesh)
    return funcol.all_to_all_single(x, arrived.tolist(), counts.tolist(), mesh)


def parts(x: Any, counts: Any, mesh: Any) -> Any:
    arrived = funcol.all_to_all_single(counts, None, None, mesh)
    sizes = arrived.tolist()
    return funcol.all_to_all_single(x, sizes, counts.tolist(), mesh).split(sizes)


def asks(n: Any) -> Any:
    return 1 if n == 0 else 2


def by_mask(rows: Any) -> Any:
    return rows[rows[:, 0] > 0]


CASES: dict[str, tuple[Any, str]] = {
    "a decision": (lambda x, c, m: asks(c.tolist()[0]), "Whether it is == <0>.*torch.where"),
    "its truth": (lambda x, c, m: bool(c.tolist()[0]), "Whether it is"),
    "range": (lambda x, c, m: list(range(c.tolist()[0])), "The value of <n>"),
    "a factor": (lambda x, c, m: c.tolist()[0] * 0.5, r"sym_float\(\) of <n>"),
    "a quotient": (lambda x, c, m: c.tolist()[0] // 2, "A quotient of <n>"),
    "a float": (lambda x, c, m: c.tolist()[0] / 2, "of <n>"),
    "no bound": (lambda x, c, m: torch.zeros(c.tolist()[0], device="xla"), r"_check\(n <= most"),
    "an array": (lambda x, c, m: c.cpu().numpy(), "on the host"),
    "max": (lambda x, c, m: exchanged(x, c, m).max(), r"aten::max.*xd.row_exchange"),
    "softmax over rows": (lambda x, c, m: exchanged(x, c, m).softmax(0), "aten::_softmax"),
    "sort": (lambda x, c, m: exchanged(x, c, m).sort(0), "aten::sort"),
    "variance": (lambda x, c, m: exchanged(x, c, m).var(0), "aten::var"),
    "a mask": (lambda x, c, m: by_mask(exchanged(x, c, m)), "by a mask"),
    "one row": (lambda x, c, m: exchanged(x, c, m)[2], "aten::select"),
    "other rows": (
        lambda x, c, m: exchanged(x, c, m) + torch.ones(DEVICES * ROWS, 3, device="xla"),
        "aten::add.Tensor of a RaggedTensor",
    ),
    "rows of another exchange": (
        lambda x, c, m: exchanged(x, c, m) * exchanged(x, c, m),
        "the same sum of entries of one tolist",
    ),
    "writing to a part": (lambda x, c, m: parts(x, c, m)[0].add_(1), r"clone\(\) it"),
    "the values": (lambda x, c, m: exchanged(x, c, m).tolist(), "local_values"),
}


def counts_of(seed: int) -> torch.Tensor:
    to = torch.randint(DEVICES, (DEVICES, ROWS), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.one_hot(to, DEVICES).sum(1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, compiled: bool, mesh: Any) -> None:
    function, message = CASES[case]
    x = xd.from_device_values(list(torch.randn(DEVICES, ROWS, 3)), mesh)

    def step(x: Any, counts: Any) -> Any:
        return function(x, counts, mesh)

    run: Any = xd.compile(step) if compiled else step
    with pytest.raises((xd.DataDependentError, xd.PerDeviceValueError), match=f"(?s){message}"):
        run(x, xd.from_device_values(list(counts_of(0)), mesh))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sizes_that_do_not_match(compiled: bool, mesh: Any) -> None:
    """torch would hang, or read what isn't there."""
    group = mesh.get_group()

    def step(x: Any, sent: Any, got: Any) -> Any:
        return funcol.all_to_all_single(x, got.tolist(), sent.tolist(), group).sum()

    def called(sent: Any, got: Any) -> Any:
        run: Any = xd.compile(step) if compiled else step
        x = xd.from_device_values([torch.ones(ROWS)] * DEVICES, mesh)
        placed = (xd.from_device_values(list(torch.tensor(t)), mesh) for t in (sent, got))
        return run(x, *placed).local_values()

    sent = [[3, 1, 1, 1], [0, 6, 0, 0], [2, 2, 1, 1], [0, 0, 3, 3]]
    got = torch.tensor(sent).t().tolist()
    assert called(sent, got)[0].item() == 5
    with pytest.raises(RuntimeError, match="another number of rows than the other one sends"):
        called(sent, sent)
    short = [[2, 1, 1, 1], *sent[1:]]
    with pytest.raises(RuntimeError, match="don't add up to the rows"):
        called(short, torch.tensor(short).t().tolist())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_bound_of_the_users(compiled: bool, mesh: Any) -> None:
    def step(counts: Any) -> Any:
        n = counts.tolist()[0]
        torch._check(n <= 4)
        return (torch.ones(n, device="xla") * 2).sum(), torch.arange(n, device="xla").sum()

    run: Any = xd.compile(step) if compiled else step
    for numbers in ([1, 4, 0, 2], [4, 4, 4, 0]):
        counts = xd.from_device_values([torch.tensor([n]) for n in numbers], mesh)
        ones, places = run(counts)
        assert [v.item() for v in ones.local_values()] == [2 * n for n in numbers]
        assert [v.item() for v in places.local_values()] == [n * (n - 1) // 2 for n in numbers]
    with pytest.raises(RuntimeError, match="a number of rows is above 4"):
        found, _ = run(xd.from_device_values([torch.tensor([n]) for n in (1, 5, 0, 0)], mesh))
        found.local_values()


# Of x (4 rows) and counts of two entries, each as torch does it.
LENGTHS: dict[str, Any] = {
    "split": lambda x, counts: x.split(counts.tolist())[1].sum(),
    "zeros": lambda x, counts: torch.zeros(_small(counts), device=x.device).sum(),
    "new_ones": lambda x, counts: x.new_ones(_small(counts), 2).sum(),
    "arange": lambda x, counts: torch.arange(_small(counts), device=x.device).sum(),
    "narrow": lambda x, counts: x.narrow(0, 0, _small(counts)).sum(),
    "repeat_interleave": lambda x, counts: torch.repeat_interleave(
        counts, output_size=_small(counts, 2)
    ).sum(),
}


def _small(counts: Any, of: int = 1) -> Any:
    n = sum(counts.tolist()[:of])
    torch._check(n <= 4)
    return n


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", LENGTHS)
def test_a_negative_number_is_no_length(case: str, compiled: bool, mesh: Any) -> None:
    function = LENGTHS[case]
    x = torch.arange(1.0, 5)

    def step(x: Any, counts: Any) -> Any:
        return function(x, counts)

    run: Any = xd.compile(step) if compiled else step

    def called(counts: Any) -> Any:
        placed = (xd.from_device_values(values, mesh) for values in ([x] * DEVICES, list(counts)))
        return run(*placed).local_values()

    counts = torch.tensor([[1, 3], [4, 0], [0, 4], [2, 2]])
    expected = [function(x, c) for c in counts]
    assert all(map(torch.equal, called(counts), expected))
    counts[2] = torch.tensor([-1, 5])
    if case != "repeat_interleave":  # CPU torch 2.13 writes to memory that isn't its own
        with pytest.raises(RuntimeError):
            function(x, counts[2])
    with pytest.raises(RuntimeError, match=r"is negative|behind the last row"):
        called(counts)


def test_one_list_for_all_devices(mesh: Any) -> None:
    x = xd.from_device_values([torch.ones(ROWS)] * DEVICES, mesh)
    with pytest.raises(xd.UnsupportedOpError, match=r"counts\.tolist\(\)"):
        funcol.all_to_all_single(x, [1, 2, 2, 1], [1, 2, 2, 1], mesh)


def test_repeat_interleave_names_output_size(mesh: Any) -> None:
    def step(counts: Any) -> Any:
        return torch.arange(DEVICES, device="xla").repeat_interleave(counts)

    counts = xd.from_device_values(list(counts_of(0)), mesh)
    with pytest.raises(xd.DataDependentError, match=r"output_size=.*torch._check\(n <= most\)"):
        xd.compile(step)(counts)
    with pytest.raises(xd.PerDeviceValueError):
        step(counts)


def test_text_in_a_step_is_only_printed(mesh: Any, capsys: Any) -> None:
    counts = xd.from_device_values([torch.arange(DEVICES)] * DEVICES, mesh)

    @xd.compile
    def printing(counts: Any) -> Any:
        n = (counts + 0).tolist()[1]
        print(f"sends {n}")
        return counts.sum()

    printing(counts)
    assert "sends <n>" in capsys.readouterr().out
    with pytest.raises(xd.DataDependentError, match="The text of <n>"):
        xd.compile(lambda c: {f"{(c + 0).tolist()[1]}": c.sum()})(counts)
    varying = xd.from_device_values(list(counts_of(0)), mesh)
    shown = ", ".join(map(str, counts_of(0)[:, 1].tolist()))
    assert repr(varying.tolist()[1]) == f"<{shown}>"
