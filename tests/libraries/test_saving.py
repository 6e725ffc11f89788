"""Files of libraries: what is written from the xla device, whole or in parts, is byte for byte what
is written from the CPU, with shared weights once; and is read back."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors", reason="it isn't installed: make test-libraries")
pytest.importorskip("transformers", reason="it isn't installed: make test-libraries")

from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import xla_dtensor as xd
from tests.libraries.conftest import Chosen

pytestmark = pytest.mark.filterwarnings("ignore")


def llama(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


def by_size(model: nn.Module) -> nn.Module:
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    return xd.parallel.shard_by_size(model, mesh, least=64)


def by_fully_shard(model: Any) -> nn.Module:
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
    for layer in model.model.layers:
        xd.fully_shard(layer, mesh=mesh)
    return xd.fully_shard(model, mesh=mesh)


PLACES: dict[str, Callable[[Any], Any]] = {
    "whole": lambda model: model.to("xla"),
    "by size": by_size,
    "fully_shard": by_fully_shard,
}
places = pytest.mark.parametrize("place", PLACES)
ties = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def files(folder: Path) -> dict[str, str]:
    """The files below a folder, by a hash of each."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, xd.XLAShardedTensor) else value).detach().cpu()


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    values = dict(expected.state_dict())
    assert list(found.state_dict()) == list(values)
    for name, value in found.state_dict().items():
        assert torch.equal(full(value), full(values[name])), name


@places
@ties
@pytest.mark.parametrize("pieces", ["5GB", "8KB"])
def test_save_pretrained(place: str, tied: bool, pieces: str, tmp_path: Path) -> None:
    expected = llama(tied=tied)
    expected.save_pretrained(tmp_path / "cpu", max_shard_size=pieces)
    model = PLACES[place](llama(tied=tied))
    model.save_pretrained(tmp_path / "xla", max_shard_size=pieces)
    found = files(tmp_path / "xla")
    assert found == files(tmp_path / "cpu")
    assert sum(name.endswith(".safetensors") for name in found) > (1 if pieces == "8KB" else 0)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "xla", device_map="xla")
    assert again.device == torch.device("xla:0")
    assert_same(again, expected)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


@places
@ties
def test_safetensors(place: str, tied: bool, tmp_path: Path) -> None:
    """``save_model`` writes what is shared once, and ``load_model`` reads into what lies in
    parts."""
    expected = llama(tied=tied)
    save_model(expected, str(tmp_path / "cpu"))
    model = PLACES[place](llama(tied=tied))
    save_model(model, str(tmp_path / "xla"))
    assert (tmp_path / "xla").read_bytes() == (tmp_path / "cpu").read_bytes()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_model(model, str(tmp_path / "xla"))
    assert_same(model, expected)


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """Refused by `save_file`, as the CPU's are; others aren't, and read onto the device."""
    x = torch.arange(24.0, device="xla").reshape(4, 6)
    with pytest.raises(RuntimeError, match="share memory"):
        save_file({"a": x, "b": x[1:]}, tmp_path / "shared")
    tensors = {"a": x, "b": x.clone(), "c": torch.ones(3, dtype=torch.bfloat16, device="xla")}
    save_file(tensors, tmp_path / "own")
    save_file({k: v.cpu() for k, v in tensors.items()}, tmp_path / "cpu")
    assert (tmp_path / "own").read_bytes() == (tmp_path / "cpu").read_bytes()
    for name, value in load_file(tmp_path / "own", device="cpu").items():
        assert torch.equal(value, tensors[name].cpu())


@places
def test_after_a_step(place: str, tmp_path: Path) -> None:
    """Of what a compiled step has written, file and model are one."""
    model = PLACES[place](llama(tied=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = (torch.arange(16) % 64).reshape(2, 8).to("xla")

    @xd.compile
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(tokens)
    model.save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    before = full(model.lm_head.weight)
    step(tokens)
    model.save_pretrained(tmp_path)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(again, model)
    assert not torch.equal(again.lm_head.weight, before)


def test_hub_mixins(tmp_path: Path) -> None:
    from huggingface_hub import PyTorchModelHubMixin

    class Model(nn.Module, PyTorchModelHubMixin):
        def __init__(self, size: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(size, size)
            self.head = nn.Linear(size, size)
            self.head.weight = self.layer.weight

    Model(4).save_pretrained(tmp_path / "cpu")
    Model(4).to("xla").save_pretrained(tmp_path / "xla")
    mine, wanted = files(tmp_path / "xla"), files(tmp_path / "cpu")
    assert mine["model.safetensors"] == wanted["model.safetensors"]
    again: Any = Model.from_pretrained(tmp_path / "xla").to("xla")
    assert again.layer.weight is again.head.weight


def test_accelerates_save_model(chosen: Chosen, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    for device in ("cpu", "xla"):
        with chosen(device):
            accelerator = accelerate.Accelerator()
            accelerator.save_model(accelerator.prepare(llama(tied=True)), tmp_path / device)
    assert files(tmp_path / "xla") == files(tmp_path / "cpu")


# --- peft ----------------------------------------------------------------------------------------


def adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="it isn't installed: make test-libraries")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(3)
    made = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:  # zeros, which would hide what is wrong
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return made


@places
@ties
def test_peft_adapters(place: str, tied: bool, tmp_path: Path) -> None:
    """The adapter's file is the CPU's; loaded over a model on the device, it gives its results."""
    expected = adapter(llama(tied=tied))
    expected.save_pretrained(tmp_path / "cpu")
    model = adapter(llama(tied=tied))
    if place == "fully_shard":
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        xd.fully_shard(model, mesh=mesh)
    else:
        model = PLACES[place](model)
    model.save_pretrained(tmp_path / "xla")
    name = "adapter_model.safetensors"
    assert (tmp_path / "xla" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes()

    import peft

    again = peft.PeftModel.from_pretrained(llama(tied=tied).to("xla"), tmp_path / "xla")
    assert {p.device for p in again.parameters()} == {torch.device("xla:0")}
    tokens = (torch.arange(16) % 64).reshape(2, 8)
    wanted = expected(input_ids=tokens).logits
    torch.testing.assert_close(again(input_ids=tokens.to("xla")).logits.cpu(), wanted)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=tokens.to("xla")).logits.cpu(), wanted)


def test_peft_trains(tmp_path: Path) -> None:
    """Two steps of the adapter alone, eagerly and compiled, as on the CPU; saved, the same file
    up to rounding."""

    def train(model: Any, tokens: torch.Tensor, *, compiled: bool) -> list[float]:
        own = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(own, lr=1e-2)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = xd.compile(step) if compiled else step
        return [full(call(tokens)).item() for _ in range(2)]

    tokens = (torch.arange(16) % 64).reshape(2, 8)
    wanted = adapter(llama())
    losses = train(wanted, tokens, compiled=False)
    wanted.save_pretrained(tmp_path / "cpu")
    expected = load_file(tmp_path / "cpu" / "adapter_model.safetensors")
    for compiled in (False, True):
        model = adapter(llama()).to("xla")
        found = train(model, tokens.to("xla"), compiled=compiled)
        assert found == pytest.approx(losses, rel=1e-5)
        model.save_pretrained(tmp_path / "xla")
        saved = load_file(tmp_path / "xla" / "adapter_model.safetensors")
        assert list(saved) == list(expected)
        for name, value in saved.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


# --- torch.save, which others build on ------------------------------------------------------------


@places
def test_torch_save(place: str, tmp_path: Path) -> None:
    """A state dict with shared weights: read on the CPU they are shared, and are the values."""
    expected = llama(tied=True)
    model = PLACES[place](copy.deepcopy(expected))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt", map_location="cpu")
    for name, value in expected.state_dict().items():
        assert torch.equal(read[name], value), name
    model.load_state_dict(read)
    assert_same(model, expected)
