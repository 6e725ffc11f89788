"""The README's Python runs as it is written, top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[1] / "README.md"


def test_blocks_run(mesh_2x4: Any) -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    values = names["loss"].local_values()
    torch.testing.assert_close(values[0], values[3])
    assert not torch.equal(values[0], values[4])  # another batch
