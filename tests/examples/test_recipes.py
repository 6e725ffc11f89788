"""The recipes train as the same model does in plain CPU torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))
LIMIT = 120

# What differs from a plain loop: gradients that are clipped to a norm.
CLIPPED = {"fsdp": 1.0, "pp": 1.0}
MODELS = {"hsdp": "Classifier", "tp_sp": "Decoder"}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_cpu(recipe: ModuleType, steps: int) -> tuple[list[float], nn.Module]:
    name = recipe.__name__.removeprefix("recipe_")
    torch.manual_seed(0)
    model = getattr(recipe, MODELS.get(name, "Model"))()
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    losses = []
    for i in range(steps):
        loss = recipe.loss_of(model, *recipe.batch(i))
        loss.backward()
        if name in CLIPPED:
            nn.utils.clip_grad_norm_(learning, CLIPPED[name])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def test_there_is_one_for_each_way() -> None:
    assert set(RECIPES) == {"cp", "fsdp", "hsdp", "lora", "moe", "pp", "tp_sp"}
    index = (FOLDER.parent / "README.md").read_text()
    for name in RECIPES:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < LIMIT
        assert f"recipes/{name}.py" in index


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", RECIPES)
def test_losses(name: str) -> None:
    recipe = load(name)
    options: dict[str, Any] = {"param_dtype": torch.float32} if name == "hsdp" else {}
    steps = 4
    found = recipe.train(steps, **options)
    wanted, _ = on_cpu(recipe, steps)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    assert wanted[-1] < wanted[0]


@pytest.mark.slow
def test_hsdp_in_bfloat16_learns() -> None:
    recipe = load("hsdp")
    found, wanted = recipe.train(3), on_cpu(recipe, 3)[0]
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.05)


def test_the_experts_buffers_overflow() -> None:
    """Otherwise the recipe's test says nothing about tokens that are dropped."""
    model = on_cpu(load("moe"), 4)[1]
    assert all(layer.dropped > 0 for layer in list(model)[1:3])
