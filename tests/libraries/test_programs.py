"""Each library's program gives CPU torch's numbers."""

from __future__ import annotations

import math

import pytest

from tests.libraries import table
from tests.libraries.programs import PROGRAMS, Program, installed

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.package)
def test_it_gives_the_cpus_numbers(program: Program) -> None:
    if not installed(program):
        pytest.skip(f"{program.package} isn't installed: make test-libraries")
    expected, found = program.run("cpu"), program.run("xla")
    assert all(map(math.isfinite, expected)) and len(expected) > 1
    r = program.tolerance
    assert found == pytest.approx(expected, rel=r, abs=r)


def test_the_page_has_each() -> None:
    """docs/libraries.md is made by `tests/libraries/table.py`."""
    listed = table.PAGE.read_text().partition(table.BEGIN)[2].partition(table.END)[0]
    rows = [line.split("|")[1].strip() for line in listed.splitlines()[2:] if line]
    assert rows == [table.name_of(program) for program in table.ALL.values()]
