"""`xd.transfer` between meshes of two processes."""

from __future__ import annotations

import pytest

from tests import launch


@pytest.mark.slow
def test_between_meshes_of_two_processes() -> None:
    run = launch.run(["-m", "tests.weights.programs.two_processes"], 2, 200)
    assert all("transferred" in output for output in launch.succeeded(run))
