"""Entries through a compiler, without being run; the TPU's and the GPU's where they are there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.conformance import compiled as programs
from tests.conformance import compiled_report, entries
from tests.conformance.check import check_entry
from tests.conformance.compiled import EAGER, ERROR, NAMED, PASS, compile_entry
from tests.conftest import make_mesh
from tests.planning.gpus import needs_gpu_compiler
from tests.planning.tpus import needs_libtpu
from xla_dtensor.base.tables import cache
from xla_dtensor.lowering import workarounds
from xla_dtensor.lowering.partitioned import per_slice

FOR_TPUS = (
    *("topk", "max_pool2d_with_indices_backward", "fft.rfft2", "multinomial"),
    "linalg.svdvals",
)


def compiled(name: str, topology: str, **options: Any) -> Any:
    (entry,) = [e for e in entries.select(name) if entries.full_name(e) == name]
    return compile_entry(entry, torch.float32, topology, "2x4", 1, **options)


def test_classes_on_devices_that_are_here() -> None:
    both = lambda kind: {"forward": kind, "backward": kind}
    assert compiled("mm", "cpu:8").forms == both(PASS)
    assert compiled("mm", "cpu:8", whole=True).layouts == ["[5, 10] [R][R]; [10, 5] [R][R]"]
    assert compiled("argmax", "cpu:8").forms == {"forward": PASS}
    assert compiled("masked_select", "cpu:8").forms == both(EAGER)
    refused = compiled("to_sparse", "cpu:8")
    assert refused.forms == both(NAMED) and "dense" in refused.failures[0]["text"]
    assert compiled("jiterator_unary", "cpu:8").forms == {}  # CPU torch hasn't got it


def test_a_refusal_of_the_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = iter([RuntimeError("INTERNAL: no")])  # the program with gradients comes first

    def refuse_one(program: Any) -> None:
        for error in refusals:
            raise error

    monkeypatch.setattr(programs, "_compiled", refuse_one)
    found = compiled("mm", "cpu:8")
    assert found.forms == {"forward": PASS, "backward": ERROR}
    about = {"topology": "v5e:2x4", "mesh": "2x4", "dtype": "float32", "limit": 1}
    record = {**vars(found), **about, "commit": "abc", "seconds": 60}
    table = compiled_report.render([record])
    assert "| forward | 1 | 1 | 100.0 % | 1 | 0 | 0 | 0 |" in table
    assert "| backward | 1 | 0 | 0.0 % | 0 | 0 | 0 | 1 |" in table
    assert "| mm | backward | [5, 10]" in table and "INTERNAL: no" in table


@pytest.mark.slow
@pytest.mark.parametrize("name", ["topk", "max_pool2d_with_indices_backward", "linalg.ldl_factor"])
def test_what_tpus_have_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without calls that compute each shard by itself the partitioner has them, the same for all
    backends: CPU torch's numbers in sharded layouts."""
    nowhere = dataclasses.replace(workarounds.CALLS_PER_SHARD, platforms=())
    monkeypatch.setattr(per_slice, "CALLS_PER_SHARD", nowhere)
    cache.clear()
    try:
        (entry,) = entries.select(name)
        forms = ("forward", "backward")
        found = check_entry(entry, torch.float32, make_mesh("2x4"), 2, 2, forms)
        assert set(found.forms.values()) == {PASS}, found.failures
    finally:
        cache.clear()


@needs_libtpu
@pytest.mark.parametrize("name", FOR_TPUS)
def test_for_tpus(name: str) -> None:
    assert set(compiled(name, "v5e:2x4").forms.values()) == {PASS}


@needs_gpu_compiler
@pytest.mark.parametrize("name", ["linalg.svdvals", "sort", "fft.rfft2", "multinomial", "mm"])
def test_for_gpus(name: str) -> None:
    assert set(compiled(name, "h100:2x4").forms.values()) == {PASS}


@needs_libtpu
def test_for_tpus_by_name_or_eagerly() -> None:
    assert set(compiled("linalg.eig", "v5e:2x4").forms.values()) == {NAMED}
    assert set(compiled("nonzero", "v5e:2x4").forms.values()) == {EAGER}
