"""XLA ends the process at a flag that it doesn't know, so none is given to it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from xla_dtensor.runtime import xla_flags

FUSION, LEVEL, *_ = xla_flags.QUICK_COMPILES


@pytest.mark.parametrize(
    ("version", "before", "after"),
    [
        ("0.10.2", None, f"{FUSION} {LEVEL}"),
        ("0.11.0", None, LEVEL),
        ("0.12.0.1", "--xla_dump_to=/tmp", f"--xla_dump_to=/tmp {LEVEL}"),
        (
            "0.9.0",
            "--xla_backend_optimization_level=3",
            f"--xla_backend_optimization_level=3 {FUSION}",
        ),
    ],
)
def test_what_is_added(
    monkeypatch: pytest.MonkeyPatch, version: str, before: str | None, after: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setenv("XLA_FLAGS", before or "")
    for _ in range(2):  # again changes nothing
        xla_flags.add(FUSION, LEVEL)
        assert os.environ["XLA_FLAGS"] == after


@pytest.mark.parametrize(("version", "known"), [("0.9.0", 3), ("0.11.2", 3), ("0.12.0", 0)])
def test_pipelined_collectives_where_they_are_known(
    monkeypatch: pytest.MonkeyPatch, version: str, known: int
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert len(xla_flags.options(*xla_flags.PIPELINED)) == known
    first = f"--{xla_flags.PIPELINED[0]}"
    monkeypatch.setenv("XLA_FLAGS", f"{first}=false")  # who has said so is obeyed
    xla_flags.add(*(f"--{name}=true" for name in xla_flags.PIPELINED))
    there = os.environ["XLA_FLAGS"].split()
    assert there[0] == f"{first}=false" and len(there) == max(known, 1)


def test_this_jax_knows_all_of_them() -> None:
    code = (
        "from xla_dtensor.runtime import xla_flags as f\n"
        "f.add(*f.QUICK_COMPILES, f.OWN_BFLOAT16_PRODUCTS, *(f'--{n}=true' for n in f.PIPELINED))\n"
        "import jax; assert jax.devices()"
    )
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], env=clean, check=True)
