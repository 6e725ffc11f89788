"""What is registered under names, and who is told."""

import pytest

from xla_dtensor.base.tables.registry import Changes, Registry


def test_a_name_is_taken_once_unless_overridden():
    registry = Registry("lowering", Changes())
    registry.add("aten::relu", 1)
    with pytest.raises(ValueError, match="aten::relu already has a lowering"):
        registry.add("aten::relu", 2)
    assert registry["aten::relu"] == 1
    registry.add("aten::relu", 3, override=True)
    assert registry["aten::relu"] == 3


def test_listeners_hear_of_every_addition_and_of_no_refusal():
    changes, heard = Changes(), []
    one, other = Registry("rule", changes), Registry("name", changes)
    changes.listen(lambda: heard.append((len(one), len(other))))
    one.add("a", 1)
    other.add("a", 1)
    with pytest.raises(ValueError, match="already"):
        one.add("a", 2)
    assert heard == [(1, 0), (1, 1)]  # after the change


def test_a_copy_has_its_own_content():
    changes, heard = Changes(), []
    changes.listen(lambda: heard.append(None))
    registry = Registry("rule", changes)
    registry.add("a", 1)
    copy = registry.copy()
    copy.add("b", 2)
    assert list(registry) == ["a"] and list(copy) == ["a", "b"] and len(heard) == 2
