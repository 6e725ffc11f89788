"""What Python's collector visits while a step is traced."""

from __future__ import annotations

import gc

from xla_dtensor.compilation.code.garbage import NewObjects


def test_only_new_objects_are_visited() -> None:
    """Also where Python has frozen objects of its own when it started (3.12)."""
    before = [[]]
    with NewObjects() as new:
        inside = [[]]
        found = new.made()
    assert found is not None
    assert id(inside) in found and id(before) not in found


def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with NewObjects() as new:
            assert new.made() is None
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()
