"""Checkpoints of a large model: time next to `dd`, and the memory of the host.

    python benchmarks/checkpoints.py [--gigabytes 2] [--folder /tmp/...]

Memory is the process's peak above what it had before the call (VmHWM, reset before each); on
simulated devices the model itself is in that memory, too.
"""

import argparse
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

# Large blocks go back to the system when they are freed: what malloc keeps is nobody's memory.
if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    os.execv(sys.executable, [sys.executable, *sys.argv])
os.environ.setdefault("NPROC", "64")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

import xla_dtensor as xd

TENSOR = (4096, 8192)  # float32: 128 MiB


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def measured(function: Callable[[], object]) -> tuple[float, int]:
    """Seconds that it takes, and the peak of memory above what there was."""
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = status("VmRSS"), time.perf_counter()
    function()
    return time.perf_counter() - begin, status("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    line = xd.init_device_mesh("xla", (8,), mesh_dim_names=("x",))
    each = 4 * TENSOR[0] * TENSOR[1]
    count = max(1, round(options.gigabytes * 2**30 / each))
    names = [f"layer{i}" for i in range(count)]

    def tensors(on: xd.DeviceMesh, placements: list[Shard]) -> dict[str, torch.Tensor]:
        make = torch.distributed.tensor.rand
        return {name: make(*TENSOR, device_mesh=on, placements=placements) for name in names}

    state = tensors(mesh, [Shard(0), Shard(1)])
    torch.xla.synchronize()
    total = count * each
    folder = Path(tempfile.mkdtemp(prefix="checkpoints", dir=options.folder))
    print(
        f"{count} tensors of {each / 2**20:.0f} MiB, {total / 1e9:.2f} GB, on a 2x4 mesh",
        flush=True,
    )

    def manager(name: str, asynchronous: bool) -> Callable[[], object]:
        def save() -> None:
            objects = {"state": state}
            with xd.checkpoint.CheckpointManager(
                folder / name, objects, asynchronous=asynchronous, keep_last=1
            ) as made:
                made.save(round(time.time()))

        return save

    def dd() -> None:
        command = ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=1M", f"count={total >> 20}"]
        subprocess.run([*command, "conv=fsync"], check=True, stderr=subprocess.DEVNULL)

    writes: dict[str, Callable[[], object]] = {
        "dd, conv=fsync": dd,
        "dcp.save": lambda: dcp.save(state, checkpoint_id=folder / "dcp"),
        "CheckpointManager, at once": manager("at once", False),
        "CheckpointManager, asynchronous": manager("asynchronous", True),
        "save_safetensors": lambda: xd.checkpoint.save_safetensors(state, folder / "safe"),
    }
    rates: dict[str, list[float]] = {name: [] for name in writes}
    peaks: dict[str, list[int]] = {name: [] for name in writes}
    for _ in range(options.repeat):  # in turn, so that the disk's moods meet all of them
        for name, write in writes.items():
            os.sync()
            seconds, peak = measured(write)
            rates[name].append(total / 1e6 / seconds)
            peaks[name].append(peak)
    base = statistics.median(rates["dd, conv=fsync"])
    for name in writes:
        rate, most = statistics.median(rates[name]), statistics.median(peaks[name])
        print(
            f"{name:34} {rate:7.0f} MB/s  {100 * rate / base:4.0f} % of dd"
            f"  peak {most / 2**20:6.0f} MiB, {most / each:5.2f} of a tensor",
            flush=True,
        )

    def compared(name: str, load: Callable[[dict[str, torch.Tensor]], object]) -> None:
        for where, on, placements in (
            ("as saved", mesh, [Shard(0), Shard(1)]),
            ("on another mesh", line, [Shard(1)]),
        ):
            other = tensors(on, placements)
            for tensor in other.values():
                tensor.zero_()
            torch.xla.synchronize()
            seconds, peak = measured(functools.partial(load, other))
            print(
                f"{name + ', ' + where:34} {total / 1e6 / seconds:7.0f} MB/s"
                f"  {'':11}  peak {peak / 2**20:6.0f} MiB, {peak / each:5.2f} of a tensor",
                flush=True,
            )

    def restore(other: dict[str, torch.Tensor]) -> None:
        with xd.checkpoint.CheckpointManager(folder / "at once", {"state": other}) as made:
            made.restore()

    compared("dcp.load", lambda other: dcp.load(other, checkpoint_id=folder / "dcp"))
    compared("CheckpointManager.restore", restore)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
