"""What a step reads and the walk once passed over: each change is seen, as in torch."""

from __future__ import annotations

import copy
import functools
import importlib
import random
import signal
import sys
import time
from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import xla_dtensor as xd


def a_decorator_object(x: Any) -> Any:
    class Timed:
        def __init__(self, function: Any) -> None:
            functools.update_wrapper(self, function)
            self.function, self.scale = function, 1.0

        def __call__(self, x: Any) -> Any:
            return self.function(x) * self.scale

    timed = Timed(lambda x: x * 2)
    return (lambda x: timed(x)), lambda: setattr(timed, "scale", 3.0)


def what_a_decorator_object_wraps(x: Any) -> Any:
    factor = [2.0]

    class Calls:
        def __init__(self, function: Any) -> None:
            functools.update_wrapper(self, function)

        def __call__(self, x: Any) -> Any:
            return self.__wrapped__(x)  # type: ignore[attr-defined]

    calls = Calls(lambda x: x * factor[0])
    return (lambda x: calls(x)), lambda: factor.__setitem__(0, 5.0)


def a_class_attribute_of_a_dict(x: Any) -> Any:
    class Config(dict):
        scale = 1.0

    config = Config(lr=1.0)
    return (lambda x: x * config.scale), lambda: setattr(config, "scale", 3.0)


def a_class_attribute_of_a_list(x: Any) -> Any:
    class Factors(list):
        scale = 1.0

    factors = Factors([2.0])
    return (lambda x: x * factors[0] * factors.scale), lambda: setattr(factors, "scale", 3.0)


def an_attribute_put_on_a_parameter(x: Any) -> Any:
    p = torch.nn.Parameter(torch.ones_like(x))
    return (
        lambda x: x * p.detach() * getattr(p, "lr_scale", 1.0),
        lambda: setattr(p, "lr_scale", 3.0),
    )


def whether_a_parameter_has_an_attribute(x: Any) -> Any:
    p = torch.nn.Parameter(torch.ones_like(x))
    return (lambda x: x * (2 if hasattr(p, "frozen") else 1)), lambda: setattr(p, "frozen", 0)


def subclasses(x: Any) -> Any:
    kept = []

    class Base:
        k = 1.0

    class One(Base):
        k = 2.0

    def change() -> None:
        class Two(Base):
            k = 7.0

        kept.extend([One, Two])

    return (lambda x: x * sum(c.k for c in Base.__subclasses__())), change


def an_attribute_of_a_subclass(x: Any) -> Any:
    class Base:
        k = 1.0

    class One(Base):
        k = 2.0

    return (lambda x: x * sum(c.k for c in Base.__subclasses__())), lambda: setattr(One, "k", 9.0)


def a_setter(x: Any) -> Any:
    class Meter:
        factor, kept = 2.0, None

        @property
        def value(self) -> Any:
            return self.kept

        @value.setter
        def value(self, value: Any) -> None:
            self.kept = value * self.factor

    meter = Meter()

    def step(x: Any) -> Any:
        meter.value = x
        return meter.kept + 1

    return step, lambda: setattr(meter, "factor", 5.0)


def a_descriptors_setter(x: Any) -> Any:
    class Scaled:
        factor = 2.0

        def __set__(self, owner: Any, value: Any) -> None:
            owner.kept = value * self.factor

    class Meter:
        value = Scaled()

    meter = Meter()

    def step(x: Any) -> Any:
        meter.value = x
        return meter.kept + 1  # type: ignore[attr-defined]

    return step, lambda: setattr(Meter.__dict__["value"], "factor", 5.0)


def a_learning_rate_that_is_only_read(x: Any) -> Any:
    p = torch.nn.Parameter(torch.ones_like(x))
    optimizer = torch.optim.SGD([p], lr=0.5)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 2.0
    return (
        lambda x: x * optimizer.param_groups[0]["lr"],
        lambda: optimizer.load_state_dict(saved),
    )


def state_that_is_only_read(x: Any) -> Any:
    p = torch.nn.Parameter(torch.ones_like(x))
    optimizer = torch.optim.Adam([p], lr=0.5)

    def train() -> None:
        (p * x).sum().backward()
        optimizer.step()

    train()
    saved = copy.deepcopy(optimizer.state_dict())
    train()
    return (
        lambda x: x * optimizer.state[p]["exp_avg"].sum(),
        lambda: optimizer.load_state_dict(saved),
    )


def the_kernel_of_an_operator(x: Any) -> Any:
    factor, name = [2.0], f"scaled_on_{x.device.type}"
    operator = torch.library.custom_op(
        f"xla_dtensor_reads::{name}",
        lambda x: x * factor[0],
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    operator.register_fake(torch.empty_like)
    packet = getattr(torch.ops.xla_dtensor_reads, name)
    # It is found by its name, as long as somebody holds it.
    return (lambda x: packet(x)), lambda: (operator, factor.__setitem__(0, 5.0))


SCRIPTS = [
    the_kernel_of_an_operator,
    *(a_decorator_object, what_a_decorator_object_wraps, a_class_attribute_of_a_dict),
    *(a_class_attribute_of_a_list, an_attribute_put_on_a_parameter, subclasses, a_setter),
    *(whether_a_parameter_has_an_attribute, an_attribute_of_a_subclass, a_descriptors_setter),
    *(a_learning_rate_that_is_only_read, state_that_is_only_read),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_change_is_seen(script: Any) -> None:
    found = {}
    for device in ("cpu", "xla"):
        x = torch.ones(2, device=device)
        step, change = script(x)
        step = xd.compile(step) if device == "xla" else step
        before = [step(x)[0].item(), step(x)[0].item()]
        if device == "xla":
            assert step.compilations == 1
        change()
        found[device] = [*before, step(x)[0].item(), step(x)[0].item()]
    assert found["xla"] == pytest.approx(found["cpu"])
    assert found["cpu"][1] != found["cpu"][2]


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_all_optimizers(kind: str) -> None:
    register = {
        "pre": register_optimizer_step_pre_hook,
        "post": register_optimizer_step_post_hook,
    }[kind]
    found = {}
    for device in ("cpu", "xla"):
        w = torch.nn.Parameter(torch.ones(2, device=device))
        optimizer = torch.optim.SGD([w], lr=0.1)

        def step(x: Any, w: Any = w, optimizer: Any = optimizer) -> None:
            (w * x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def halve(*_: Any, w: Any = w) -> None:
            with torch.no_grad():
                w.mul_(0.5)

        step = xd.compile(step) if device == "xla" else step
        x, values = torch.ones(2, device=device), []
        for i in range(4):
            if i == 2:
                handle = register(halve)
            step(x)
            if i == 2:
                handle.remove()
            values.append(w[0].item())
        found[device] = values
    assert found["xla"] == pytest.approx(found["cpu"])


def test_a_users_file_named_like_one_of_pythons(tmp_path: Any, monkeypatch: Any) -> None:
    assert "sched" in sys.stdlib_module_names
    (tmp_path / "sched.py").write_text("factor = 1.0\ndef scale(x): return x * factor\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    sched: Any = importlib.import_module("sched")
    try:
        step = xd.compile(lambda x: sched.scale(x))
        x = torch.ones(2, device="xla")
        assert step(x)[0].item() == 1
        sched.factor = 5.0
        assert step(x)[0].item() == 5
    finally:
        del sys.modules["sched"]


class TooLong(Exception):
    pass


def counting() -> Any:
    class Trainer:
        n = 0

        def step(self, x: Any) -> Any:
            self.n += 1
            time.sleep(0.2)  # a long trace
            return x * self.n

    return xd.compile(Trainer().step), [()] * 5


def scaling() -> Any:
    def scaled(x: Any, by: float) -> Any:
        time.sleep(0.2)
        return x * by

    return xd.compile(scaled), [(float(k),) for k in range(1, 6)]


@pytest.mark.parametrize(
    ("make", "after"),
    [(counting, 0.1), (counting, 0.3), (scaling, 0.1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_signal_is_not_taken_for_the_step_s_own_failure(make: Any, after: float) -> None:
    def handler(signum: int, frame: Any) -> None:
        raise TooLong

    step, arguments = make()
    x = torch.ones(2, device="xla")
    before = signal.signal(signal.SIGALRM, handler)
    values = []
    try:
        for i, rest in enumerate(arguments):
            try:
                if i == 1:
                    signal.setitimer(signal.ITIMER_REAL, after)
                values.append(step(x, *rest)[0].item())
            except TooLong:
                values.append("interrupted")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    done = [v for v in values if v != "interrupted"]
    expected = [1.0, 2.0, 3.0, 4.0] if make is counting else [1.0, 3.0, 4.0, 5.0]
    assert values[1] == "interrupted" and done == expected
    assert step.compilations == 2  # the number is an input from its second value on


def test_an_error_from_outside_is_raised_and_tried_no_other_way() -> None:
    outside = []

    def run(x: Any, by: float) -> Any:
        return x * by if not outside else fail()

    def fail() -> Any:
        raise ConnectionError("down for a moment")

    compiled = xd.compile(run)
    x = torch.ones(2, device="xla")
    assert compiled(x, 1.0)[0].item() == 1
    outside.append(1)
    with pytest.raises(ConnectionError):
        compiled(x, 2.0)
    outside.clear()
    assert [compiled(x, float(k))[0].item() for k in (3, 4, 5)] == [3, 4, 5]
    assert compiled.compilations == 2


class Trainer:
    """A step among other methods: one is called like what the step calls of its optimizer, and what
    makes the object assigns attributes by names that it makes up."""

    def __init__(self) -> None:
        self.model: Any = torch.nn.Linear(4, 4).to("xla")
        for name in ("seen", "log"):
            setattr(self, name, [])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.train_step = xd.compile(self._train_step)

    def _train_step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self) -> None:
        self.seen.append(random.random())
        self.log.append(self.train_step(torch.ones(2, 4, device="xla")).item())


def test_methods_that_the_step_does_not_run_are_not_read() -> None:
    trainer = Trainer()
    for _ in range(5):
        trainer.step()
    assert trainer.train_step.traces <= 2 and len(trainer.log) == 5
    trainer.optimizer.param_groups[0]["lr"] = 1.0
    trainer.step()
    trainer.step()
    assert trainer.log[-1] != trainer.log[-2] and trainer.train_step.traces <= 2


def test_a_method_that_a_change_makes_it_run_is_read() -> None:
    class Scaled:
        def __init__(self) -> None:
            self.on, self.scale = False, 2.0

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x) if self.on else x + 1

    owner = Scaled()
    step = xd.compile(owner.step)
    x = torch.ones(2, device="xla")
    found = []
    for on, scale in ((False, 2.0), (False, 3.0), (True, 3.0), (True, 4.0), (False, 4.0)):
        owner.on, owner.scale = on, scale
        found.append(step(x)[0].item())
    assert found == [2, 2, 3, 4, 2]
