"""Programs are kept between runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xla_dtensor.runtime import program_cache

_PROGRAM = """
import jax, torch, xla_dtensor
from jax._src import monitoring
hits = []
monitoring.register_event_listener(lambda name, **_: hits.append("cache_hits" in name))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
x = torch.randn(7, 7, device="xla")
assert torch.isfinite(torch.linalg.inv(x + 9 * torch.eye(7, device="xla")).sum()).item()
for n in range(3, 6):  # eager programs without LAPACK aren't JAX's
    jax.jit(lambda y: (y @ y.T).sum())(jax.numpy.ones((5, n)))
print(jax.config.jax_compilation_cache_dir, sum(hits))
"""


def _run(**environment: str) -> tuple[str, int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_DTENSOR_"))}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    where, hits = done.stdout.split()[-2:]
    return where, int(hits)


def test_the_second_run_finds_them(tmp_path: Path) -> None:
    where, hits = _run(XDG_CACHE_HOME=str(tmp_path))
    assert Path(where).is_relative_to(tmp_path / "xla_dtensor") and hits == 0
    assert list(Path(where).iterdir())
    # The process that wrote one program was killed over it long ago; another is being written now.
    times = sorted(Path(where).glob("*-atime"))
    for time in times[:2]:
        time.unlink()
    halves = [time.with_name(time.name.removesuffix("atime") + "cache") for time in times[:2]]
    os.utime(halves[0], (0, 0))
    assert _run(XDG_CACHE_HOME=str(tmp_path))[1] > 0
    assert halves[0].with_name(times[0].name).exists() is halves[0].exists()  # away, or made anew
    assert halves[1].exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({"XLA_DTENSOR_CACHE": "off"}, "None"),
        ({"JAX_COMPILATION_CACHE_DIR": "/tmp/their-own"}, "/tmp/their-own"),
        ({"XLA_DTENSOR_CACHE": "/proc/nobody/can/write"}, "None"),
    ],
)
def test_not_asked_for(environment: dict[str, str], where: str, tmp_path: Path) -> None:
    assert _run(XDG_CACHE_HOME=str(tmp_path), **environment)[0] == where
    assert not list(tmp_path.rglob("*"))


def test_a_folder_for_each_kind_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    found = program_cache.folder("user")
    assert found is not None and found.parent == Path("/cache/xla_dtensor/programs")
    assert program_cache.folder("/elsewhere") == Path("/elsewhere")
    assert program_cache.folder("off") is None


def test_plans_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert program_cache.folder_of_plans("user") == Path("/cache/xla_dtensor/plans")
    assert program_cache.folder_of_plans("/elsewhere") == Path("/elsewhere/plans")
    assert program_cache.folder_of_plans("off") is None
