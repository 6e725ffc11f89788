"""What a step whose Python runs in every call (``watch="replay"``) costs the host, and how much of
that is hidden behind the devices: next to a watched step and to eager code.

    python benchmarks/replay.py     # --layers, --milliseconds, --rounds, --calls, --help

The Llama of `examples/train_llama`, forward, backward and AdamW, sharded over a 2x4 mesh of
simulated devices. All modes train models of their own, in one process and in turns, on one batch;
their losses must agree before anything is timed.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "train_llama"))
# With fewer threads, XLA's simulated CPU devices can deadlock waiting for one another.
os.environ.setdefault("NPROC", "64")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import torch
from model import Llama, ModelConfig, next_token_loss
from sharding import shard_batch, shard_model

import xla_dtensor as xd

DIM, HEADS, LENGTH, ROWS = 32, 4, 16, 4
CHECKED_STEPS, TOLERANCE = 4, 1e-4
WARM = 8  # calls before anything is timed: eager code launches its batches as one after a few
MODES = ("watched", "replay", "eager")


class Side:
    """One mode's model and step.

    Attributes:
        threads: that ran the step's Python: the caller's, and the one of autograd for the devices.
    """

    def __init__(self, mode: str, layers: int, rows: int) -> None:
        torch.manual_seed(0)
        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        config = ModelConfig(DIM, layers, HEADS, HEADS, LENGTH)
        self.model = shard_model(Llama(config), mesh)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        tokens, targets = (
            shard_batch(torch.randint(0, config.vocab, (rows, LENGTH)), mesh) for _ in range(2)
        )
        self.threads: set[int] = set()

        def note(*_: Any) -> None:
            self.threads.add(threading.get_ident())

        def step() -> Any:
            loss = next_token_loss(self.model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        watch: Any = "auto" if mode == "watched" else "replay"
        self.step: Any = step if mode == "eager" else xd.compile(step, watch=watch)
        hook = next(self.model.parameters()).register_hook(note)
        note()
        if mode != "watched":
            step()  # its Python runs in autograd's thread, too
        hook.remove()

    def call(self) -> Any:
        return self.step()

    def wait(self) -> None:
        """Until the devices have done all that they were asked for."""
        jax.block_until_ready([p._storage_.array for p in self.model.parameters()])

    def cpu(self) -> float:
        """Seconds that the step's threads have run: the host's time alone, as simulated devices
        have threads of their own, and other programs on the cores don't add to it."""
        return sum(map(time.clock_gettime, map(time.pthread_getcpuclockid, self.threads)))


@dataclass
class Times:
    """Of one mode: per step, in seconds, a list of them per round.

    Attributes:
        host: CPU time of the step's threads.
        alone: from a call to its last value, nothing else being under way.
        following: the same of steps of which only the last is waited for.
    """

    host: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    following: list[float] = field(default_factory=list)

    def take(self, side: Side, calls: int) -> None:
        """One round."""
        hosts, walls = [], []
        for _ in range(calls):
            side.wait()
            cpu, wall = side.cpu(), time.perf_counter()
            side.call()
            hosts.append(side.cpu() - cpu)
            side.wait()
            walls.append(time.perf_counter() - wall)
        self.host.append(statistics.median(hosts))
        self.alone.append(statistics.median(walls))
        wall = time.perf_counter()
        for _ in range(calls):
            side.call()
        side.wait()
        self.following.append((time.perf_counter() - wall) / calls)


def measure(layers: int, rows: int, rounds: int, calls: int) -> tuple[dict[str, Times], int]:
    """All modes in turns; and how many operations the replayed step writes down."""
    sides = {mode: Side(mode, layers, rows) for mode in MODES}
    losses = {}
    for mode, side in sides.items():
        if mode == "watched":
            side.call()  # the others have made a step to find their threads
        losses[mode] = [side.call().item() for _ in range(CHECKED_STEPS)]
    for mode in MODES[1:]:
        pairs = zip(losses[mode], losses["watched"], strict=True)
        if not max(abs(a - b) for a, b in pairs) <= TOLERANCE:  # also catches NaN
            raise SystemExit(f"{mode}: losses differ: {losses}")
    for side in sides.values():
        for _ in range(WARM):
            side.call()
    times = {mode: Times() for mode in MODES}
    for i in range(rounds):
        for mode in MODES[:: 1 if i % 2 else -1]:
            times[mode].take(sides[mode], calls)
    step = sides["replay"].step
    assert step.compilations <= 2, step.recompilations
    (program,) = step._programs.values()
    return times, len(program[-1]._entries)


def batches(layers: int) -> Callable[[int], int]:
    """The size of a batch with which the devices take so many milliseconds for a step."""

    def device(rows: int) -> float:
        side, times = Side("watched", layers, rows), Times()
        for _ in range(WARM):
            side.call()
        times.take(side, WARM)
        return times.alone[0]

    few, many = ROWS, 32 * ROWS
    shortest = device(few)
    each = (device(many) - shortest) / (many - few)

    def size(milliseconds: int) -> int:
        more = (milliseconds / 1e3 - shortest) / each
        return max(ROWS, ROWS * round((few + more) / ROWS))

    return size


# --- reporting -------------------------------------------------------------------------------


def ms(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.1f} ms"


def over(ours: list[float], theirs: list[float]) -> str:
    """The median over rounds: a slow moment of the machine weighs on both."""
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"


def host_row(layers: int, rounds: int, calls: int) -> list[str]:
    times, operations = measure(layers, ROWS, rounds, calls)
    replay = times["replay"]
    each = [seconds / operations for seconds in replay.host]
    return [
        f"{layers} layers, {operations} operations",
        f"{statistics.median(each) * 1e6:.1f} us",
        *(ms(times[mode].host) for mode in MODES),
        over(replay.host, times["watched"].host),
        over(replay.host, times["eager"].host),
    ]


def hidden_row(layers: int, rows: int, rounds: int, calls: int) -> list[str]:
    times, _ = measure(layers, rows, rounds, calls)
    watched, replay = times["watched"], times["replay"]
    # What the devices take, and how much of the host's time isn't waited for besides.
    devices = [a - b for a, b in zip(watched.alone, watched.host, strict=True)]
    each = zip(replay.host, devices, replay.following, strict=True)
    hidden = [(host + device - wall) / min(host, device) for host, device, wall in each]
    longest = [max(pair) for pair in zip(replay.host, devices, strict=True)]
    return [
        f"{ms(devices)} ({layers} layers, batch {rows})",
        ms(replay.host),
        ms(replay.following),
        over(replay.following, longest),
        f"{100 * statistics.median(hidden):.0f} %",
        over(replay.following, watched.following),
        over(times["eager"].following, watched.following),
    ]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12, 32])
    parser.add_argument("--milliseconds", type=int, nargs="*", default=[20, 50, 200])
    parser.add_argument("--hidden-layers", type=int, default=2, help="of the steps of that length")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=8, help="per round and mode")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = [
        "host time of a step",
        "replay, an operation",
        *MODES,
        "replay over watched",
        "over eager",
    ]
    rows = [host_row(layers, args.rounds, args.calls) for layers in args.layers]
    print(table(head, rows), flush=True)
    head = [
        "devices' time of a step",
        "replay, host",
        "replay, a step",
        "over the longer of both",
        "hidden",
        "replay over watched, a step",
        "eager over watched",
    ]
    if not args.milliseconds:
        return
    layers = args.hidden_layers
    sizes = map(batches(layers), args.milliseconds)
    print()
    print(table(head, [hidden_row(layers, rows, args.rounds, args.calls) for rows in sizes]))


if __name__ == "__main__":
    main()
