"""Runs a library's own tests in slices of processes, and writes down how each test went.

    export PYTHONPATH=XLA_DTENSOR:XLA_DTENSOR/tests/libraries
    python -m their_tests OUT.jsonl --slice 200 -- -p default_device test/nn

What follows ``--`` is pytest's. Programs of ever new shapes make a process grow, so each has a
slice; one that grows over ``--gib`` or dies is replaced, and the test that it was at is written
down as "died". Tests that OUT.jsonl has already are left out: an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

OUT = "XLA_DTENSOR_THEIR_TESTS_OUT"  # the plugin's, below
COLLECTED = "XLA_DTENSOR_THEIR_TESTS_COLLECTED"
CHOSEN = "XLA_DTENSOR_THEIR_TESTS_CHOSEN"


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if CHOSEN in os.environ:
        order = {n: i for i, n in enumerate(Path(os.environ[CHOSEN]).read_text().splitlines())}
        items[:] = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])


def pytest_collection_finish(session: Any) -> None:
    if COLLECTED in os.environ:
        Path(os.environ[COLLECTED]).write_text("\n".join(i.nodeid for i in session.items))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Any:
    write(event="begins", test=item.nodeid)
    before = time.process_time()
    outcome = yield
    rss = psutil.Process().memory_info().rss >> 20
    write(event="ends", test=item.nodeid, cpu=round(time.process_time() - before, 2), rss=rss)
    return outcome


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        why, where = "", []
        if report.skipped:
            why = str(report.longrepr)[-300:]
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = (crash.message if crash else str(report.longrepr))[:1500]
            where = re.findall(r"^(\S+\.py:\d+)", str(report.longrepr), re.M)[-6:]
        write(event=report.outcome, test=report.nodeid, why=why, where=where)


def write(**what: Any) -> None:
    if OUT in os.environ:
        with Path(os.environ[OUT]).open("a") as file:
            file.write(json.dumps(what) + "\n")


def collected(arguments: list[str]) -> list[str]:
    with tempfile.NamedTemporaryFile("r") as found:
        options = ["-q", "-p", "their_tests", "--collect-only", *arguments]
        command = [sys.executable, "-m", "pytest", *options]
        environment = {**os.environ, COLLECTED: found.name}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        return found.read().splitlines()


def results(out: Path) -> dict[str, dict[str, Any]]:
    """What is known of each test: the worst of its phases; "died" if it began and didn't end."""
    rank = ["passed", "skipped", "failed"]
    known: dict[str, dict[str, Any]] = {}
    for line in out.read_text().splitlines() if out.exists() else []:
        said = json.loads(line)
        one = known.setdefault(said["test"], {"event": "died", "why": "", "where": [], "cpu": 0.0})
        if said["event"] in rank:
            if one["event"] == "died" or rank.index(said["event"]) > rank.index(one["event"]):
                one.update({k: said[k] for k in ("event", "why", "where")})
        elif said["event"] == "ends":
            one.update(cpu=said["cpu"], rss=said["rss"])
    return known


def run(tests: list[str], arguments: list[str], out: Path, most: int, limit: float) -> None:
    """One process over these tests."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as chosen:
        chosen.write("\n".join(tests))
        chosen.flush()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "their_tests",
            "--tb=short",
            *arguments,
        ]
        own = {OUT: str(out), CHOSEN: chosen.name}
        log = out.with_suffix(".log").open("a")
        process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)
        watched, last, size = psutil.Process(process.pid), time.monotonic(), 0
        while process.poll() is None:
            time.sleep(0.5)
            now = out.stat().st_size if out.exists() else 0
            if now != size:
                size, last = now, time.monotonic()
            try:
                rss = watched.memory_info().rss
            except psutil.Error:
                break
            if rss > most or time.monotonic() - last > limit:
                process.kill()
        process.wait()


def main() -> None:
    cut = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--slice", type=int, default=200)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a test")
    parser.add_argument("--every", type=int, default=1, help="each n-th test alone")
    given, arguments = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    tests = collected(arguments)[:: given.every]
    print(len(tests), "tests", flush=True)
    empty = 0
    while rest := [t for t in tests if t not in results(given.out)]:
        before = len(rest)
        run(rest[: given.slice], arguments, given.out, int(given.gib * 2**30), given.limit)
        empty = empty + 1 if len([t for t in rest if t not in results(given.out)]) == before else 0
        if empty == 2:
            raise SystemExit(f"nothing ran of {rest[:3]}: see {given.out.with_suffix('.log')}")
    known = [results(given.out)[t] for t in tests]
    print(dict(collections.Counter(k["event"] for k in known)), "CPU", sum(k["cpu"] for k in known))


if __name__ == "__main__":
    main()
