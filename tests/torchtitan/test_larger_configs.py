"""Slices of one layer of torchtitan's published Llama 3 configurations."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

import torch

import xla_dtensor as xd
from tests.torchtitan import harness
from tests.torchtitan.plan import BATCH, Plan, batches
from tests.torchtitan.releases import release

FLAVORS = ("8B", "70B", "405B")
FAST = "70B"
of_each = pytest.mark.parametrize(
    "flavor", [f if f == FAST else pytest.param(f, marks=pytest.mark.slow) for f in FLAVORS]
)
PLAN = Plan(dp_shard=2, tp=4)


# What of a config is a size, and not a number of heads, positions or experts.
_SIZES = ("dim", "vocab_size", "in_features", "out_features", "head_dim", "normalized_shape")
_SIZES += ("num_embeddings", "embedding_dim")


def _narrower(config: Any, factor: int) -> None:
    """Divide every width of Llama 3's config: it has as many heads, and each is narrower."""
    if isinstance(config, list):
        for element in config:
            _narrower(element, factor)
    elif dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name, None)
            if field.name in _SIZES and value is not None:
                assert value % factor == 0, (field.name, value)
                setattr(config, field.name, value // factor)
            else:
                _narrower(value, factor)
            if field.name == "wqkv":  # its own way to initialise it knows the heads' width
                value.param_init = {"weight": functools.partial(torch.nn.init.normal_, std=0.02)}


@of_each
def test_a_narrower_slice_learns_as_in_one_process(flavor: str) -> None:
    """Every width over 16, with as many heads and key-value heads: 405B has 1024 of 16384."""
    spec = release.debug_model("llama3", 1, flavor=flavor)
    _narrower(spec.model, 16)
    state = harness.initial_state(spec)
    expected = harness.on_cpu(spec, PLAN, state, 4)
    run = harness.on_mesh(spec, PLAN, state, 4, compiled=True)
    assert run.off(expected) < 1e-5
    assert run.losses[-1] < run.losses[0] - 0.05
    assert run.recompilations == []


@of_each
def test_a_whole_slice_is_planned(flavor: str) -> None:
    """At its own width and vocabulary, without data: parameters and Adam's two states are spread
    over all devices, and gathered over data parallelism where they are used."""
    spec = release.debug_model("llama3", 1, flavor=flavor)
    with xd.abstract("cpu:8"), release.on_mesh(PLAN):
        model, dims = harness.parallelized(spec, PLAN, initialise=False)
        training = harness.Training(PLAN, model, spec, 10, dims)
        batch = batches(1, spec.model.vocab_size, PLAN)[0]
        report = xd.plan(training.step, *harness.on_mesh_inputs(batch, PLAN, dims, model))
    count = sum(p.numel() for p in release.build(spec, Plan()).parameters())
    assert report.replicated == ()
    states = sum(one.bytes for one in report.inputs if one.kind != "argument")
    assert states == pytest.approx(3 * count * torch.float32.itemsize / 8, rel=1e-3)
    embeddings = spec.model.vocab_size * spec.model.dim
    assert report.flops > 6 * 0.99 * BATCH * PLAN.sequence * (count - embeddings)
    assert {row.kind for row in report.collectives} >= {"all-gather", "all-reduce"}
