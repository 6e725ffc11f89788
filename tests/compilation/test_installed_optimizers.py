"""Optimizers of installed packages: compiled they are right, or refused by name.

Not one of them is a dependency; what isn't installed is skipped. `own_optimizers.py` of the table
of changes has their habits.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from tests.compilation.changes import EagerMesh, Mesh, World, assert_same, observe
from tests.compilation.changes._table import mlp

pytestmark = pytest.mark.slow

# Package, class, options, and whether a compiled step may refuse it.
OPTIMIZERS: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
    ("lion_pytorch", "Lion", {"lr": 0.01, "weight_decay": 0.1}, False),
    ("schedulefree", "SGDScheduleFree", {"lr": 0.1}, False),
    ("schedulefree", "AdamWScheduleFree", {"lr": 0.02, "warmup_steps": 3}, False),
    ("schedulefree", "AdamWScheduleFree", {"lr": 0.02, "foreach": False}, False),
    ("schedulefree", "RAdamScheduleFree", {"lr": 0.02}, False),
    ("prodigyopt", "Prodigy", {"lr": 1.0}, True),
    ("dadaptation", "DAdaptAdam", {"lr": 1.0}, True),
    ("dadaptation", "DAdaptLion", {"lr": 1.0}, True),
    *(
        ("pytorch_optimizer", name, {"lr": 0.01}, False)
        for name in ("ADOPT", "AdaBelief", "AdEMAMix", "Adan", "AggMo", "Lion", "StableAdamW")
    ),
    *(
        ("pytorch_optimizer", name, {"lr": 0.01}, True)
        for name in ("AdaFactor", "AdamP", "Prodigy", "ScheduleFreeAdamW", "Shampoo")
    ),
)


def program(world: World, package: str, name: str, options: dict[str, Any]) -> Iterator[Any]:
    model = mlp(world)
    optimizer = getattr(importlib.import_module(package), name)(model.parameters(), **options)
    training = getattr(optimizer, "train", None)
    if training is not None:
        training()
    world.watch(model=model)

    def function(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = world.compile(function)
    for i in range(7):
        if i in (3, 5):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        yield step(world.batch(i, (16, 6)))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("package", "name", "options", "refused"),
    OPTIMIZERS,
    ids=[f"{package}.{name}-{i}" for i, (package, name, _, _) in enumerate(OPTIMIZERS)],
)
@pytest.mark.filterwarnings("ignore")
def test_as_cpu_torch(
    mesh_2x4: DeviceMesh,
    package: str,
    name: str,
    options: dict[str, Any],
    refused: bool,
    compiled: bool,
) -> None:
    pytest.importorskip(package, reason=f"{package} isn't installed")

    def observations(world: World) -> Iterator[Any]:
        torch.manual_seed(0)
        return observe(program(world, package, name, options), world)

    expected = list(observations(World()))
    world = Mesh(mesh_2x4) if compiled else EagerMesh(mesh_2x4)
    count = 0
    try:
        for actual in observations(world):
            assert_same(actual, expected[count], f"after call {count}")
            count += 1
    except xd.DataDependentError as error:
        if not (compiled and refused):
            raise
        assert str(error)
        return
    assert count == len(expected)
