"""What is rounded as CPU torch rounds it, in programs as users' are compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_rounded_as_torch_does() -> None:
    # The tests' own programs are compiled with less effort, which rearranges less.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tools.rounding", "--check"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
