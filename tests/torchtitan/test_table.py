"""The table's runs are kept: those of the same code aren't made again."""

from __future__ import annotations

from pathlib import Path

import pytest

import xla_dtensor as xd
from tests.torchtitan import table

ROWS = [table.Row("model", "dp4", {"dp": 4}, 1e-5), table.Row("model", "tp4", {"tp": 4}, 1e-5)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Which runs have been made."""
    monkeypatch.setattr(table, "_code", lambda: "a commit")
    monkeypatch.setattr(xd.debug, "clear_caches", lambda: None)  # nothing has been compiled
    return []


def make(path: Path, made: list[tuple[str, bool]], *arguments: str, rows=ROWS) -> int:
    def measure(row: table.Row, steps: int, compiled: bool) -> tuple[float, int]:
        if (row.plan, compiled) == ("tp4", False) and len(made) == 3:
            raise KeyboardInterrupt
        made.append((row.plan, compiled))
        return (2e-5 if row.plan == "tp4" else 1e-6), 0

    options = table.parser(None).parse_args([f"--records={path}", *arguments])
    return table.make(rows, measure, options)


def test_it_goes_on(tmp_path: Path, made: list[tuple[str, bool]], capsys, monkeypatch) -> None:
    path = tmp_path / "runs"
    with pytest.raises(KeyboardInterrupt):
        make(path, made)
    assert made == [("dp4", True), ("tp4", True), ("dp4", False)]
    capsys.readouterr()
    assert make(path, made, "--table") == 1  # the compiled run that is off
    assert "| model | tp4 | 20 | 2.0e-05 | - | 0 |" in capsys.readouterr().out
    made.clear()
    assert make(path, made) == 2
    assert made == [("tp4", False)]
    assert "| model | dp4 | 20 | 1.0e-06 | 1.0e-06 | 0 |" in capsys.readouterr().out
    made.clear()
    make(path, made, "--steps=4", "--only=dp4", "--compiled")
    other = [table.Row("model", "dp4", {"dp": 2}, 1e-5)]
    make(path, made, "--compiled", rows=other)
    monkeypatch.setattr(table, "_code", lambda: "the next commit")
    make(path, made, "--only=dp4", "--compiled")
    assert made == [("dp4", True)] * 3
