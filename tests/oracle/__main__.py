"""Run scenarios or fuzz chains, and keep the dumps.

    python -m torch.distributed.run --standalone --nproc-per-node 4 \\
        -m tests.oracle --out DIR NAME...
    python -m tests.oracle --out DIR NAME...
    python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m tests.oracle --xla --out DIR NAME...

The first form is torch's DTensor, and each rank writes ``DIR/NAME.RANK.pt``; the second an xla mesh
in one process, and writes ``DIR/NAME.xla.pt``; the third an xla mesh whose devices are shared out
among the processes, and each writes ``DIR/NAME.RANK.pt`` of its own devices. A name is a
scenario's, or ``fuzz:N`` for the chain of seed N (``fuzz:0-199`` for many). Without names: every
scenario of this world size.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.oracle import fuzz
from tests.oracle._harness import (
    Oracle,
    own_ranks,
    run_rank,
    run_xla,
    scenario,
    scenario_names,
)


def _expand(names: list[str]) -> list[str]:
    result = []
    for name in names:
        if name.startswith("fuzz:") and "-" in name:
            first, last = map(int, name.removeprefix("fuzz:").split("-"))
            result += [f"fuzz:{seed}" for seed in range(first, last + 1)]
        else:
            result.append(name)
    return result


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--xla", action="store_true", help="an xla mesh over all processes")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    ranks = 0 if options.xla else int(os.environ.get("WORLD_SIZE", "0"))  # set by torchrun
    if ranks or options.xla:
        torch.set_num_threads(1)
    if ranks:
        # A rank that fails leaves the others waiting in a collective.
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    names = _expand(options.names) or [
        name for name in scenario_names() if not ranks or ranks == scenario(name).WORLD_SIZE
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        began = time.perf_counter()
        if name.startswith("fuzz:"):
            seed, size = int(name.removeprefix("fuzz:")), fuzz.WORLD_SIZE

            def run(oracle: Oracle, seed: int = seed) -> None:
                fuzz.chain(oracle, seed)
        else:
            run, size = scenario(name).main, scenario(name).WORLD_SIZE
        if ranks and size != ranks:
            parser.error(f"{name} wants {size} ranks, not {ranks}")
        try:
            dump = run_rank(run) if ranks else run_xla(run, size)
        except BaseException:
            print(f"tests.oracle: {name} failed", file=sys.stderr, flush=True)
            raise
        file = name.replace(":", "_")
        if options.xla:
            for rank, own in zip(own_ranks(size), dump, strict=True):
                torch.save(own, options.out / f"{file}.{rank}.pt")
        else:
            suffix = str(dist.get_rank()) if ranks else "xla"
            torch.save(dump, options.out / f"{file}.{suffix}.pt")
        if os.environ.get("RANK", "0") == "0":
            print(f"{name} {time.perf_counter() - began:.2f} s", flush=True)
    if ranks:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
