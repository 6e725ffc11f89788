"""``python -m tests.conformance --names add,mm --limit 3 --out report.jsonl --resume``."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.conftest import make_mesh  # isort: skip  (sets the environment: first)

import torch

from tests.conformance import entries
from tests.conformance.check import FORMS, Result, check_entry
from tests.conformance.compare import ERROR, EntryTimeout
from tests.conformance.compiled import compile_entry


def main() -> None:
    options = _parse()
    if options.restart:
        sys.exit(_supervise(options))
    dtype = getattr(torch, options.dtype)
    mesh = None if options.compile_for else make_mesh(options.mesh)
    index, count = map(int, options.shard.split("/"))
    out, running = Path(options.out), Path(options.out + ".running")
    done = _done(out, running, options) if options.resume else set()
    if not options.resume:
        out.unlink(missing_ok=True)
    signal.signal(signal.SIGALRM, _on_alarm)
    end = time.monotonic() + options.seconds
    for entry in entries.select(options.names)[index::count]:
        name = entries.full_name(entry)
        if name in done or dtype not in entry.supported_dtypes("cpu"):
            continue
        if time.monotonic() > end:
            print("out of time: go on with --resume")
            break
        running.write_text(name)
        begun = time.monotonic()
        result = _guarded(entry, dtype, mesh, options)
        _write(out, result, options, time.monotonic() - begun)
        running.unlink()
    else:
        print(f"complete: {out}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.conformance", description=__doc__)
    parser.add_argument("--names", default="", help="names in op_db, comma separated; all if empty")
    parser.add_argument("--limit", type=int, default=3, help="samples per entry")
    parser.add_argument("--layouts", type=int, default=1, help="layouts per sample")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--forms", default=",".join(FORMS), help="which, comma separated")
    parser.add_argument(
        "--mesh", default="2x4", help="a shape; most samples divide by 5, few by 2x4"
    )
    parser.add_argument(
        "--compile-for", default="", help="compile for this topology (v5e:2x4) and run nothing"
    )
    parser.add_argument(
        "--whole", action="store_true", help="with --compile-for: tensors are replicated"
    )
    parser.add_argument("--out", default="report.jsonl")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th entry from the i-th")
    parser.add_argument("--resume", action="store_true", help="skip what --out has")
    parser.add_argument(
        "--restart", action="store_true", help="go on after an entry that ends the process"
    )
    parser.add_argument("--timeout", type=int, default=60, help="seconds per entry")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    return parser.parse_args()


def _supervise(options: argparse.Namespace) -> int:
    """Run in a process that is started again when an entry has ended it."""
    given = [a for a in sys.argv[1:] if a not in ("--restart", "--resume")]
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-m", "tests.conformance"]
    again = ["--resume"] if options.resume else []
    while True:
        code = subprocess.run([*command, *given, *again]).returncode
        if code == 0 or not Path(options.out + ".running").exists():
            return code
        again = ["--resume"]


def _guarded(entry: Any, dtype: torch.dtype, mesh: Any, options: Any) -> Result:
    # In case that the alarm is never seen: ends the process; --resume notes it and goes on.
    faulthandler.dump_traceback_later(3 * options.timeout, exit=True)
    signal.alarm(options.timeout)
    try:
        if options.compile_for:
            where = options.compile_for, options.mesh
            return compile_entry(entry, dtype, *where, options.limit, options.whole)
        forms = options.forms.split(",")
        return check_entry(entry, dtype, mesh, options.limit, options.layouts, forms)
    except EntryTimeout:
        return _failed(entries.full_name(entry), f"took over {options.timeout} s")
    except Exception as error:
        # The samples themselves failed.
        return _failed(entries.full_name(entry), f"harness: {type(error).__name__}: {error}"[:600])
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def _failed(name: str, text: str) -> Result:
    failure = {"form": "forward", "class": ERROR, "sample": 0, "layouts": [], "text": text}
    return Result(name, {"forward": ERROR}, failures=[failure])


def _on_alarm(*_: Any) -> None:
    raise EntryTimeout


def _done(out: Path, running: Path, options: argparse.Namespace) -> set[str]:
    lines = out.read_text().splitlines() if out.exists() else []
    records = list(map(json.loads, lines))
    # What other code has made is made again.
    done = {r["name"] for r in records if r.get("commit", _commit()) == _commit()}
    if running.exists():
        name = running.read_text()
        if name and name not in done:
            _write(out, _failed(name, "ended the process"), options, 0)
            done.add(name)
        running.unlink()
    return done


def _write(out: Path, result: Result, options: argparse.Namespace, seconds: float) -> None:
    about = {"dtype": options.dtype, "mesh": options.mesh, "limit": options.limit}
    if options.compile_for:
        about |= {"topology": options.compile_for, "whole": options.whole, "commit": _commit()}
    record = {**vars(result), **about, "seconds": round(seconds, 2)}
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    bad = {k: v for k, v in result.forms.items() if v != "pass"}
    print(f"{seconds:6.1f}s {result.name}: {bad or 'pass'}", flush=True)


@functools.cache
def _commit() -> str:
    """Of the code; a plus where it has been changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
