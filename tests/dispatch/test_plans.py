"""Plans: made once per kind of call, holding no tensors, numbers as inputs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.dispatch import execute
from xla_dtensor.lowering import find_lowering, lowers
from xla_dtensor.plans.computation import Computation

pytestmark = pytest.mark.usefixtures("strict_eager")


def sharded(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(value, mesh, [Shard(0), *[Replicate()] * (mesh.ndim - 1)])


def loop(x: torch.Tensor, w: torch.Tensor, i: int) -> torch.Tensor:
    y = torch.relu(x @ w) * (1.0 / (i + 1)) + i
    y[1:3] += 0.5 * i
    return (y.softmax(-1).sum(0) - i).view(2, -1).t()


def test_a_steady_loop_makes_no_plan_and_compiles_nothing(mesh_2x4: DeviceMesh) -> None:
    x, w = sharded(torch.randn(8, 6), mesh_2x4), sharded(torch.randn(6, 4), mesh_2x4)
    for i in range(2):
        loop(x, w, i)
    plans = len(execute._plans)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **kw: compiled.append(event) if "compile" in event else None
    )
    try:
        for i in range(50):
            loop(x, w, i)
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(execute._plans) == plans
    assert compiled == []


VIEWS: list[Any] = [
    *(lambda x, n=n: x.view(n, -1) for n in (2, 3, 6)),
    *(lambda x, d=d: x.select(d, 1) for d in (0, 1)),
    *(lambda x, i=i: x[i] for i in (0, 1, -1)),
    *(lambda x, end=end: x[:, 1:end] for end in (None, 2, 3)),
    *(lambda x, d=d: x.transpose(0, d).unsqueeze(d) for d in (0, 1)),
    *(lambda x, keep=keep: x.detach().expand(keep, *x.shape) for keep in (1, 2)),
    *(lambda x, part=part: x.split(2, 1)[part].t() for part in (0, 1)),
    *(lambda x, dtype=dtype: x.view(dtype) for dtype in (torch.int32, torch.float32)),
    lambda x: x.squeeze(),
    lambda x: x.squeeze(0),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["sharded", "replicated", "per device"])
def test_views_that_differ_in_little(layout: str, mesh_2x4: DeviceMesh) -> None:
    """Each is what it is on the CPU, whatever came before it: also of views, in inference mode and
    in compiled steps."""
    value = torch.arange(24.0).reshape(4, 6)
    placements = [Shard(0) if layout == "sharded" else Replicate(), Replicate()]

    def full(view: torch.Tensor) -> torch.Tensor:
        return (view.full_tensor() if isinstance(view, DTensor) else view).cpu()

    x = (
        value.to("xla")
        if layout == "per device"
        else distribute_tensor(value, mesh_2x4, placements)
    )
    for prepare in (lambda x: x, lambda x: x[1:], lambda x: x[2:]):
        for _ in range(2):
            for view in VIEWS:
                expected = view(prepare(value))
                found = view(prepare(x))
                assert found.stride() == expected.stride() and torch.equal(full(found), expected)
                assert found.storage_offset() == expected.storage_offset()
                assert found._is_view() == expected._is_view()
            with torch.inference_mode():
                assert x.t()._is_view() and not x.t().is_inference()
        step = xd.compile(lambda x, prepare=prepare: prepare(x).transpose(0, 1) + 1)
        assert torch.equal(full(step(x)), prepare(value).t() + 1)


def test_plans_keep_no_tensor_alive(mesh_2x4: DeviceMesh) -> None:
    x, w = sharded(torch.randn(8, 7), mesh_2x4), sharded(torch.randn(7, 5), mesh_2x4)
    references = [weakref.ref(t._storage_) for t in (x, w)]
    w.requires_grad_()
    loss = loop_with_state(x, w)
    references += [weakref.ref(t._storage_) for t in (loss, w.grad)]
    del x, w, loss
    gc.collect()
    assert [r() for r in references] == [None] * 4


def loop_with_state(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    loss = torch.relu(x @ w).sum()
    loss.backward()
    return loss


@pytest.mark.slow
def test_many_operations_hold_no_memory(mesh_2x4: DeviceMesh) -> None:
    x, w = sharded(torch.randn(8, 6), mesh_2x4), sharded(torch.randn(6, 4), mesh_2x4)
    loop(x, w, 0)
    gc.collect()
    before = len(jax.live_arrays())
    for i in range(100):
        loop(x, w, i)
    gc.collect()
    assert len(jax.live_arrays()) <= before


def test_a_lowering_of_ones_own(mesh_2x4: DeviceMesh) -> None:
    torch.library.define("xd_test::double", "(Tensor x) -> Tensor")
    torch.library.impl("xd_test::double", "Meta", lambda x: torch.empty_like(x))
    x = sharded(torch.ones(8), mesh_2x4)
    with pytest.raises(xd.UnsupportedOpError, match=r"xd_test::double\.default has no lowering"):
        torch.ops.xd_test.double(x)
    lowers("xd_test::double")(lambda x: x * 2)
    assert find_lowering("xd_test::double.default") is not None
    y = torch.ops.xd_test.double(x)
    assert y.cpu().tolist() == [2.0] * 8
    # Without a rule the layout is what XLA chooses when nothing moves.
    assert y.placements == x.placements
    with pytest.raises(ValueError, match="has a lowering"):
        lowers("xd_test::double")(lambda x: x)


def test_tensors_of_different_meshes(mesh_2x4: DeviceMesh) -> None:
    other = xd.init_device_mesh("xla", (2,), mesh_dim_names=("x",))
    x, y = sharded(torch.ones(8), mesh_2x4), sharded(torch.ones(8), other)
    with pytest.raises(xd.MeshMismatchError) as error:
        x + y
    message = str(error.value)
    assert message.startswith("aten::add.Tensor: one tensor is on DeviceMesh((dp=2, tp=4), 'xla'")
    assert "(x=2)" in message and "redistribute(device_mesh, placements)" in message
    moved = y.redistribute(mesh_2x4, [Shard(0), Replicate()])
    assert (x + moved).cpu().tolist() == [2.0] * 8
    with pytest.raises(xd.MeshMismatchError, match="redistribute"):
        x + sharded(torch.ones(8), xd.init_device_mesh("xla", (8,)))


def test_errors_are_torchs_own(mesh_2x4: DeviceMesh) -> None:
    x = sharded(torch.ones(8, 3), mesh_2x4)
    with pytest.raises(RuntimeError, match="broadcast"):
        x + torch.ones(8, 4)
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.sum(5)
    with pytest.raises(RuntimeError, match="for generator but found 'cpu'"):
        torch.rand_like(x, generator=torch.Generator())
    with pytest.raises(xd.UnsupportedOpError, match="into a CPU tensor"):
        torch.ones(8, 3).add_(x)


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min", "product"])
def test_partial_operands_count_as_reduced(mesh_2x4: DeviceMesh, reduce_op: str) -> None:
    value = torch.randn(4, 4)
    x = distribute_tensor(value, mesh_2x4, [Partial(reduce_op), Shard(0)])
    torch.testing.assert_close((x.exp() * 2 - x).cpu(), value.exp() * 2 - value)


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_filling_what_is_pending_fills_the_whole(op: str, mesh_2x4: DeviceMesh) -> None:
    """torch's DTensor fills each part, and what is written with ``fill_`` inside (losses, backward
    formulas) then gives other numbers than on one device."""
    x = DTensor.from_local(torch.ones(3, device="xla"), mesh_2x4, [Replicate(), Partial(op)])
    assert x.fill_(3.0) is x and x.placements == (Replicate(), Partial(op))
    assert x.full_tensor().tolist() == [3] * 3
    assert x.zero_().full_tensor().tolist() == [0] * 3


class Traced:
    """How often lowerings are traced for steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        original = Computation._call

        def counted(computation: Computation, keys: Any, values: Any) -> Any:
            if any(isinstance(value, jax.core.Tracer) for value in values):
                self.names.append(computation._info.name)
            return original(computation, keys, values)

        monkeypatch.setattr(Computation, "_call", counted)


def test_steps_trace_an_operation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(3, 5)
    x = value.to("xla")
    traced = Traced(monkeypatch)
    for depth in (4, 6):

        def step(x: torch.Tensor, depth: int = depth) -> torch.Tensor:
            for _ in range(depth):
                x = torch.tanh(x)
            return x

        wanted = step(value)
        torch.testing.assert_close(xd.compile(step)(x).cpu(), wanted)
    assert traced.names.count("aten::tanh.default") == 1
    torch.testing.assert_close(
        xd.compile(lambda x: x.tanh())(x.double()).cpu(), value.double().tanh()
    )
    assert traced.names.count("aten::tanh.default") == 2  # of another dtype it is another plan


def test_what_a_plan_has_traced_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither arrays that the step has found, nor what of it differs from call to call."""
    traced = Traced(monkeypatch)
    first, second = (torch.full((7,), value, device="xla") for value in (2.0, 3.0))
    reference = weakref.ref(first.jax_array)
    for captured, wanted in ((first, 2.0), (second, 3.0)):
        step = xd.compile(lambda x, captured=captured: torch.maximum(x, captured).sigmoid())
        got = step(torch.zeros(7, device="xla"))
        torch.testing.assert_close(got.cpu(), torch.full((7,), wanted).sigmoid())
    assert [traced.names.count(f"aten::{name}.default") for name in ("maximum", "sigmoid")] == [
        1,
        1,
    ]
    del first, captured, step
    gc.collect()
    assert reference() is None


def test_a_step_names_the_line_of_each_use() -> None:
    """The equations of an operation that was traced before are those of the present line."""

    def step(x: torch.Tensor) -> torch.Tensor:
        with jax.named_scope("earlier"):
            x = torch.cosh(x)
        with jax.named_scope("later"):
            return torch.cosh(x)

    text = xd.compile(step).lower(torch.ones(3, device="xla")).as_text(debug_info=True)
    assert "earlier/cosh" in text and "later/cosh" in text


def test_zeros_of_both_signs_are_two_numbers() -> None:
    x = torch.tensor([float("nan"), 1.0])
    for zero in (0.0, -0.0, 0.0):
        found = x.to("xla").nan_to_num(zero).cpu()
        assert torch.equal(found.signbit(), x.nan_to_num(zero).signbit())
