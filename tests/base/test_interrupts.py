"""Ctrl-C, and other signals, while operations, backward passes and optimizers run."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.base import interrupts
from xla_dtensor.compilation.program import executable


def press(signum: int = signal.SIGINT) -> None:
    """Ctrl-C, or another signal, as if it had been sent to this thread just now."""
    signal.pthread_kill(threading.main_thread().ident, signum)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in interrupts._SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.install()
    yield
    assert not any(waiting.count for waiting in interrupts._waiting.values())
    assert sys.gettrace() is None
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def x(mesh_2x4: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(torch.arange(8.0), mesh_2x4, [Shard(0), Shard(0)])


done: list[str] = []


@interrupts.atomic
def atomic(inside: Callable[[], object] = press) -> None:
    done.clear()
    inside()
    for i in range(3):
        done.append(f"atomic {i}")  # noqa: PERF401  (an interrupt could come between two)


@interrupts.completed
def completed(inside: Callable[[], object]) -> None:
    try:
        inside()
    finally:
        done.append("completed")


@interrupts.interruptible
def interruptible(inside: Callable[[], object]) -> None:
    inside()


def after() -> None:
    done.append("after")


def test_an_interrupt_waits_for_an_atomic_function() -> None:
    with pytest.raises(KeyboardInterrupt):
        atomic()
        after()
    assert done == ["atomic 0", "atomic 1", "atomic 2"]


def test_atomic_functions_in_each_other() -> None:
    with pytest.raises(KeyboardInterrupt):
        atomic(lambda: atomic())
    assert done == [f"atomic {i}" for i in range(3)] * 2


def test_elsewhere_it_comes_at_once() -> None:
    def work() -> None:
        done.append("before")
        press()
        after()

    done.clear()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["before"]


def test_a_completed_function_is_left_with_the_second() -> None:
    def once() -> None:
        press()
        after()

    def twice() -> None:
        press()
        press()
        after()

    def atomic_twice() -> None:
        atomic(lambda: (press(), press()))
        after()

    for inside, expected in [
        (once, ["after", "completed"]),
        (twice, ["completed"]),
        (atomic_twice, ["atomic 0", "atomic 1", "atomic 2", "completed"]),
        (lambda: interruptible(once), ["completed"]),
        (lambda: interruptible(lambda: completed(once)), ["after", "completed", "completed"]),
    ]:
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            completed(inside)
            after()
        assert done == expected


def test_a_call_that_waits() -> None:
    start = time.monotonic()
    threading.Timer(0.1, press).start()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(20)
    assert time.monotonic() - start < 10


def test_a_block_that_returns_is_left() -> None:
    """The instruction behind `return f()` is no longer guarded by the blocks around it."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        try:
            yield
        finally:
            done.append("left")

    def in_with() -> None:
        with block():
            return atomic()

    def in_try() -> None:
        try:
            with block(), torch.no_grad():
                return atomic()
        finally:
            done.append("finally")

    def by_another() -> None:
        in_with()
        after()

    for work, ends in ((in_with, ["left"]), (by_another, ["left"]), (in_try, ["left", "finally"])):
        with pytest.raises(KeyboardInterrupt):
            work()
        assert done == ["atomic 0", "atomic 1", "atomic 2", *ends]
        assert torch.is_grad_enabled()


def test_a_destructor_does_not_swallow_it() -> None:
    class Swallows:
        def __del__(self) -> None:
            press()
            done.append("__del__")

    class Key:
        pass

    def work() -> None:
        key = Swallows()
        del key
        after()

    done.clear()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["__del__"]
    keys: Any = weakref.WeakKeyDictionary()
    assert interrupts._kinds[keys._remove.__code__] is interrupts._Kind.ATOMIC


def test_the_users_own_handlers(x: torch.Tensor) -> None:
    calls: list[str] = []
    previous = signal.getsignal(signal.SIGINT)

    def own(signum: int, frame: Any) -> None:
        calls.append("own")
        previous(signum, frame)  # type: ignore[operator, misc]

    signal.signal(signal.SIGINT, own)
    x + 1
    assert interrupts.ready()
    with pytest.raises(KeyboardInterrupt):
        atomic()
    assert calls == ["own"]
    for handler in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, handler)
        x + 1
        assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_does_not_raise() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, frame: calls.append(signum))
    interrupts.install()
    atomic()
    after()
    assert done[-1] == "after" and calls == [signal.SIGINT]


class TimeIsUpError(Exception):
    pass


def _raise_time_is_up(signum: int, frame: Any) -> None:
    raise TimeIsUpError(signum)


@pytest.mark.parametrize("signum", [s for s in interrupts._SIGNALS if s != signal.SIGINT])
def test_other_signals_wait_too(x: torch.Tensor, signum: int) -> None:
    """However often they come: who sends them isn't impatient."""
    signal.signal(signum, _raise_time_is_up)
    x + 1

    def thrice() -> None:
        for _ in range(3):
            press(signum)
        after()

    with pytest.raises(TimeIsUpError):
        atomic(lambda: press(signum))
        after()
    assert done == ["atomic 0", "atomic 1", "atomic 2"]
    done.clear()
    with pytest.raises(TimeIsUpError):
        completed(thrice)
        after()
    assert done == ["after", "completed"]


def test_two_signals_at_once() -> None:
    """Each is raised; the second one finds what the first one has left."""
    signal.signal(signal.SIGALRM, _raise_time_is_up)
    interrupts.install()
    raised = []
    for _ in range(2):
        try:
            if not raised:
                atomic(lambda: (press(signal.SIGALRM), press()))
            time.sleep(5)
        except (KeyboardInterrupt, TimeIsUpError) as error:
            raised.append(type(error))
    assert set(raised) == {KeyboardInterrupt, TimeIsUpError}


def test_the_handler_of_one_signal_for_another(x: torch.Tensor) -> None:
    before = signal.signal(signal.SIGQUIT, signal.getsignal(signal.SIGINT))
    try:
        x + 1
        with pytest.raises(KeyboardInterrupt):
            press(signal.SIGQUIT)
            time.sleep(5)
    finally:
        signal.signal(signal.SIGQUIT, before)


def test_a_signal_that_is_left_to_the_system_stays_so(x: torch.Tensor) -> None:
    for handler in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGTERM, handler)
        x + 1
        assert signal.getsignal(signal.SIGTERM) is handler


def test_under_a_debugger() -> None:
    """Its trace function stays; the interrupt comes a little later."""

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        return None

    outer = sys.gettrace()
    sys.settrace(tracer)
    try:
        with pytest.raises(KeyboardInterrupt):
            atomic()
            time.sleep(5)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(outer)
    assert done == ["atomic 0", "atomic 1", "atomic 2"]


@pytest.mark.usefixtures("strict_eager")
def test_an_operation_is_done_when_it_comes(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To autograd, too: the version, and the graph."""
    from xla_dtensor.dispatch.execute import _plans

    x.add_(1)
    w = x.clone().requires_grad_()
    y = w * 2
    y.mul_(3)
    for plan in list(_plans.values()):
        eager = getattr(plan, "eager", None)
        if eager is not None:

            def pressing(*args: Any, eager: Any = eager) -> Any:
                result = eager(*args)
                press()
                return result

            monkeypatch.setattr(plan, "eager", pressing)
    version = x._version
    with pytest.raises(KeyboardInterrupt):
        x.add_(1)
        after()
    with pytest.raises(KeyboardInterrupt):
        y.mul_(4)
    monkeypatch.undo()
    assert x._version == version + 1
    assert x.tolist() == [i + 2 for i in range(8)]
    assert y.grad_fn is not None
    y.sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad.cpu(), torch.full((8,), 24.0))


@pytest.mark.parametrize("times", [1, 2])
def test_in_a_backward_pass(x: torch.Tensor, times: int) -> None:
    w = x.clone().requires_grad_()
    seen: list[str] = []

    def hook(grad: torch.Tensor) -> None:
        for _ in range(times):
            press()
        seen.append("went on")

    y = w * 2
    y.register_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    if times == 1:
        assert seen == ["went on"] and w.grad is not None and w.grad.tolist() == [2] * 8
    else:
        assert seen == [] and w.grad is None
    (w * 2).sum().backward()
    assert w.grad is not None


def test_while_an_exception_leaves_a_backward_pass(x: torch.Tensor) -> None:
    """C++ then asks the device guard, whose Python finds both."""
    # In C, so that no Python runs between the interrupt and the engine's question.
    hook = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyErr_SetInterrupt", ctypes.pythonapi))
    hook.errcheck = operator.truediv  # which it calls with three arguments: a TypeError
    w = x.clone().requires_grad_()
    y = w * 2
    y.register_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        with pytest.raises(TypeError, match="truediv"):
            y.sum().backward()
        time.sleep(5)
    (w * 2).sum().backward()
    assert w.grad is not None


def _train(*arguments: str) -> str:
    """What `interrupted_training.py` says; sends the interrupts it asks for."""
    command = [sys.executable, "-W", "error", "-X", "faulthandler"]
    with subprocess.Popen(
        [*command, "-m", "tests.base.interrupted_training", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"},
    ) as process:
        lines = []
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            word, _, delay = line.partition(" ")
            if word == "press":
                time.sleep(float(delay))
                process.send_signal(signal.SIGINT)
            else:
                lines.append(line)
        errors = process.stderr.read()
    assert process.returncode == 0, "".join(lines) + errors
    return "".join(lines)


VARIANTS = [pytest.param([], id="eager"), pytest.param(["--compiled"], id="compiled")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", VARIANTS)
def test_training_goes_on(options: list[str]) -> None:
    said = _train("sgd", "fused", "--outside", "--interrupts", "8", *options)
    assert said.count("8 interrupts") == 2


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("seed", ["1", "2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "fused", "loop"])
def test_200_interrupts(optimizer: str, seed: str, options: list[str]) -> None:
    said = _train(
        optimizer, "--outside", "--interrupts", "25", "--cold", "4", "--seed", seed, *options
    )
    assert "25 interrupts" in said


@pytest.mark.parametrize("when", ["taken", "put back"])
def test_torchs_modes_stay_whole(
    x: torch.Tensor, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes a mode from its stack while the mode works, and puts it back."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **kwargs or {})

    name = "_pop_torch_function_stack" if when == "taken" else "_push_on_torch_function_stack"
    original = getattr(torch.overrides, name)

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        if not pressed:
            pressed.append(when)
            press()
        return result

    depth = torch._C._len_torch_function_stack()
    pressed = []
    with pytest.raises(KeyboardInterrupt), Mode():
        monkeypatch.setattr(torch.overrides, name, interrupted)
        try:
            torch.nn.functional.softmax(x, -1)
        finally:
            monkeypatch.setattr(torch.overrides, name, original)
    assert pressed and torch._C._len_torch_function_stack() == depth


def test_numbers_of_a_trace_are_atomic_for_cpp() -> None:
    """torch's C++ asks them for their value, and takes an interrupt that is raised in them for the
    argument's being of another type."""
    from xla_dtensor.base.numbers import python_numbers, traced_number

    asked = (
        traced_number.NumberNode.guard_float,
        traced_number.NumberNode.add,  # type: ignore[attr-defined]
        traced_number.ComparisonNode.guard_bool,
        python_numbers.Float.__add__,
        vars(python_numbers._PythonNumber)["__class__"].fget,
    )
    for function in asked:
        assert interrupts._kinds[function.__code__] is interrupts._Kind.ATOMIC


def test_other_threads_go_on_with_a_step_that_was_interrupted(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt that waits for a call is raised when the call's lock has been given back."""
    constrained = executable.constrained

    def pressed(*given: Any) -> Any:
        monkeypatch.undo()
        press()
        return constrained(*given)

    monkeypatch.setattr(executable, "constrained", pressed)
    step = xd.compile(lambda x: x * 2)
    with pytest.raises(KeyboardInterrupt):
        step(x)
        pytest.fail("it was not raised")
    found: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: found.append(step(x)), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()
    assert torch.equal(found[0].full_tensor().cpu(), torch.arange(8.0) * 2)
