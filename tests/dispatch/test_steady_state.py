"""A steady loop builds nothing: no compilation, no growing cache, no memory."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import xla_dtensor as xd
from xla_dtensor import dispatch
from xla_dtensor.base.tables.cache import Cache, Interned
from xla_dtensor.dispatch import execute
from xla_dtensor.execution import batch
from xla_dtensor.lowering import lowers
from xla_dtensor.plans import ops
from xla_dtensor.plans.plan import Plan

pytestmark = pytest.mark.usefixtures("strict_eager")


@pytest.fixture
def small_mesh() -> DeviceMesh:
    return xd.init_device_mesh("xla", (2,), mesh_dim_names=("dp",))


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """JAX's events of tracing, lowering and compiling, as they happen."""
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **kw: events.append(event) if "compile" in event else None
    )
    yield events
    jax.monitoring.clear_event_listeners()


def cache_sizes() -> dict[str, int]:
    """The size of every container and function cache that a module of ours keeps, and of every
    executable's own cache."""
    sizes: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "xla_dtensor":
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, dict | list | set | Cache | Interned) and not key.startswith("__"):
                sizes[f"{name}.{key}"] = len(value)
            elif isinstance(value, functools._lru_cache_wrapper):
                sizes[f"{name}.{key}"] = value.cache_info().currsize
    for index, plan in enumerate(execute._plans.values()):
        if isinstance(plan, Plan):
            sizes[f"plan {index}: {plan.info.name}"] = plan.eager.jitted._cache_size()
    for index, executable in enumerate(batch.executables.values()):
        sizes[f"batch {index}"] = executable._cache_size()
    return sizes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.head(nn.functional.dropout(x, 0.1)[:, 1:])


def shard_rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        module.register_parameter(key, nn.Parameter(sharded))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [300, 1000])
def test_training_steps(small_mesh: DeviceMesh, compilations: list[str], steps: int) -> None:
    model = distribute_module(Model(), small_mesh, shard_rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    # Of another length in each case: what one has compiled the other would find.
    tokens = distribute_tensor(torch.randint(11, (4, steps // 50)), small_mesh, [Shard(0)])

    def step() -> torch.Tensor:
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.detach()

    first = step().item()
    for _ in range(2):
        step()
    gc.collect()
    known, objects, arrays = cache_sizes(), len(gc.get_objects()), len(jax.live_arrays())
    assert compilations  # the counter counts
    compilations.clear()
    for _ in range(steps):
        loss = step()
    last = loss.item()
    del loss
    assert compilations == []
    assert cache_sizes() == known
    gc.collect()
    assert len(jax.live_arrays()) == arrays
    # No container anywhere in the process, ours or not, has been growing by one per step.
    assert len(gc.get_objects()) < objects + 200
    assert last < 0.7 * first  # of random tokens there is only so much to learn


def mixed_operations(x: torch.Tensor, w: torch.Tensor, i: int) -> Iterator[Any]:
    """Endless operations of many kinds, each of which gives up its result."""
    while True:
        i += 1
        yield x + i
        yield x @ w
        yield torch.relu(x) * (1 / i)
        yield x.view(4, -1).t()[1:] + 1
        yield x.mul_(0.5).add_(1.0)
        yield torch.cat([x, x]).softmax(-1)
        yield torch.rand_like(x)
        yield x.sum(0).sum()
        yield x[1:3].fill_(i % 5)
        yield x.to(torch.float64).mean(-1)
        yield x.redistribute(placements=[Replicate()])
        yield torch._foreach_mul([x, w], [0.5, 2.0])
        yield x.sum().item()
        with dispatch.batched():
            y = x * i
            yield y - x


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_10000_mixed_operations_hold_no_memory(
    small_mesh: DeviceMesh, compilations: list[str]
) -> None:
    x = distribute_tensor(torch.randn(64, 32), small_mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(32, 32), small_mesh, [Shard(1)])
    operations = mixed_operations(x, w, 0)
    for _ in itertools.islice(operations, 1500):
        pass
    gc.collect()
    x.sum().item()
    known, arrays, resident = cache_sizes(), len(jax.live_arrays()), resident_bytes()
    compilations.clear()
    for _ in itertools.islice(operations, 10_000):
        pass
    x.sum().item()
    gc.collect()
    assert compilations == [] and cache_sizes() == known
    assert len(jax.live_arrays()) <= arrays + 2  # a half-way result of the generator
    # 10,000 results of 8 kB each are 80 MB.
    assert resident_bytes() - resident < 20 * 2**20


@pytest.mark.slow
def test_a_new_lowering_clears_what_was_made_with_the_old_ones(small_mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 4), small_mesh, [Shard(0)])

    def work() -> list[torch.Tensor]:
        with dispatch.batched():
            return [(x * 2).cpu(), x.t().sum(0).cpu(), (x + 1).cpu()]

    xd.debug.clear_caches()
    gc.collect()
    # A replayed step that some module keeps holds the plans of its programs.
    others = {id(plan) for plan in gc.get_objects() if type(plan) is Plan}
    expected = work()
    executables = [p.eager for p in execute._plans.values() if isinstance(p, Plan)]
    assert executables and len(batch.executables) and ops.infos
    del executables
    lowers("xd_test_clearing::nothing")(lambda x: x)
    gc.collect()
    assert not (len(execute._plans) or len(batch.executables) or ops.infos)
    left = [p for p in gc.get_objects() if type(p) is Plan and id(p) not in others]
    assert not left, [list(map(type, gc.get_referrers(plan))) for plan in left]
    for value, want in zip(work(), expected, strict=True):
        assert torch.equal(value, want)
    assert len(execute._plans) and len(batch.executables)


def test_a_new_rule_clears_the_batches_too(small_mesh: DeviceMesh, scratch: None) -> None:
    x = distribute_tensor(torch.ones(8, 4), small_mesh, [Shard(0)])

    def work() -> torch.Tensor:
        with dispatch.batched():
            return torch.ops.aten.relu(x)

    assert work().placements == (Shard(0),)
    xd.register_rule("aten::relu", lambda call: "a b -> a b", override=True)
    assert not len(execute._plans) and not len(batch.executables)
    torch.testing.assert_close(work().cpu(), torch.ones(8, 4))
