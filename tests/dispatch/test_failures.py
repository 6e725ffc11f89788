"""What fails changes nothing: tensors and optimizers are, bit by bit, what they were before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.dispatch import batched
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution import batch

pytestmark = pytest.mark.usefixtures("strict_eager")


class _Expected(BaseException):
    """Like `KeyboardInterrupt`, no `Exception`."""


def _out_of_memory() -> Exception:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")


# --- several writes in one call -----------------------------------------------------------------


@pytest.fixture
def refused() -> torch.Tensor:
    """A tensor that refuses writes."""
    x = torch.arange(4.0, device="xla")
    x._storage_.refuses_writes = "not this one"
    return x


def _batch_norm(ok: torch.Tensor, refused: torch.Tensor) -> None:
    torch.nn.functional.batch_norm(torch.randn(3, 4, device="xla"), ok, refused, training=True)


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "foreach": lambda ok, refused: torch._foreach_add_([ok, refused], 1),
    "foreach_copy": lambda ok, refused: torch._foreach_copy_(
        [ok, refused], [torch.ones(4, device="xla")] * 2
    ),
    "out": lambda ok, refused: torch.aminmax(
        torch.randn(4, 4, device="xla"), dim=0, out=(ok, refused)
    ),
    "out that grows": lambda ok, refused: torch.frexp(
        torch.randn(4, device="xla"), out=(ok.resize_(0), refused)
    ),
    "batch_norm": _batch_norm,
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("write_down", [False, True])
def test_one_of_several_writes_is_refused(
    name: str, write_down: bool, refused: torch.Tensor
) -> None:
    ok = torch.arange(4.0, device="xla")
    if name == "out that grows":
        refused._storage_.refuses_writes = None
        refused = refused.to(torch.int32)
        refused._storage_.refuses_writes = "not this one"
    before = ok.cpu(), refused.cpu()
    with pytest.raises(UnsupportedOpError, match="not this one"):
        if write_down:
            with batched():
                WRITES[name](ok, refused)
        else:
            WRITES[name](ok, refused)
    if name == "out that grows":
        assert ok.shape == (0,)
    else:
        assert torch.equal(ok.cpu(), before[0])
    assert torch.equal(refused.cpu(), before[1])


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_one_of_several_writes_needs_memory_that_is_shared() -> None:
    """Of two `out=` tensors that must grow the second has a view."""
    x = torch.randn(4, 4, device="xla")
    first, second = torch.ones(2, device="xla"), torch.ones(2, device="xla")
    view = second[:1]
    with pytest.raises(UnsupportedOpError, match="share the memory"):
        torch.aminmax(x, dim=0, out=(first, second))
    assert first.shape == second.shape == (2,)
    assert torch.equal(first.cpu(), torch.ones(2)) and torch.equal(view.cpu(), torch.ones(1))


def test_running_statistics_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch that writes them fails."""
    norm = torch.nn.BatchNorm1d(4).to("xla")
    x = torch.randn(3, 4, device="xla")
    norm(x)
    before = norm.running_mean.cpu(), norm.running_var.cpu()
    from xla_dtensor.dispatch import execute

    plans = [p for p in execute._plans.values() if getattr(p, "mutated", ())]

    def fail(*args: Any) -> Any:
        raise _out_of_memory()

    for plan in plans:
        if plan.info.name != "aten::add_.Tensor":  # num_batches_tracked, which is torch's
            monkeypatch.setattr(plan, "eager", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE"):
        norm(x)
    assert torch.equal(norm.running_mean.cpu(), before[0])
    assert torch.equal(norm.running_var.cpu(), before[1])


# --- batches ------------------------------------------------------------------------------------


def _fail_launch(patch: pytest.MonkeyPatch) -> None:
    def executable(*args: Any) -> Any:
        def launch(*args: Any) -> Any:
            raise _out_of_memory()

        return launch

    patch.setattr(batch, "fused", executable)


def _fail_tracing(patch: pytest.MonkeyPatch) -> None:
    from xla_dtensor.forms.form import Form

    def physical(*args: Any) -> Any:
        raise ValueError("while it was traced")

    patch.setattr(Form, "physical", physical)


def _fail_lowering(patch: pytest.MonkeyPatch) -> None:
    from jax._src.interpreters import mlir

    def lower(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("while it was lowered")

    patch.setattr(mlir, "lower_jaxpr_to_module", lower)


def _fail_compile(patch: pytest.MonkeyPatch) -> None:
    from jax._src import compiler

    def compile_(*args: Any, **kwargs: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: while it was compiled")

    patch.setattr(compiler, "compile_or_get_cached", compile_)


def _interrupt_launch(patch: pytest.MonkeyPatch) -> None:
    def executable(*args: Any) -> Any:
        raise _Expected("in the launch")

    patch.setattr(batch, "fused", executable)


FAILURES = {
    "trace": (_fail_tracing, ValueError),
    "lower": (_fail_lowering, NotImplementedError),
    "compile": (_fail_compile, jax.errors.JaxRuntimeError),
    "launch": (_fail_launch, jax.errors.JaxRuntimeError),
    "interrupt": (_interrupt_launch, _Expected),
}


@pytest.fixture(params=FAILURES)
def failure(request: pytest.FixtureRequest) -> Any:
    return FAILURES[request.param]


@pytest.fixture(autouse=True)
def _no_executables() -> Iterator[None]:
    """Those that a test breaks are made in it, and not found by the next."""
    batch.executables.clear()
    yield
    batch.executables.clear()


def test_a_batch_that_fails(failure: Any, mesh_2x4: DeviceMesh) -> None:
    inject, error = failure
    value = torch.randn(8, 3)
    x = distribute_tensor(value, mesh_2x4, [Shard(0), Shard(1)])
    view = x[2:5]
    local = distribute_tensor(torch.arange(8.0), mesh_2x4, [Replicate(), Shard(0)])
    devices = local.to_local()
    views = view.cpu(), devices.local_values()
    made = []
    with pytest.raises(error), pytest.MonkeyPatch.context() as patch, batched():
        x.add_(1)
        x.mul_(2)
        local.add_(1)
        made.append(x + 1)
        inject(patch)
    assert torch.equal(x.cpu(), value)
    assert torch.equal(view.cpu(), views[0])
    assert torch.equal(local.cpu(), torch.arange(8.0))
    for now, before in zip(local.to_local().local_values(), views[1], strict=True):
        assert torch.equal(now, before)
    with pytest.raises(RuntimeError, match=r"no value: .*failed \(") as raised:
        made[0].cpu()
    assert isinstance(raised.value.__cause__, error)
    x.add_(1)
    assert torch.equal(x.cpu(), value + 1) and torch.equal(view.cpu(), (value + 1)[2:5])
    with batched():
        x.add_(1)
    assert torch.equal(x.cpu(), value + 1 + 1)


def test_a_launch_that_fails_in_the_middle_of_a_block() -> None:
    """What was launched before is done; the error comes where the value was asked for."""
    x, y = torch.zeros(3, device="xla"), torch.zeros(3, device="xla")
    with batched():
        x.add_(1)
        assert x.sum().item() == 3
        x.add_(1)
        y.add_(5)
        with pytest.MonkeyPatch.context() as patch:
            _fail_launch(patch)
            with pytest.raises(jax.errors.JaxRuntimeError):
                (x + y).cpu()
        x.add_(10)
    assert x.tolist() == [11] * 3 and y.tolist() == [0] * 3


@pytest.mark.parametrize("error", [_Expected, KeyboardInterrupt, ValueError])
def test_an_exception_in_a_block(error: Any) -> None:
    """What was done before it is done, as without a batch."""
    x, y = torch.zeros(3, device="xla"), torch.zeros(3, device="xla")
    with pytest.raises(error), batched():
        torch._foreach_add_([x, y], 1)
        raise error
    assert x.tolist() == y.tolist() == [1] * 3
    assert (x + 1)._storage_.value.__class__ is not batch.Pending


def test_a_batch_read_by_another_thread() -> None:
    """While it is written down, and more is added."""
    x = torch.zeros(8, device="xla")
    results: list[float] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            results.append(float(x.sum().cpu()))

    thread = threading.Thread(target=look)
    with batched():
        x.add_(1)
        thread.start()
        for _ in range(60):
            x.add_(1)
            y = x * 2
    stop.set()
    thread.join()
    assert x.tolist() == [61] * 8 and y.tolist() == [122] * 8
    assert all(r % 8 == 0 for r in results) and results == sorted(results)


# --- optimizers ---------------------------------------------------------------------------------

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adagrad, {}),
]


class Training:
    """Parameters in two groups, their optimizer, and what all of it was."""

    def __init__(self, optimizer: Any, options: dict[str, Any], mesh: DeviceMesh) -> None:
        torch.manual_seed(1)
        values = [torch.randn(4 + i % 2, 8) for i in range(4)]
        layouts = [[Shard(0), Replicate()], [Replicate(), Shard(1)]]
        self.parameters = [
            torch.nn.Parameter(distribute_tensor(v, mesh, layouts[i % 2]))
            for i, v in enumerate(values)
        ]
        self.plain = [torch.nn.Parameter(v.clone()) for v in values]
        groups = ([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}] for p in self.both())
        self.optimizer, self.plain_optimizer = (optimizer(g, lr=0.01, **options) for g in groups)
        for p, q in zip(*self.both(), strict=True):
            q.grad = torch.randn_like(q)
            p.grad = distribute_tensor(q.grad, mesh, p.placements)

    def both(self) -> tuple[list[Any], list[Any]]:
        return self.parameters, self.plain

    def snapshot(self) -> list[Any]:
        """Everything that a step may change: values, layouts, identities, versions."""

        def of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            layout = getattr(value, "placements", None), getattr(value, "_form", None)
            return value.detach().cpu().numpy().tobytes(), layout, id(value)

        found: list[Any] = [(of(p), of(p.grad), p._version) for p in self.parameters]
        for p in self.parameters:
            state = self.optimizer.state.get(p)
            found.append(state and (id(state), {k: of(v) for k, v in state.items()}))
        return [*found, [dict(g, params=0) for g in self.optimizer.param_groups]]

    def step(self) -> None:
        self.optimizer.step()
        self.plain_optimizer.step()

    def check(self) -> None:
        for p, q in zip(*self.both(), strict=True):
            torch.testing.assert_close(p.detach().cpu(), q.detach())


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS[:4])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.one_in(6)
def test_a_step_whose_launch_fails(
    optimizer: Any, options: dict[str, Any], steps: int, failure: Any, mesh_2x4: DeviceMesh
) -> None:
    inject, error = failure
    training = Training(optimizer, options, mesh_2x4)
    for _ in range(steps):
        training.step()
    batch.executables.clear()
    before = training.snapshot()
    with pytest.raises(error), pytest.MonkeyPatch.context() as patch:
        inject(patch)
        training.optimizer.step()
    assert training.snapshot() == before
    batch.executables.clear()
    training.step()
    training.step()
    training.check()


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_step_that_raises_in_the_middle(
    optimizer: Any, options: dict[str, Any], steps: int, mesh_2x4: DeviceMesh
) -> None:
    """In the second group, and in a hook after the step that has looked at the results."""
    training = Training(optimizer, options, mesh_2x4)
    for _ in range(steps):
        training.step()
    before = training.snapshot()
    group = training.optimizer.param_groups[1]
    lr = group["lr"]
    group["lr"] = "a mistake"
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        training.optimizer.step()
    group["lr"] = lr
    assert training.snapshot() == before

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        training.parameters[0].detach().cpu()
        raise _Expected

    handle = training.optimizer.register_step_post_hook(hook)
    with pytest.raises(_Expected):
        training.optimizer.step()
    handle.remove()
    assert training.snapshot() == before
    training.step()
    training.step()
    training.check()


def test_autograd_has_not_seen_a_step_that_failed(mesh_2x4: DeviceMesh) -> None:
    training = Training(torch.optim.SGD, {}, mesh_2x4)
    p = training.parameters[0]
    loss = (p * p).sum()
    with pytest.raises(jax.errors.JaxRuntimeError), pytest.MonkeyPatch.context() as patch:
        _fail_launch(patch)
        training.optimizer.step()
    p.grad = None
    loss.backward()
    torch.testing.assert_close(p.grad.cpu(), 2 * p.detach().cpu())


def test_another_thread_runs_the_launch_that_fails(mesh_2x4: DeviceMesh) -> None:
    training = Training(torch.optim.SGD, {}, mesh_2x4)
    before = training.snapshot()
    seen: list[BaseException] = []

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        def look() -> None:
            with pytest.raises(jax.errors.JaxRuntimeError) as raised:
                training.parameters[0].detach().cpu()
            seen.append(raised.value)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    training.optimizer.register_step_post_hook(hook)
    with (
        pytest.raises(RuntimeError, match="step that has failed") as raised,
        pytest.MonkeyPatch.context() as patch,
    ):
        _fail_launch(patch)
        training.optimizer.step()
    assert raised.value.__cause__ is seen[0]
    assert training.snapshot() == before


def test_groups_that_torch_updates_one_by_one(mesh_2x4: DeviceMesh) -> None:
    training = Training(torch.optim.Adam, {}, mesh_2x4)
    for optimizer in (training.optimizer, training.plain_optimizer):
        optimizer.param_groups[1]["foreach"] = False
    training.step()
    training.step()
    training.check()


def test_a_users_optimizer_around_torchs(mesh_2x4: DeviceMesh) -> None:
    class Decayed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.mul_(0.5)
            return super().step(closure)

    training = Training(Decayed, {"momentum": 0.9}, mesh_2x4)
    training.step()
    training.step()
    training.check()


def test_an_optimizer_step_in_the_closure_of_another(mesh_2x4: DeviceMesh) -> None:
    first = Training(torch.optim.SGD, {}, mesh_2x4)
    second = Training(torch.optim.SGD, {}, mesh_2x4)
    before = first.snapshot()

    def closure() -> torch.Tensor:
        second.step()
        raise _Expected

    with pytest.raises(_Expected):
        first.optimizer.step(closure)
    second.check()
    assert first.snapshot() == before


def test_a_trace_is_not_affected(mesh_2x4: DeviceMesh) -> None:
    training = Training(torch.optim.SGD, {"momentum": 0.9}, mesh_2x4)
    xd.compile(training.optimizer.step)()
    training.plain_optimizer.step()
    training.check()
