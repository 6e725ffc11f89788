"""Slices of one layer of torchtitan's published Llama 3 configurations."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

import torch

import xla_dtensor as xd
from tests.torchtitan import harness

FLAVORS = ("8B", "70B", "405B")
FAST = "70B"
of_each = pytest.mark.parametrize(
    "flavor", [f if f == FAST else pytest.param(f, marks=pytest.mark.slow) for f in FLAVORS]
)
PLAN = harness.Plan(dp_shard=2, tp=4)


@of_each
def test_a_narrower_slice_learns_as_in_one_process(flavor: str) -> None:
    """Every width over 16, with as many heads and key-value heads: 405B has 1024 of 16384."""
    spec = harness.debug_model("llama3", 1, flavor)
    harness.narrower(spec.model, 16)
    state = harness.initial_state(spec)
    expected = harness.on_cpu(spec, PLAN, state, 4)
    run = harness.on_mesh(spec, PLAN, state, 4, compiled=True)
    assert max(map(abs, map(float.__sub__, run.losses, expected.losses))) < 1e-5
    assert run.losses[-1] < run.losses[0] - 0.05
    assert run.step.recompilations == []


@of_each
def test_a_whole_slice_is_planned(flavor: str) -> None:
    """At its own width and vocabulary, without data: parameters and Adam's two states are spread
    over all devices, and gathered over data parallelism where they are used."""
    spec = harness.debug_model("llama3", 1, flavor)
    with xd.abstract("cpu:8"), harness.backend(PLAN.backend):
        model, dims = harness.parallelized(spec, PLAN, initialise=False)
        training = harness.Training(PLAN, model, spec, 10, dims)
        batch = harness.batches(1, spec.model.vocab_size, PLAN)[0]
        report = xd.plan(training.step, *harness.on_mesh_inputs(batch, PLAN, dims, model))
    count = sum(p.numel() for p in harness.build(spec, harness.Plan()).parameters())
    assert report.replicated == ()
    states = sum(one.bytes for one in report.inputs if one.kind != "argument")
    assert states == pytest.approx(3 * count * torch.float32.itemsize / 8, rel=1e-3)
    embeddings = spec.model.vocab_size * spec.model.dim
    assert report.flops > 6 * 0.99 * harness.BATCH * PLAN.sequence * (count - embeddings)
    assert {row.kind for row in report.collectives} >= {"all-gather", "all-reduce"}
