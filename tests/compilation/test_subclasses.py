"""Compiled steps with tensors of users' subclasses: arguments, results, state, what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from tests.tensors.test_subclasses import Image, Label, Tagged, Weight, described

Step = Callable[..., Any]


def ones(i: int, device: str) -> Any:
    return (torch.arange(4.0) + i).to(device)


def leaf(i: int, device: str) -> Any:
    return ones(i, device).requires_grad_()


def image(i: int, device: str) -> Any:
    return ones(i, device).as_subclass(Image)


def label(i: int, device: str) -> Any:
    return ones(i, device).as_subclass(Label)


def image_of_leaf(i: int, device: str) -> Any:
    return leaf(i, device).as_subclass(Image)


def image_leaf(i: int, device: str) -> Any:
    return image(i, device).requires_grad_()


def tagged(i: int, device: str) -> Any:
    return Tagged(ones(i, device), i)


def marks(x: Any) -> Any:
    y = (x + 1).as_subclass(Image)
    y.mark = 3
    return y


def writes(y: Any) -> Any:
    y.add_(1)
    return y, y[:2], y.mul(2)


def several(x: Any) -> Any:
    y = x + 1
    return y, y.as_subclass(Image), y[1:].as_subclass(Label), (x * x).as_subclass(Image)[:2]


def leaves(x: Any) -> Any:
    y = (x * 2).detach().as_subclass(Image).requires_grad_()
    (y * y).sum().backward()
    return y, y.grad


STEPS: dict[str, tuple[Step, Callable[[int, str], Any]]] = {
    "argument": (lambda y: (y * 2, y), image),
    "argument of one that gives plain tensors": (lambda y: (y * 2, y, y[1:]), label),
    "within": (lambda x: (x.as_subclass(Image) * 2).as_subclass(torch.Tensor), ones),
    "result": (lambda x: x.as_subclass(Image) * 2, ones),
    "the argument's memory": (lambda x: x.as_subclass(Image), ones),
    "several of one memory": (several, ones),
    "marked": (marks, ones),
    "written": (writes, image),
    "with a history": (several, leaf),
    "of a leaf": (lambda y: (y * y, (y * y)[1:]), image_of_leaf),
    "a leaf": (lambda y: (y * y).as_subclass(Label), image_leaf),
    "leaves made by the step": (leaves, ones),
    "a parameter": (lambda x: torch.nn.Parameter((x * 2).as_subclass(Image)), ones),
    "a Parameter's subclass": (lambda x: torch.Tensor._make_subclass(Weight, x * 2, True), ones),
    "all that is kept": (lambda y: (y * 2, y + 1, y.tag * y), tagged),
    "its class": (lambda y: (type(y).__name__, isinstance(y, Image), y.sum()), image),
}


@pytest.mark.parametrize("name", STEPS)
def test_as_on_the_cpu(name: str) -> None:
    step, make = STEPS[name]
    compiled = xd.compile(step)
    for i in range(3):
        wanted, found = step(make(i, "cpu")), compiled(make(i, "xla"))
        assert described(found) == described(wanted)


def test_results_share_memory() -> None:
    step = xd.compile(lambda x: (y := x + 1, y.as_subclass(Image)))
    for i in range(2):
        plain, shown = step(ones(i, "xla"))
        shown.zero_()
        assert plain.tolist() == [0] * 4
    x = ones(0, "xla")
    xd.compile(lambda x: x.as_subclass(Image))(x).zero_()
    assert x.tolist() == [0] * 4


def test_gradients_go_through() -> None:
    step = xd.compile(lambda y: (y * y).as_subclass(Image))
    for i in range(2):
        x = leaf(i, "xla")
        step(x.as_subclass(Label)).sum().backward()
        assert x.grad.tolist() == (2 * ones(i, "cpu")).tolist()


class Scaled(torch.Tensor):
    """Whose code a step runs."""

    factor = 2

    def scaled(self) -> Any:
        return self * self.factor


def test_the_class_is_watched() -> None:
    step = xd.compile(lambda y: y.scaled())
    y = torch.ones(2, device="xla").as_subclass(Scaled)
    try:
        for factor in (2, 3, 2):
            Scaled.factor = factor
            assert step(y).tolist() == [factor] * 2
    finally:
        Scaled.factor = 2


def test_another_class_is_another_program() -> None:
    step = xd.compile(lambda y: y * 2 if isinstance(y, Image) else y * 3)
    for make, factor in ((ones, 3), (image, 2), (label, 3), (image, 2)):
        assert step(make(0, "xla")).tolist() == (ones(0, "cpu") * factor).tolist()
    assert step.traces == 3
    assert any("to Image [4]" in why for why in step.recompilations)


def test_what_is_kept_on_an_argument_is_read() -> None:
    step = xd.compile(lambda y: y.as_subclass(torch.Tensor) * y.mark)
    for mark in (1, 2, 1):
        y = image(0, "xla")
        y.mark = mark
        assert step(y).tolist() == (ones(0, "cpu") * mark).tolist()


class State:
    """What a step carries on."""

    def __init__(self, h: Any) -> None:
        self.h = h


def test_carried() -> None:
    def run(device: str, wrap: Callable[[Step], Step]) -> Any:
        state = State(torch.zeros(4, device=device))

        def step(x: Any) -> Any:
            state.h = (state.h + x).as_subclass(Image)
            return state.h * 2

        compiled = wrap(step)
        return [described(compiled(ones(i, device))) for i in range(4)], described(state.h)

    assert run("xla", xd.compile) == run("cpu", lambda step: step)


@pytest.mark.parametrize("layout", ["one device", "mesh"])
def test_training(mesh_2x4: DeviceMesh, layout: str) -> None:
    """A parameter of a subclass, with an optimizer."""

    def run(device: str, wrap: Callable[[Step], Step]) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 8)
        weight = model.weight.detach().to(device)
        if device == "xla" and layout == "mesh":
            model.to("xla")
            weight = xd.distribute_tensor(weight, mesh_2x4, [xd.Shard(0), xd.Shard(1)])
        model.to(device)
        model.weight = torch.nn.Parameter(weight.as_subclass(Image))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x: Any) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled = wrap(step)
        losses = [compiled(torch.full((2, 4), 1.0 + i).to(device)) for i in range(4)]
        assert all(type(loss) == Image for loss in losses)  # noqa: E721
        assert isinstance(model.weight, Image) and isinstance(model.weight, torch.nn.Parameter)
        return [float(loss) for loss in losses]

    wanted = run("cpu", lambda step: step)
    assert run("xla", xd.compile) == pytest.approx(wanted, rel=1e-5)
    assert run("xla", lambda step: step) == pytest.approx(wanted, rel=1e-5)
