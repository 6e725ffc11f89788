"""What the programs of a row move and hold: compiled for simulated devices and run there, or
compiled for devices that aren't here."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from step_vs_jax import JaxSide, TorchSide, narrow
from steps.case import Batch, Case
from steps.jax_training import Training
from torch.distributed.tensor import Replicate

import xla_dtensor as xd
from sweep.layouts import OnMesh
from sweep.models import MODELS
from sweep.sides import case
from xla_dtensor.planning.collectives import HloCollective, collectives
from xla_dtensor.rules import cost
from xla_dtensor.runtime import gpus
from xla_dtensor.runtime.program_cache import not_kept

SIDES = ("step", "torch", "alone", "expert")
OURS = SIDES[:2]  # by how `xd.compile` lays out what is inside of the step
STEPS = 2  # whose losses must agree with CPU torch's: the second has seen an update


def microseconds(one: HloCollective) -> float:
    """What a collective takes, once, by the link model of `xla_dtensor.rules.cost`.

    Args:
        one: of a compiled program.

    Returns:
        microseconds, of which only ratios mean something: the model's link is that of one host.
    """
    if one.kind in ("collective-permute", "collective-broadcast"):
        return cost.STARTUP_US + cost.HOP_US + one.bytes / cost.BYTES_PER_US
    kind = one.kind.removeprefix("ragged-")
    total = one.bytes * one.size if kind == "reduce-scatter" else one.bytes
    return cost.Collective(kind, None, one.size, total).cost


def figures(program: Any, on: OnMesh) -> dict[str, Any]:
    """What a program does on one device in a step.

    Args:
        program: a ``jax.stages.Compiled``.
        on: the layout.

    Returns:
        "bytes" of the collectives' results, their "count", their estimated time in "us", bytes of
        "temporaries", "flops" as XLA counts them, and "kinds", the counts by kind.
    """
    found = collectives(program.as_text(), on.shape, on.axes)
    kinds: dict[str, int] = {}
    for one in found:
        kinds[one.kind] = kinds.get(one.kind, 0) + one.times
    return {
        "bytes": sum(one.bytes * one.times for one in found),
        "count": sum(kinds.values()),
        "us": round(sum(microseconds(one) * one.times for one in found), 1),
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "flops": (program.cost_analysis() or {}).get("flops", 0.0),  # XLA:GPU doesn't count here
        "kinds": dict(sorted(kinds.items())),
    }


def measure(model: str, layout: str, mesh: str, topology: str | None = None) -> dict[str, Any]:
    """The `figures` of a row, by side.

    Args:
        model: one of `sweep.models.MODELS`.
        layout: one of `sweep.layouts.LAYOUTS`.
        mesh: one of `sweep.layouts.MESHES`.
        topology: what to compile for, ``"v5e:4x4"``; None for the devices that are here, on which
            each side's losses are compared with CPU torch's.

    Raises:
        ValueError: a side's losses are others.
    """
    on = OnMesh.of(layout, mesh)
    made = MODELS[model]
    cases = {side: case(made, on, expert=side == "expert") for side in SIDES}
    batches = made.make_batches(STEPS)
    if topology is not None:
        return _compiled_for(topology, cases, batches[0], on)
    expected = _losses(model)
    found = {}
    for name, of in cases.items():
        side = TorchSide(of, batches, name) if name in OURS else JaxSide(of, batches)
        losses = [side.step(i) for i in range(STEPS)]
        for loss, right in zip(losses, expected, strict=True):
            if not abs(loss - right) <= of.tolerance * abs(right):  # also catches NaN
                raise ValueError(f"{name}: losses {losses}, CPU torch's {expected}")
        found[name] = figures(side.program(), on)
    return found


@functools.cache
def _losses(model: str) -> list[float]:
    """CPU torch's, which no layout changes."""
    made = MODELS[model]
    step = case(made, OnMesh.of("dp", "8")).make_step(made.make())
    return [step(*batch).item() for batch in made.make_batches(STEPS)]


def _compiled_for(
    topology: str, cases: dict[str, Case], batch: Batch, on: OnMesh
) -> dict[str, Any]:
    """The figures of programs for devices that aren't here."""
    found = {}
    of = cases[OURS[0]]
    with xd.abstract(topology) as block:
        mesh = xd.init_device_mesh("xla", of.mesh_shape, mesh_dim_names=of.mesh_names)
        # The same chips in the same order on all sides.
        one = xd.distribute_tensor(torch.zeros(1), mesh, [Replicate()] * mesh.ndim)
        jax_mesh = one._form.frame.jax_mesh
        sharded = tuple(of.shard_batch(tensor, mesh) for tensor in batch)
        for name in OURS:
            model = of.shard_model(of.make_model(), mesh)
            step = xd.compile(of.make_step(model), layouts=name)
            compile, options = step.looked_at(
                sharded, {}, lambda made: (made.executable.compile, made.options)
            )
            with jax.enable_x64(True), not_kept():
                found[name] = figures(compile(options), on)
    for name in ("alone", "expert"):
        with not_kept():
            twin = _twin(cases[name], jax_mesh, batch, block.topology.compiler_options)
            found[name] = figures(twin, on)
    return found


def _twin(of: Case, mesh: Mesh, batch: Batch, options: dict[str, Any]) -> Any:
    """The JAX step of a case, compiled for a mesh without any data."""
    training = Training(
        of.jax_loss, of.jax_optimizer, mesh, of.param_spec, of.batch_spec, of.max_norm
    )
    model = of.make_model()
    kept = model.state_dict().keys()  # not tables, which this side makes itself
    params = {name: p.detach().numpy() for name, p in model.named_parameters()}
    buffers = {name: narrow(b.numpy()) for name, b in model.named_buffers() if name in kept}
    where = training.shardings(params, buffers)
    state = {
        "params": params,
        "buffers": buffers,
        "optimizer": dict.fromkeys(of.jax_optimizer.moments, params)
        | {"step": np.zeros((), np.float32)},
    }
    shaped = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    rows = NamedSharding(mesh, of.batch_spec)
    with jax.set_mesh(mesh):
        lowered = training.jitted(where).lower(
            jax.tree.map(shaped, state, where),
            tuple(shaped(narrow(tensor.numpy()), rows) for tensor in batch),
            jax.ShapeDtypeStruct((), np.float32),
        )
        return gpus.compiled(lowered, options)
