"""The same step as an expert writes it in JAX, compiled for the same devices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

import xla_dtensor as xd
from pods.sizes import Sizes, rope_angles
from xla_dtensor.lowering.attention.splash import name_of_call
from xla_dtensor.mesh.domains import domains
from xla_dtensor.planning.collectives import collective_traffic, collectives
from xla_dtensor.planning.flops import flops
from xla_dtensor.planning.host_copies import host_copies
from xla_dtensor.planning.links import links
from xla_dtensor.planning.memory import of_compiled
from xla_dtensor.planning.program_text import HloText
from xla_dtensor.planning.rows import exposed_per_dim, rows, seconds_per_dim
from xla_dtensor.planning.schedule import schedule
from xla_dtensor.runtime import gpus


def planned(sizes: Sizes, topology: str, mesh_sizes: dict[str, int]) -> dict[str, Any]:
    with xd.abstract(topology) as block:  # the same chips in the same order
        mesh = xd.init_device_mesh(
            "xla", tuple(mesh_sizes.values()), mesh_dim_names=tuple(mesh_sizes)
        )
        one = xd.distribute_tensor(torch.zeros(8), mesh, [xd.Replicate()] * 2)
        mesh, chips = one._form.frame.jax_mesh, block.topology
    jitted, arguments = step_of(sizes, mesh, sizes.rows(mesh_sizes))
    traced = jitted.trace(*arguments)
    jax.config.update("jax_enable_compilation_cache", False)  # it can't read what is for others
    options = {**chips.compiler_options, **dict(sizes.options)}
    compiled = gpus.compiled(traced.lower(), options)
    memory = of_compiled(compiled, None)
    text = compiled.as_text()
    moved = collective_traffic(text)
    return {
        "memory": memory.needed,
        "temporaries": memory.temporaries,
        "flops": flops(traced.jaxpr.jaxpr, mesh.devices.flat[0].platform).total(),
        "bytes": dict(moved.bytes),
        "counts": dict(moved.counts),
        **in_time(text, mesh, chips.chip),
    }


def in_time(text: str, mesh: jax.sharding.Mesh, chip: Any) -> dict[str, Any]:
    """What a report says of a program's text: what goes over the slow network, how long it takes in
    XLA's order, and how long of that a device waits."""
    program, devices = HloText(text), list(mesh.devices.flat)
    found = collectives(program, mesh.devices.shape, mesh.axis_names, devices)
    over, apart = links(chip, mesh.devices, mesh.axis_names), domains(devices)
    order = schedule(program, found, over, chip, host_copies(program))
    table = rows(found, [], over, order.exposed, apart if len(set(apart)) > 1 else [])
    return {
        "slow": sum(row.slow_bytes for row in table),
        "scheduled": order.seconds,
        "exposed": exposed_per_dim(table),
        "bounds": seconds_per_dim(table),
    }


def step_of(sizes: Sizes, mesh: jax.sharding.Mesh, rows: int) -> tuple[Any, tuple[Any, ...]]:
    """The compiled-to-be step, and what it is called with: shapes, dtypes and shardings of the
    parameters, AdamW's state, and twice a batch of so many ``rows``."""
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
    if sizes.experts:
        # Experts over the second dim of the mesh, all else as FSDP has it.
        dense = {name: s for name, s in shapes.items() if name not in ("w1", "w2", "w3")}
        everywhere = lambda shape: (
            (None,) * (len(shape) - 2) + ((dp, tp),) if len(shape) > 1 else ()
        )
        shapes = {
            name: (shape, () if "norm" in name else everywhere(shape))
            for name, (shape, _) in dense.items()
        } | {
            "router": ((n, d, sizes.experts), (None, (dp, tp))),
            "w1": ((n, sizes.experts, d, sizes.hidden), (None, tp, dp)),
            "w3": ((n, sizes.experts, d, sizes.hidden), (None, tp, dp)),
            "w2": ((n, sizes.experts, sizes.hidden, d), (None, tp, None, dp)),
        }
    if sizes.hsdp:
        over = tp if sizes.hsdp == "shards" else None
        shapes = {
            name: (shape, () if "norm" in name else (None,) * (len(shape) - 2) + (over,))
            for name, (shape, _) in shapes.items()
        }
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed(*s))
        for name, (shape, s) in shapes.items()
    }
    state = (params, params, jax.ShapeDtypeStruct((), jnp.float32, sharding=placed()))
    by = (dp, tp) if sizes.over_both else dp  # of the batch
    batch = jax.ShapeDtypeStruct((rows, sizes.seq), jnp.int32, sharding=placed(by))
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
        kernel = {"gpu": "cudnn", "cpu": "xla"}.get(mesh.devices.flat[0].platform)
        if kernel is not None:
            turned = (t.transpose(0, 2, 1, 3) for t in (q, k, v))  # [b, s, heads, head]
            out = jax.nn.dot_product_attention(*turned, is_causal=True, implementation=kernel)
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
        call = lambda *qkv: jax.vmap(kernel)(*qkv)
        call.__name__ = name_of_call(sizes.seq, sizes.seq, is_causal=True)  # tells its operations
        return jax.jit(call)((q / math.sqrt(sizes.head)).astype(q.dtype), k, v)

    heads = spec(by) if sizes.over_both else spec(dp, tp)
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
        return laid_out(x + (experts(h, p, w) if sizes.experts else feed_forward(h, w)))

    def feed_forward(h: Any, w: Any) -> Any:
        return (jax.nn.silu(h @ w["w1"]) * (h @ w["w3"])) @ w["w2"]

    def experts(x_BSD: Any, p: Any, w: Any) -> Any:  # the letters are `in_torch.Experts`'
        B, E, C = len(x_BSD), sizes.experts, sizes.capacity
        said = jax.lax.with_sharding_constraint
        scores_BSE = x_BSD.astype(wide) @ p["router"]
        weight_BSK, expert_BSK = jax.lax.top_k(scores_BSE, sizes.taken)
        chosen_BKSE = jax.nn.one_hot(expert_BSK, E, dtype=jnp.int32).swapaxes(1, 2)
        queued = jnp.cumsum(chosen_BKSE.reshape(B, -1, E), 1).reshape(chosen_BKSE.shape)
        place_BKS = jnp.sum((queued - 1) * chosen_BKSE, -1)
        slot_BKSC = jax.nn.one_hot(place_BKS, C, dtype=narrow)  # none where there is no place
        gate_BKS = jax.nn.softmax(weight_BSK, -1).swapaxes(1, 2).astype(narrow)
        chosen = chosen_BKSE.astype(narrow)
        dispatch = jnp.einsum("bkse,bksc->bsec", chosen, slot_BKSC)
        combine = jnp.einsum("bkse,bksc->bsec", chosen * gate_BKS[..., None], slot_BKSC)
        # Made where the tokens are, then sent to where the experts are; and back.
        taken = said(jnp.einsum("bsec,bsd->ebcd", dispatch, x_BSD), placed(None, by))
        taken = said(taken, placed(tp, dp))
        hidden = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", taken, w["w1"]))
        hidden *= jnp.einsum("ebcd,edf->ebcf", taken, w["w3"])
        given = said(jnp.einsum("ebcf,efd->ebcd", hidden, w["w2"]), placed(tp, dp))
        return jnp.einsum("bsec,ebcd->bsd", combine, said(given, placed(None, by)))

    def narrow_rows(table: Any, tokens: Any) -> Any:
        return table.astype(narrow)[tokens]

    embedded: Any = narrow_rows
    if sizes.wide_embedding:
        embedded = jax.custom_vjp(narrow_rows)

        def added_up(tokens: Any, grad: Any) -> Any:
            zeros = jnp.zeros((sizes.vocab, sizes.dim), wide)
            return zeros.at[tokens].add(grad.astype(wide)), None

        embedded.defvjp(lambda table, tokens: (table.astype(narrow)[tokens], tokens), added_up)

    def laid_out(x: Any) -> Any:
        if not (sizes.sequence_parallel or sizes.loop or sizes.experts):
            return x
        where = placed(dp, tp) if sizes.sequence_parallel else placed(by)
        return jax.lax.with_sharding_constraint(x, where)

    def loss_of(params: Any, tokens: Any, targets: Any) -> Any:
        of_layer = {k: v for k, v in params.items() if k not in ("embedding", "output", "norm")}
        x = embedded(params["embedding"], tokens)
        x = jax.lax.with_sharding_constraint(x, placed(by))
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
    return jitted, (params, state, batch, batch)
