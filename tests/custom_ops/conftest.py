from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_ops(own_ops: None) -> None:
    """For every test here."""
