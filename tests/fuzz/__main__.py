"""Random programs by number: `make fuzz` (README.md beside this file).

python -m tests.fuzz --first 0 --programs 20000 --out .cache/fuzz
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

TIMEOUT = 300  # seconds for a program
COMMAND = (sys.executable, "-W", "ignore", "-m", "tests.fuzz.worker")


class Worker:
    """A process that runs programs, started again when it has died or grown."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = command or COMMAND
        self._process: subprocess.Popen[str] | None = None

    def ask(self, **request: Any) -> dict[str, Any]:
        """What came of a program; where the process died over it, that."""
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # it has died between two programs
        process = self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        try:
            answer = self._answers.get(timeout=TIMEOUT)
        except queue.Empty:
            return self._failed("hung", f"no answer in {TIMEOUT} s")
        if answer is None:
            process.wait()
            return self._failed("died", f"the process ended with {process.returncode}")
        if answer["ends"]:
            self.stop()
        return answer

    def _failed(self, what: str, text: str) -> dict[str, Any]:
        self.stop()
        failure = {"way": "", "kind": "died", "what": what, "text": text}
        return {"failures": [failure], "seconds": 0.0}

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
            self._reader = threading.Thread(
                target=_read, args=(self._process.stdout, self._answers), daemon=True
            )
            self._reader.start()
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes
                self._reader.join()
            self._process = None


def _read(lines: Iterable[str], answers: queue.Queue[Any]) -> None:
    for line in lines:
        answers.put(json.loads(line))
    answers.put(None)


class Totals:
    def __init__(self) -> None:
        self.programs = self.refused = 0
        self.seconds = 0.0
        self.wrong: list[int] = []
        self.messages: collections.Counter[str] = collections.Counter()

    def add(self, answer: dict[str, Any]) -> None:
        self.programs += 1
        self.seconds += answer["seconds"]
        kinds = {failure["kind"] for failure in answer["failures"]}
        if kinds - {"refused"}:
            self.wrong.append(answer["seed"])
        self.refused += kinds == {"refused"}
        for text in {
            re.sub(r"\[[\d, ]*\]", "[..]", f["text"].splitlines()[0])[:160]
            for f in answer["failures"]
            if f["kind"] == "refused"
        }:
            self.messages[text] += 1

    def told(self) -> str:
        each = self.seconds / max(1, self.programs)
        return (
            f"{self.programs} programs, {len(self.wrong)} wrong, {self.refused} refused, "
            f"{each:.2f} CPU seconds each"
        )


def _write_script(worker: Worker, failure: dict[str, Any], seed: int, options: Any) -> None:
    """The failure as a script of a few lines, beside the record."""
    if failure["kind"] == "died":
        _write_script_of_death(seed, options)
        return
    path = options.out / f"seed_{seed}_{failure['way']}.py"
    text = str(path.with_suffix(".txt").absolute())
    found = worker.ask(
        seed=seed, mesh=options.mesh, shrink=failure, within=options.shrink, path=text
    )
    if found.get("script"):
        path.write_text(found["script"])
        print(f"{found['told']}{found['text'][:1000]}\n{found['blamed']}\n{path}\n", flush=True)
    else:
        print(f"seed {seed}: not shrunk", flush=True)


def _write_script_of_death(seed: int, options: Any) -> None:
    """The same where the process has died: each attempt has one of its own."""
    from tests.fuzz.program import Program, packed
    from tests.fuzz.run import WAYS, Failure
    from tests.fuzz.script import script
    from tests.fuzz.seeds import draw
    from tests.fuzz.shrink import shrunk

    def dies(program: Program, way: str) -> bool:
        worker = Worker()
        try:
            answer = worker.ask(seed=seed, program=packed(program), ways=[way])
        finally:
            worker.stop()
        return any(failure["kind"] == "died" for failure in answer["failures"])

    program = draw(seed, options.mesh)
    for way in WAYS:
        if dies(program, way):
            # An attempt takes ten times as long as it does in one process.
            small = shrunk(program, lambda p, way=way: dies(p, way), 10 * options.shrink)
            path = options.out / f"seed_{seed}_{way}.py"
            path.write_text(script(small, Failure(way, "died", "process", ""), seed))
            print(f"{small.told()}the process ends\n{path}\n", flush=True)
            return
    print(f"seed {seed}: no way by itself ends the process", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--programs", type=int, default=200, help="how many seeds")
    parser.add_argument("--minutes", type=float, help="no longer than this")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--mesh", help="in place of the one that a seed draws: 2x4, 4x2, 2x2x2, 8")
    parser.add_argument("--ways", help="of lazy,strict,compiled,outside")
    parser.add_argument("--out", type=Path, default=Path(".cache/fuzz"), help="the record")
    parser.add_argument("--shrink", type=float, default=120, help="seconds to shrink a failure in")
    parser.add_argument("--resume", action="store_true", help="leave out what the record has")
    options = parser.parse_args(arguments)
    ways = options.ways.split(",") if options.ways else None
    options.out.mkdir(parents=True, exist_ok=True)
    record = options.out / "record.jsonl"
    totals, done = Totals(), set()
    if options.resume and record.exists():
        for line in record.read_text().splitlines():
            answer = json.loads(line)
            done.add(answer["seed"])
            totals.add(answer)
    seeds = range(options.first, options.first + options.programs)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    started, worker = time.monotonic(), Worker()
    with record.open("a" if options.resume else "w") as file:
        for seed in seeds:
            if seed in done:
                continue
            if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
                break
            answer = worker.ask(seed=seed, mesh=options.mesh, ways=ways) | {"seed": seed}
            totals.add(answer)
            file.write(json.dumps(answer) + "\n")
            file.flush()
            bad = [f for f in answer["failures"] if f["kind"] != "refused"]
            for failure in bad:
                head = f"seed {seed} {failure['way']} {failure['kind']} {failure['what']}"
                print(f"{head}: {failure['text'][:1000]}", flush=True)
            if bad and options.shrink:
                _write_script(worker, bad[0], seed, options)
            if totals.programs % 50 == 0:
                print(totals.told(), file=sys.stderr, flush=True)
    worker.stop()
    for text, count in totals.messages.most_common():
        print(f"refused {count} times: {text}")
    print(totals.told())
    return int(bool(totals.wrong))


if __name__ == "__main__":
    os.environ.setdefault("NPROC", "64")
    sys.exit(main())
