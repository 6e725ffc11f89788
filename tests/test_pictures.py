"""The pictures of the pages are of what the package does now (`tools/pictures.py`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the pictures are made with matplotlib")

from tools import pictures


def texts(path: Path) -> list[str]:
    """What is written in a picture."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_says_what_is_so(name: str, tmp_path: Path) -> None:
    kept = texts(pictures.FOLDER / f"{name}.svg")
    assert kept and texts(pictures.make(name, tmp_path)) == kept, f"python -m tools.pictures {name}"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_page_shows_it(name: str) -> None:
    root = pictures.FOLDER.parents[1]
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    assert any(f"pictures/{name}.svg)" in page.read_text() for page in pages)
