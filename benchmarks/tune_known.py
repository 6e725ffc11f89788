"""`xd.tune` where the answer is known: Llama 3 8B and 70B, long sequences, experts, on pods.

    python benchmarks/tune_known.py                          # estimates of all cases
    python benchmarks/tune_known.py long experts --top 3     # compiled, too
    python benchmarks/tune_known.py --tokens 128 512 4096    # 70B by tokens on a chip

Nothing is run. Without ``--top`` no compiler is asked (of TPUs libtpu describes the topology).
A case is a model of `pods`, its batch, and devices; nothing is said of layouts. The layers are a
scan, each computed again in backward, parameters and AdamW's state float32, products bfloat16.

With ``--tokens`` each device has one sequence of so many tokens: 70B for 64 v5p chips, on meshes of
1, 4 and 16 along tensor parallelism, next to the scaling book's formula
(https://jax-ml.github.io/scaling-book/training/): with F columns of the feed-forward and t chips
along tensor parallelism a layer's products move as much as ``F / (t rings of FSDP) + tokens t /
(rings of tensor parallelism)``, in the same unit for all t.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")

import torch
from pods.model import model_of, step_of
from pods.sizes import MODELS, Sizes, rope_angles

import xla_dtensor as xd
from xla_dtensor.tuning import Configuration, Trial, Tuned


@dataclasses.dataclass(frozen=True)
class Case:
    """What is looked for.

    Attributes:
        model: of `pods.sizes`.
        topology: the devices.
        rows, seq: the batch.
        known: what others say is best.
        holds: whether a configuration is that.
        mesh: sizes of the mesh's dims that are given.
        offload: whether what the layers keep may be in the host's memory.
    """

    model: str
    topology: str
    rows: int
    seq: int
    known: str
    holds: Callable[[Configuration], bool]
    mesh: dict[str, int] | None = None
    offload: bool = False


def along(own: Configuration, name: str) -> dict[str, int | None]:
    """Which dim of the parameter each of the mesh's dims shards."""
    return dict(zip(own.mesh, own.parameters[name], strict=True))


def batch_along(own: Configuration) -> dict[str, int | None]:
    return dict(zip(own.mesh, own.batch, strict=True))


def is_fsdp(own: Configuration) -> bool:
    """Batch over all devices, and parameters cut along the same dims."""
    cut = [dims for dims in own.parameters.values() if any(d is not None for d in dims)]
    return all(d == 0 for d in own.batch) and bool(cut)


def tensor_parallel(own: Configuration) -> int:
    """How many devices have columns of the feed-forward's first product, and the rows of its last;
    1 where it is none."""
    up, down = (along(own, f"layers.0.feed_forward.{name}.weight") for name in ("w1", "w2"))
    shared = [axis for axis, d in batch_along(own).items() if d is None]
    return math.prod(own.mesh[a] for a in shared if up[a] == 0 and down[a] == 1)


def is_context_parallel(own: Configuration) -> bool:
    return 1 in own.batch


def has_experts_apart(own: Configuration) -> bool:
    return 0 in along(own, "layers.0.feed_forward.w1_EDF").values()


CASES = {
    "8b": Case("8b", "v5p:4x4x4", 64, 8192, "FSDP", is_fsdp),
    "70b": Case("70b", "v5p:4x4x4", 64, 512, "FSDP x TP", lambda own: tensor_parallel(own) > 1),
    "long": Case("8b", "v5p:4x4x4", 2, 131072, "sequences cut", is_context_parallel),
    "experts": Case(
        *("mixtral", "h100:4x8", 32, 4096, "experts on an axis"),
        *(has_experts_apart, {"dp": 4, "tp": 8}),
    ),
    "offload": Case(
        *("8b", "v5e:4x4", 16, 16384, "layers' inputs on the host"),
        *(lambda own: own.offload, {"dp": 16}, True),
    ),
    "autoparallel-8b": Case(
        *("8b", "h100:8x8", 16, 8192, "no tensor parallelism in the feed-forward"),
        *(lambda own: tensor_parallel(own) == 1, {"dp": 8, "tp": 8}),
    ),
    "autoparallel-70b": Case(
        *("70b", "h100:32x8", 64, 8192, "tensor parallelism in the feed-forward"),
        *(lambda own: tensor_parallel(own) == 8, {"dp": 32, "tp": 8}),
    ),
}


ALONG = (1, 4, 16)
"""Chips along tensor parallelism: v5p:4x4x4 has three rings of 4."""


def by_the_book(tokens: int, columns: int = 28672) -> int:
    """Along how many of 64 v5p chips products should be cut, if nothing is hidden behind anything:
    what is left of the three rings is FSDP's."""

    def cost(t: int) -> float:
        rings = round(math.log(t, 4))
        return columns / (t * (3 - rings)) + (tokens * t / rings if rings else 0.0)

    return min(ALONG, key=cost)


def by_tokens(tokens: int, minutes: float) -> str:
    """A line of the table by tokens on a chip."""
    case = dataclasses.replace(CASES["70b"], seq=tokens)
    cells, found = [], {}
    for t in ALONG:
        tuned = looked_for(dataclasses.replace(case, mesh={"tp": t, "dp": 64 // t}), 0, minutes)
        print(tuned, flush=True)
        best = next((trial for trial in tuned.trials if trial.fits), tuned.trials[0])
        found[t] = best.estimate.rank
        compute = best.estimate.compute or 0.0
        cells.append(f"{best.estimate.rank * 1e3:.0f} ms ({compute * 1e3:.0f} of it products)")
    chosen = min(found, key=found.__getitem__)
    return f"| {tokens} | {' | '.join(cells)} | {chosen} | {by_the_book(tokens)} |"


def build_of(sizes: Sizes, offload: bool = False) -> Callable[..., Callable[..., Any]]:
    """What `xd.tune` takes; one that may have layers' inputs on the host if ``offload`` is."""

    def either(parallelize: Any, offload: bool) -> Callable[..., Any]:
        model = model_of(sizes)
        for name, table in zip(("cos", "sin"), rope_angles(sizes), strict=True):
            model.register_buffer(name, table)
        parallelize(model)
        layers = xd.scan_layers(model["layers"], recompute=True, offload=offload)
        return step_of(model, model.cos, model.sin, layers, lambda x: x)

    return either if offload else lambda parallelize: either(parallelize, False)


def looked_for(
    case: Case, top: int, minutes: float, pinned: Mapping[str, Any] | None = None
) -> Tuned:
    sizes = dataclasses.replace(Sizes(**MODELS[case.model]), seq=case.seq)
    tokens = torch.zeros(case.rows, case.seq, dtype=torch.int32)
    return xd.tune(
        build_of(sizes, case.offload),
        (tokens, tokens.long()),
        topology=case.topology,
        top=top,
        mesh=case.mesh,
        pinned=pinned,
        recompute=("nothing",),  # each layer is by itself
        minutes=minutes,
    )


def once(path: Path | None, look: Callable[[], Tuned]) -> tuple[Tuned, float]:
    """What is in the file, or what is found, and the CPU seconds that it took."""
    if path is not None and path.exists():
        kept = json.loads(path.read_text())
        return Tuned.from_json(kept["found"]), kept["took"]
    start = time.process_time()
    found = look()
    took = time.process_time() - start
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"found": found.as_json(), "took": took}))
    return found, took


def other(case: Case, found: Tuned) -> Trial | None:
    """The best of those that are on the other side of what is known; None if nothing fits."""
    if not found.fits:
        return None
    side = case.holds(found.best)
    rest = (t for t in found.trials if t.fits and case.holds(t.configuration) != side)
    return next(rest, None)


def row(name: str, case: Case, top: int, minutes: float, kept: Path | None) -> str:
    path = kept and kept / f"known-{name}-{top}.json"
    found, took = once(path, lambda: looked_for(case, top, minutes))
    print(found, flush=True)
    best, second = found.trials[0], other(case, found)
    cells = [
        *(name, f"{case.topology}, {case.rows} x {case.seq}", case.known),
        *(best.configuration.describe(), "yes" if case.holds(best.configuration) else "no"),
        *(_time(best), f"{best.memory / 2**30:.1f} GiB", f"{best.estimate.moved / 2**30:.1f} GiB"),
        "-" if second is None else f"{second.configuration.describe()}: {_time(second)}",
        f"{took:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def _time(trial: Trial) -> str:
    return "-" if trial.seconds is None else f"{trial.seconds * 1e3:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, help="70B by tokens on a chip instead")
    parser.add_argument("--top", type=int, default=0, help="how many are compiled")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each case")
    parser.add_argument("--kept", type=Path, help="a folder: what it has isn't made again")
    given = parser.parse_args()
    cases = {name: CASES[name] for name in given.cases or CASES}
    if given.tokens:
        lines = [by_tokens(tokens, given.minutes) for tokens in given.tokens]
        print("| tokens | tp 1 | tp 4 | tp 16 | found | the book |")
        print("|---:|---:|---:|---:|---:|---:|")
        print("\n".join(lines))
        return
    lines = [row(name, case, given.top, given.minutes, given.kept) for name, case in cases.items()]
    print("| case | devices, batch | known | found | is it | step | memory | moves | else | CPU |")
    print("|---|---|---|---|---|---:|---:|---:|---|---:|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
