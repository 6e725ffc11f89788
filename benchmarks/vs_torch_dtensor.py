"""FSDP x TP: torch's DTensor in 8 gloo processes against one xla process with 8 simulated devices.

Both run fsdp_tp.py: the same model from the same weights, each data-parallel device with its own
batch. The processes are all alive at once and take turns on the same cores: who has no turn sleeps.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

# With fewer threads, XLA's simulated CPU devices can deadlock waiting for one another.
os.environ.setdefault("NPROC", "64")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "train_llama"))

import data
from fsdp_tp import make_step
from history import record
from hlo import collective_traffic
from model import ModelConfig

MESH_SHAPE, MESH_NAMES = (2, 4), ("dp", "tp")
DEVICES = MESH_SHAPE[0] * MESH_SHAPE[1]
CHECKED_STEPS = 8  # whose losses must agree, on every device
TOLERANCE = 1e-4
PATIENCE = timedelta(hours=1)  # of a process whose turn it isn't


@dataclass(frozen=True)
class Size:
    """Of the model and of the batch of all data-parallel devices."""

    dim: int
    layers: int
    batch: int
    seq: int

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(self.dim, self.layers, heads=8, kv_heads=4, max_seq=self.seq)

    def batches(self, devices: int = MESH_SHAPE[0]) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Endless; each the (tokens, targets) of every data-parallel device."""
        text, _ = data.load()
        stream = data.Batches(text, self.batch, self.seq, seed=0)
        batches = [next(stream) for _ in range(CHECKED_STEPS)]
        for tokens, targets in itertools.cycle(batches):
            parts = (tokens.chunk(devices), targets.chunk(devices))
            yield list(zip(*parts, strict=True))


@dataclass(frozen=True)
class Turn:
    """Some steps in a row: the losses [step][device], and the time from before the first step until
    the last device's loss was read."""

    losses: list[list[float]]
    seconds: float


class Side(Protocol):
    def turn(self, steps: int) -> Turn: ...


class Gloo:
    """Torch's DTensor and FSDP in `torchrun`'s processes, which wait for their turns at a store."""

    def __init__(self, store: dist.TCPStore, launch: subprocess.Popen[bytes]) -> None:
        self.store, self.launch = store, launch
        self.turns = itertools.count()
        for rank in range(DEVICES):
            self._wait(f"ready.{rank}")

    def _wait(self, key: str) -> bytes:
        while not self.store.check([key]):
            if self.launch.poll() is not None:
                raise SystemExit(f"torchrun ended early, with exit code {self.launch.returncode}")
            time.sleep(0.02)
        return self.store.get(key)

    def turn(self, steps: int) -> Turn:
        number = next(self.turns)
        self.store.set(f"turn.{number}", str(steps))
        ranks = [json.loads(self._wait(f"turn.{number}.{rank}")) for rank in range(DEVICES)]
        losses = [list(step) for step in zip(*(r["losses"] for r in ranks), strict=True)]
        return Turn(losses, max(r["seconds"] for r in ranks))


def serve_turns(port: int, size: Size) -> None:
    """What each of `torchrun`'s processes does."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", MESH_SHAPE, mesh_dim_names=MESH_NAMES)
    own = mesh["dp"].get_local_rank()
    batches = (parts[own] for parts in size.batches())
    step = make_step(size.config, mesh, fully_shard)
    take_turns(port, step, batches)


def take_turns(
    port: int, step: Callable[..., Tensor], batches: Iterator[tuple[Tensor, Tensor]]
) -> None:
    """Run ``step`` when it is the processes' turn, until they are told to end."""
    turns = dist.TCPStore("localhost", port, timeout=PATIENCE)
    rank = dist.get_rank()
    turns.set(f"ready.{rank}", "")
    for number in itertools.count():
        if not (steps := int(turns.get(f"turn.{number}"))):
            break
        dist.barrier()
        begin = time.perf_counter()
        losses = [step(*next(batches)).item() for _ in range(steps)]
        result = {"losses": losses, "seconds": time.perf_counter() - begin}
        turns.set(f"turn.{number}.{rank}", json.dumps(result))
    dist.destroy_process_group()


@contextmanager
def gloo(size: Size, script: str = __file__) -> Iterator[Gloo]:
    """The processes, until the end of the block; what they print is shown if they fail."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={DEVICES}", script, "--serve", str(store.port)]
    for name, value in vars(size).items():
        command += [f"--{name}", str(value)]
    with tempfile.TemporaryFile() as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        launch = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            side = Gloo(store, launch)
            yield side
            store.set(f"turn.{next(side.turns)}", "0")
            launch.wait(timeout=60)
        finally:
            if launch.poll() is None:
                launch.terminate()
                launch.wait()
            if launch.returncode:
                output.seek(0)
                sys.stderr.write(output.read().decode()[-10_000:])


class InThisProcess:
    """xla_dtensor on a mesh of this process.

    Args:
        make_step: of the mesh.
        parts: of each batch what each device along ``over`` gets.
        over: a mesh dim.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        make_step: Callable[[Any], Any],
        parts: Iterable[Any],
        over: str,
    ) -> None:
        import jax

        import xla_dtensor as xd

        # `make` asks for one, and a first call is to be a first call.
        jax.config.update("jax_enable_compilation_cache", False)
        mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=names)
        self.step: Any = make_step(mesh)
        self.batches = (
            [xd.from_device_values(list(values), mesh[over]) for values in zip(*batch, strict=True)]
            for batch in parts
        )
        # The model has arrived on the devices before any clock starts.
        jax.block_until_ready(jax.live_arrays())

    def turn(self, steps: int) -> Turn:
        begin = time.perf_counter()
        losses = [self.step(*next(self.batches)).local_values() for _ in range(steps)]
        seconds = time.perf_counter() - begin
        return Turn([[loss.item() for loss in step] for step in losses], seconds)

    def collectives(self) -> dict[str, int]:
        return collective_traffic(self.step.compiled_programs()[-1].as_text()).counts


def xla(size: Size, compiled: bool) -> InThisProcess:
    """The step in this process."""
    import xla_dtensor as xd

    def step(mesh: Any) -> Any:
        made = make_step(size.config, mesh, xd.fully_shard)
        return xd.compile(made) if compiled else made

    return InThisProcess(MESH_SHAPE, MESH_NAMES, step, size.batches(), "dp")


def check_losses(first: dict[str, list[Turn]]) -> float:
    """The largest difference from gloo's loss, on any device in any of the first steps."""
    losses = {
        name: torch.tensor([step for turn in turns for step in turn.losses])
        for name, turns in first.items()
    }
    worst = 0.0
    for name, values in losses.items():
        difference = (values - losses["gloo"]).abs().max().item()
        if not difference <= TOLERANCE:  # also catches NaN
            raise SystemExit(f"{name}: losses\n{values}\ndiffer from gloo's\n{losses['gloo']}")
        worst = max(worst, difference)
    if losses["gloo"].unique(dim=1).shape[1] != MESH_SHAPE[0]:
        raise SystemExit(f"not one loss per data-parallel device:\n{losses['gloo']}")
    return worst


def in_turns(sides: dict[str, Side], steps: int, reverse: bool = False) -> dict[str, Turn]:
    order = list(sides)[:: -1 if reverse else 1]
    return {name: sides[name].turn(steps) for name in order}


def measure(size: Size, rounds: int, steps: int, eager: bool) -> dict[str, Any]:
    """The figures of each side; its "ratio" is gloo's time over its own."""
    with gloo(size) as processes:
        sides: dict[str, Side] = {"gloo": processes, "xla": xla(size, compiled=True)}
        if eager:
            sides["eager"] = xla(size, compiled=False)
        first = [in_turns(sides, n) for n in (1, 1, CHECKED_STEPS - 2)]
        difference = check_losses({name: [turns[name] for turns in first] for name in sides})
        timed = [in_turns(sides, steps, reverse=i % 2 == 1) for i in range(rounds)]
    result: dict[str, Any] = {}
    for name in sides:
        times = [turns[name].seconds / steps for turns in timed]
        result[name] = {
            "step_ms": 1000 * statistics.median(times),
            "fastest_ms": 1000 * min(times),
            "first_call_s": first[0][name].seconds,
            "second_call_s": first[1][name].seconds,
        }
        if name != "gloo":
            # Of each round, so that a slow moment of the machine weighs on both sides.
            ratios = [turns["gloo"].seconds / turns[name].seconds for turns in timed]
            result[name] |= {
                "ratio": statistics.median(ratios),
                "ratio_lowest": min(ratios),
                "ratio_highest": max(ratios),
            }
    result["xla"]["collectives"] = sides["xla"].collectives()  # type: ignore[attr-defined]
    result["loss_difference"] = difference
    return result


def span(figures: dict[str, Any]) -> str:
    if "ratio" not in figures:
        return ""
    return "{ratio:.2f} ({ratio_lowest:.2f} to {ratio_highest:.2f})".format(**figures)


ROWS: list[tuple[str, Callable[[Any], str]]] = [
    ("step, median of the rounds", lambda f: f"{f['step_ms']:.0f} ms"),
    ("step, fastest round", lambda f: f"{f['fastest_ms']:.0f} ms"),
    ("torch DTensor's time over this, median (range)", span),
    ("first call", lambda f: f"{f['first_call_s']:.2f} s"),
    ("second call", lambda f: f"{f['second_call_s']:.2f} s"),
]
COLUMNS = {"gloo": "torch DTensor, 8 processes", "xla": "xla_dtensor", "eager": "the same, eager"}


def markdown(result: dict[str, Any]) -> str:
    names = [name for name in COLUMNS if name in result]
    lines = [f"| | {' | '.join(COLUMNS[name] for name in names)} |", f"|---{'|---:' * len(names)}|"]
    lines += [f"| {row} | {' | '.join(show(result[n]) for n in names)} |" for row, show in ROWS]
    return "\n".join(
        [
            *lines,
            "",
            f"largest difference of a device's loss: {result['loss_difference']:.1e}",
            f"xla_dtensor's collectives: {result['xla']['collectives']}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--dim", type=int, default=256, help="width of the model, in 8 heads")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences, of all devices together")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--eager", action="store_true", help="xla's step without xd.compile, too")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--record", action="store_true", help="keep the figures in history/")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dim % 16 or options.batch % MESH_SHAPE[0] or options.seq % MESH_SHAPE[1]:
        parser.error("--dim must be a multiple of 16, --batch of 2 and --seq of 4")
    size = Size(options.dim, options.layers, options.batch, options.seq)
    if options.serve:
        serve_turns(options.serve, size)
        return
    result = measure(size, options.rounds, options.steps, options.eager)
    if options.record:
        record(Path(__file__).stem, {"size": vars(size), **result})
    print(json.dumps(result, indent=2) if options.json else markdown(result))


if __name__ == "__main__":
    main()
