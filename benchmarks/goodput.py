"""What a training loses when processes and hosts are killed at random moments.

    python benchmarks/goodput.py --kills 20 --steps 300

Hosts are processes of this machine, each with two simulated devices (`tests/elastic/hosts.py`): an
agent (`xla_dtensor.elastic.run`) and the process that it has started. Every other kill is that of a
host, both at once; it comes back when the others have gone on. The rest are processes alone. Steps
take a second; losses and samples of all are compared with CPU torch's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.elastic.hosts import Hosts
from tests.elastic.programs.training import expected, rows

PARTS = ("noticed, met and started", "joined", "restored", "first step", "all")


def starts(folder: Path) -> list[list[float]]:
    path = folder / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def has_come_to(step: int, logged: list[list[Any]]) -> bool:
    """Whether a process has finished so many steps."""
    return max(own[0] for own in logged) >= step


def has_gone_on(folder: Path, known: int, logged: list[list[Any]]) -> bool:
    """Whether there was another start than those known, and a step after it."""
    own = starts(folder)
    return len(own) > known and logged[-1][4] > own[known][2]


def run(folder: Path, count: int, kills: int, steps: int, seed: int) -> dict[str, Any]:
    choose = random.Random(seed)
    lost: list[int] = []
    parts: list[list[float]] = []
    kinds: list[str] = []
    with Hosts(
        folder, ["tests.elastic.programs.training", str(folder), str(steps), "1"], count
    ) as hosts:
        names = [f"host{i}" for i in range(count)]
        for name in names:
            hosts.start(name)
        hosts.wait_for(lambda logged: len(logged) > 2, 600)
        began = time.time()
        for number in range(kills):
            # So that kills are spread over the steps that are left, wherever these are by then.
            at = max(step[0] for step in hosts.steps())
            target = at + max((steps - at) // (kills - number + 1), 1)
            hosts.wait_for(functools.partial(has_come_to, target), 600)
            time.sleep(choose.random() * 0.5)
            victim, kind = choose.choice(names), ("host", "process")[number % 2]
            logged, known, killed = len(hosts.steps()), len(starts(folder)), time.time()
            (hosts.lose if kind == "host" else hosts.kill_process)(victim)
            hosts.wait_for(functools.partial(has_gone_on, folder, known), 600)
            first = starts(folder)[known]
            step = next(s for s in hosts.steps()[logged:] if s[4] > first[2])
            reached = max(s[0] for s in hosts.steps() if s[4] <= killed + 1) + 1
            lost.append(max(int(reached - first[3]), 0))
            moments = [killed, *first[:3], step[4]]
            parts.append([b - a for a, b in itertools.pairwise(moments)] + [step[4] - killed])
            kinds.append(kind)
            print(
                number,
                kind,
                victim,
                "steps lost",
                lost[-1],
                [round(p, 1) for p in parts[-1]],
                flush=True,
            )
            if kind == "host":
                hosts.start(victim)
                hosts.wait_for(lambda log: log[-1][1] == 2 * count, 600)
        hosts.wait_for(lambda log: log[-1][0] == steps - 1, 1200)
        took = time.time() - began
        log = hosts.steps()
    return {"lost": lost, "parts": parts, "kinds": kinds, "log": log, "took": took}


def told(found: dict[str, Any], steps: int) -> str:
    wanted = expected(steps)
    worst = max(abs(loss - wanted[i]) / abs(wanted[i]) for i, _, loss, _, _ in found["log"])
    wrong = sum(samples != rows(i) for i, _, _, samples, _ in found["log"])
    assert {i for i, *_ in found["log"]} == set(range(steps)), "a step is missing"
    lines = [
        f"{len(found['lost'])} kills in {steps} steps, {found['took']:.0f} s; steps lost: "
        f"{sum(found['lost'])} in all, at most {max(found['lost'])} by a kill; losses within "
        f"{worst:.1e} of CPU torch's; steps with other samples: {wrong}",
        "",
        "| seconds from the kill, median (longest) | " + " | ".join(PARTS) + " |",
        "|---|" + "---:|" * len(PARTS),
    ]
    for kind in ("process", "host"):
        of = [p for p, k in zip(found["parts"], found["kinds"], strict=True) if k == kind]
        columns = [f"{statistics.median(c):.1f} ({max(c):.1f})" for c in zip(*of, strict=True)]
        lines.append(f"| {len(of)} times a {kind} | " + " | ".join(columns) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="for logs; by default a temporary one")
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(told(run(folder, given.hosts, given.kills, given.steps, given.seed), given.steps))


if __name__ == "__main__":
    main()
