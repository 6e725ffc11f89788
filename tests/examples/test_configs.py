"""The configurations of large models: their sizes are consistent, and fit their meshes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "configs"


def configuration(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return found


@pytest.mark.parametrize("name", ["llama3_8b.json", "llama3_70b.json"])
def test_sizes(name: str) -> None:
    found = configuration(name)
    model, mesh, training = found["model"], found["mesh"], found["training"]
    dim, head = model["dim"], model["head_dim"]
    attention = 2 * dim * model["heads"] * head + 2 * dim * model["kv_heads"] * head
    layer = attention + 3 * dim * model["hidden_dim"] + 2 * dim
    embeddings = (1 if model["tied_embeddings"] else 2) * model["vocab_size"] * dim
    assert model["parameters"] == embeddings + model["layers"] * layer + dim
    assert model["heads"] * head == dim
    for size in ("heads", "kv_heads", "hidden_dim", "vocab_size"):
        assert model[size] % mesh["tp"] == 0, size
    assert model["layers"] % mesh["pp"] == 0
    assert training["global_batch_rows"] % mesh["dp"] == 0
    assert training["sequence_length"] % mesh["cp"] == 0
