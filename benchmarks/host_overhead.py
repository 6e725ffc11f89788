"""Host time of a compiled call with many arrays, against bare `jax.jit` with the same arrays.

600 parameters in 206 modules, all of them tiny, so that a call is what the host does: checking that
the program is still the step's, handing over its arrays, putting the new ones in place. Every
number of devices has a process of its own, in which all sides take turns.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

# With fewer threads, XLA's simulated CPU devices can deadlock waiting for one another.
os.environ.setdefault("NPROC", "64")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import xla_dtensor as xd

WIDTH, BATCH, BLOCKS, GROUPS = 8, 4, 50, 5
PARAMETERS, MODULES = 600, 206
DROPOUT = 0.1
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-8, 1e-2
CHECKED_STEPS = 8  # whose losses must agree with CPU torch's
TOLERANCE = 2e-3  # each side draws its own dropout masks


class Block(nn.Module):
    """A model of its own with its loss: 12 parameters, and an activation."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.activation: nn.Module = nn.Dropout(DROPOUT) if index % 10 == 4 else nn.SiLU()
        for name in ("a1", "a2", "a3"):
            self.register_parameter(name, nn.Parameter(1 + 0.1 * torch.randn(WIDTH)))
        self.a4 = nn.Parameter(0.1 * torch.randn(WIDTH))
        for name in ("b1", "b2", "b3", "b4"):
            self.register_parameter(name, nn.Parameter(0.01 * torch.randn(WIDTH)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = (self.norm(x) * self.a1 + self.b1) * self.a2 + self.b2
        h = (self.linear(self.activation(h)) * self.a3 + self.b3) * self.a4 + self.b4
        return ((h - y) ** 2).mean()


class Branches(nn.ModuleList):
    """The mean of its modules' losses.

    Were the blocks to depend on each other, XLA's CPU backend would take minutes to compile them:
    without large products in between it computes what they share anew for each parameter.
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return sum(module(x, y) for module in self) / len(self)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(i) for i in range(BLOCKS)]
    bounds = itertools.pairwise(range(0, BLOCKS + 1, BLOCKS // GROUPS))
    model = Branches(Branches(blocks[a:b]) for a, b in bounds)
    assert len(list(model.parameters())) == PARAMETERS
    assert len(list(model.modules())) == MODULES
    return model


def make_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), LR, BETAS, EPS, DECAY)


# --- the sides -------------------------------------------------------------------------------


class CompiledSide:
    """The training step in torch's API."""

    def __init__(self, devices: int) -> None:
        mesh = init_device_mesh("xla", (devices,))
        self.model = make_model()
        for module in self.model.modules():
            for name, p in module.named_parameters(recurse=False):
                on_mesh = distribute_tensor(p.detach(), mesh, [Replicate()])
                module.register_parameter(name, nn.Parameter(on_mesh))
        self.args = [distribute_tensor(t, mesh, [Replicate()]) for t in make_batch()]
        self.step = xd.compile(make_step(self.model, make_optimizer(self.model)))

    def call(self) -> Any:
        return self.step(*self.args)._storage_.array

    def program(self) -> Any:
        return self.step.compiled_programs()[-1]

    def arrays(self) -> tuple[int, int]:
        """The numbers of arrays that go in and come out."""
        program = self.program()
        return len(jax.tree.leaves(program.args_info)), program.out_tree.num_leaves


class JaxSide:
    """The same model and step as one would write them in JAX, the state donated.

    Args:
        tree: hold parameters and moments as nested dicts, not as flat lists.
        counters: how many step counts there are; an expert has one.
    """

    def __init__(self, devices: int, tree: bool, counters: int = 1) -> None:
        replicated = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("d",)), P())
        nested = jax_parameters(make_model())
        structure = jax.tree.structure(nested)

        def train_step(state: Any, x: Any, y: Any, lr: Any) -> Any:
            params, means, squares, counts = state
            key = jax.random.fold_in(jax.random.key(0), counts[0])

            def loss_of(params: Any) -> Any:
                nested = jax.tree.unflatten(structure, jax.tree.leaves(params))
                return jax_model(nested, x, y, key)

            loss, grads = jax.value_and_grad(loss_of)(params)
            lists = [jax.tree.leaves(part) for part in (params, grads, means, squares)]
            counts = [count + 1 for count in counts]
            of_each = counts if len(counts) > 1 else counts * len(lists[0])
            every = zip(*lists, of_each, strict=True)
            updated = [adamw(p, g, mean, square, n, lr) for p, g, mean, square, n in every]
            form = jax.tree.structure(params)
            parts = [jax.tree.unflatten(form, part) for part in zip(*updated, strict=True)]
            return (*parts, counts), loss

        params = nested if tree else jax.tree.leaves(nested)
        counts = [jnp.zeros((), jnp.float32) for _ in range(counters)]
        state = params, *(jax.tree.map(jnp.zeros_like, params) for _ in range(2)), counts
        self.state = jax.device_put(state, replicated)
        self.batch = [jax.device_put(t.numpy(), replicated) for t in make_batch()]
        self.train_step = jax.jit(train_step, donate_argnums=0, out_shardings=replicated)
        self.lr = np.float32(LR)  # from the host at every step, as a schedule would give it

    def call(self) -> Any:
        self.state, loss = self.train_step(self.state, *self.batch, self.lr)
        return loss

    def arrays(self) -> tuple[int, int]:
        state = len(jax.tree.leaves(self.state))
        return state + len(self.batch) + 1, state + 1


def jax_parameters(model: nn.Module) -> list[dict[str, Any]]:
    """Of every block a dict of its parameters."""
    result = []
    for block in itertools.chain.from_iterable(model.children()):
        own: dict[str, Any] = {}
        for path, p in block.named_parameters():
            *inner, name = path.split(".")
            place = own.setdefault(inner[0], {}) if inner else own
            place[name] = jnp.asarray(p.detach().numpy())
        result.append(own)
    return result


def jax_model(blocks: list[dict[str, Any]], x: Any, y: Any, key: Any) -> Any:
    losses = []
    for index, p in enumerate(blocks):
        centered = x - x.mean(-1, keepdims=True)
        h = centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
        h = h * p["norm"]["weight"] + p["norm"]["bias"]
        h = (h * p["a1"] + p["b1"]) * p["a2"] + p["b2"]
        if index % 10 == 4:
            kept = jax.random.bernoulli(jax.random.fold_in(key, index), 1 - DROPOUT, h.shape)
            h = jnp.where(kept, h / (1 - DROPOUT), 0)
        else:
            h = jax.nn.silu(h)
        h = (h @ p["linear"]["weight"].T + p["linear"]["bias"]) * p["a3"] + p["b3"]
        losses.append(jnp.mean((h * p["a4"] + p["b4"] - y) ** 2))
    return sum(losses) / len(losses)


def adamw(p: Any, g: Any, mean: Any, square: Any, count: Any, lr: Any) -> tuple[Any, Any, Any]:
    b1, b2 = BETAS
    mean, square = b1 * mean + (1 - b1) * g, b2 * square + (1 - b2) * g * g
    update = (mean / (1 - b1**count)) / (jnp.sqrt(square / (1 - b2**count)) + EPS)
    return p * (1 - lr * DECAY) - lr * update, mean, square


class BareSide:
    """The executable that XLA made of the compiled step, called with arrays: the least that a call
    of it can take in JAX."""

    def __init__(self, program: Any) -> None:
        self.program = program
        infos, self.tree = jax.tree.flatten(program.args_info[0])
        shardings = jax.tree.leaves(program.input_shardings[0], is_leaf=lambda s: s is None)
        kinds = [(info.shape, jnp.dtype(info.dtype)) for info in infos]
        with jax.enable_x64(True):
            self.inputs = [
                jax.device_put(np.zeros(*kind), s) for kind, s in zip(kinds, shardings, strict=True)
            ]
        outputs = self.outputs()
        # What was donated comes back as an output of the same kind: input i as output j.
        of_kind: dict[Any, list[int]] = defaultdict(list)
        for j, array in enumerate(outputs):
            of_kind[array.shape, array.dtype].append(j)
        self.again = [(i, of_kind[kinds[i]].pop()) for i, info in enumerate(infos) if info.donated]
        self.take(outputs)

    def outputs(self) -> list[Any]:
        return jax.tree.leaves(self.program(*jax.tree.unflatten(self.tree, self.inputs)))

    def take(self, outputs: list[Any]) -> None:
        for i, j in self.again:
            self.inputs[i] = outputs[j]

    def call(self) -> Any:
        outputs = self.outputs()
        self.take(outputs)
        return outputs[0]


# --- measuring -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Time:
    """Of a call, in seconds.

    Attributes:
        wall: from the call to its return.
        thread: during which the calling thread ran. Other programs on the cores don't add to it,
            nor do the threads of several simulated devices; a single device runs in it.
    """

    wall: float
    thread: float


CLOCKS = [field.name for field in fields(Time)]


def timed(call: Callable[[], Any]) -> tuple[Time, Any]:
    """The time of a call that begins with nothing under way, and its result."""
    wall, thread = time.perf_counter(), time.thread_time()
    result = call()
    thread, wall = time.thread_time() - thread, time.perf_counter() - wall
    jax.block_until_ready(result)
    return Time(wall, thread), result


def time_of_checks(step: Any, args: list[Any]) -> Time:
    """Of deciding that a program of ``step`` may run with ``args``."""
    taken, why = timed(lambda: step.why_not(*args))
    assert why is None, why
    return taken


def reference_losses() -> list[float]:
    """CPU torch's."""
    model = make_model()
    step = make_step(model, make_optimizer(model))
    batch = make_batch()
    return [step(*batch).item() for _ in range(CHECKED_STEPS)]


class Builds:
    """What JAX lowers and compiles."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._event)

    def _event(self, event: str, duration: float, **_: Any) -> None:
        kind = {"jaxpr_to_mlir_module_duration": "lowered", "backend_compile_duration": "compiled"}
        name = kind.get(event.rsplit("/", 1)[-1])
        if name is not None:
            self.counts[name] += 1

    def take(self) -> dict[str, int]:
        taken = {name: self.counts[name] for name in ("lowered", "compiled")}
        self.counts.clear()
        return taken


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p10": statistics.quantiles(values, n=10)[0]}


def summary(times: list[Time]) -> dict[str, dict[str, float]]:
    return {clock: spread([getattr(t, clock) for t in times]) for clock in CLOCKS}


def ratios(ours: list[Time], theirs: list[Time], batch: int) -> dict[str, dict[str, float]]:
    """Of the medians of each round: a slow moment of the machine weighs on both."""
    result = {}
    for clock in CLOCKS:
        rounds = [
            [
                statistics.median(getattr(t, clock) for t in own[i : i + batch])
                for i in range(0, len(own), batch)
            ]
            for own in (ours, theirs)
        ]
        result[clock] = spread([a / b for a, b in zip(*rounds, strict=True)])
    return result


def measure(devices: int, rounds: int, batch: int) -> dict[str, Any]:
    """All sides on so many devices, in this process."""
    torch.set_num_threads(1)
    # With it, part of a call would run on after the call has returned (see eager.py).
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_compilation_cache", False)
    expected = reference_losses()

    ours = CompiledSide(devices)
    jax.block_until_ready(jax.live_arrays())
    builds, before = Builds(), 0
    losses: list[float] = []
    first_calls = []
    for _ in range(3):
        builds.take()
        taken, loss = timed(ours.call)
        losses.append(float(loss))
        first_calls.append(
            {"seconds": taken.wall, "runs": ours.step.traces - before, **builds.take()}
        )
        before = ours.step.traces
    check("xla_dtensor", losses + more_losses(ours, losses), expected)
    donated = [i for i in jax.tree.leaves(ours.program().args_info) if i.donated]
    # One as an expert has it, and as many as we have.
    counters = {1, max(1, sum(not info.shape for info in donated))}
    jax_sides = {
        f"jax.jit, {'dicts' if tree else 'lists'}"
        + (f", {count} counters" if count > 1 else ""): JaxSide(devices, tree, count)
        for count in sorted(counters)
        for tree in (False, True)
    }
    jax_first = None
    for name, side in jax_sides.items():
        taken, loss = timed(side.call)
        jax_first = jax_first or taken.wall
        check(name, [float(loss), *more_losses(side, [loss])], expected)
    sides: dict[str, Any] = {"xla_dtensor": ours, **jax_sides}
    arrays = {name: side.arrays() for name, side in sides.items()}
    sides["the executable alone"] = BareSide(ours.program())
    times, checks = take_turns(sides, ours, rounds, batch)
    mine = times["xla_dtensor"]
    return {
        "devices": devices,
        "times": {name: summary(own) for name, own in times.items()},
        "ratios": {
            name: ratios(mine, own, batch) for name, own in times.items() if own is not mine
        },
        "checks": {name: summary(own) for name, own in checks.items()},
        "first calls": first_calls,
        "first call of jax.jit": jax_first,
        "traces while timed": ours.step.traces - before,
        "arrays": arrays,
    }


def more_losses(side: Any, losses: list[Any]) -> list[float]:
    return [float(side.call()) for _ in range(CHECKED_STEPS - len(losses))]


def take_turns(
    sides: dict[str, Any], ours: CompiledSide, rounds: int, batch: int
) -> tuple[dict[str, list[Time]], dict[str, list[Time]]]:
    """Per side the time of every call; and the times of the checks alone, twice in a row."""
    times: dict[str, list[Time]] = {name: [] for name in sides}
    checks: dict[str, list[Time]] = {"after a call": [], "once more": []}
    for side in sides.values():
        timed(side.call)
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            times[name] += [timed(sides[name].call)[0] for _ in range(batch)]
        for _ in range(batch):
            timed(ours.call)  # which leaves little in the caches of the processor
            # The next allocation puts the allocator's bins in order, after all that the call has
            # freed: milliseconds, which are no part of the checks.
            filler = [(j,) for j in range(4096)]
            del filler
            checks["after a call"].append(time_of_checks(ours.step, ours.args))
            checks["once more"].append(time_of_checks(ours.step, ours.args))
    return times, checks


def check(name: str, losses: list[float], expected: list[float]) -> None:
    """The sides must train alike, or their times say nothing."""
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    if not worst <= TOLERANCE:  # also catches NaN
        raise SystemExit(f"{name}: losses {losses} differ from CPU torch's {expected}")


# --- reporting -------------------------------------------------------------------------------


def markdown(results: list[dict[str, Any]]) -> str:
    rows: list[list[str]] = []

    def row(label: str, cells: Iterable[str]) -> None:
        rows.append([label, *cells])

    def ms(times: dict[str, dict[str, float]]) -> str:
        return ", ".join(
            f"{times[clock]['median'] * 1e3:.2f} ({times[clock]['p10'] * 1e3:.2f})"
            for clock in CLOCKS
        )

    def over(ratios: dict[str, dict[str, float]]) -> str:
        return ", ".join(f"{ratios[clock]['median']:.2f}" for clock in CLOCKS)

    heads = [f"{r['devices']} device{'s' if r['devices'] > 1 else ''}" for r in results]
    for name in results[0]["times"]:
        row(f"{name}, ms", (ms(r["times"][name]) for r in results))
    for name in results[0]["checks"]:
        row(f"the checks alone, {name}, ms", (ms(r["checks"][name]) for r in results))
    for name in results[0]["ratios"]:
        row(f"xla_dtensor over {name}", (over(r["ratios"][name]) for r in results))
    for i, which in enumerate(("first", "second", "third")):
        row(f"{which} call", (first_call(r["first calls"][i]) for r in results))
    row("first call of jax.jit", (f"{r['first call of jax.jit']:.2f} s" for r in results))
    row("traces while timed", (str(r["traces while timed"]) for r in results))
    for name in results[0]["arrays"]:
        row(f"arrays in, out: {name}", ("{}, {}".format(*r["arrays"][name]) for r in results))
    title = f"median (10th percentile); {', '.join(CLOCKS)} time"
    lines = [[title, *heads], ["---", *("---:" for _ in heads)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def first_call(entry: dict[str, Any]) -> str:
    if not (entry["runs"] or entry["lowered"] or entry["compiled"]):
        return f"{entry['seconds'] * 1e3:.1f} ms"
    return (
        f"{entry['seconds']:.2f} s ({entry['runs']} traced, {entry['lowered']} lowered, "
        f"{entry['compiled']} compiled)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=20, help="batches of each side")
    parser.add_argument("--batch", type=int, default=4, help="calls per batch")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        (devices,) = options.devices
        print(json.dumps(measure(devices, options.rounds, options.batch)))
        return
    sizes = ["--rounds", str(options.rounds), "--batch", str(options.batch)]
    results = []
    for devices in options.devices:
        command = [sys.executable, __file__, "--here", "--devices", str(devices), *sizes]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results.append(json.loads(output.splitlines()[-1]))
    print(json.dumps(results, indent=2) if options.json else markdown(results))


if __name__ == "__main__":
    main()
