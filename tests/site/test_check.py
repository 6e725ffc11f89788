"""The check of the site: links, and pages in a Chromium."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.site.tools import tool

check = tool("check")


def site(folder: Path, **pages: str) -> Path:
    for name, body in pages.items():
        head = f'<title>{name}</title><link rel="icon" href="data:,">'
        text = f"<!doctype html><html><head>{head}</head><body>{body}</body></html>"
        (folder / f"{name}.html").write_text(text)
    return folder


def test_links(tmp_path: Path) -> None:
    found = check.dead_links(
        site(
            tmp_path,
            index='<h1 id="top">Here</h1><a href="other.html#there">1</a> <a href="#top">2</a>'
            ' <a href="https://example.org/">elsewhere isn\'t looked at</a>',
            other='<h2 id="there">There</h2><a href="gone.html">3</a> <a href="index.html#no">4</a>'
            ' <a href="#nowhere">5</a>',
        )
    )
    assert sorted(found) == [
        "other.html: #nowhere: no such anchor",
        "other.html: gone.html",
        "other.html: index.html#no: no such anchor",
    ]


def test_without_a_chromium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(check, "CHROMIUM", None)
    with pytest.raises(SystemExit, match="apt-get install chromium"):
        check.opened(site(tmp_path, index="<p>1</p>"), None)
    monkeypatch.setattr("sys.argv", ["check.py", str(tmp_path), "--links"])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 0 and "1 pages, 0 problems" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(
    check.CHROMIUM is None or check.DRIVER is None,
    reason="there is no Chromium: apt-get install chromium chromium-driver",
)
@pytest.mark.skipif(
    importlib.util.find_spec("selenium") is None, reason="selenium is in pip install -e '.[docs]'"
)
def test_pages_in_a_chromium(tmp_path: Path) -> None:
    found = check.opened(
        site(
            tmp_path,
            good="<p>nothing is wrong</p>",
            bad='<script>console.error("a mistake")</script>',
        ),
        tmp_path / "shots",
    )
    assert len(found) == 1 and "bad.html" in found[0] and "a mistake" in found[0]
    assert (tmp_path / "shots" / "good.png").stat().st_size > 1000
