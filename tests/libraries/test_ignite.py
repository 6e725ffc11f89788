"""PyTorch-Ignite trains and evaluates on the device, and goes on from its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd

pytest.importorskip("ignite", reason="it isn't installed: make test-libraries")

from ignite import distributed
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, ModelCheckpoint
from ignite.metrics import Accuracy, Loss

cross_entropy = nn.functional.cross_entropy


def made(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.arange(8) % 3) for _ in range(3)]


def trained(device: str, folder: Path) -> list[float]:
    """The losses of two epochs, the second one by what the first one has saved; what metrics say
    then."""
    losses: list[float] = []

    def new() -> dict[str, Any]:
        model, optimizer = made(device)
        trainer = create_supervised_trainer(model, optimizer, cross_entropy, device=device)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
        )
        return {"model": model, "optimizer": optimizer, "trainer": trainer}

    first, second = new(), new()
    saver = ModelCheckpoint(str(folder), device, n_saved=1)
    first["trainer"].add_event_handler(Events.EPOCH_COMPLETED, saver, first)
    first["trainer"].run(batches(), max_epochs=1)
    Checkpoint.load_objects(second, torch.load(str(saver.last_checkpoint), weights_only=False))
    second["trainer"].run(batches(), max_epochs=2)
    model = second["model"]
    metrics = {"accuracy": Accuracy(), "loss": Loss(cross_entropy)}
    said = create_supervised_evaluator(model, metrics, device=device).run(batches()).metrics
    assert {p.device.type for p in model.parameters()} == {device} and len(losses) == 6
    return [*losses, said["accuracy"], said["loss"]]


def test_it_trains_and_goes_on_as_on_the_cpu(tmp_path: Path) -> None:
    expected = trained("cpu", tmp_path / "cpu")
    assert trained("xla", tmp_path / "xla") == pytest.approx(expected, rel=1e-5)


def test_precisions_that_are_for_cuda() -> None:
    model, optimizer = made("xla")
    for device in ("xla", torch.device("xla", 0)):
        with pytest.raises(xd.errors.UnsupportedOpError, match="model_fn"):
            create_supervised_trainer(model, optimizer, cross_entropy, device, amp_mode="amp")
    seen = []

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("xla", torch.bfloat16):
            out = model(x)
        seen.append(out.dtype)
        return out.float()

    trainer = create_supervised_trainer(
        model, optimizer, cross_entropy, device="xla", model_fn=step
    )
    trainer.run(batches()[:1])
    assert seen == [torch.bfloat16]


def test_which_device_it_finds() -> None:
    assert distributed.device().type == "cpu"
    with xd.config.override(device="xla"):
        assert distributed.device() == torch.device("xla", 0)
        model = distributed.auto_model(made("cpu")[0])
    assert {p.device.type for p in model.parameters()} == {"xla"}
