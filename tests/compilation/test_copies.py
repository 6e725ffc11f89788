"""Copies of compiled steps, and steps pickled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import xla_dtensor as xd


@xd.compile
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Trainer:
    def __init__(self) -> None:
        self.scale = 2.0
        self.own = xd.compile(self.times)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    of_class = xd.compile(times)


def test_a_copied_object_has_steps_of_its_own() -> None:
    trainer, x = Trainer(), torch.ones(2, device="xla")
    assert trainer.own(x).tolist() == trainer.of_class(x).tolist() == [2.0, 2.0]
    other = copy.deepcopy(trainer)
    other.scale = 5.0
    assert other.own is not trainer.own
    assert [s(x)[0].item() for s in (other.own, other.of_class)] == [5.0, 5.0]
    assert [s(x)[0].item() for s in (trainer.own, trainer.of_class)] == [2.0, 2.0]


def test_a_copied_step_keeps_what_it_was_made_with() -> None:
    step = xd.compile(tripled, audit=3, checks=True)
    step.label = ["mine"]
    other = copy.deepcopy(step)
    assert other.label == ["mine"] and other.label is not step.label
    assert other._audit == 3 and other._asked == step._asked
    assert other(torch.ones(2, device="xla")).tolist() == [3.0, 3.0]
    assert (other.traces, step.traces) == (1, 0)


def test_steps_pickled() -> None:
    x = torch.ones(2, device="xla")
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    step = xd.compile(tripled)
    step(x)
    other = pickle.loads(pickle.dumps(step))
    assert other.traces == 0 and other(x).tolist() == [3.0, 3.0]
    trainer = pickle.loads(pickle.dumps(Trainer()))
    trainer.scale = 4.0
    assert trainer.own(x).tolist() == trainer.of_class(x).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("settings", [{"buckets": {"x": {0: (4, 8)}}}, {"watch": "replay"}])
def test_settings_of_copies(settings: dict[str, Any]) -> None:
    step = xd.compile(tripled, **settings)
    xs = [torch.ones(n, device="xla") for n in (1, 2, 3)]
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert [other(x).tolist() for x in xs] == [[3.0], [3.0] * 2, [3.0] * 3]
        assert type(other) is type(step) and step.traces == 0
        assert other.compilations == (1 if "buckets" in settings else 3)


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(xd.compile(lambda x: x))
