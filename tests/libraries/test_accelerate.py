"""accelerate's loop: device, precision, accumulation, clipping, ``save_state`` and ``load_state``,
with models that are whole and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="it isn't installed: make test-libraries")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig

import xla_dtensor as xd
from tests.libraries.conftest import Chosen
from xla_dtensor.ecosystem import random_states
from xla_dtensor.errors import UnsupportedOpError

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, SAVED = 6, 3  # save after so many


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 4))


def sharded(way: str) -> nn.Module:
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    if way == "by size":
        return xd.parallel.shard_by_size(model(), mesh, least=8)
    made = model()
    xd.fully_shard(made, mesh=mesh["dp"])
    return made


def train(
    made: nn.Module,
    folder: Path | None = None,
    *,
    resume: bool = False,
    precision: str = "no",
    **plugins: Any,
) -> tuple[list[float], Accelerator]:
    """The losses of all steps, or of those after the one that was saved."""
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision, **plugins)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(4 * STEPS, 8, generator=generator), torch.arange(4 * STEPS) % 4
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), 4)
    made, optimizer, loader, scheduler = accelerator.prepare(made, optimizer, loader, scheduler)
    if resume:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, SAVED + 1)
    losses = []
    for step, (x, y) in enumerate(loader):
        assert x.device == accelerator.device
        with accelerator.accumulate(made):
            loss = nn.functional.cross_entropy(made(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).item())
        if folder is not None and not resume and step == SAVED:
            accelerator.save_state(str(folder))
    return losses, accelerator


@pytest.fixture
def expected(chosen: Chosen) -> list[float]:
    """CPU torch's losses, by accelerate."""
    with chosen("cpu"):
        losses, accelerator = train(model())
        assert accelerator.device.type == "cpu"
    return losses


@pytest.mark.parametrize("way", ["whole", "by size", "fully_shard"])
def test_a_loop_and_its_checkpoint(
    chosen: Chosen, expected: list[float], way: str, tmp_path: Path
) -> None:
    """Resumed, it goes on as if nothing had been."""
    with chosen("xla"):
        made = model() if way == "whole" else sharded(way)
        losses, accelerator = train(made, tmp_path)
        assert accelerator.device == torch.device("xla:0") == next(made.parameters()).device
    assert losses == pytest.approx(expected, rel=1e-5)
    with chosen("xla"):
        again = model() if way == "whole" else sharded(way)
        torch.xla.manual_seed(7)
        losses, _ = train(again, tmp_path, resume=True)
    assert losses == pytest.approx(expected[SAVED + 1 :], rel=1e-5)
    for a, b in zip(made.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(full(a), full(b))


def full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, xd.XLAShardedTensor) else value).detach().cpu()


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=32, **options
    )


@pytest.mark.parametrize("sizes", [{}, {"dp_replicate_size": 2, "dp_shard_size": 4}])
def test_fsdp2(chosen: Chosen, expected: list[float], sizes: Any, tmp_path: Path) -> None:
    """accelerate shards the model that it is given, an optimizer that was made before has the new
    parameters, and batches lie in parts. A checkpoint goes on."""
    options = {"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}
    with chosen("xla"):
        made = model()
        losses, accelerator = train(made, tmp_path, fsdp_plugin=plugin(), **options)
        (loader,) = accelerator._dataloaders
        first = next(iter(loader))[0]
        assert all(placement.is_shard(0) for placement in first.placements)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(each.placements[-1].is_shard() for each in made.parameters())
    (optimizer,) = accelerator._optimizers
    state = optimizer.state[made[0].weight]
    assert state["exp_avg"].placements == made[0].weight.placements
    with chosen("xla"):
        again = model()
        losses, _ = train(again, tmp_path, resume=True, fsdp_plugin=plugin(), **options)
    assert losses == pytest.approx(expected[SAVED + 1 :], rel=1e-5)
    for a, b in zip(made.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(full(a), full(b))


def test_fsdp2_options(chosen: Chosen, expected: list[float]) -> None:
    with chosen("xla"):
        losses, _ = train(model(), fsdp_plugin=plugin(activation_checkpointing=True))
    assert losses == pytest.approx(expected, rel=1e-5)
    with chosen("xla"):
        made = model()
        losses, _ = train(made, precision="bf16", fsdp_plugin=plugin())
    assert losses == pytest.approx(expected, rel=1e-2) and losses != expected
    assert made[0].weight.dtype == torch.float32


def test_fsdp2_takes_an_optimizer_that_has_stepped(chosen: Chosen) -> None:
    def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        made(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return made, optimizer

    def again(made: Any, optimizer: Any, device: str) -> None:
        made(torch.ones(4, 8, device=device)).square().sum().backward()
        optimizer.step()

    reference, its = stepped()
    again(reference, its, "cpu")
    with chosen("xla"):
        made, optimizer = Accelerator(fsdp_plugin=plugin()).prepare(*stepped())
        again(made, optimizer, "xla")
    for a, b in zip(made.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(a), b.detach())


def test_fsdp2_wants_the_optimizer(chosen: Chosen) -> None:
    with chosen("xla"), pytest.raises(ValueError, match="must be passed together"):
        Accelerator(fsdp_plugin=plugin()).prepare(model())


def test_a_tensor_parallel_model(chosen: Chosen, tmp_path: Path) -> None:
    """transformers' plan, over the mesh of accelerate's config."""
    transformers = pytest.importorskip("transformers", reason="make test-libraries")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=32, **sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokens = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(1))

    def losses(plan: dict[str, Any], resume: bool = False, **options: Any) -> list[float]:
        accelerator = Accelerator(**options)
        made = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", **plan)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        made, optimizer = accelerator.prepare(made, optimizer)
        if plan:
            weight = made.model.layers[0].self_attn.q_proj.weight
            assert weight.device_mesh == accelerator.torch_device_mesh["tp"]
            assert weight.placements[0].is_shard()
        if resume:
            accelerator.load_state(str(tmp_path / "state"))
        found = []
        for step in range(2 if resume else 4):
            ids = tokens.to(accelerator.device)
            loss = made(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(accelerator.gather(loss.detach()).item())
            if plan and not resume and step == 1:
                accelerator.save_state(str(tmp_path / "state"))
        return found

    with chosen("cpu"):
        expected = losses({})
    for resume in (False, True):
        with chosen("xla"):
            options = {"parallelism_config": ParallelismConfig(tp_size=4)}
            found = losses({"tp_plan": "auto"}, resume, **options)
        assert found == pytest.approx(expected[2 * resume :], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision(chosen: Chosen, expected: list[float], precision: str, tmp_path: Path) -> None:
    """fp16 with a scaler of the device, which is saved, too."""
    with chosen("xla"):
        losses, accelerator = train(model(), tmp_path, precision=precision)
    assert losses == pytest.approx(expected, rel=2e-3) and losses != expected
    scaler = accelerator.scaler
    if precision == "fp16":
        assert scaler.is_enabled() and scaler._device == "xla"
        assert (tmp_path / "scaler.pt").exists()
    else:
        assert scaler is None


def test_random_numbers_go_on(chosen: Chosen, tmp_path: Path) -> None:
    with chosen("xla"):
        accelerator = Accelerator()
        accelerator.prepare(model())
        accelerator.save_state(str(tmp_path))
        wanted = torch.rand(4, device="xla").tolist()
        torch.rand(4, device="xla")
        accelerator.load_state(str(tmp_path))
        assert torch.rand(4, device="xla").tolist() == wanted


def test_a_checkpoint_of_another_device(
    chosen: Chosen, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its numbers can't go on, and it is said so."""
    with chosen("cpu"):
        accelerator = Accelerator()
        first = accelerator.prepare(model())
        accelerator.save_state(str(tmp_path))
    assert not (tmp_path / random_states.FILE).exists()
    with chosen("xla"):
        accelerator = Accelerator()
        made = accelerator.prepare(model())
        accelerator.load_state(str(tmp_path))
    assert "random numbers of the device don't go on" in caplog.text
    pairs = zip(made.parameters(), first.parameters(), strict=True)
    assert all(torch.equal(full(a), b) for a, b in pairs)


def test_its_own_variable(chosen: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    with chosen("cpu"):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "xla")
        assert Accelerator().device == torch.device("xla:0")
    with chosen("xla"):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        assert Accelerator().device == torch.device("cpu")


def test_simulated_devices_are_not_taken(chosen: Chosen) -> None:
    with chosen("cpu"), xd.config.override(device="auto"):
        assert Accelerator().device == torch.device("cpu")


def test_the_cpu_when_asked_for(chosen: Chosen) -> None:
    with chosen("xla"):
        assert Accelerator(cpu=True).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("fsdp_plugin", lambda: FullyShardedDataParallelPlugin(fsdp_version=1)),
        ("parallelism_config", lambda: ParallelismConfig(dp_replicate_size=2)),
        ("parallelism_config", lambda: ParallelismConfig(dp_shard_size=2, tp_size=4)),
        ("parallelism_config", lambda: ParallelismConfig(cp_size=2)),
    ],
)
def test_plugins_are_refused(chosen: Chosen, name: str, make: Any) -> None:
    """In one process they would do nothing. The next one is as if it hadn't been."""
    with chosen("xla"):
        with pytest.raises(UnsupportedOpError, match=rf"accelerate's {name} on the xla device"):
            Accelerator(**{name: make()})
        assert Accelerator().device == torch.device("xla:0")


def test_several_processes_are_refused(chosen: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time, also where accelerate's variable names the device."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with chosen("xla"):
        for _ in range(2):
            with pytest.raises(UnsupportedOpError, match="accelerate on the xla device"):
                Accelerator()
    with chosen("cpu"):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "xla")
        with pytest.raises(UnsupportedOpError, match="accelerate on the xla device"):
            Accelerator()
