"""docs/horovod.md: its tables are of this module and these tests; and `collectives.pyi`."""

from __future__ import annotations

from tests.horovod.ranks import CASES, DEVICES, PROCESSES, THREADS
from tools import horovod_names


def test_the_tables_are_what_is_there() -> None:
    text = horovod_names.DOCUMENT.read_text()
    assert horovod_names.with_tables(text) == text, "run python tools/horovod_names.py --write"


def test_type_checkers_see_the_signatures_that_are_there() -> None:
    text = horovod_names.SIGNATURES.read_text()
    assert horovod_names.signatures() == text, "run python tools/horovod_names.py --write"


def test_there_is_a_case_for_every_name() -> None:
    rows = [row for row in horovod_names.names_table().splitlines()[2:] if "| 0 | 0 | 0 |" in row]
    assert rows == []


def test_there_are_as_many_as_were_asked_for() -> None:
    """Of Horovod's own."""
    own = [case for case in CASES.values() if case.kind not in ("X", "A")]
    counts = {where: sum(where in case.where for case in own) for where in (DEVICES, THREADS)}
    assert counts[DEVICES] >= 70 and counts[THREADS] >= 95
    assert sum(PROCESSES in case.where for case in own) >= 100
