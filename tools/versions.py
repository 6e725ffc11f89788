"""The supported versions of Python, torch and JAX: a part of the tests in an environment for each.

    python tools/versions.py            # make test-versions; --list, --only 2.15-0.12-3.12, --short

Environments are made in .cache/versions (several GB each: the registry's torch brings CUDA's
libraries) and used again. The table in docs/versions.md is written from what they said.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "versions"
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"

# What every part of the library stands on.
TESTS = (
    "tests/base/test_private_apis.py",
    "tests/base/test_private_attributes.py",
    "tests/test_readme.py",
    "tests/integration/test_import.py",
    "tests/integration/test_composites.py",
    "tests/integration/test_data_parallel.py",
    "tests/integration/test_process_groups.py",
    "tests/mesh",
    "tests/movement",
    "tests/tensors",
    "tests/dispatch/test_batch.py",
    "tests/dispatch/test_optimizers.py",
    "tests/compilation/test_failures.py",
    "tests/compilation/test_memory.py",
    "tests/compilation/test_scan_layers.py",
    "tests/compilation/test_scan_casts.py",
    "tests/layouts/test_constrain.py",
    "tests/layouts/test_factors.py",
    "tests/layouts/test_folding.py",
    "tests/layouts/test_graph.py",
    "tests/compilation/test_history.py",
    "tests/compilation/test_state.py",
    "tests/custom_ops/test_dfunction.py",
    "tests/parallel",
    "tests/checkpoint/test_state_dict.py",
)
# Of these, what has differed between versions before: three minutes a row, in one process.
SHORT = (
    "tests/base/test_private_apis.py",
    "tests/base/test_private_attributes.py",
    "tests/mesh",
    "tests/integration/test_import.py",
    "tests/dispatch/test_batch.py",
    "tests/compilation/test_scan_casts.py",
    "tests/compilation/test_state.py",
    "tests/custom_ops/test_dfunction.py",
    "tests/checkpoint/test_state_dict.py",
    "tests/layouts/test_factors.py",
    "tests/compat/torch_xla/test_meshes.py",
)
# absl: JAX 0.9.2's kernels for TPUs import it, and JAX doesn't bring it.
ALSO = ("pytest", "pytest-xdist", "expecttest", "safetensors", "matplotlib", "tqdm", "absl-py")


@dataclass(frozen=True)
class Versions:
    python: str
    torch: str
    jax: str

    @property
    def name(self) -> str:
        short = [".".join(v.split(".")[:2]) for v in (self.torch, self.jax)]
        return "-".join([*short, self.python])


# The corners and the diagonal. JAX 0.11 and later need Python 3.12.
ROWS = (
    Versions("3.11", "2.11.0", "0.9.0"),
    Versions("3.12", "2.11.0", "0.12.0.1"),
    Versions("3.11", "2.15.0", "0.9.0"),
    Versions("3.12", "2.15.0", "0.12.0.1"),
    Versions("3.12", "2.12.1", "0.9.2"),
    Versions("3.11", "2.13.0", "0.10.2"),
    Versions("3.13", "2.14.1", "0.11.2"),
)


def interpreter(version: str) -> str:
    """The newest Python of this version: on the path, or pyenv's."""
    found = shutil.which(f"python{version}")
    if (
        found
        and subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode == 0
    ):
        return found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = sorted(pyenv.glob(f"{version}.*/bin/python"))
    if not candidates:
        raise SystemExit(f"Python {version} is neither on the path nor in {pyenv}")
    return str(candidates[-1])


def environment(versions: Versions) -> Path:
    """The Python of an environment with these versions, made if it isn't there."""
    folder = FOLDER / versions.name
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([interpreter(versions.python), "-m", "venv", folder], check=True)
        wanted = [f"torch=={versions.torch}", f"jax=={versions.jax}", f"jaxlib=={versions.jax}"]
        install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        subprocess.run([*install, *wanted, *ALSO], check=True)
        subprocess.run([*install, "--no-deps", "--editable", ROOT], check=True)
        subprocess.run([*install, "scipy", "ml_dtypes", "highspy!=1.16.0"], check=True)
        done.touch()
    return python


def run(versions: Versions, arguments: list[str]) -> tuple[str, float]:
    """What pytest's last line says, and how long it took."""
    begin = time.monotonic()
    command = [environment(versions), "-m", "pytest", "-q", "-m", "not slow", "-n", "2", *arguments]
    own = {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(FOLDER / "jax")}
    process = subprocess.run(
        [*command, "--dist", "worksteal", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(process.stdout, flush=True)
    lines = process.stdout.strip().splitlines()
    counts = re.findall(r"\d+ (?:passed|failed|error|errors|skipped|xfailed)", lines[-1])
    return ", ".join(counts) or f"exit status {process.returncode}", time.monotonic() - begin


def write(results: dict[Versions, tuple[str, float]]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    lines = ["| torch | JAX | Python | tests |", "|---|---|---|---|"]
    for versions, (counts, _) in results.items():
        lines.append(f"| {versions.torch} | {versions.jax} | {versions.python} | {counts} |")
    table = "\n".join(lines) + f"\n\nMade by {commit} on {datetime.date.today()}.\n"
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows by name: see --list")
    parser.add_argument("--list", action="store_true", help="the names of the rows")
    parser.add_argument("--short", action="store_true", help="the tests that take three minutes")
    parser.add_argument("tests", nargs="*", help="tests in place of the usual ones")
    options = parser.parse_args()
    if options.list:
        print("\n".join(row.name for row in ROWS))
        return
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    tests = options.tests or list(SHORT if options.short else TESTS)
    results = {}
    for row in rows:
        print(f"== {row.name}", flush=True)
        results[row] = run(row, tests)
        counts, seconds = results[row]
        print(f"{row.name}: {counts} in {seconds:.0f} s", flush=True)
    if len(rows) == len(ROWS) and tests == list(TESTS):
        write(results)
    if any("passed" not in c or "failed" in c or "error" in c for c, _ in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
