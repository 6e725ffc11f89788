"""Comparing many objects by identity."""

import random

import pytest

from xla_dtensor.compilation.code.identities import by_id, identities, of_tuple

EVERY_KIND = (None, 1, 1.0, -0.0, "x", (), (1,), [], {}, object(), int, print)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_addresses_are_read_where_they_are(count):
    chosen = random.Random(0).choices(EVERY_KIND, k=count)
    assert of_tuple(chosen) == by_id(chosen)
    assert of_tuple(iter(chosen)) == by_id(chosen)


def test_equal_is_not_the_same():
    a, b = [1], [1]
    assert identities((a, b)) != identities((b, a))
    assert identities((a, b)) == identities(iter((a, b)))
    assert identities((a,)) != identities((a, a))
    assert identities((0.0,)) != identities((float("-0.0"),))
