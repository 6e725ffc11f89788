"""Lightning's Trainer and Fabric on the xla device: accelerator, strategy, precision, fit,
validation, checkpoints that others can read, and what is refused."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="it isn't installed: make test-libraries")

import lightning as L
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.libraries.conftest import Chosen
from xla_dtensor.ecosystem.lightning import fully_shard_strategy
from xla_dtensor.errors import UnsupportedOpError

pytestmark = pytest.mark.filterwarnings("ignore")

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


def module(package: str = "lightning.pytorch", **options: Any) -> Any:
    """A LightningModule that keeps its losses."""
    base: Any = importlib.import_module(package).LightningModule

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
            self.last = nn.Linear(16, 4)
            self.dropout = nn.Dropout(options.get("dropout", 0.0))
            self.losses: list[float] = []
            self.seen: list[Any] = []

        def loss(self, batch: Any) -> torch.Tensor:
            x, y = batch
            x = self.first(x)
            for block in self.blocks:
                x = torch.relu(block(x))
            return nn.functional.cross_entropy(self.last(self.dropout(x)), y)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("loss", loss)
            self.losses.append(full(loss.detach()).item())
            places = [getattr(p, "placements", p.device) for p in self.parameters()]
            self.seen.append((batch[0], places))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Module()


def full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, xd.XLAShardedTensor) else value).cpu()


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(32, 8, generator=generator), torch.arange(32) % 4
    )
    return torch.utils.data.DataLoader(data, batch_size=8)


def fit(
    folder: Path,
    made: Any,
    package: str = "lightning.pytorch",
    *,
    resume: Path | None = None,
    **options: Any,
) -> tuple[list[float], float, Any]:
    """The losses, the validation's loss at the end, and the trainer."""
    pl: Any = importlib.import_module(package)
    trainer = pl.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **options,
    )
    trainer.fit(made, loader(), loader(), ckpt_path=resume)
    (validated,) = trainer.validate(made, loader(), verbose=False)
    return made.losses, validated["validation"], trainer


@pytest.fixture
def expected(tmp_path: Path) -> tuple[list[float], float]:
    """CPU torch's, by Lightning."""
    losses, validated, _ = fit(tmp_path / "expected", module(), accelerator="cpu")
    return losses, validated


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("strategy", ["auto", "xla_fully_shard"])
def test_it_fits_and_goes_on(
    expected: tuple[list[float], float], strategy: str, package: str, tmp_path: Path
) -> None:
    """Accumulation, clipping, schedulers, validation; from a checkpoint the losses are as
    without."""
    pytest.importorskip(package.partition(".")[0])
    losses, validated = expected
    options = {"accelerator": "xla", "strategy": strategy}
    made = module(package)
    found, after, trainer = fit(tmp_path, made, package, **options)
    assert trainer.strategy.root_device == torch.device("xla:0") and trainer.world_size == 1
    assert found == pytest.approx(losses, rel=1e-5) and after == pytest.approx(validated, rel=1e-4)
    batch, places = made.seen[0]
    if strategy == "auto":
        assert set(places) == {torch.device("xla:0")} == {batch.device}
    else:
        assert batch.placements[0].is_shard(0) and batch.device_mesh.shape == (8,)
        assert all(placements[0].is_shard(0) for placements in places)
    again = module(package)
    found, after, _ = fit(tmp_path, again, package, resume=tmp_path / "epoch=0.ckpt", **options)
    assert found == pytest.approx(losses[4:], rel=1e-5)
    assert after == pytest.approx(validated, rel=1e-4)


@pytest.mark.parametrize("strategy", ["auto", "xla_fully_shard"])
def test_a_checkpoint_is_anybodys(strategy: str, tmp_path: Path) -> None:
    """Whole CPU tensors, which a process without xla_dtensor reads; and back, from the CPU's."""
    made = module()
    fit(tmp_path, made, accelerator="xla", strategy=strategy)
    path = tmp_path / "epoch=1.ckpt"
    code = (
        "import sys, torch\n"
        f"file = torch.load({str(path)!r}, weights_only=True)\n"
        "tensors = [*file['state_dict'].values()]\n"
        "states = file['optimizer_states'][0]['state'].values()\n"
        "tensors += [tensor for state in states for tensor in state.values()]\n"
        "print({(type(t).__name__, t.device.type) for t in tensors}, 'xla_dtensor' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "{('Tensor', 'cpu')} False"
    file = torch.load(path, weights_only=True)
    for name, value in made.state_dict().items():
        assert torch.equal(full(value), file["state_dict"][name]), name
    fit(tmp_path / "cpu", module(), accelerator="cpu")
    first = tmp_path / "cpu" / "epoch=0.ckpt"
    wanted = fit(tmp_path / "b", module(), resume=first, accelerator="cpu")[0]
    found = fit(tmp_path / "a", module(), resume=first, accelerator="xla", strategy=strategy)[0]
    assert found == pytest.approx(wanted, rel=1e-5) and len(found) == 4


@pytest.mark.parametrize("strategy", ["auto", "xla_fully_shard"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_precision(
    expected: tuple[list[float], float], strategy: str, precision: str, tmp_path: Path
) -> None:
    options: Any = {"accelerator": "xla", "strategy": strategy, "precision": precision}
    found, _, trainer = fit(tmp_path, module(), **options)
    assert found == pytest.approx(expected[0], rel=2e-2) and found != expected[0]
    if precision == "16-mixed":
        assert trainer.precision_plugin.scaler.is_enabled()
        again = fit(tmp_path, module(), resume=tmp_path / "epoch=0.ckpt", **options)[0]
        assert again == pytest.approx(found[4:], rel=1e-4)


@pytest.mark.parametrize("shards", [True, False], ids=["configure_model", "fully_shard"])
def test_a_mesh_of_ones_own(
    expected: tuple[list[float], float], shards: bool, tmp_path: Path
) -> None:
    """Whose other dim ``configure_model`` uses, as for Lightning's ``ModelParallelStrategy``."""
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    made = module()

    def configure_model() -> None:
        assert made.device_mesh is mesh
        if made.last.weight.device.type != "xla":  # Lightning calls it before each fit and validate
            xd.parallel.shard_by_size(made, mesh, least=64)

    if shards:
        made.configure_model = configure_model
    strategy = fully_shard_strategy(mesh)
    found, _, _ = fit(tmp_path, made, accelerator="xla", strategy=strategy)
    assert found == pytest.approx(expected[0], rel=1e-5)
    batch, places = made.seen[0]
    assert batch.device_mesh == mesh and batch.placements == (Shard(0), Replicate())
    assert all(len(p) == (2 if shards else 1) for p in places if isinstance(p, tuple))
    assert sum(isinstance(p, tuple) for p in places) > 2


def test_some_devices(expected: tuple[list[float], float], tmp_path: Path) -> None:
    made = module()
    found, _, _ = fit(tmp_path, made, accelerator="xla", devices=4, strategy="xla_fully_shard")
    assert found == pytest.approx(expected[0], rel=1e-5)
    assert made.seen[0][0].device_mesh.shape == (4,)


def test_auto(chosen: Chosen, tmp_path: Path) -> None:
    """The rule of `device_choice`: simulated devices where they are asked for."""
    pl = importlib.import_module("lightning.pytorch")
    with chosen("xla"):
        assert pl.Trainer(logger=False).strategy.root_device == torch.device("xla:0")
        assert L.Fabric().device == torch.device("xla:0")
    with chosen("cpu"), xd.config.override(device="auto"):
        assert pl.Trainer(logger=False).strategy.root_device == torch.device("cpu")
        assert L.Fabric().device == torch.device("cpu")
        assert L.Fabric(accelerator="xla").device == torch.device("xla:0")


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"devices": 2}, UnsupportedOpError, "strategy='xla_fully_shard'"),
    ({"num_nodes": 2}, UnsupportedOpError, "num_nodes=2"),
    ({"strategy": "ddp"}, UnsupportedOpError, "strategy 'ddp' with accelerator 'xla'"),
    ({"strategy": "fsdp"}, UnsupportedOpError, "strategy 'fsdp' with accelerator 'xla'"),
    ({"devices": [1]}, ValueError, "the first ones"),
    (
        {"accelerator": "cpu", "strategy": "xla_fully_shard"},
        UnsupportedOpError,
        "is for accelerator='xla', not for CPUAccelerator",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    pl = importlib.import_module("lightning.pytorch")
    with pytest.raises(error, match=message):
        pl.Trainer(**{"accelerator": "xla", "logger": False, **options})


def test_refused_when_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="with a strategy on cpu"):
        fit(tmp_path, module(), accelerator="xla", strategy=single_cpu())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedOpError, match="Lightning on the xla device in one of several"):
        fit(tmp_path, module(), accelerator="xla")


def single_cpu() -> Any:
    strategies = importlib.import_module("lightning.pytorch.strategies")
    return strategies.SingleDeviceStrategy(device="cpu")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_fabric(precision: Any, tmp_path: Path) -> None:
    """Its loop, and its checkpoint."""

    def losses(accelerator: str, precision: Any) -> list[float]:
        fabric = L.Fabric(accelerator=accelerator, precision=precision)
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        model, optimizer = fabric.setup(made, optimizer)
        found = []
        for x, y in fabric.setup_dataloaders(loader()):
            assert x.device == fabric.device
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        path = tmp_path / f"{accelerator}.ckpt"
        fabric.save(path, {"model": model, "optimizer": optimizer})
        before = [p.detach().cpu().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        fabric.load(path, {"model": model, "optimizer": optimizer})
        assert all(map(torch.equal, before, (p.detach().cpu() for p in model.parameters())))
        return found

    r = 1e-5 if precision == "32-true" else 2e-2
    assert losses("xla", precision) == pytest.approx(losses("cpu", "32-true"), rel=r)


def test_validation_before_training_takes_no_numbers(tmp_path: Path) -> None:
    """As under torch: the sanity check leaves the generator as it was."""

    def numbers(checks: int) -> float:
        torch.manual_seed(0)
        made = module(dropout=0.5)
        original = made.validation_step

        def validation_step(batch: Any, batch_idx: int) -> None:
            torch.rand(3, device="xla").sum().item()
            original(batch, batch_idx)

        made.validation_step = validation_step
        pl = importlib.import_module("lightning.pytorch")
        torch.manual_seed(5)
        pl.Trainer(
            max_steps=1,
            num_sanity_val_steps=checks,
            limit_val_batches=1,
            accelerator="xla",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(made, loader(), loader())
        return made.losses[0]

    assert numbers(0) == numbers(1)
