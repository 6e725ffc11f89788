"""The training step in torch, planned for devices that aren't here."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from pods.model import in_turn, model_of, step_of
from pods.sizes import Sizes, rope_angles

COLUMNS = ("wq", "wk", "wv", "w1", "w3")
# The dims of a weight that (dp, tp) shard. The table by vocabulary over tp.
DIMS = {
    **dict.fromkeys((*COLUMNS, "output"), (1, 0)),
    **dict.fromkeys(("wo", "w2"), (0, 1)),
    "embedding": (1, 0),
}
# Of a model with experts: those over the second dim of the mesh, all else as FSDP has it.
EXPERT_DIMS = {"w1_EDF": (1, 0), "w3_EDF": (1, 0), "w2_EFD": (2, 0)}


def lay_out(model: nn.Module, sizes: Sizes, mesh: Any) -> None:
    """Shards weights over the mesh's two dims."""

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        name = name.rpartition(".")[2]
        for key, p in list(module.named_parameters(recurse=False)):
            dims = DIMS.get(name)
            if sizes.experts:
                dims = EXPERT_DIMS.get(key, (0, 0) if p.ndim > 1 else None)
            where = [xd.Replicate()] * 2 if dims is None else [xd.Shard(d) for d in dims]
            if sizes.hsdp:
                inside = xd.Shard(0) if sizes.hsdp == "shards" else xd.Replicate()
                where = [xd.Replicate(), inside]
            if sizes.fully_shard and name in COLUMNS:  # each tp device's part over dp
                where = [_StridedShard(0, split_factor=mesh.size(1)), xd.Shard(0)]
            laid_out = xd.distribute_tensor(p.data, mesh, where)
            module.register_parameter(key, nn.Parameter(laid_out))

    xd.distribute_module(model, mesh, shard)


def planned(
    sizes: Sizes, topology: str, mesh_sizes: dict[str, int], save: str | None
) -> dict[str, Any]:
    with xd.abstract(topology):
        names = tuple(mesh_sizes)
        mesh = xd.init_device_mesh("xla", tuple(mesh_sizes.values()), mesh_dim_names=names)
        model = model_of(sizes)
        lay_out(model, sizes, mesh)
        replicated, rows = [xd.Replicate()] * 2, [xd.Shard(0), xd.Replicate()]
        if sizes.over_both:
            rows = [xd.Shard(0)] * 2
        stream = rows
        if sizes.sequence_parallel:
            stream = [xd.Shard(0), xd.Shard(1)]
        if sizes.sequence_parallel or sizes.loop:
            for layer in model["layers"]:
                layer.stream = mesh, stream
        cos, sin = (xd.distribute_tensor(t, mesh, replicated) for t in rope_angles(sizes))
        if sizes.loop:
            layers = in_turn(model["layers"], sizes.keep)
        else:
            layers = xd.scan_layers(model["layers"], recompute=not sizes.keep)
        step = step_of(model, cos, sin, layers, lambda x: x.redistribute(mesh, stream))
        batch = torch.zeros(sizes.rows(mesh_sizes), sizes.seq, dtype=torch.int32)
        tokens = xd.distribute_tensor(batch, mesh, rows)
        targets = xd.distribute_tensor(batch.long(), mesh, rows)
        report = xd.plan(step, tokens, targets, compiler_options=dict(sizes.options))
    if save:
        report.save(save)
    print(report)
    moved, counts = collections.Counter[str](), collections.Counter[str]()
    for row in report.collectives:
        moved[row.kind] += row.bytes
        counts[row.kind] += row.count
    return {
        "memory": report.memory.needed,
        "temporaries": report.memory.temporaries,
        "flops": report.flops,
        "bytes": dict(moved),
        "counts": dict(counts),
        "slow": report.slow_bytes,
        "scheduled": report.scheduled,
        "exposed": report.exposed,
        "bounds": report.seconds,
        "gradient_shard": sum(one.bytes for one in report.inputs if one.kind == "parameter"),
    }
