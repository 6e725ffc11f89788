"""Time per eager call: xla_dtensor, torch's own DTensor, and a bare cached `jax.jit` call.

All three run in one process on one device, the operations on `[64, 64]` float32 tensors, in short
batches that take turns: what else the machine does weighs on all of them alike. Every call is timed
by itself.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "1"

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import xla_dtensor  # noqa: F401  (the "xla" mesh)

# XLA's CPU client runs a small program in the calling thread, unless the one before is still under
# way: then it wakes another thread, for 15 us more, and so does the next call, and the next. Which
# of the two a batch would see is luck, for jax.jit and for us.
jax.config.update("jax_cpu_enable_async_dispatch", False)

N = 64


@dataclass(frozen=True)
class Op:
    """One operation on named inputs (see `inputs`); without a JAX counterpart for what costs JAX
    nothing."""

    name: str
    arguments: str
    torch: Callable[..., Any]
    jax: Callable[..., Any] | None
    grad: bool = False


def gelu(x: Any) -> Any:
    # jax.nn's has erfc, which takes XLA's CPU backend 20 us longer.
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weight + bias


OPS = [
    Op("add", "x y", torch.add, jnp.add),
    Op("add, autograd on", "xg yg", torch.add, jnp.add, grad=True),
    Op("sub, broadcast", "x row", torch.sub, jnp.subtract),
    Op("mul by a number", "x", lambda x: x * 0.5, lambda x: x * 0.5),
    Op("add_", "written y", Tensor.add_, jnp.add),
    Op("relu", "x", torch.relu, jax.nn.relu),
    Op("gelu", "x", F.gelu, gelu),
    Op("where", "mask x y", torch.where, jnp.where),
    Op("sum", "x", torch.sum, jnp.sum),
    Op("mean over a dim", "x", lambda x: x.mean(-1), lambda x: x.mean(-1)),
    Op("softmax", "x", lambda x: x.softmax(-1), lambda x: jax.nn.softmax(x, -1)),
    Op("layer_norm", "x row row", lambda x, w, b: F.layer_norm(x, (N,), w, b), layer_norm),
    Op("mm", "x y", torch.mm, jnp.matmul),
    Op("bmm", "batch batch", torch.bmm, jnp.matmul),
    Op("linear", "x y row", F.linear, lambda x, w, b: x @ w.T + b),
    Op("linear, autograd on", "xg yg row", F.linear, lambda x, w, b: x @ w.T + b, grad=True),
    Op("cat", "x y", lambda x, y: torch.cat([x, y]), lambda x, y: jnp.concatenate([x, y])),
    Op("embedding", "index x", F.embedding, lambda i, w: w[i]),
    Op("index_select", "x index", lambda x, i: x.index_select(0, i), lambda x, i: x[i]),
    Op("clone", "x", torch.clone, jnp.copy),
    Op("view", "x", lambda x: x.view(N // 2, 2 * N), lambda x: x.reshape(N // 2, 2 * N)),
    Op("transpose", "x", lambda x: x.transpose(0, 1), lambda x: x.T),
    Op("slice", "x", lambda x: x[:, : N // 2], lambda x: x[:, : N // 2]),
    Op("detach", "x", Tensor.detach, None),
]


def inputs() -> dict[str, Tensor]:
    """The inputs by name, on the host; those ending in "g" require grad."""
    torch.manual_seed(0)
    return {
        "x": torch.randn(N, N),
        "y": torch.randn(N, N),
        "xg": torch.randn(N, N),
        "yg": torch.randn(N, N),
        "row": torch.randn(N),
        "batch": torch.randn(4, N // 4, N // 4),
        "written": torch.randn(N, N),
        "mask": torch.rand(N, N) > 0.5,
        "index": torch.randint(N, (N,)),
    }


def on_mesh(mesh: DeviceMesh) -> dict[str, DTensor]:
    result = {}
    for name, value in inputs().items():
        result[name] = distribute_tensor(value, mesh, [Replicate()])
        result[name].requires_grad_(name.endswith("g"))
    return result


class Sides:
    """The three systems; each gives a call without arguments for an operation."""

    names = ("xla_dtensor", "torch DTensor", "jax.jit")

    def __init__(self) -> None:
        self.xla = on_mesh(init_device_mesh("xla", (1,)))
        self.gloo = on_mesh(init_device_mesh("cpu", (1,)))
        self.arrays = {name: jnp.asarray(value.numpy()) for name, value in inputs().items()}

    def calls(self, op: Op) -> list[Callable[[], Any] | None]:
        names = op.arguments.split()
        jitted = None if op.jax is None else jax.jit(op.jax)
        return [
            bind(op.torch, [self.xla[n] for n in names]),
            bind(op.torch, [self.gloo[n] for n in names]),
            None if jitted is None else bind(jitted, [self.arrays[n] for n in names]),
        ]


def bind(function: Callable[..., Any], arguments: list[Any]) -> Callable[[], Any]:
    # A lambda of fixed arity calls faster than functools.partial with a starred list.
    if len(arguments) == 1:
        (a,) = arguments
        return lambda: function(a)
    if len(arguments) == 2:
        a, b = arguments
        return lambda: function(a, b)
    a, b, c = arguments
    return lambda: function(a, b, c)


def check(op: Op, calls: list[Callable[[], Any] | None]) -> None:
    """The three must compute the same, or their times say nothing."""
    values: list[Any] = [None if call is None else call() for call in calls]
    expected = values[1].full_tensor().detach()
    torch.testing.assert_close(values[0].detach().cpu(), expected, rtol=1e-4, atol=1e-4)
    if values[2] is not None:
        torch.testing.assert_close(
            torch.tensor(jax.device_get(values[2])), expected, rtol=1e-4, atol=1e-4
        )


def time_calls(call: Callable[[], Any], count: int) -> list[int]:
    """Nanoseconds of each of ``count`` calls."""
    clock = time.perf_counter_ns
    times = []
    result = None
    for _ in range(count):
        start = clock()
        result = call()
        times.append(clock() - start)
    array = getattr(getattr(result, "_storage_", None), "array", result)
    jax.block_until_ready(array)  # the next batch begins with nothing under way
    return times


def measure(op: Op, sides: Sides, rounds: int, batch: int) -> dict[str, list[float]]:
    """Per system the median and the 10th percentile of a call, in microseconds."""
    calls = sides.calls(op)
    times: list[list[int]] = [[] for _ in calls]
    with torch.set_grad_enabled(op.grad):
        check(op, calls)
        for call in calls:
            if call is not None:
                time_calls(call, batch)
        for _ in range(rounds):
            for call, own in zip(calls, times, strict=True):
                if call is not None:
                    own += time_calls(call, batch)
    return {
        name: [statistics.median(own) / 1e3, statistics.quantiles(own, n=10)[0] / 1e3]
        for name, own in zip(sides.names, times, strict=True)
        if own
    }


def report(results: dict[str, dict[str, list[float]]]) -> str:
    ours, theirs, bare = Sides.names
    lines = [
        f"| us per call: median (10th percentile) | {ours} | {theirs} | {bare} "
        f"| over {bare} | of {theirs} |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, r in results.items():
        cells = [f"{r[s][0]:.1f} ({r[s][1]:.1f})" if s in r else "" for s in Sides.names]
        over = f"{r[ours][0] - r[bare][0]:+.1f}" if bare in r else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {over} | {ratio(r):.2f} |")
    middle = statistics.median(map(ratio, results.values()))
    lines += ["", f"Median operation: {middle:.2f} of {theirs}'s time."]
    return "\n".join(lines)


def ratio(result: dict[str, list[float]]) -> float:
    ours, theirs, _ = Sides.names
    return result[ours][0] / result[theirs][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="batches per system and operation")
    parser.add_argument("--batch", type=int, default=30, help="calls per batch")
    parser.add_argument("--only", help="operations whose names contain this")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        sides = Sides()
        results = {
            op.name: measure(op, sides, args.rounds, args.batch)
            for op in OPS
            if args.only is None or args.only in op.name
        }
        dist.destroy_process_group()
    print(json.dumps(results, indent=1) if args.json else report(results))


if __name__ == "__main__":
    main()
