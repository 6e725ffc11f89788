"""The notebooks print what they say that they print."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_print_what_is_stored(path: Path) -> None:
    notebooks, notebook = tool(), json.loads(path.read_text())
    found = notebooks.run(notebook)
    assert len(found) > 3
    for said, printed in zip(notebooks.stored(notebook), found, strict=True):
        assert printed == said
