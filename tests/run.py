"""Runs the tests in the ways that the Makefile names, each a line of `WAYS`.

python tests/run.py quick                       # one test in fifty, a first signal
python tests/run.py fast -- tests/mesh -x       # what follows `--` goes to pytest
python tests/run.py processor 3                 # rounds as another processor
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Another processor rounds in another way. Each of these is another one to MKL, to torch's own
# kernels or to XLA, whose programs have a folder of their own then.
PROCESSORS = (
    {"MKL_CBWR": "COMPATIBLE"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
)
QUICK = 50  # one test in so many
TWO = ("-n", "2", "--dist", "worksteal")


def run(*arguments: str, **environment: str) -> int:
    """pytest's exit status."""
    command = [sys.executable, "-m", "pytest", *TWO, *arguments]
    own = {
        "NPROC": "64",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        **os.environ,
        # The tests start dozens of programs: each would compile the package's source again.
        "PYTHONDONTWRITEBYTECODE": "",
        **environment,
    }
    return subprocess.run(command, cwd=ROOT, env=own, check=False).returncode


def fast(*more: str) -> int:
    """All tests but the slow ones."""
    return run("-m", "not slow", *more)


def slow(*more: str) -> int:
    """The slow tests."""
    return run("-m", "slow", *more)


def quick(*more: str) -> int:
    """One fast test in `QUICK`, the same ones each time, and those of the floors and the README."""
    whole = ["tests/test_layers.py", "tests/test_readme.py"]
    return run("-m", "not slow", "--one-in", str(QUICK), "-q", *more) or run(*whole, "-q")


def audit(*more: str) -> int:
    """The tests of compiled steps, each call compared with a new trace."""
    own = ROOT / "tests" / "compilation"
    others = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if own not in path.parents and "xd.compile" in path.read_text()
    ]
    left_out = "not optim_db and not the_change_shows and not checkpointing"
    marked = ("-m", "not slow", "-k", left_out)
    return run(str(own), *others, *marked, *more, XLA_DTENSOR_AUDIT="1")


def optimized(*more: str) -> int:
    """One fast test in `QUICK`, compiled as users' programs are: the others' with less effort."""
    own = {"XLA_DTENSOR_TESTS_OPTIMIZED": "1"}
    return run("-m", "not slow", "--one-in", str(QUICK), *more, **own)


def processor(number: str, *more: str) -> int:
    """The fast tests as processor 1 to 4 rounds."""
    setting = PROCESSORS[int(number) - 1]
    folder = str(ROOT / ".cache" / f"jax-{number}")
    own = {**setting, "XLA_DTENSOR_CACHE": "off", "JAX_COMPILATION_CACHE_DIR": folder}
    return run("-m", "not slow", *more, **own)


def processors(*more: str) -> int:
    """As all of them, one after the other, until one fails."""
    numbers = map(str, range(1, len(PROCESSORS) + 1))
    return next((code for n in numbers if (code := processor(n, *more))), 0)


def libraries(*more: str) -> int:
    """The tests of other people's libraries, which their environment has."""
    return run("tests/libraries", *more)


_ALL = (quick, fast, slow, audit, optimized, processor, processors, libraries)
WAYS = {way.__name__: way for way in _ALL}


def main() -> int:
    """pytest's exit status."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("way", choices=WAYS, help="which tests")
    parser.add_argument("arguments", nargs="*", help="the processor; what pytest is given")
    options = parser.parse_args()
    return WAYS[options.way](*options.arguments)


if __name__ == "__main__":
    sys.exit(main())
