"""Whether a training has the same bits on each mesh and in each layout, and what that costs.

    python benchmarks/same_bits.py --steps 50
    python benchmarks/same_bits.py --steps 50 --processes 1 2 4

The models of step_vs_jax.py, trained with ``xd.config.reproducible = "across meshes"`` on one
device and on meshes of two to eight: weights whole, cut by `fully_shard`, and cut over both dims of
a mesh. All losses, parameters and buffers are compared to the bit with those of one device, and
with those of a second run. The same layouts without the switch say what it costs: the time of a
step, and what is communicated. With ``--processes`` the layouts of eight devices, shared out among
so many processes, are compared with those of one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["NPROC"] = "64"
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples/train_llama"))

import torch
from steps import llama, moe, resnet
from torch import Tensor, nn

import xla_dtensor as xd
from tests import launch
from xla_dtensor.planning.collectives import collective_traffic

CASES = {"llama": llama.CASE, "resnet": resnet.CASE, "moe": moe.CASE}
DEVICES = 8
TIMED = 5
"""Steps without the switch."""
Place = Callable[[nn.Module, Any], Callable[[Tensor], Tensor]]


def _to_device(model: nn.Module, mesh: None) -> Callable[[Tensor], Tensor]:
    model.to("xla")
    return lambda x: x.to("xla")


def _rows(mesh: Any) -> Callable[[Tensor], Tensor]:
    placements = [xd.Shard(0), *[xd.Replicate()] * (mesh.ndim - 1)]
    return lambda x: xd.distribute_tensor(x, mesh, placements)


def _by_hand(where: Callable[[Tensor, int], Any]) -> Place:
    def place(model: nn.Module, mesh: Any) -> Callable[[Tensor], Tensor]:
        def of(name: str, module: nn.Module, mesh: Any) -> None:
            for key, tensor in [*module.named_parameters(recurse=False)]:
                placements = [where(tensor, dim) for dim in range(mesh.ndim)]
                own = xd.distribute_tensor(tensor.detach(), mesh, placements)
                module.register_parameter(key, nn.Parameter(own))
            for key, tensor in [*module.named_buffers(recurse=False)]:
                whole = xd.distribute_tensor(tensor, mesh, [xd.Replicate()] * mesh.ndim)
                module.register_buffer(key, whole)

        xd.distribute_module(model, mesh, of)
        return _rows(mesh)

    return place


def _fully(model: nn.Module, mesh: Any) -> Callable[[Tensor], Tensor]:
    xd.fully_shard(model, mesh=mesh)
    return _rows(mesh)


def _cut(tensor: Tensor, dim: int) -> Any:
    """The first dim over the first mesh dim, the last one over the second."""
    at = 0 if dim == 0 else tensor.ndim - 1
    return xd.Shard(at) if tensor.ndim > 1 and tensor.shape[at] % 4 == 0 else xd.Replicate()


LAYOUTS: dict[str, tuple[tuple[int, ...], Place]] = {
    "1 device": ((), _to_device),
    "2, weights whole": ((2,), _by_hand(lambda tensor, dim: xd.Replicate())),
    "4, `fully_shard`": ((4,), _fully),
    "8, `fully_shard`": ((8,), _fully),
    "2x2, weights over both": ((2, 2), _by_hand(_cut)),
    "2x4, weights over both": ((2, 4), _by_hand(_cut)),
}


@dataclass
class Run:
    digest: str
    milliseconds: float
    first: float
    megabytes: float


def run(case: Any, layout: str, steps: int, across: bool) -> Run:
    shape, place = LAYOUTS[layout]
    mesh = (
        xd.init_device_mesh("xla", shape, mesh_dim_names=("a", "b")[: len(shape)])
        if shape
        else None
    )
    model = case.make_model()
    put = place(model, mesh)
    with xd.config.override(reproducible="across meshes" if across else "on a mesh"):
        step = xd.compile(case.make_step(model))
    batches = case.make_batches(8)
    losses, seconds = [], []
    for number in range(steps):
        batch = [put(tensor) for tensor in batches[number % len(batches)]]
        begin = time.perf_counter()
        losses.append(whole(step(*batch)))
        seconds.append(time.perf_counter() - begin)
    found = hashlib.sha256()
    for tensor in [*losses, *model.parameters(), *model.buffers()]:
        found.update(whole(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    text = step.compiled_programs()[-1].as_text()
    moved = collective_traffic(text).total_bytes / 1e6
    return Run(found.hexdigest()[:12], 1000 * statistics.median(seconds[1:]), seconds[0], moved)


def whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().cpu()


def in_processes(count: int, model: str, layout: str, steps: int) -> Run:
    """The same in so many processes, which have to agree."""
    command = [__file__, "--steps", str(steps), "--models", model, "--layouts", layout, "--alone"]
    devices = {"JAX_NUM_CPU_DEVICES": str(DEVICES // count), "JAX_PLATFORMS": "cpu"}
    outputs = launch.succeeded(launch.run(command, count, 900, devices))
    runs = [Run(**json.loads(output.splitlines()[-1])) for output in outputs]
    assert len({run.digest for run in runs}) == 1, runs
    return runs[0]


def of_processes(options: argparse.Namespace) -> int:
    """A table of processes; how many of its rows have other bits than the model's first one."""
    print("| model | devices | processes | bits | ms a step | first call, s |")
    print("|---|---|---|---|---|---|")
    differ = 0
    for model in options.models:
        expected = None
        for layout in options.layouts:
            if math.prod(LAYOUTS[layout][0]) != DEVICES:
                continue  # a mesh has the devices of all processes
            for count in options.processes:
                found = in_processes(count, model, layout, options.steps)
                expected = expected or found.digest
                same = found.digest == expected
                differ += not same
                cells = [model, layout, str(count), "the same" if same else "**others**"]
                cells += [f"{found.milliseconds:.0f}", f"{found.first:.1f}"]
                print(f"| {' | '.join(cells)} |", flush=True)
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--models", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--layouts", nargs="+", default=[*LAYOUTS], choices=[*LAYOUTS])
    parser.add_argument("--processes", nargs="+", type=int, help="how many, as 1 2 4")
    parser.add_argument("--alone", action="store_true", help="one row, as JSON")
    options = parser.parse_args()
    if options.alone:
        (model,), (layout,) = options.models, options.layouts
        print(json.dumps(asdict(run(CASES[model], layout, options.steps, True))), flush=True)
        return
    if options.processes:
        sys.exit(bool(of_processes(options)))
    print(
        "| model | devices | bits | ms a step | without | MB | without | first call, s | without |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    differ = 0
    for model in options.models:
        expected = None
        for layout in options.layouts:
            found = run(CASES[model], layout, options.steps, True)
            plain = run(CASES[model], layout, TIMED, False)
            expected = expected or found.digest
            same = found.digest == expected
            differ += not same
            cells = [
                *(model, layout, "the same" if same else "**others**"),
                *(f"{found.milliseconds:.0f}", f"{plain.milliseconds:.0f}"),
                *(f"{found.megabytes:.1f}", f"{plain.megabytes:.1f}"),
                *(f"{found.first:.1f}", f"{plain.first:.1f}"),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
