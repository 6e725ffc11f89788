"""transformers' Trainer: device, precision, accumulation, evaluation, checkpoints; and a trainer of
trl's, a model of sentence-transformers', which find the device by the same rule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="it isn't installed: make test-libraries")
pytest.importorskip("transformers", reason="it isn't installed: make test-libraries")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import xla_dtensor as xd
from tests.libraries.conftest import Chosen
from xla_dtensor.ecosystem import random_states
from xla_dtensor.errors import UnsupportedOpError

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, SAVED = 4, 2


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(64, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def model(**options: Any) -> Any:
    set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options))


def trainer(folder: Path, made: nn.Module, **options: Any) -> Trainer:
    arguments: Any = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=SAVED,
        eval_steps=SAVED,
        eval_strategy="steps",
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return Trainer(made, arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def history(of: Trainer) -> dict[str, list[float]]:
    """Losses, gradients' norms and evaluations, as logged."""
    names = ("loss", "grad_norm", "eval_loss")
    return {n: [row[n] for row in of.state.log_history if n in row] for n in names}


def assert_close(found: dict[str, list[float]], expected: dict[str, list[float]], r: float) -> None:
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=r), name


@pytest.fixture
def expected(chosen: Chosen, tmp_path: Path) -> dict[str, list[float]]:
    """CPU torch's, by the Trainer."""
    with chosen("cpu"):
        wanted = trainer(tmp_path / "expected", model(), save_strategy="no")
        wanted.train()
        assert wanted.args.device.type == "cpu"
    return history(wanted)


@pytest.mark.parametrize("way", ["whole", "by size"])
def test_it_trains_and_goes_on(
    chosen: Chosen, expected: dict[str, list[float]], way: str, tmp_path: Path
) -> None:
    """Accumulation, evaluation, checkpoint; resumed, the losses and weights are as without."""

    def made() -> nn.Module:
        if way == "whole":
            return model()
        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        return xd.parallel.shard_by_size(model(), mesh, least=64)

    with chosen("xla"):
        first = trainer(tmp_path, made())
        first.train()
        assert first.args.device == torch.device("xla:0") == first.model.device
        assert first.args.n_gpu <= 1
    assert_close(history(first), expected, 1e-5)
    with chosen("xla"):
        again = trainer(tmp_path, made())
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    assert_close(history(again), expected, 1e-5)
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(full(a), full(b))


def full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, xd.XLAShardedTensor) else value).detach().cpu()


def test_dropout_goes_on(chosen: Chosen, tmp_path: Path) -> None:
    """The device's generator is in the checkpoint."""
    with chosen("xla"):
        first = trainer(tmp_path, model(attention_dropout=0.5))
        first.train()
    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    assert (checkpoint / random_states.FILE).exists()
    with chosen("xla"):
        again = trainer(tmp_path, model(attention_dropout=0.5))
        again.train(resume_from_checkpoint=str(checkpoint))
    assert history(again) == history(first)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision(
    chosen: Chosen, expected: dict[str, list[float]], precision: str, tmp_path: Path
) -> None:
    with chosen("xla"):
        made = trainer(tmp_path, model(), save_strategy="no", **{precision: True})
        made.train()
    found = history(made)
    assert_close(found, expected, 1e-2)
    assert found["loss"] != expected["loss"]
    assert all(map(math.isfinite, found["grad_norm"]))
    assert next(made.model.parameters()).dtype == torch.float32


def test_what_it_is_told(chosen: Chosen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The CPU where it is asked for; bfloat16 refused, as by transformers, where nothing is."""
    with chosen("xla"):
        assert TrainingArguments(str(tmp_path), use_cpu=True).device == torch.device("cpu")
    with chosen("cpu"), xd.config.override(device="auto"):
        assert TrainingArguments(str(tmp_path)).device == torch.device("cpu")
        with pytest.raises(ValueError, match="doesn't support bf16/gpu"):
            TrainingArguments(str(tmp_path), bf16=True)
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "xla")
        assert TrainingArguments(str(tmp_path), bf16=True).device == torch.device("xla:0")


def test_fsdp_is_refused(chosen: Chosen, tmp_path: Path) -> None:
    with chosen("xla"), pytest.raises(UnsupportedOpError, match=r"\(fsdp=...\) on the xla device"):
        trainer(tmp_path, model(), fsdp="full_shard")


def sft(folder: Path) -> Any:
    """A trainer of trl's, with a tokenizer of 60 words."""
    trl = pytest.importorskip("trl", reason="it isn't installed: make test-libraries")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i + 2 for i in range(60)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>"
    )
    rows = [{"text": " ".join(f"w{(i + j) % 60}" for j in range(6))} for i in range(8)]
    arguments = trl.SFTConfig(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-2,
        bf16=False,
        gradient_checkpointing=False,
    )
    data = Dataset.from_list(rows)
    return trl.SFTTrainer(model(), arguments, train_dataset=data, processing_class=tokenizer)


def test_trl(chosen: Chosen, tmp_path: Path) -> None:
    def losses(device: str) -> list[float]:
        with chosen(device):
            made = sft(tmp_path / device)
            made.train()
            assert made.model.device.type == device
        return history(made)["loss"]

    assert losses("xla") == pytest.approx(losses("cpu"), rel=1e-5)


def encoder() -> Any:
    """A model of sentence-transformers' that needs no files."""
    st = pytest.importorskip("sentence_transformers", reason="it isn't installed")
    set_seed(0)
    words = st.sentence_transformer.modules.BoW(vocab=["a", "b", "c"])
    dense = st.sentence_transformer.modules.Dense(3, 4)
    return st.SentenceTransformer(modules=[words, dense])


def test_sentence_transformers(chosen: Chosen) -> None:
    with chosen("xla"):
        found = encoder()
    assert found.device == torch.device("xla:0")
    with chosen("cpu"):
        wanted = encoder().encode(["a b", "c"])
    assert found.encode(["a b", "c"]) == pytest.approx(wanted, rel=1e-6)
