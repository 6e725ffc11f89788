"""`xd.tune` against plans that people have made: those of `pod_llama.py`, and torchtitan's configs.

    python benchmarks/tune_by_hand.py                       # estimates of all cases
    python benchmarks/tune_by_hand.py v5e-8b --top 2        # compiled, too
    python benchmarks/tune_by_hand.py --top 2 --kept FOLDER # goes on where it was stopped

Nothing is run. In the folder each side of a case leaves what `xd.tune` has found (and what the
compiler has said is kept by the package itself). A case is a model, a batch, devices, and a plan: a
mesh, and which dim of each weight each of its dims shards. The plan is judged as what `xd.tune`
finds is, with the mesh and all parameters given: what is computed lies as is cheapest, so it is at
most what its authors pay.
Model, step and precision are `tune_known.py`'s; each layer is computed again.

torchtitan's configs are `llama3_8b` (FSDP; one sequence of 8192 a GPU) and `llama3_70b` (tensor
parallelism in 8, FSDP; 8 sequences for each of its groups), of b5bcd76c6
(`torchtitan/models/llama3/config_registry.py`). Its 8B keeps what is dear to compute; here all
plans compute each layer again. FSDP there cuts the first dim of what tensor parallelism has left;
here it is the other dim of a matrix, which moves as much.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

from tune_known import Case, looked_for, once

from xla_dtensor.tuning import Trial, Tuned

Plan = Mapping[str, Mapping[str, int]]

COLUMNS = ("layers.*.wq.*", "layers.*.wk.*", "layers.*.wv.*", "*.w1.*", "*.w3.*", "output.*")
ROWS = ("layers.*.wo.*", "*.w2.*")
FSDP: Plan = {"*": {"dp": 0}}
"""Of all parameters the first dim."""
FSDP_TP: Plan = {
    **{name: {"dp": 1, "tp": 0} for name in (*COLUMNS, "embedding.*")},
    **{name: {"dp": 0, "tp": 1} for name in ROWS},
    "*norm.*": {},
}
"""`pods.in_torch`'s."""
TITANS: Plan = {**FSDP_TP, "*norm.*": {"dp": 0}}


def _case(
    model: str, topology: str, rows: int, whose: str, plan: Plan, **mesh: int
) -> tuple[Case, Plan]:
    return Case(model, topology, rows, 8192, whose, lambda own: True, mesh), plan


SIDES = ("hand", "mesh", "found")
"""The plan; what is found on its mesh; and on all meshes."""

CASES = {
    "v5e-8b": _case("8b", "v5e:16x16", 32, "pod_llama", FSDP_TP, dp=32, tp=8),
    "v5p-8b": _case("8b", "v5p:4x4x4", 16, "pod_llama", FSDP_TP, dp=16, tp=4),
    "v5p-70b": _case("70b", "v5p:8x8x8", 64, "pod_llama", FSDP_TP, dp=64, tp=8),
    "h100-8b": _case("8b", "h100:8x8", 8, "pod_llama", FSDP_TP, dp=8, tp=8),
    "h100-70b": _case("70b", "h100:32x8", 32, "pod_llama", FSDP_TP, dp=32, tp=8),
    "titan-8b": _case("8b", "h100:8x8", 64, "torchtitan", FSDP, dp=64),
    "titan-70b": _case("70b", "h100:32x8", 256, "torchtitan", TITANS, dp=32, tp=8),
}


def line(name: str, side: str, found: Tuned, trial: Trial, took: float) -> str:
    """A row of the table: the estimate, and what the compiler says where it was asked."""
    report, estimate = trial.report, trial.estimate
    cells = [name, side, trial.configuration.describe(), _seconds(estimate.seconds)]
    cells += [f"{estimate.memory / 2**30:.1f}", f"{estimate.moved / 2**30:.1f}"]
    if report is None:
        cells += [trial.error.splitlines()[0] if trial.error else "-", "", "", ""]
    else:
        cells += [_seconds(report.scheduled), _seconds(report.bound)]
        cells += [f"{trial.memory / 2**30:.1f}", f"{report.collective_bytes / 2**30:.1f}"]
    cells += [f"{len(found.trials)}", f"{took:.0f} s"]
    return f"| {' | '.join(cells)} |"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--top", type=int, default=0, help="how many are compiled of each side")
    parser.add_argument("--side", choices=SIDES, action="append")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each side of a case")
    parser.add_argument("--kept", type=Path, help="a folder: what it has isn't made again")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    lines = []
    for name in given.cases or CASES:
        case, plan = CASES[name]
        for side in given.side or SIDES:

            def look(side: str = side, case: Case = case, plan: Plan = plan) -> Tuned:
                if side == "hand":
                    return looked_for(case, min(given.top, 1), given.minutes, plan)
                free = case if side == "mesh" else dataclasses.replace(case, mesh=None)
                return looked_for(free, given.top, given.minutes)

            what = f"{name}-{side}-{given.top}.json"
            found, took = once(given.kept and given.kept / what, look)
            print(found, flush=True)
            kind = case.known if side == "hand" else f"found ({side})"
            own = f"{name}: {case.model}, {case.topology}, {case.rows} rows"
            lines.append(line(own, kind, found, found.trials[0], took))
            print(lines[-1], flush=True)
    print(
        "| case | plan | | estimate, ms | GiB | moves, GiB "
        "| compiled, ms | bound, ms | GiB | moves, GiB | looked at | CPU |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
