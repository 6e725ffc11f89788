"""Llama 3 on pods that aren't here: `xd.plan` of a training step next to a hand-written JAX step of
the same, both compiled by the compiler of TPUs or GPUs. Nothing is run.

    python benchmarks/pod_llama.py --topology v5e:16x16 --mesh dp=32,tp=8     # --side, --layers
    python benchmarks/pod_llama.py --model 70b --topology v5p:8x8x8 --mesh dp=64,tp=8
    python benchmarks/pod_llama.py --model 70b --topology h100:32x8 --mesh dp=32,tp=8

FSDP x tensor parallelism: batch over dp, heads and feed-forward over tp, each weight's other dim
over dp. Float32 parameters and AdamW state, bfloat16 computation, S = 8192, one sequence per dp
device; the layers are a scan, each computed again in backward. Needs libtpu, or XLA's GPU compiler
and cuDNN (docs/pods.md).

The JAX step is what is read here: `jax.checkpoint` as it is (``--no-barrier`` for
``prevent_cse=False``), the residual stream laid out once. ``--sequence-parallel`` shards the stream
over tp in both, after each of its sums; ``--loop`` has no scan in either, and lays the stream out
there, too; ``--fully-shard`` lays the layers' column-wise weights out as `fully_shard` over
``ColwiseParallel`` does, their outputs over tp and dp.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.planning.collectives import collective_traffic
from xla_dtensor.planning.flops import flops
from xla_dtensor.planning.memory import of_compiled


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of Llama 3 8B; and how both sides lay it out and compute it."""

    dim: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    layers: int = 32
    seq: int = 8192
    batch: int = 1
    sequence_parallel: bool = False
    loop: bool = False
    fully_shard: bool = False
    barrier: bool = True
    keep: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    head = property(lambda self: self.dim // self.heads)


MODELS: dict[str, dict[str, int]] = {
    "8b": {},
    "70b": {"dim": 8192, "hidden": 28672, "heads": 64, "layers": 80},
    "tiny": {"dim": 512, "hidden": 1024, "heads": 4, "kv_heads": 4, "vocab": 1024, "layers": 3},
}


def rope_angles(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = np.arange(0, sizes.head, 2, dtype=np.float32) / sizes.head
    angles = np.outer(np.arange(sizes.seq, dtype=np.float32), 500_000.0**-exponents)
    return torch.tensor(np.cos(angles)).bfloat16(), torch.tensor(np.sin(angles)).bfloat16()


# --- in torch ------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """Computes in its input's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight, self.eps).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        linear = lambda i, o: Linear(i, o, bias=False)
        self.head, kv = sizes.head, sizes.kv_heads * sizes.head
        self.stream: Any = None  # the mesh and placements of the residual stream, once more
        self.attention_norm = RMSNorm(sizes.dim, eps=1e-5)
        self.wq, self.wo = linear(sizes.dim, sizes.dim), linear(sizes.dim, sizes.dim)
        self.wk, self.wv = linear(sizes.dim, kv), linear(sizes.dim, kv)
        self.ffn_norm = RMSNorm(sizes.dim, eps=1e-5)
        self.w1, self.w3 = linear(sizes.dim, sizes.hidden), linear(sizes.dim, sizes.hidden)
        self.w2 = linear(sizes.hidden, sizes.dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = self.laid_out(x + self.wo(out.transpose(1, 2).flatten(2)))
        h = self.ffn_norm(x)
        return self.laid_out(x + self.w2(F.silu(self.w1(h)) * self.w3(h)))

    def laid_out(self, x: Any) -> Any:
        return x if self.stream is None else x.redistribute(*self.stream)


COLUMNS = ("wq", "wk", "wv", "w1", "w3")
# The dims of a weight that (dp, tp) shard. The table by vocabulary over tp.
DIMS = {
    **dict.fromkeys((*COLUMNS, "output"), (1, 0)),
    **dict.fromkeys(("wo", "w2"), (0, 1)),
    "embedding": (1, 0),
}


def ours(
    sizes: Sizes, topology: str, mesh_sizes: dict[str, int], save: str | None
) -> dict[str, Any]:
    with xd.abstract(topology):
        names = tuple(mesh_sizes)
        mesh = xd.init_device_mesh("xla", tuple(mesh_sizes.values()), mesh_dim_names=names)
        model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(sizes.vocab, sizes.dim),
                "layers": nn.ModuleList(Block(sizes) for _ in range(sizes.layers)),
                "norm": RMSNorm(sizes.dim, eps=1e-5),
                "output": Linear(sizes.dim, sizes.vocab, bias=False),
            }
        )

        def shard(name: str, module: nn.Module, mesh: Any) -> None:
            name = name.rpartition(".")[2]
            dims = DIMS.get(name)
            for key, p in list(module.named_parameters(recurse=False)):
                where = [xd.Replicate()] * 2 if dims is None else [xd.Shard(d) for d in dims]
                if sizes.fully_shard and name in COLUMNS:  # each tp device's part over dp
                    where = [_StridedShard(0, split_factor=mesh.size(1)), xd.Shard(0)]
                laid_out = xd.distribute_tensor(p.data, mesh, where)
                module.register_parameter(key, nn.Parameter(laid_out))

        xd.distribute_module(model, mesh, shard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        replicated, rows = [xd.Replicate()] * 2, [xd.Shard(0), xd.Replicate()]
        stream = rows
        if sizes.sequence_parallel:
            stream = [xd.Shard(0), xd.Shard(1)]
        if sizes.sequence_parallel or sizes.loop:
            for layer in model["layers"]:
                layer.stream = mesh, stream
        cos, sin = (xd.distribute_tensor(t, mesh, replicated) for t in rope_angles(sizes))

        def step(tokens: Any, targets: Any) -> Any:
            x = F.embedding(tokens, model["embedding"].weight.bfloat16())
            x = x.redistribute(mesh, stream)
            if sizes.loop:
                for layer in model["layers"]:
                    x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = xd.scan_layers(model["layers"], recompute=not sizes.keep)(x, cos, sin)
            logits = model["output"](model["norm"](x)).float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        batch = torch.zeros(sizes.batch * mesh_sizes["dp"], sizes.seq, dtype=torch.int32)
        tokens = xd.distribute_tensor(batch, mesh, rows)
        targets = xd.distribute_tensor(batch.long(), mesh, rows)
        report = xd.plan(step, tokens, targets, compiler_options=dict(sizes.options))
    if save:
        report.save(save)
    print(report)
    moved, counts = collections.Counter(), collections.Counter()
    for row in report.collectives:
        moved[row.kind] += row.bytes
        counts[row.kind] += row.count
    return {
        "memory": report.memory.needed,
        "temporaries": report.memory.temporaries,
        "flops": report.flops,
        "bytes": dict(moved),
        "counts": dict(counts),
    }


# --- in JAX --------------------------------------------------------------------------------------


def in_jax(sizes: Sizes, topology: str, mesh_sizes: dict[str, int]) -> dict[str, Any]:
    with xd.abstract(topology) as block:  # the same chips in the same order
        mesh = xd.init_device_mesh(
            "xla", tuple(mesh_sizes.values()), mesh_dim_names=tuple(mesh_sizes)
        )
        one = xd.distribute_tensor(torch.zeros(8), mesh, [xd.Replicate()] * 2)
        mesh, chips = one._form.frame.jax_mesh, block.topology
    dp, tp = mesh.axis_names
    spec = jax.sharding.PartitionSpec
    placed = lambda *s: jax.sharding.NamedSharding(mesh, spec(*s))
    d, n, kv = sizes.dim, sizes.layers, sizes.kv_heads * sizes.head
    head, row = (dp, tp), (tp, dp)  # of [in, out]
    column = (None, (tp, dp)) if sizes.fully_shard else head
    shapes = {
        "embedding": ((sizes.vocab, d), (tp, dp)),
        "output": ((d, sizes.vocab), head),
        "norm": ((d,), ()),
        "wq": ((n, d, d), (None, *column)),
        "wk": ((n, d, kv), (None, *column)),
        "wv": ((n, d, kv), (None, *column)),
        "wo": ((n, d, d), (None, *row)),
        "w1": ((n, d, sizes.hidden), (None, *column)),
        "w3": ((n, d, sizes.hidden), (None, *column)),
        "w2": ((n, sizes.hidden, d), (None, *row)),
        "attention_norm": ((n, d), ()),
        "ffn_norm": ((n, d), ()),
    }
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed(*s))
        for name, (shape, s) in shapes.items()
    }
    state = (params, params, jax.ShapeDtypeStruct((), jnp.float32, sharding=placed()))
    rows = sizes.batch * mesh_sizes["dp"], sizes.seq
    batch = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=placed(dp))
    cos, sin = (jnp.asarray(t.float().numpy(), jnp.bfloat16) for t in rope_angles(sizes))
    wide, narrow = jnp.float32, jnp.bfloat16

    def norm(x: Any, weight: Any) -> Any:
        y = x.astype(wide)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
        return (y * weight).astype(x.dtype)

    def rotate(x: Any, cos: Any, sin: Any) -> Any:  # [b, s, heads, head]
        first, second = jnp.split(x, 2, axis=-1)
        c, s = cos[:, None, :], sin[:, None, :]
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    def attend(q: Any, k: Any, v: Any) -> Any:
        if mesh.devices.flat[0].platform == "gpu":
            turned = (t.transpose(0, 2, 1, 3) for t in (q, k, v))  # [b, s, heads, head]
            out = jax.nn.dot_product_attention(*turned, is_causal=True, implementation="cudnn")
            return out.transpose(0, 2, 1, 3)
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as splash,
        )
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_mask as masks,
        )

        size = 512
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([masks.CausalMask((sizes.seq, sizes.seq))] * q.shape[1]),
            block_sizes=splash.BlockSizes(
                block_q=size, block_kv=size, block_kv_compute=size, block_q_dkv=size,
                block_kv_dkv=size, block_kv_dkv_compute=size, block_q_dq=size, block_kv_dq=size,
            ),
            head_shards=1, q_seq_shards=1,
        )  # fmt: skip
        return jax.vmap(kernel)((q / math.sqrt(sizes.head)).astype(q.dtype), k, v)

    heads = spec(dp, tp)
    attention = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads, check_vma=False
    )

    def block(x: Any, p: Any) -> Any:
        w = {name: value.astype(narrow) for name, value in p.items()}
        h = norm(x, p["attention_norm"])
        split = lambda t: t.reshape(*t.shape[:2], -1, sizes.head)
        q, k, v = (split(h @ w[name]) for name in ("wq", "wk", "wv"))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = attention(*(t.transpose(0, 2, 1, 3) for t in (q, k, v)))
        x = laid_out(x + out.transpose(0, 2, 1, 3).reshape(x.shape) @ w["wo"])
        h = norm(x, p["ffn_norm"])
        return laid_out(x + (jax.nn.silu(h @ w["w1"]) * (h @ w["w3"])) @ w["w2"])

    def laid_out(x: Any) -> Any:
        if not (sizes.sequence_parallel or sizes.loop):
            return x
        where = placed(dp, tp) if sizes.sequence_parallel else placed(dp)
        return jax.lax.with_sharding_constraint(x, where)

    def loss_of(params: Any, tokens: Any, targets: Any) -> Any:
        of_layer = {k: v for k, v in params.items() if k not in ("embedding", "output", "norm")}
        x = params["embedding"].astype(narrow)[tokens]
        x = jax.lax.with_sharding_constraint(x, placed(dp))
        x = laid_out(x)
        layer = block if sizes.keep else jax.checkpoint(block, prevent_cse=sizes.barrier)
        if sizes.loop:
            for i in range(n):
                x = layer(x, {name: value[i] for name, value in of_layer.items()})
        else:
            x = jax.lax.scan(lambda x, p: (layer(x, p), None), x, of_layer)[0]
        logits = (norm(x, params["norm"]) @ params["output"].astype(narrow)).astype(wide)
        logs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(logs, targets[..., None], axis=-1))

    def step(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets)
        first, second, count = state
        count = count + 1
        one, two = 1 - 0.9**count, 1 - 0.999**count
        first = jax.tree.map(lambda m, g: m + 0.1 * (g - m), first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)

        def updated(p: Any, m: Any, v: Any) -> Any:
            return p * (1 - 3e-4 * 0.01) - 3e-4 * (m / one) / (jnp.sqrt(v / two) + 1e-8)

        return loss, jax.tree.map(updated, params, first, second), (first, second, count)

    kept = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(None, *kept))
    traced = jitted.trace(params, state, batch, batch)
    jax.config.update("jax_enable_compilation_cache", False)  # it can't read what is for others
    platform = mesh.devices.flat[0].platform
    compiled = traced.lower().compile({**chips.compiler_options, **dict(sizes.options)})
    memory = of_compiled(compiled, None)
    moved = collective_traffic(compiled.as_text())
    return {
        "memory": memory.needed,
        "temporaries": memory.temporaries,
        "flops": flops(traced.jaxpr.jaxpr, platform).total(),
        "bytes": dict(moved.bytes),
        "counts": dict(moved.counts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:16x16")
    parser.add_argument("--mesh", default="dp=32,tp=8")
    parser.add_argument("--side", choices=("ours", "jax"), action="append")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq", type=int, default=Sizes.seq)
    parser.add_argument("--batch", type=int, default=1, help="sequences per dp device")
    parser.add_argument("--sequence-parallel", action="store_true", help="the stream over tp, too")
    parser.add_argument("--fully-shard", action="store_true", help="columns over tp and dp")
    parser.add_argument("--loop", action="store_true", help="no scan")
    parser.add_argument("--keep", action="store_true", help="keep what backward needs, in both")
    parser.add_argument("--option", action="append", default=[], help="of XLA's: NAME=VALUE")
    parser.add_argument("--no-barrier", action="store_true", help="JAX with prevent_cse=False")
    parser.add_argument("--report", help="where to save our report: .json, .txt or .png")
    given = parser.parse_args()
    sizes = Sizes(
        **MODELS[given.model],
        seq=given.seq,
        batch=given.batch,
        sequence_parallel=given.sequence_parallel,
        loop=given.loop,
        fully_shard=given.fully_shard,
        barrier=not given.no_barrier,
        keep=given.keep,
        options=tuple(
            (name, json.loads(value)) for name, value in (one.split("=", 1) for one in given.option)
        ),
    )
    if given.layers is not None:
        sizes = dataclasses.replace(sizes, layers=given.layers)
    mesh = {name: int(size) for name, _, size in (d.partition("=") for d in given.mesh.split(","))}
    found = {}
    for side in given.side or ("ours", "jax"):
        start = time.process_time(), time.perf_counter()
        if side == "ours":
            found[side] = ours(sizes, given.topology, mesh, given.report)
        else:
            found[side] = in_jax(sizes, given.topology, mesh)
        took = time.process_time() - start[0], time.perf_counter() - start[1]
        found[side]["cpu_seconds"], found[side]["seconds"] = (round(t, 1) for t in took)
        found[side]["total"] = sum(found[side]["bytes"].values())
        print(side, json.dumps(found[side]), flush=True)
    if len(found) > 1:
        for name in ("memory", "total", "flops"):
            print(f"{name}: {found['ours'][name] / found['jax'][name]:.3f} of JAX's")


if __name__ == "__main__":
    main()
