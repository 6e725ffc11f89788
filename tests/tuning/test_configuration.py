"""A configuration lays a model and a batch out, and its code does the same."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from tests.tuning.programs import Model, batch, build, training
from xla_dtensor.tuning import Configuration
from xla_dtensor.tuning.configuration import attentions, pattern_of, repeated_layers

PARAMETERS = {
    **{f"layers.{i}.up.weight": (None, 0) for i in range(3)},
    **{f"layers.{i}.down.weight": (0, 1) for i in range(3)},
    "head.bias": (None, None),
}
CONFIGURATIONS = {
    "tensor parallel": Configuration({"dp": 2, "tp": 4}, (0, None), "nothing", PARAMETERS),
    "computed again": Configuration({"dp": 2, "tp": 4}, (0, None), "layers", PARAMETERS),
    "attention computed again": Configuration({"dp": 8}, (0,), "attention"),
    "whole": Configuration({"dp": 8}, (0,)),
    "both on one dim": Configuration(
        {"dp": 2, "fsdp": 4}, (0, 0), "nothing", {f"layers.{i}.up.weight": (0, 0) for i in range(3)}
    ),
    "one layer apart": Configuration(
        {"dp": 2, "tp": 4}, (0, None), "nothing", PARAMETERS | {"layers.1.up.weight": (0, None)}
    ),
}


def placements_of(model: nn.Module) -> dict[str, Any]:
    return {name: p.placements for name, p in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_is_torchs(name: str) -> None:
    own, data = CONFIGURATIONS[name], batch(8)
    expected = build()(lambda model: model)
    step = xd.compile(build()(own.apply))
    for _ in range(3):
        torch.testing.assert_close(
            step(*own.place(*data)).full_tensor().cpu(), expected(*data), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_its_code_does_the_same(name: str) -> None:
    own = CONFIGURATIONS[name]
    code = own.as_code()
    assert "tune" not in code and "xla_dtensor as xd" in code
    there: dict[str, Any] = {}
    exec(compile(code, "<code>", "exec"), there)
    theirs, ours = there["parallelize"](Model(64, 3)), own.apply(Model(64, 3))
    assert placements_of(theirs) == placements_of(ours)
    assert placements_of(ours)["head.weight"] == (xd.Replicate(),) * len(own.mesh)
    for x in (batch(8)[0], torch.ones(3, 5), torch.ones(8), torch.tensor(1.0)):
        assert there["place"](x).placements == own.place(x)[0].placements
    again = [type(layer.forward).__name__ for m in (theirs, ours) for layer in m.layers]
    assert set(again) == {"partial" if own.recompute == "layers" else "method"}


class Attending(nn.Module):
    """A block whose attention is computed again; neither its norm nor attention's own parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.self_attn = nn.MultiheadAttention(width, 4, batch_first=True, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU())
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        x = x + self.self_attn(h, h, h, need_weights=False)[0]
        return x + self.out(self.feed_forward(x))


def attending() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(*(Attending(64) for _ in range(2))))


def test_attention_alone_is_computed_again() -> None:
    model = attending()
    assert attentions(model) == [layer.self_attn for layer in model[1]]
    assert attentions(Model(64, 3)) == []
    own = Configuration({"dp": 8}, (0,), "attention", {"1.0.out.weight": (0,)})
    there: dict[str, Any] = {}
    exec(compile(own.as_code(), "<code>", "exec"), there)
    for parallelize in (own.apply, there["parallelize"]):
        changed = [
            name
            for name, module in parallelize(copy.deepcopy(model)).named_modules()
            if type(module.forward).__name__ == "partial"
        ]
        assert changed == ["1.0.self_attn", "1.1.self_attn"]
    data = (torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(1)),)
    same = training(attending, torch.optim.SGD, 0.1)
    expected, step = same(lambda model: model), xd.compile(same(own.apply))
    for _ in range(2):
        loss = step(*own.place(*data)).full_tensor().cpu()
        torch.testing.assert_close(loss, expected(*data), rtol=1e-4, atol=1e-5)


def test_equal_layers_are_one_line() -> None:
    code = CONFIGURATIONS["tensor parallel"].as_code()
    assert '"layers.*.down.weight": [Shard(0), Shard(1)]' in code
    assert "head" not in code
    apart = CONFIGURATIONS["one layer apart"].as_code()
    assert '"layers.1.up.weight": [Shard(0), Replicate()]' in apart
    assert '"layers.0.up.weight": [Replicate(), Shard(0)]' in apart


def test_names_have_patterns() -> None:
    assert pattern_of("layers.12.up.3.weight") == "layers.*.up.*.weight"
    assert pattern_of("0.weight") == "*.weight" and pattern_of("conv2d.w1") == "conv2d.w1"


def test_layers_are_the_longest_list_of_one_class() -> None:
    model = Model(8, 3)
    assert repeated_layers(model) == [*model.layers]
    assert repeated_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    assert repeated_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_what_lacks_the_dim_stays_whole() -> None:
    own = Configuration({"dp": 2, "cp": 4}, (0, 1))
    tokens, weights, scale = own.place(torch.zeros(4, 8), torch.zeros(4), 2.0)
    inside, one = own.place({"b": [torch.zeros(4)]}, torch.zeros(1, 8))
    (rest,) = inside["b"]
    assert one.placements == (xd.Replicate(), xd.Shard(1))
    assert rest.placements == (xd.Shard(0), xd.Replicate())
    assert tokens.placements == (xd.Shard(0), xd.Shard(1)) and scale == 2.0
    assert weights.placements == (xd.Shard(0), xd.Replicate())


def test_parameters_that_are_frozen_stay_so() -> None:
    model = Model(8, 1)
    model.head.weight.requires_grad_(False)
    laid_out = Configuration({"dp": 8}, (0,)).apply(model)
    assert [n for n, p in laid_out.named_parameters() if not p.requires_grad] == ["head.weight"]


class Twice(nn.Module):
    """One parameter that its module has by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(64, 64) / 8)
        self.down = self.up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.up) @ self.down.T


def test_one_parameter_with_two_names() -> None:
    own = Configuration({"tp": 8}, (None,), "nothing", {"up": (0,), "down": (0,)})
    there: dict[str, Any] = {}
    exec(compile(own.as_code(), "<code>", "exec"), there)
    same = training(Twice, torch.optim.SGD, 0.1)
    expected = same(lambda model: model)
    steps = [xd.compile(same(parallelize)) for parallelize in (own.apply, there["parallelize"])]
    for _ in range(2):
        loss = expected(batch(8)[0])
        for step in steps:
            found = step(*own.place(batch(8)[0])).full_tensor().cpu()
            torch.testing.assert_close(found, loss, rtol=1e-4, atol=1e-5)


def test_json_has_all_of_it() -> None:
    own = CONFIGURATIONS["one layer apart"]
    found = Configuration(**json.loads(json.dumps(own.as_dict())))
    assert found == own and found.as_code() == own.as_code()


def test_names_alike_are_apart_in_the_code() -> None:
    """``*`` stands for one number: what is whole isn't laid out as another pattern says."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    dims = {"0.weight": (0,), "1.0.weight": (1,), "1.1.weight": (None,)}
    own = Configuration({"dp": 8}, (0,), "nothing", dims)
    there: dict[str, Any] = {}
    exec(compile(own.as_code(), "<code>", "exec"), there)
    theirs = placements_of(there["parallelize"](copy.deepcopy(model)))
    assert theirs == placements_of(own.apply(model))
