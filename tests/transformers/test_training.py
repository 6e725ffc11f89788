"""A plain training loop with a transformers model, compiled; and its ``generate``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="it isn't installed: make test-transformers")

import xla_dtensor as xd
from tests.transformers import harness
from tests.transformers.architectures import BY_NAME

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_training_loop() -> None:
    llama = BY_NAME["Llama"]
    mesh = xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("dp", "tp"))
    model, batch = harness.by_size(llama, mesh)
    expected: Any = llama.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = torch.optim.AdamW(expected.parameters(), lr=1e-2)

    @xd.compile
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(3):
        loss = expected(**llama.batch()).loss
        loss.backward()
        wanted.step()
        wanted.zero_grad()
        torch.testing.assert_close(harness.whole(step(batch)), loss.detach())
    assert (step.compilations, step.recompilations) == (1, [])


def test_the_pages_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text()
    names: dict[str, Any] = {"__name__": "docs.transformers"}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    losses = list(map(float, printed[:3]))
    assert losses[2] < losses[0]
    assert printed[3:] == ["torch.Size([2, 28]) 1 1", "torch.Size([2, 16]) 2"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_generate_with_a_static_cache(compiled: bool) -> None:
    """Greedy tokens are CPU torch's; a token is one call of one program."""
    llama = BY_NAME["Llama"]
    prompt = llama.batch()["input_ids"][:, :6]
    options: dict[str, Any] = {
        "cache_implementation": "static",
        "max_new_tokens": 6,
        "do_sample": False,
        "disable_compile": True,  # transformers' own: torch.compile
    }
    expected: Any = llama.make()
    wanted = expected.generate(prompt, **options)
    model: Any = llama.make()
    mesh = xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("dp", "tp"))
    xd.parallel.shard_by_size(model, mesh, least=256)
    step = xd.compile(model.forward)
    if compiled:
        model.forward = step
    found = model.generate(prompt.to("xla"), **options)
    assert harness.whole(found).tolist() == wanted.tolist()
    if compiled:
        assert step.compilations <= 3, step.recompilations
