"""What is said of the release in several files is the same."""

from __future__ import annotations

import re
import tomllib

from tests.launch import ROOT
from xla_dtensor.version import VERSION


def test_the_version_has_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"] and "version" not in project
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None and cited[1] == VERSION
    assert f"\n## {VERSION} " in (ROOT / "CHANGELOG.md").read_text()


def test_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"gpu", "gpu13", "gpu-plan", "gpu-plan12", "tpu", "ray", "docs", "examples", "dev"}
    assert set(project["optional-dependencies"]) == wanted


def test_workflows_run_what_the_gate_runs() -> None:
    """And each target that they name is one of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = {path.name: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
    assert ".ci/run" in texts["ci.yml"]
    named = {
        name for text in texts.values() for name in re.findall(r"make ([a-z-]+)(?![a-z$-])", text)
    }
    named |= set(re.findall(r"make ([a-z-]+)", (ROOT / ".ci" / "run").read_text()))
    assert {"dist", "check-docs", "check", "test"} <= named <= targets
