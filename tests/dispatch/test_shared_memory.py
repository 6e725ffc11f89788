"""Calls that write to several tensors, some of which share memory: one after another, as torch does
it on the CPU, in whatever order such calls are made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor import dispatch
from xla_dtensor.dispatch import execute

Place = Callable[[torch.Tensor], torch.Tensor]
Program = Callable[[torch.Tensor, torch.Tensor], object]

CALLS: dict[str, Program] = {
    "apart": lambda x, y: torch._foreach_add_([x, y], 1),
    "twice": lambda x, y: torch._foreach_add_([x, x], 1),
    "twice, numbers": lambda x, y: torch._foreach_mul_([x, y, x], [2.0, 3.0, 5.0]),
    "two views": lambda x, y: torch._foreach_add_([x[0], x[1]], 1),
    "overlapping views": lambda x, y: torch._foreach_mul_([x[:2], x[1:]], 2),
    "read after written": lambda x, y: torch._foreach_add_([x, y], [y, x]),
    "read after written, not by itself": lambda x, y: torch._foreach_add_([x, y], [x, x], alpha=2),
    "copied": lambda x, y: torch._foreach_copy_([x, y], [y, x]),
    "read in a second list": lambda x, y: torch._foreach_addcmul_([x, y], [y, x], [x, x], 0.5),
    "read by itself": lambda x, y: torch._foreach_mul_([x, y], [x, y]),
    "a view is read": lambda x, y: torch._foreach_add_([x, y], [y, x[:]]),
    "zeroed": lambda x, y: torch._foreach_zero_([x, x[0]]),
    "unscaled": lambda x, y: torch._amp_foreach_non_finite_check_and_unscale_(
        [x, y, x], torch.zeros(1, device=x.device), torch.full((1,), 2.0, device=x.device)
    ),
}


def run(calls: tuple[str, ...], place: Place) -> list[torch.Tensor]:
    values = torch.arange(1.0, 13).view(3, 4), torch.arange(30.0, 42).view(3, 4)
    x, y = map(place, values)
    for call in calls:
        CALLS[call](x, y)
    return [x.cpu(), y.cpu()]


def same(values: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for value, want in zip(values, expected, strict=True):
        torch.testing.assert_close(value, want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", list(CALLS))
def test_any_order(mesh_2x4: DeviceMesh, first: str) -> None:
    def place(value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value, mesh_2x4, [Replicate(), Shard(1)])

    for second in CALLS:
        execute._plans.clear()  # the first call makes the plans
        calls = first, second, first
        same(run(calls, place), run(calls, torch.clone))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("call", list(CALLS))
def test_batched_compiled_and_per_device(call: str) -> None:
    expected = run((call, "apart", call), torch.clone)
    same(run((call, "apart", call), lambda value: value.to("xla")), expected)
    with dispatch.batched():
        x, y = (value.to("xla") for value in start())
        for name in (call, "apart", call):
            CALLS[name](x, y)
    same([x.cpu(), y.cpu()], expected)
    x, y = (value.to("xla") for value in start())
    for name in (call, "apart", call):
        xd.compile(CALLS[name])(x, y)
    same([x.cpu(), y.cpu()], expected)


def start() -> list[torch.Tensor]:
    return [torch.arange(1.0, 13).view(3, 4), torch.arange(30.0, 42).view(3, 4)]


WRITES: dict[str, Program] = {
    **{name: CALLS[name] for name in ("apart", "twice", "two views", "copied", "zeroed")},
    "copies into a list": lambda x, y: torch.split_copy(x, 2, 1, out=[y[:, :2], y[:, 2:]]),
    "out": lambda x, y: torch.ops.aten._foreach_add.List_out([x], [x], out=[y]),
}


@pytest.mark.parametrize("name", list(WRITES))
def test_autograd_sees_the_writes(name: str) -> None:
    """Backward through what was overwritten raises, as it does on the CPU."""

    def outcome(place: Place) -> list[object]:
        tensors = list(map(place, start()))
        factor = place(torch.ones(3, 4)).requires_grad_()
        losses = [(factor * tensor).sum() for tensor in tensors]
        WRITES[name](*tensors)
        found: list[object] = []
        for tensor, loss in zip(tensors, losses, strict=True):
            found.append(tensor._version > 0)
            try:
                loss.backward()
            except RuntimeError as error:
                found.append("modified by an inplace operation" in str(error))
        return found

    expected = outcome(torch.clone)
    assert True in expected
    assert outcome(lambda value: value.to("xla")) == expected


def test_writes_in_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.ones(3).to("xla")
        torch._foreach_add_([x, x], 1)
        assert x.cpu().tolist() == [3.0] * 3


@pytest.mark.parametrize("first", ["apart", "together"])
def test_two_results_in_one_tensor(mesh_2x4: DeviceMesh, first: str) -> None:
    def results(x: torch.Tensor, which: str) -> list[torch.Tensor]:
        a, b = (torch.empty_like(x[:, 0, 0]) for _ in range(2))
        sign, logarithm = torch.linalg.slogdet(x, out=(a, a if which == "together" else b))
        assert sign is a
        return [sign.cpu(), logarithm.cpu()]

    value = torch.randn(4, 2, 2)
    x = distribute_tensor(value, mesh_2x4, [Shard(0), Replicate()])
    execute._plans.clear()
    for which in (first, "apart", "together"):
        same(results(x, which), results(value, which))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_two_results_that_resize_one_tensor() -> None:
    x, whole = torch.randn(4, 2, 2).to("xla"), torch.empty(3, device="xla")
    with pytest.raises(xd.UnsupportedOpError, match="share the memory that it has"):
        torch.linalg.slogdet(x, out=(whole[:1], whole[:1]))


def test_running_statistics_in_one_tensor() -> None:
    x, stats = torch.randn(4, 2).to("xla"), torch.zeros(2, device="xla")
    with pytest.raises(xd.UnsupportedOpError, match="writes to two tensors that share memory"):
        torch.ops.aten._native_batch_norm_legit(x, None, None, stats, stats, True, 0.1, 1e-5)


def test_the_fused_optimizer_functions() -> None:
    """A parameter that is in the list twice takes two steps."""

    def steps(place: Place) -> list[torch.Tensor]:
        p, g, m, v = (place(torch.full((3,), float(i))) for i in (1, 2, 0, 0))
        count = place(torch.ones(()))
        lists = [[p, p], [g, g], [m, m], [v, v], [], [count, count]]
        torch._fused_adam_(
            *lists,
            lr=0.1,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        return [t.cpu() for t in (p, m, v)]

    same(steps(lambda value: value.to("xla")), steps(torch.clone))
