"""What torch and its libraries ask of values before they compute: asserted in compiled steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import distributions as D

import xla_dtensor as xd

Step = Callable[[torch.Tensor], torch.Tensor]

CHECKED: dict[str, tuple[Step, list[float]]] = {
    "normal": (lambda x: D.Normal(x, 2.0).log_prob(x + 1), [0.5, float("nan")]),
    "scale": (lambda x: D.Normal(0.0, x).log_prob(torch.ones_like(x)), [0.5, -1.0]),
    "sample": (lambda x: D.Exponential(torch.ones_like(x)).log_prob(x), [0.5, -1.0]),
    "categorical": (lambda x: D.Categorical(logits=x.log()).entropy(), [0.5, float("nan")]),
    "kl": (lambda x: D.kl_divergence(D.Normal(x, 1.0), D.Normal(0.0, 1.0)), [0.5, float("nan")]),
    "equal": (lambda x: x * 2 if torch.equal(x, x) else x, [0.5, float("nan")]),
}


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: torch.compile, which CPU torch's loops call, turns them off for good."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


@pytest.mark.parametrize("name", CHECKED)
def test_asserted(name: str) -> None:
    function, (valid, wrong) = CHECKED[name]
    step = xd.compile(function)
    for scale in (1.0, 2.0):
        x = torch.full((4,), valid) * scale
        torch.testing.assert_close(step(x.to("xla")).cpu(), function(x))
    with pytest.raises((ValueError, RuntimeError), match=r"valid|NaNs"):
        step(torch.tensor([valid, wrong, valid, valid]).to("xla")).cpu()
    x = torch.full((4,), valid)
    torch.testing.assert_close(step(x.to("xla")).cpu(), function(x))


def test_validation_that_is_off_asserts_nothing() -> None:
    step = xd.compile(lambda x: D.Normal(0.0, x, validate_args=False).log_prob(x))
    assert step(torch.tensor([1.0, -1.0]).to("xla")).cpu()[1].isnan()


def test_policy_gradient() -> None:
    """A step of PPO: samples and ratios of two policies."""
    torch.manual_seed(0)
    reference = torch.nn.Linear(3, 2)
    given = torch.randn(8, 3), torch.randint(2, (8,)), torch.randn(8)

    def step(model: torch.nn.Module, x: torch.Tensor, a: torch.Tensor, gain: torch.Tensor) -> None:
        policy = D.Categorical(logits=model(x))
        ratio = (policy.log_prob(a) - policy.log_prob(a).detach()).exp()
        (-(ratio * gain).mean() - 0.01 * policy.entropy().mean()).backward()

    model = torch.nn.Linear(3, 2)
    model.load_state_dict(reference.state_dict())
    model.to("xla")
    xd.compile(step)(model, *(t.to("xla") for t in given))
    step(reference, *given)
    torch.testing.assert_close(model.weight.grad.cpu(), reference.weight.grad)


def test_tensors_of_other_shapes_are_not_equal() -> None:
    step = xd.compile(lambda x, y: x if torch.equal(x, y) else -x)
    x = torch.ones(3, device="xla")
    assert step(x, torch.ones(4, device="xla")).tolist() == [-1, -1, -1]
    with pytest.raises(xd.DataDependentError, match="equal"):
        step(x, torch.ones(3, device="xla"))
