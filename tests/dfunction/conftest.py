from __future__ import annotations

from collections.abc import Iterator

import pytest

from xla_dtensor.dfunction import _op


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops registered in a test are forgotten after it; those of its module stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_op, "OPS", dict(_op.OPS))
        yield
