"""How many programs XLA was asked to run, from JAX's profiler: whoever asked, none is missed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

# XLA's client records one of these per program: the first for several devices, the second for one,
# and the third for any in JAX 0.9.
_SHARDED = "CommonPjRtLoadedExecutable::Execute ("
_SINGLE = "CommonPjRtLoadedExecutable::ExecuteHelperOnSingleDevice"
_IN_09 = "PjRtCpuExecutable::Execute"


def launches(function: Callable[[], Any]) -> int:
    """The number of programs that XLA ran during ``function()``."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            function()
        (profile,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(profile))
    return sum(
        event.name in (_SINGLE, _IN_09) or event.name.startswith(_SHARDED)
        for plane in data.planes
        for line in plane.lines
        for event in line.events
    )
