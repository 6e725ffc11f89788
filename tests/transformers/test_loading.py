"""``from_pretrained(tp_plan="auto")`` in one process for all devices: transformers' own plan on a
checkpoint of random weights, judged by the model that was saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="it isn't installed: make test-transformers")

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import xla_dtensor as xd
from tests import launch
from tests.transformers import harness
from tests.transformers.architectures import BY_NAME, Architecture
from tests.transformers.table import LIMIT

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = [
    pytest.param(name, marks=() if name in {"Llama", "Qwen3"} else pytest.mark.slow)
    for name in ("Llama", "Qwen3", "Gemma 2", "Phi", "GPT-NeoX", "StarCoder2", "Cohere", "SmolLM3")
]


@pytest.fixture
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Architecture, Path]:
    architecture = BY_NAME[getattr(request, "param", "Llama")]
    architecture.make().save_pretrained(tmp_path)
    return architecture, tmp_path


@pytest.fixture(autouse=True)
def _no_mesh() -> Any:
    yield
    xd.set_mesh(None)


@pytest.mark.parametrize("saved", NAMES, indirect=True)
def test_loss_and_gradients(saved: tuple[Architecture, Path]) -> None:
    architecture, path = saved
    with xd.init_device_mesh("xla", (2,), mesh_dim_names=("tp",)) as mesh:
        model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto")
    model.train(architecture.make().training)
    batch = {name: value.to("xla") for name, value in architecture.batch().items()}
    found = harness.run(model, batch, compiled=False)
    off = harness.difference(found, harness.on_cpu(architecture), model)
    assert off.sharded[0] > 0 and off.loss < 1e-5 and off.gradient < LIMIT, off
    sharded = [p for p in model.parameters() if isinstance(p, xd.XLAShardedTensor)]
    assert {p.device_mesh for p in sharded} == {mesh}
    assert all(p.device.type == "xla" for p in (*model.parameters(), *model.buffers()))


def test_a_compiled_step_generate_and_saving(
    saved: tuple[Architecture, Path], tmp_path: Path
) -> None:
    architecture, path = saved
    expected: Any = architecture.make().eval()
    mesh = xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("dp", "tp"))
    xd.set_mesh(mesh)
    config = DistributedConfig(tp_plan="auto")
    assert config.tp_size == 2
    model: Any = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    assert model.model.layers[0].mlp.up_proj.weight.device_mesh == mesh["tp"]
    tokens = architecture.batch()["input_ids"]
    step = xd.compile(lambda tokens: model(input_ids=tokens).logits)
    with torch.no_grad():
        torch.testing.assert_close(
            harness.whole(step(tokens.to("xla"))), expected(input_ids=tokens).logits
        )
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    wanted = expected.generate(tokens[:, :5], **options)
    assert harness.whole(model.generate(tokens[:, :5].to("xla"), **options)).equal(wanted)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for name, value in expected.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_weights_that_are_tied(tmp_path: Path) -> None:
    llama = BY_NAME["Llama"]
    made: Any = llama.make()
    config = made.config
    config.tie_word_embeddings = True
    expected: Any = type(made)(config)
    expected.save_pretrained(tmp_path)
    options = DistributedConfig(tp_plan="auto", tp_size=2)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=options)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    batch = {name: value.to("xla") for name, value in llama.batch().items()}
    loss = expected(**llama.batch()).loss
    loss.backward()
    found = harness.run(model, batch, compiled=False)
    off = harness.difference(found, (loss.detach(), harness.gradients(expected)), model)
    assert off.loss < 1e-5 and off.gradient < LIMIT, off


PROGRAM = """
import sys
import torch
import xla_dtensor as xd
from transformers.distributed import DistributedConfig

config = DistributedConfig(tp_plan="auto")  # before there is a model

from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=config)
weight = model.lm_head.weight
assert weight.device_mesh.size() == 2 and weight.to_local().shape[0] * 2 == weight.shape[0]
plain = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = torch.arange(16).reshape(2, 8)
loss = model(input_ids=tokens.to("xla"), labels=tokens.to("xla")).loss
loss.backward()
expected = plain(input_ids=tokens, labels=tokens).loss
expected.backward()
torch.testing.assert_close(loss.detach().cpu(), expected.detach())
torch.testing.assert_close(weight.grad.full_tensor().cpu(), plain.lm_head.weight.grad)
print("all of it")
"""


def test_two_processes(saved: tuple[Architecture, Path]) -> None:
    command = ["-W", "ignore", "-c", PROGRAM, str(saved[1])]
    outputs = launch.succeeded(launch.run(command, 2, 240, {"JAX_PLATFORMS": "cpu"}))
    assert all("all of it" in output for output in outputs)


def test_one_device_and_no_mesh(saved: tuple[Architecture, Path]) -> None:
    """A line says that nothing is sharded."""
    program = "import sys, xla_dtensor, transformers as t; print(t.__name__);"
    program += "t.AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan='auto')"
    command = ["-W", "ignore", "-c", program, str(saved[1])]
    (output,) = launch.succeeded(launch.run(command, 1, 240, {"JAX_PLATFORMS": "cpu"}))
    assert "tp_plan over one device shards nothing; make a mesh current" in output


@pytest.mark.parametrize(
    ("sizes", "way"),
    [
        ({"pp_size": 2}, "docs/pipeline.md"),
        ({"fsdp_size": 2}, "xd.fully_shard"),
        ({"dp_replicate_size": 2}, "xd.replicate"),
        ({"ep_size": 2, "tp_size": 2}, "xd.parallel.shard_by_size"),
    ],
)
def test_what_wants_a_process_per_device(
    saved: tuple[Architecture, Path], sizes: dict[str, int], way: str
) -> None:
    config = DistributedConfig(**sizes)
    with pytest.raises(xd.UnsupportedOpError, match=f"one process per device; use.*{way}"):
        AutoModelForCausalLM.from_pretrained(saved[1], distributed_config=config)


def test_meshes_that_do_not_fit(saved: tuple[Architecture, Path]) -> None:
    with xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("dp", "model")):
        with pytest.raises(xd.MeshMismatchError, match=r"has no dim 'tp': .*with mesh\['model'\]"):
            AutoModelForCausalLM.from_pretrained(saved[1], tp_plan="auto")
        with pytest.raises(xd.MeshMismatchError, match="no dim 'tp'"):
            DistributedConfig(tp_plan="auto")
    with xd.init_device_mesh("xla", (4,)):
        config = dataclasses.replace(DistributedConfig(tp_plan="auto"), tp_size=2)
        with pytest.raises(xd.MeshMismatchError, match="has 4 devices for it"):
            AutoModelForCausalLM.from_pretrained(saved[1], distributed_config=config)


def test_no_plan_is_transformers_alone(saved: tuple[Architecture, Path]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(saved[1])
    assert all(p.device.type == "cpu" for p in plain.parameters())
    assert DistributedConfig().tp_size == 1
