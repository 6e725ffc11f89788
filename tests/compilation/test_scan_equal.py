"""`xd.scan_layers` against the same models on the CPU."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.compilation.test_scan_layers import LAYOUTS, WIDTH, Block, replicated, value


class Model(nn.Module):
    """Calls its layers as ``how`` says."""

    def __init__(self, how: Callable[..., Any], depth: int = 5, p: float = 0.0) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(Block(WIDTH, p) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.how(self.layers, x))


def plainly(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def with_an_argument(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    scale = torch.sigmoid(x.detach().mean())
    for layer in layers:
        x = layer(x, scale=scale)
    return x


def with_all_results(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    found = []
    for layer in layers:
        x = layer(x)
        found.append(x)
    return found[1] * 2 + found[3].sin() + found[-1]


def then_other_arguments(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(layers):
        x = layer(x, scale=1.0 if i < 3 else 0.5)
    return x


def then_another_input(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(layers):
        x = layer(x + 1 if i == 2 else x)
    return x


def written_between(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(layers):
        x = layer(x)
        if i == 1:
            x.mul_(0.5)
    return x


def not_all(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers[:3]:
        x = layer(x)
    return x


def in_another_order(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for i in (0, 1, 3, 2, 4):
        x = layers[i](x)
    return x


def twice(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return plainly(layers, plainly(layers, x))


def changed_between(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(layers):
        x = layer(x)
        if i == 1:
            with torch.no_grad():
                layers[3].shift.add_(0.25)
    with torch.no_grad():
        layers[3].shift.sub_(0.25)
    return x


def frozen_between(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(layers):
        with torch.set_grad_enabled(i != 3):
            x = layer(x)
    return x


def checkpointed(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


# How layers are called, and how many of five are answered by a loop.
CALLS: dict[Callable[..., Any], list[int]] = {
    plainly: [5],
    with_an_argument: [5],
    with_all_results: [5],
    twice: [5, 5],
    then_other_arguments: [3],
    then_another_input: [2],
    written_between: [2],
    not_all: [3],
    in_another_order: [2],
    changed_between: [3],
    frozen_between: [3],
    checkpointed: [],
}


def trained(
    model: nn.Module, x: torch.Tensor, compiled: bool, **options: Any
) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        with xd.scan_layers(**options):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = xd.compile(step) if compiled else step
    losses = [run(x) for _ in range(3)]
    return [value(t) for t in (*losses, *model.state_dict().values())]


def answered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each loop has answered for; filled when traces end."""
    from xla_dtensor.compilation.scan import equal as scan_equal

    found: list[int] = []
    original = scan_equal._Chain.next

    def counted(chain: Any, *args: Any) -> Any:
        result = original(chain, *args)
        if not chain.is_open:
            found.append(chain._done)
        return result

    counted.__module__ = scan_equal.__name__  # or the step would be found to call the test's code
    monkeypatch.setattr(scan_equal._Chain, "next", counted)
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", CALLS, ids=lambda how: how.__name__)
def test_ways_to_call_layers(how: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop where they are called one after the other; always torch's numbers."""
    torch.manual_seed(0)
    plain = Model(how)
    ours, x = copy.deepcopy(plain), torch.randn(8, WIDTH)
    place = replicated(ours)
    found = answered(monkeypatch)
    mine = trained(ours, place(x), True)
    # Of the first trace; that not all are called is seen when the block ends.
    wanted = [] if how is not_all else CALLS[how]
    assert found[: len(wanted)] == wanted and bool(found) == bool(wanted)
    for one, other in zip(mine, trained(plain, x, False), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"recompute": True}, marks=pytest.mark.slow),
        pytest.param({"offload": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training(layout: Callable[..., Any], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
    ours, x = copy.deepcopy(plain), torch.randn(16, WIDTH)
    place = layout(ours)
    mine = trained(ours, place(x), True, **options)
    for one, other in zip(mine, trained(plain, x, False), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_the_program_is_a_loop() -> None:
    x = torch.ones(8, WIDTH, device="xla")

    def loops(model: nn.Module, **options: Any) -> int:
        model.to("xla")

        @xd.compile
        def step(x: Any) -> Any:
            with xd.scan_layers(**options):
                loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return int(step.lower(x).as_text().count("stablehlo.while"))

    assert loops(Model(plainly)) == 2
    assert loops(Model(plainly), at_least=6) == 0
    assert loops(Model(checkpointed)) == 0
    assert loops(nn.Sequential(*(Block(WIDTH) for _ in range(4)))) == 2
    # A run of four in the middle.
    mixed = nn.Sequential(nn.Tanh(), *(Block(WIDTH) for _ in range(4)), nn.Linear(WIDTH, WIDTH))
    assert loops(mixed) == 2
    shared = Block(WIDTH)
    assert loops(nn.Sequential(*[shared] * 4)) == 0
    hooked = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
    for layer in hooked:
        layer.register_forward_hook(lambda module, args, result: None)
    assert loops(hooked) == 0
    first, second = (nn.Sequential(*(Block(WIDTH) for _ in range(4))) for _ in range(2))
    assert loops(nn.Sequential(first, nn.Tanh(), second)) == 4


@pytest.mark.parametrize("p", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
def test_random_numbers_are_those_of_the_loop(p: float) -> None:
    torch.manual_seed(0)
    model, x = Model(plainly, p=p), torch.randn(8, WIDTH)
    results = []
    for scans in (True, False):
        ours = copy.deepcopy(model)
        place = replicated(ours)
        torch.manual_seed(5)

        @xd.compile
        def step(x: Any, ours: Any = ours, scans: bool = scans) -> Any:
            if not scans:
                y = ours(x)
            else:
                with xd.scan_layers():
                    y = ours(x)
            y.square().sum().backward()
            return y.detach(), torch.rand_like(y)

        outputs = [*step(place(x)), *step(place(x))]
        results.append([value(t) for t in (*outputs, *(q.grad for q in ours.parameters()))])
    for scanned, looped in zip(*results, strict=True):
        torch.testing.assert_close(scanned, looped, rtol=1e-5, atol=1e-5)


def parts_after_three(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(layers):
        x = layer(x if i < 3 else x * 1.5)
    return x


def draws_between(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x + torch.rand_like(x))
    return x


def test_random_numbers_after_a_loop_that_was_left(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Model(parts_after_three, p=0.3).to("xla")
    x, results = torch.ones(8, WIDTH, device="xla"), []
    for at_least in (4, 99):
        torch.manual_seed(5)

        @xd.compile
        def step(x: Any, at_least: int = at_least) -> Any:
            with xd.scan_layers(at_least=at_least):
                return model(x), torch.rand_like(x)

        # The second call, too: the generator goes on from where the loop would have left it.
        results.append([value(t) for t in (*step(x), *step(x), torch.rand(3, device="xla"))])
    for scanned, looped in zip(*results, strict=True):
        torch.testing.assert_close(scanned, looped, rtol=1e-5, atol=1e-5)
    assert "layer 3 is called with something else" in caplog.text
    assert "of the loop's 5 results 3 are used" in caplog.text


def test_random_numbers_between_layers() -> None:
    model, x = Model(draws_between, p=0.3).to("xla"), torch.ones(8, WIDTH, device="xla")

    @xd.compile
    def step(x: Any) -> Any:
        with xd.scan_layers():
            return model(x)

    with pytest.raises(xd.UnsupportedOpError, match="something between two of them does, too"):
        step(x)
    assert nn.Module.__call__.__name__ != "call"  # torch's own again


class Scaled(nn.Module):
    """Reads a parameter from elsewhere."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.own, self.read = nn.Linear(WIDTH, WIDTH), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) * self.read()


def test_why_layers_are_no_loop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="xla_dtensor")
    x = torch.ones(8, WIDTH, device="xla")

    def looked_at(*layers: nn.Module) -> str:
        model = nn.Sequential(*layers).to("xla")

        @xd.compile
        def step(x: Any) -> Any:
            with xd.scan_layers():
                return model(x)

        caplog.clear()
        torch.testing.assert_close(step(x).cpu(), model(x).cpu().detach())
        return caplog.text

    widths = [WIDTH, 8, 24, 8, WIDTH]
    text = looked_at(*(nn.Linear(i, o) for i, o in itertools.pairwise(widths)))
    assert "they differ in itself.in_features" in text
    weight = nn.Parameter(torch.randn(WIDTH, device="xla"))
    text = looked_at(*(Scaled(lambda: weight) for _ in range(4)))
    assert "that needs a gradient, or what was computed from it" in text
    text = looked_at(*(nn.BatchNorm1d(WIDTH) for _ in range(4)))
    assert "a layer writes to a tensor" in text


def test_outside_of_a_step() -> None:
    model, x = Model(plainly), torch.randn(8, WIDTH)
    with xd.scan_layers():
        inside = model(x)
    assert torch.equal(inside, model(x))
    with pytest.raises(ValueError, match="two layers or more"), xd.scan_layers(at_least=1):
        pass
