"""Who gets the xla device without naming it: the switch, what JAX has, and loading by torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from xla_dtensor.ecosystem import device_choice
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtime import jax_runtime

ROOT = Path(__file__).parents[2]
CPU, CUDA, XLA = torch.device("cpu"), torch.device("cuda", 0), torch.device("xla", 0)


def has(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    devices = [SimpleNamespace(platform=platform)]
    monkeypatch.setattr(jax_runtime, "is_started", lambda: True)
    monkeypatch.setattr(jax_runtime, "all_devices", lambda: devices)


@pytest.mark.parametrize(
    ("switch", "platform", "found", "expected"),
    [
        ("auto", "cpu", CPU, CPU),  # simulated devices aren't taken without being asked
        ("auto", "tpu", CPU, XLA),
        ("auto", "gpu", CPU, XLA),
        ("auto", "gpu", CUDA, CUDA),  # torch has it itself
        ("xla", "cpu", CPU, XLA),
        ("xla", "gpu", CUDA, XLA),
        ("never", "tpu", CPU, CPU),
        ("never", "gpu", CUDA, CUDA),
    ],
)
def test_the_rule(
    monkeypatch: pytest.MonkeyPatch,
    switch: Any,
    platform: str,
    found: torch.device,
    expected: torch.device,
) -> None:
    has(monkeypatch, platform)
    with xd.config.override(device=switch):
        assert device_choice.device_for(found) == expected


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device_choice.refuse_processes("somebody")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedOpError, match="somebody on the xla device in one of several"):
        device_choice.refuse_processes("somebody")


def run(code: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "NPROC"))}
    path = os.pathsep.join(map(str, (*paths, ROOT)))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=clean | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


ASKS = """
import xla_dtensor as xd
from xla_dtensor import runtime
from xla_dtensor.runtime import gpus
print(gpus.may_accelerate(), runtime.is_started())
"""


def test_jax_is_not_started_to_see_that_there_is_nothing() -> None:
    """Or no mesh of more simulated devices could be made after it."""
    found = run(
        ASKS + "print(runtime.has_accelerators(), runtime.is_started())\n"
        "print(xd.init_device_mesh('xla', (4,)).size())",
        JAX_PLATFORMS="cpu",
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["False", "False", "False", "False", "4"]


def test_a_plugin_may_have_an_accelerator(tmp_path: Path) -> None:
    (tmp_path / "jax_plugins" / "somebodys").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "somebodys" / "__init__.py").write_text("")
    found = run(ASKS, tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["True", "False"]


# --- loaded by torch -----------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that says what an installed package would."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch.backends"]
    folder = tmp_path / "xla_dtensor-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: xla-dtensor\nVersion: 0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (folder / "entry_points.txt").write_text(f"[torch.backends]\n{lines}")
    return tmp_path


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("value", "loaded"), [("", False), ("0", False), ("1", True)])
def test_torch_loads_it_when_asked(installed: Path, value: str, loaded: bool) -> None:
    code = (
        "import sys, torch\n"
        "print('xla_dtensor' in sys.modules, torch.accelerator.current_accelerator())\n"
        "assert 'jax' not in sys.modules"
    )
    found = run(code, installed, XLA_DTENSOR_AUTOLOAD=value, JAX_PLATFORMS="cpu")
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == (["True", "xla"] if loaded else ["False", "None"])


@pytest.mark.slow
def test_what_torch_has_loaded_computes(installed: Path) -> None:
    code = "import torch\nprint((torch.ones(3, device='xla') + 1).tolist())"
    found = run(code, installed, XLA_DTENSOR_AUTOLOAD="1", JAX_PLATFORMS="cpu")
    assert found.stdout.strip() == "[2.0, 2.0, 2.0]", found.stderr


@pytest.mark.slow
def test_the_package_first(installed: Path) -> None:
    """Then torch's import calls back while the package is half imported."""
    code = "import xla_dtensor as xd\nprint(xd.compile.__name__)"
    found = run(code, installed, XLA_DTENSOR_AUTOLOAD="1", JAX_PLATFORMS="cpu")
    assert found.stdout.strip() == "compile", found.stderr


def test_another_value_raises(installed: Path) -> None:
    found = run("import torch", installed, XLA_DTENSOR_AUTOLOAD="yes")
    assert "ValueError: XLA_DTENSOR_AUTOLOAD='yes': it is 1" in found.stderr
