"""torchtitan's trainer on an xla mesh: whose data it reads, and how it goes on."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

import xla_dtensor as xd
from tests.torchtitan import assets, metrics
from tests.torchtitan.plan import Plan
from tests.torchtitan.releases import release

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torchtitan and what it imports

SEQUENCE, ROWS = 32, 2
ON_8_DEVICES = [
    "--parallelism.data_parallel_shard_degree=4",
    "--parallelism.tensor_parallel_degree=2",
]
HYBRID = ["--parallelism.data_parallel_replicate_degree=2", *ON_8_DEVICES[1:]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of the tokenizer and the data set."""
    return assets.write(tmp_path_factory.mktemp("assets"))


@pytest.fixture(autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> Iterator[None]:
    for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Both are the process's, and the trainer sets them.
    multithreading = torch.autograd.is_multithreading_enabled()
    yield
    torch.autograd.set_multithreading_enabled(multithreading)
    if dist.is_initialized():
        dist.destroy_process_group()


def arguments(files: tuple[Path, Path], out: Path, *more: str) -> list[str]:
    """torchtitan's arguments for the debug model on small data."""
    return [
        "--module=llama3",
        "--config=llama3_debugmodel",
        f"--hf_assets_path={files[0]}",
        f"--dataloader.dataset_path={files[1]}",
        "--validator.dataloader.dataset=c4_test",
        f"--validator.dataloader.dataset_path={files[1]}",
        f"--dump_folder={out}",
        f"--training.seq_len={SEQUENCE}",
        f"--training.local_batch_size={ROWS}",
        "--training.mixed_precision_param=float32",
        "--debug.seed=1",
        "--debug.no-enable_structured_logging",
        *more,
    ]


def trainer(files: tuple[Path, Path], out: Path, *more: str) -> Any:
    """A trainer of a model of one layer, with what it reports as ``losses``."""
    config: Any = ConfigManager().parse_args(arguments(files, out, *more))
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    made = config.build()
    made.losses = []
    log = made.metrics_processor.log

    def note(step: int, loss: float, *others: Any, **more: Any) -> None:
        made.losses.append(loss)
        log(step, loss, *others, **more)

    made.metrics_processor.log = note
    return made


def train(made: Any) -> list[float]:
    """Train to the end.

    Returns:
        the loss of each step.
    """
    with mock.patch("time.sleep"):
        made.train()
    made.close()
    dist.destroy_process_group()
    return made.losses


def weights(made: Any) -> dict[str, torch.Tensor]:
    """The parameters, on the host."""
    return {n: p.full_tensor().detach().cpu() for n, p in made.model_parts[0].named_parameters()}


def loss_of_ranks(made: Any, files: tuple[Path, Path], state: Any, ranks: list[int]) -> float:
    """The first step's loss by CPU torch, of the batches that torchtitan deals out to ``ranks``."""
    spec = release.debug_model("llama3", 1)
    model = release.build(spec, Plan(attention="flex", sequence=SEQUENCE))
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=torch.device("cpu"))
    model.load_state_dict(state)
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(files[0]))
    total, valid = 0.0, 0
    for rank in ranks:
        loader = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(files[1]))
        inputs, labels = next(
            iter(
                loader.build(
                    dp_world_size=4,
                    dp_rank=rank,
                    tokenizer=tokenizer,
                    seq_len=SEQUENCE,
                    local_batch_size=ROWS,
                )
            )
        )
        with release.dense_attention(), torch.no_grad():
            masks = model.get_attention_masks(positions=inputs["positions"])
            logits = model(inputs["input"], inputs["positions"], masks)
        cross_entropy = torch.nn.functional.cross_entropy
        total += cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        valid += int((labels != -100).sum())
    return total / valid


def check_recompilations(step: xd.CompiledStep) -> None:
    """One program; or two, since torchtitan's chunked loss leaves ``reshard_after_forward`` of the
    last modules as True, which was False: the second step may gather parameters again."""
    assert len(step.recompilations) <= 1
    assert all("reshard_after_forward=True" in why for why in step.recompilations)


def state_of(made: Any) -> dict[str, torch.Tensor]:
    """What a model without a mesh loads."""
    return {
        n: getattr(v, "full_tensor", lambda v=v: v)().cpu()
        for n, v in made.model_parts[0].state_dict().items()
    }


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        (ON_8_DEVICES, []),
        pytest.param(HYBRID, ["--training.disable_cuda_graphs"], marks=pytest.mark.slow),
    ],
    ids=["compiled", "hybrid, eager"],
)
def test_every_ranks_data_is_read(mesh: list[str], more: list[str], files: Any, tmp_path: Path):
    """The first loss is that of all four ranks' batches, which isn't the first rank's."""
    backend = "--parallelism.spmd_backend=partial_dtensor"
    made = trainer(files, tmp_path, *mesh, backend, "--training.steps=3", *more)
    state = state_of(made)
    losses = train(made)
    expected = loss_of_ranks(made, files, state, [0, 1, 2, 3])
    assert losses[0] == pytest.approx(expected, abs=5e-6)
    assert abs(losses[0] - loss_of_ranks(made, files, state, [0])) > 1e-3
    assert losses[2] < losses[0] - 0.2
    if not more:
        assert isinstance(made.fwd_bwd_fn, xd.CompiledStep)
        check_recompilations(made.fwd_bwd_fn)


def test_it_goes_on_bit_for_bit(files: Any, tmp_path: Path) -> None:
    """From the checkpoint after two steps, with the data that follows, and with a validation in
    between, which changes nothing."""
    more = [
        *ON_8_DEVICES,
        "--parallelism.spmd_backend=partial_dtensor",
        "--training.steps=4",
        "--checkpoint.enable",
        "--checkpoint.interval=2",
    ]
    first = trainer(files, tmp_path, *more)
    losses = train(first)
    again = trainer(
        files,
        tmp_path,
        *more,
        "--checkpoint.load_step=2",
        "--validator.enable",
        "--validator.freq=3",
        "--validator.steps=1",
    )
    assert train(again) == losses[2:]
    expected = weights(first)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())


def test_validator_metrics_and_profiler(files: Any, tmp_path: Path) -> None:
    """The validator's loss is that of all ranks' batches; TensorBoard's files have it, and the
    losses; torch's profiler has written its trace."""
    made = trainer(
        files,
        tmp_path,
        *ON_8_DEVICES,
        "--parallelism.spmd_backend=partial_dtensor",
        "--training.steps=2",
        *("--validator.enable", "--validator.freq=2", "--validator.steps=1"),
        "--metrics.enable_tensorboard",
        *("--profiler.enable_profiling", "--profiler.profile_freq=2"),
        *("--profiler.profiler_active=1", "--profiler.profiler_warmup=0"),
    )
    losses = train(made)
    assert list(metrics.read(tmp_path, "loss_metrics/global_avg_loss").values()) == losses
    assert metrics.read(tmp_path, "n_tokens_seen")[2] == 2 * 4 * ROWS * SEQUENCE
    expected = loss_of_ranks(made, files, state_of(made), [0, 1, 2, 3])  # the batches of the start
    validated = metrics.read(tmp_path, "validation_metrics/loss")
    assert validated[2] == pytest.approx(expected, abs=5e-6)
    assert validated[1] > validated[2] + 0.1  # torchtitan validates after the first step, too
    traces = tmp_path / "profiling/traces"
    texts = [
        gzip.decompress(p.read_bytes()) for p in traces.glob("iteration_*/rank0_trace.json.gz")
    ]
    assert texts
    for events in (json.loads(text)["traceEvents"] for text in texts):
        assert any(event.get("cat") == "cpu_op" for event in events)


@pytest.mark.parametrize(
    "mesh",
    [ON_8_DEVICES, pytest.param(HYBRID, marks=pytest.mark.slow)],
    ids=["dp4 x tp2", "hsdp 2x2 x tp2"],
)
def test_the_whole_step_is_one_program(
    mesh: list[str], files: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Clipping and optimizer included; the losses are those of the step in parts."""
    monkeypatch.setattr(xd.config, "torchtitan_step", "whole")
    backend = "--parallelism.spmd_backend=partial_dtensor"
    made = trainer(files, tmp_path, *mesh, backend, "--training.steps=4")
    state = state_of(made)
    losses = train(made)
    assert losses[0] == pytest.approx(loss_of_ranks(made, files, state, [0, 1, 2, 3]), abs=5e-6)
    check_recompilations(made.xla_step)
    assert all(p.grad is None for p in made.model_parts[0].parameters())
    monkeypatch.setattr(xd.config, "torchtitan_step", "parts")
    parts = trainer(files, tmp_path, *mesh, backend, "--training.steps=4")
    assert losses == pytest.approx(train(parts), abs=1e-5)
    expected = weights(parts)
    for name, value in weights(made).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_accumulation_is_no_whole_step(files: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(xd.config, "torchtitan_step", "whole")
    made = trainer(
        files,
        tmp_path,
        *ON_8_DEVICES,
        "--parallelism.spmd_backend=partial_dtensor",
        "--training.global_batch_size=16",
    )
    with pytest.raises(xd.UnsupportedOpError, match="2 gradient accumulation steps"):
        made.train()
    made.close()


@pytest.mark.slow
def test_accumulating_is_one_batch(files: Any, tmp_path: Path) -> None:
    """Two micro-batches of each rank: the tokens of all count."""
    backend = "--parallelism.spmd_backend=partial_dtensor"
    more = [*ON_8_DEVICES, backend, "--training.steps=2", "--training.global_batch_size=16"]
    made = trainer(files, tmp_path, *more)
    assert made.gradient_accumulation_steps == 2
    losses = train(made)
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_the_command(files: Any, tmp_path: Path) -> None:
    """``python -m xla_dtensor.torchtitan``, in torchtitan's own precision."""
    command = [sys.executable, "-W", "ignore", "-m", "xla_dtensor.torchtitan"]
    given = [*arguments(files, tmp_path, *ON_8_DEVICES), "--training.steps=2"]
    given += ["--training.mixed_precision_param=bfloat16"]
    given += ["--parallelism.spmd_backend=full_dtensor"]
    done = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Training completed" in done.stdout + done.stderr
