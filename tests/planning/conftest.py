"""Plans are compiled in each test, whatever an earlier run has kept."""

from __future__ import annotations

import pytest

from xla_dtensor.runtime import program_cache


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "folder_of_plans", lambda asked: None)
