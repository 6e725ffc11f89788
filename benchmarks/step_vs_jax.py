"""The compiled torch training step against a hand-written JAX step of the same model.

Both sides start from the same weights, see the same batches, and use the same mesh, shardings and
optimizer formulas. Step times are taken in one process, in turns; first calls (trace and compile)
in fresh processes, in turns. `--only jax` checks and times the baseline by itself.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# With fewer threads, XLA's simulated CPU devices can deadlock waiting for one another.
os.environ["NPROC"] = "64"

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "train_llama"))

import data
import jax_llama
from hlo import collective_traffic
from model import Llama, ModelConfig
from sharding import shard_batch, shard_model, weight_dims
from train import make_train_step

CONFIG = ModelConfig(dim=256, layers=4, heads=8, kv_heads=4, max_seq=128)
BATCH = 8
MESH_SHAPE, MESH_NAMES = (2, 4), ("dp", "tp")
LR = 3e-3
MAX_NORM = 1.0
CHECKED_STEPS = 8  # whose losses must agree with CPU torch
TOLERANCE = 1e-4

Batch = tuple[Tensor, Tensor]


def make_batches() -> list[Batch]:
    text, _ = data.load()
    stream = data.Batches(text, BATCH, CONFIG.max_seq, seed=0)
    return [next(stream) for _ in range(CHECKED_STEPS)]


def make_model() -> Llama:
    torch.manual_seed(0)
    return Llama(CONFIG)


class TorchSide:
    """examples/train_llama on an "xla" mesh."""

    def __init__(self, batches: list[Batch]) -> None:
        import xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", MESH_SHAPE, mesh_dim_names=MESH_NAMES)
        model = shard_model(make_model(), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        self.compiled_step = xd.compile(make_train_step(model, optimizer, MAX_NORM))
        self.batches = [(shard_batch(x, mesh), shard_batch(y, mesh)) for x, y in batches]

    def step(self, i: int) -> float:
        return self.compiled_step(*self.batches[i % len(self.batches)]).item()

    def program(self) -> Any:
        return self.compiled_step.compiled_programs()[-1]


class JaxSide:
    """jax_llama.py, with the same shardings as examples/train_llama/sharding.py."""

    def __init__(self, batches: list[Batch]) -> None:
        mesh = Mesh(np.array(jax.devices()).reshape(MESH_SHAPE), MESH_NAMES)
        params = {name: p.detach().numpy() for name, p in make_model().named_parameters()}
        shardings = jax_llama.state_shardings({name: self.spec(name) for name in params}, mesh)
        batch_sharding = NamedSharding(mesh, P("dp"))
        self.state = jax_llama.init_state(params, shardings)
        self.train_step = jax_llama.make_train_step(CONFIG, shardings, batch_sharding, MAX_NORM)
        self.batches = [
            tuple(jax.device_put(t.numpy().astype(np.int32), batch_sharding) for t in batch)
            for batch in batches
        ]
        self.lr = np.float32(LR)  # from the host at every step, as a schedule would give it

    @staticmethod
    def spec(name: str) -> P:
        dims = weight_dims(name)
        if dims is None:
            return P()
        entries: list[tuple[str, ...]] = [(), ()]
        for mesh_dim, dim in zip(MESH_NAMES, dims, strict=True):
            entries[dim] += (mesh_dim,)
        return P(*(entry or None for entry in entries))

    def step(self, i: int) -> float:
        batch = self.batches[i % len(self.batches)]
        self.state, loss = self.train_step(self.state, *batch, self.lr)
        return float(loss)

    def program(self) -> Any:
        return self.train_step.lower(self.state, *self.batches[0], self.lr).compile()


SIDES: dict[str, Callable[[list[Batch]], Any]] = {"torch": TorchSide, "jax": JaxSide}


def seconds(call: Callable[[], object]) -> float:
    """Both sides' `step` reads the loss, and so returns when the program has finished."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def check_losses(sides: dict[str, Any], batches: list[Batch]) -> dict[str, float]:
    """Each side's largest difference from CPU torch over the first steps."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    step = make_train_step(model, optimizer, MAX_NORM)
    expected = [step(*batch).item() for batch in batches]
    differences = {}
    for name, side in sides.items():
        losses = [side.step(i) for i in range(len(batches))]
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        if not worst <= TOLERANCE:  # also catches NaN
            raise SystemExit(f"{name}: losses {losses} differ from CPU torch's {expected}")
        differences[name] = worst
    return differences


def step_times(sides: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """One step of each side per round; who goes first alternates."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            times[name].append(seconds(lambda name=name, i=i: sides[name].step(i)))
    return times


def first_call(name: str) -> dict[str, float]:
    """Runs in a fresh process, with the model on the devices before the clock starts."""
    side = SIDES[name](make_batches())
    jax.block_until_ready(jax.live_arrays())
    first = seconds(lambda: side.step(0))
    return {"first": first, "second": seconds(lambda: side.step(1))}


def first_call_times(names: list[str], repeats: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            command = [sys.executable, __file__, "--first-call", name]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            times[name].append(json.loads(output.splitlines()[-1]))
    return {
        name: {key: statistics.median(run[key] for run in runs) for key in ("first", "second")}
        for name, runs in times.items()
    }


def measure(names: list[str], rounds: int, repeats: int) -> dict[str, Any]:
    """The figures of each side, and under "ratio" torch / jax of those that have one."""
    first_calls = first_call_times(names, repeats)
    batches = make_batches()
    sides = {name: SIDES[name](batches) for name in names}
    differences = check_losses(sides, batches)
    times = step_times(sides, rounds)
    result: dict[str, Any] = {}
    for name, side in sides.items():
        program = side.program()
        traffic = collective_traffic(program.as_text())
        result[name] = {
            "step_ms": 1000 * statistics.median(times[name]),
            "first_call_s": first_calls[name]["first"],
            "second_call_s": first_calls[name]["second"],
            "collective_bytes": traffic.total_bytes,
            "collective_count": sum(traffic.counts.values()),
            "collectives": traffic.counts,
            "temp_bytes": program.memory_analysis().temp_size_in_bytes,
            "loss_difference": differences[name],
        }
    if len(sides) == 2:
        keys = ("first_call_s", "collective_bytes", "collective_count", "temp_bytes")
        result["ratio"] = {key: result["torch"][key] / result["jax"][key] for key in keys}
        # Of each round, so that a slow moment of the machine weighs on both sides.
        rounds_ratio = [a / b for a, b in zip(times["torch"], times["jax"], strict=True)]
        result["ratio"]["step_ms"] = statistics.median(rounds_ratio)
    return result


ROWS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("step, median", "step_ms", "{:.1f} ms".format),
    ("first call", "first_call_s", "{:.2f} s".format),
    ("second call", "second_call_s", "{:.2f} s".format),
    ("bytes moved by collectives", "collective_bytes", lambda n: f"{n / 2**20:.1f} MiB"),
    ("number of collectives", "collective_count", str),
    ("peak temporary memory", "temp_bytes", lambda n: f"{n / 2**20:.1f} MiB"),
    ("loss, largest difference from CPU torch", "loss_difference", "{:.1e}".format),
]


def markdown(result: dict[str, Any]) -> str:
    names = [name for name in SIDES if name in result]
    ratios = result.get("ratio", {})
    columns = [*({"torch": "xla_dtensor", "jax": "JAX"}[name] for name in names)]
    columns += ["ratio"] if ratios else []
    lines = [f"| | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|"]
    for title, key, show in ROWS:
        cells = [show(result[name][key]) for name in names]
        if ratios:
            cells.append(f"{ratios[key]:.2f}" if key in ratios else "")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    kinds = [f"{name}: {result[name]['collectives']}" for name in names]
    return "\n".join([*lines, "", *kinds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="timed steps of each side")
    parser.add_argument("--first-calls", type=int, default=3, help="fresh processes of each side")
    parser.add_argument("--only", choices=SIDES, help="measure one side")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--first-call", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", MESH_SHAPE[0] * MESH_SHAPE[1])
    if options.first_call:
        print(json.dumps(first_call(options.first_call)))
        return
    names = [options.only] if options.only else list(SIDES)
    result = measure(names, options.rounds, options.first_calls)
    print(json.dumps(result, indent=2) if options.json else markdown(result))


if __name__ == "__main__":
    main()
