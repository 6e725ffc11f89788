"""What processes distribute while programs with collectives run."""

from __future__ import annotations

import pytest

from tests import launch

PROGRAM = ["-m", "tests.runtime.programs.in_flight"]


@pytest.mark.slow
def test_what_is_distributed_is_right() -> None:
    for output in launch.succeeded(launch.run(PROGRAM, 2, 200)):
        assert output.splitlines()[-1] == "wrong 0"


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="XLA; when this passes its row can go")
def test_by_jax_alone() -> None:
    """Three times: it hangs on how far the programs are."""
    for _ in range(3):
        results = launch.run([*PROGRAM, "jax"], 2, 200)
        assert [result.code for result in results] == [0, 0]
        assert all(result.output.splitlines()[-1] == "wrong 0" for result in results)
