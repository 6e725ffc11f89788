"""The compiled torch training step against a hand-written JAX step of the same model.

The models are in `steps/`. Both sides start from the same weights, see the same batches, and use
the same mesh, shardings and optimizer formulas. Step times are taken in one process, in turns;
first calls (trace and compile) in fresh processes, in turns. `--only jax` checks and times the
baseline by itself.
"""

import argparse
import functools
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

# What an earlier run compiled would make the first call of one side alone a short one.
os.environ["XLA_DTENSOR_CACHE"] = "off"

import jax
import numpy as np
from history import record
from hlo import collective_traffic
from jax.sharding import Mesh, NamedSharding
from steps import NAMES, load
from steps.case import Batch, Case
from steps.jax_training import Training

CHECKED_STEPS = 8  # whose losses must agree with CPU torch


class TorchSide:
    """The torch model on an "xla" mesh."""

    def __init__(self, case: Case, batches: list[Batch], layouts: Any = None) -> None:
        import xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", case.mesh_shape, mesh_dim_names=case.mesh_names)
        model = case.shard_model(case.make_model(), mesh)
        self.compiled_step = xd.compile(case.make_step(model), layouts=layouts)
        self.batches = [tuple(case.shard_batch(t, mesh) for t in batch) for batch in batches]

    def step(self, i: int) -> float:
        return self.compiled_step(*self.batches[i % len(self.batches)]).item()

    def program(self) -> Any:
        return self.compiled_step.compiled_programs()[-1]


class JaxSide:
    """The same model, step and shardings, written by hand in JAX."""

    def __init__(self, case: Case, batches: list[Batch]) -> None:
        shape, names = case.mesh_shape, case.mesh_names
        mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
        training = Training(
            case.jax_loss, case.jax_optimizer, mesh, case.param_spec, case.batch_spec, case.max_norm
        )
        model = case.make_model()
        params = {name: p.detach().numpy() for name, p in model.named_parameters()}
        kept = model.state_dict().keys()  # not tables, which the other side makes itself
        buffers = {name: narrow(b.numpy()) for name, b in model.named_buffers() if name in kept}
        self.mesh = mesh
        self.train_step: Any
        self.state, self.train_step = training.start(params, buffers)
        where = NamedSharding(mesh, case.batch_spec)
        self.batches = [
            tuple(jax.device_put(narrow(t.numpy()), where) for t in batch) for batch in batches
        ]
        self.lr = np.float32(case.jax_optimizer.lr)  # from the host, as a schedule would give it

    def step(self, i: int) -> float:
        batch = self.batches[i % len(self.batches)]
        with jax.set_mesh(self.mesh):
            self.state, loss = self.train_step(self.state, batch, self.lr)
        return float(loss)

    def program(self) -> Any:
        with jax.set_mesh(self.mesh):
            return self.train_step.lower(self.state, self.batches[0], self.lr).compile()


def narrow(array: np.ndarray) -> np.ndarray:
    """JAX has no 64 bits unless asked."""
    return array.astype(np.int32) if array.dtype == np.int64 else array


SIDES: dict[str, Callable[[Case, list[Batch]], Any]] = {"torch": TorchSide, "jax": JaxSide}


def seconds(call: Callable[[], object]) -> float:
    """Both sides' `step` reads the loss, and so returns when the program has finished."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def check_losses(case: Case, sides: dict[str, Any], batches: list[Batch]) -> dict[str, float]:
    """Each side's largest difference from CPU torch over the first steps."""
    step = case.make_step(case.make_model())
    expected = [step(*batch).item() for batch in batches]
    differences = {}
    for name, side in sides.items():
        losses = [side.step(i) for i in range(len(batches))]
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        if not worst <= case.tolerance:  # also catches NaN
            raise SystemExit(f"{name}: losses {losses} differ from CPU torch's {expected}")
        differences[name] = worst
    return differences


def step_times(
    sides: dict[str, Any], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """One step of each side per round; who goes first alternates.

    Returns:
        by side the seconds of its steps, and the process's CPU seconds in them.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            begin = time.process_time()
            times[name].append(seconds(functools.partial(sides[name].step, i)))
            cpu[name].append(time.process_time() - begin)
    return times, cpu


def of_rounds(ours: list[float], theirs: list[float]) -> float:
    """The median of each round's ratio, so that a slow moment of the machine weighs on both."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def first_call(case: Case, name: str) -> dict[str, float]:
    """Runs in a fresh process, with the model on the devices before the clock starts."""
    side = SIDES[name](case, case.make_batches(2))
    jax.block_until_ready(jax.live_arrays())
    first = seconds(lambda: side.step(0))
    return {"first": first, "second": seconds(lambda: side.step(1))}


def first_call_times(model: str, names: list[str], repeats: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            command = [sys.executable, __file__, "--model", model, "--first-call", name]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            times[name].append(json.loads(output.splitlines()[-1]))
    return {
        name: {key: statistics.median(run[key] for run in runs) for key in ("first", "second")}
        for name, runs in times.items()
    }


def measure(
    model: str, names: list[str], rounds: int, repeats: int, noise: bool = False
) -> dict[str, Any]:
    """The figures of each side, and under "ratio" torch / jax of those that have one; with
    ``noise`` under "noise" what the ratio of times is for two sides that are the same."""
    case = load(model)
    first_calls = first_call_times(model, names, repeats)
    batches = case.make_batches(CHECKED_STEPS)
    sides = {name: SIDES[name](case, batches) for name in names}
    differences = check_losses(case, sides, batches)
    again: dict[str, Any] = {}
    if noise:
        again["jax again"] = JaxSide(case, batches)
        again["jax again"].step(0)
    times, cpu = step_times({**sides, **again}, rounds)
    result: dict[str, Any] = {}
    for name, side in sides.items():
        program = side.program()
        traffic = collective_traffic(program.as_text())
        result[name] = {
            "step_ms": 1000 * statistics.median(times[name]),
            "step_cpu_ms": 1000 * statistics.median(cpu[name]),
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
        result["ratio"]["step_ms"] = of_rounds(times["torch"], times["jax"])
        result["ratio"]["step_cpu_ms"] = of_rounds(cpu["torch"], cpu["jax"])
    if again:
        result["noise"] = {
            "step_ms": of_rounds(times["jax again"], times["jax"]),
            "step_cpu_ms": of_rounds(cpu["jax again"], cpu["jax"]),
        }
    return result


ROWS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("step, median", "step_ms", "{:.1f} ms".format),
    ("CPU time of a step, median", "step_cpu_ms", "{:.1f} ms".format),
    ("first call", "first_call_s", "{:.2f} s".format),
    ("second call", "second_call_s", "{:.2f} s".format),
    ("bytes moved by collectives", "collective_bytes", lambda n: f"{n / 2**20:.1f} MiB"),
    ("number of collectives", "collective_count", str),
    ("peak temporary memory", "temp_bytes", lambda n: f"{n / 2**20:.1f} MiB"),
    ("loss, largest difference from CPU torch", "loss_difference", "{:.1e}".format),
]


def markdown(result: dict[str, Any]) -> str:
    names = [name for name in SIDES if name in result]
    ratios, noise = result.get("ratio", {}), result.get("noise", {})
    columns = [*({"torch": "xla_dtensor", "jax": "JAX"}[name] for name in names)]
    columns += ["ratio"] if ratios else []
    columns += ["JAX again, ratio"] if noise else []
    lines = [f"| | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|"]
    for title, key, show in ROWS:
        cells = [show(result[name][key]) for name in names]
        if ratios:
            cells.append(f"{ratios[key]:.2f}" if key in ratios else "")
        if noise:
            cells.append(f"{noise[key]:.2f}" if key in noise else "")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    kinds = [f"{name}: {result[name]['collectives']}" for name in names]
    return "\n".join([*lines, "", *kinds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=NAMES, nargs="+", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=50, help="timed steps of each side")
    parser.add_argument("--first-calls", type=int, default=3, help="fresh processes of each side")
    parser.add_argument("--only", choices=SIDES, help="measure one side")
    parser.add_argument(
        "--noise", action="store_true", help="the JAX step twice: what the ratio of equal sides is"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not tables")
    parser.add_argument("--record", action="store_true", help="keep the figures in history/")
    parser.add_argument("--first-call", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    if options.first_call:
        print(json.dumps(first_call(load(options.model[0]), options.first_call)))
        return
    names = [options.only] if options.only else list(SIDES)
    results = {
        model: measure(model, names, options.rounds, options.first_calls, options.noise)
        for model in options.model
    }
    if options.record:
        record(Path(__file__).stem, results)
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        print("\n\n".join(f"**{model}**\n\n{markdown(r)}" for model, r in results.items()))


if __name__ == "__main__":
    main()
