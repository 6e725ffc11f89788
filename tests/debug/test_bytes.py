"""The bytes of redistributions, by hand: what each device sends, and receives, in a ring."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from xla_dtensor.debug._records import bytes_text
from xla_dtensor.rules import TensorInfo
from xla_dtensor.rules.cost import collectives, moved_bytes

R, S, P = Replicate(), Shard, Partial()
MESH = (2, 4)


# [8, 16] of float32 has 512 bytes.
@pytest.mark.parametrize(
    ("source", "target", "kinds", "nbytes"),
    [
        ((R, R), (R, R), [], 0),
        ((R, R), (S(0), S(1)), ["cut", "cut"], 0),
        ((R, S(0)), (R, R), ["all-gather"], 3 * 128),  # three times what a device has
        ((S(0), R), (R, R), ["all-gather"], 256),
        ((S(0), S(1)), (R, R), ["all-gather", "all-gather"], 3 * 64 + 256),  # tp first
        ((R, P), (R, R), ["all-reduce"], 2 * 3 * 512 // 4),
        ((R, P), (R, S(0)), ["reduce-scatter"], 3 * 512 // 4),
        ((S(0), P), (S(0), R), ["all-reduce"], 2 * 3 * 256 // 4),  # of dp's half
        ((R, S(0)), (R, S(1)), ["all-to-all"], 3 * 128 // 4),
        ((P, R), (R, S(0)), ["all-reduce", "cut"], 2 * 512 // 2),
    ],
)
def test_collectives_and_bytes(source, target, kinds, nbytes):
    info = TensorInfo((8, 16), source, torch.float32)
    assert sorted(each.kind for each in collectives(info, target, MESH)) == sorted(kinds)
    assert moved_bytes(info, target, MESH) == nbytes


def test_bytes_follow_the_dtype():
    info = TensorInfo((8, 16), (R, S(0)), torch.bfloat16)
    assert moved_bytes(info, (R, R), MESH) == 3 * 64


def test_nothing_makes_a_value_partial():
    info = TensorInfo((8, 16), (R, S(0)), torch.float32)
    assert [each.kind for each in collectives(info, (R, P), MESH)] == ["impossible"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (5 * 2**40, "5.0 TiB"),
    ],
)
def test_bytes_in_words(nbytes, text):
    assert bytes_text(nbytes) == text
