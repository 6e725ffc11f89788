"""``python -m tests.suites modules --limit 3 --out modules.jsonl``: torch's own suites."""

from __future__ import annotations

import argparse
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.conftest import make_mesh  # isort: skip  (sets the environment: first)

from tests.conformance.check import Result
from tests.conformance.compare import ERROR, EntryTimeout
from tests.suites import modules, optimizers


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.suites", description=__doc__)
    parser.add_argument("suite", choices=("modules", "optimizers"))
    parser.add_argument("--names", default="", help="entries, comma separated; all if empty")
    parser.add_argument("--limit", type=int, default=4, help="settings per module and mode")
    parser.add_argument("--layouts", type=int, default=1, help="layouts per setting")
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th entry from the i-th")
    parser.add_argument("--out", default="suite.jsonl")
    parser.add_argument("--timeout", type=int, default=1200, help="seconds per entry")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _on_alarm)
    index, count = map(int, options.shard.split("/"))
    wanted = set(filter(None, options.names.split(",")))
    entries = [e for e in _entries(options) if not wanted or e[0] in wanted]
    with Path(options.out).open("w") as file:
        for name, check in entries[index::count]:
            begun = time.monotonic()
            result = _guarded(name, check, options.timeout)
            about = {"suite": options.suite, "mesh": options.mesh, "dtype": "float32"}
            seconds = round(time.monotonic() - begun, 2)
            line = {**vars(result), **about, "limit": options.limit, "seconds": seconds}
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(f"{name}: {result.forms} {seconds} s", flush=True)
            for failure in result.failures:
                print(f"    {failure}", flush=True)


def _entries(options: Any) -> Iterator[tuple[str, Callable[[], Result]]]:
    mesh = make_mesh(options.mesh)
    if options.suite == "modules":
        for entry in modules.module_db():
            yield (
                entry.name,
                lambda entry=entry: modules.check_module(
                    entry, mesh, options.limit, options.layouts
                ),
            )
    else:
        for name, cases in optimizers.by_optimizer().items():
            yield name, lambda name=name, cases=cases: optimizers.check(name, cases, mesh)


def _guarded(name: str, check: Callable[[], Result], timeout: int) -> Result:
    signal.alarm(timeout)
    try:
        return check()
    except EntryTimeout:
        text = f"took over {timeout} s"
    except Exception as error:
        traceback.print_exc()
        text = f"harness: {type(error).__name__}: {error}"[:600]
    finally:
        signal.alarm(0)
    failure = {"form": "harness", "class": ERROR, "sample": 0, "layouts": [], "text": text}
    return Result(name, {"harness": ERROR}, failures=[failure])


def _on_alarm(*_: Any) -> None:
    raise EntryTimeout


if __name__ == "__main__":
    main()
