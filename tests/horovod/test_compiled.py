"""Horovod's calls inside of `xd.compile`: one program, that of `xd.replicate`."""

from __future__ import annotations

import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
import xla_dtensor.horovod as hvd
from benchmarks.hlo import collective_traffic
from tests.horovod.ranks import check, data, everyone, given, same


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.RMSNorm(5), nn.Tanh(), nn.Linear(5, 3))


def batch(seed: int) -> Any:
    return given([4, 6], seed=seed)


def trained_on_the_host(steps: int, clip: float | None = None) -> nn.Module:
    """By CPU torch: the average of the ranks' gradients."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(steps):
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            loss = model(data(rank, [4, 6], seed=seed)).square().mean()
            (loss / hvd.size()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def compare(model: nn.Module, expected: nn.Module) -> None:
    for own, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        check(own, same(wanted.detach()), rtol=1e-4, atol=1e-6)


def test_a_step_is_one_program_that_is_replicates(ranks: DeviceMesh) -> None:
    ours = network().to("xla")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), ours.named_parameters()
    )
    theirs = xd.replicate(network(), mesh=ranks)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    programs = []
    for model, own in ((ours, optimizer), (theirs, plain)):

        def step(x: Any, model: Any = model, own: Any = own) -> Any:
            own.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            own.step()
            return loss

        compiled = xd.compile(step)
        for seed in range(3):
            compiled(batch(seed))
        compare(model, trained_on_the_host(3))
        programs.append(compiled.compiled_programs()[-1])
    texts = [program.as_text() for program in programs]
    first, second = (Counter(re.findall(r"= \S+ ([a-z-]+)\(", text)) for text in texts)
    assert first == second
    first, second = (program.cost_analysis() for program in programs)
    assert first["flops"] == second["flops"] and first["bytes accessed"] == second["bytes accessed"]
    traffic = [collective_traffic(text) for text in texts]
    assert traffic[0] == traffic[1] and traffic[0].counts == {"all-reduce": 1}
    assert all(p.varying == () for p in ours.parameters())


def test_clipping_between_synchronize_and_step(ranks: DeviceMesh) -> None:
    model = network().to("xla")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )

    @xd.compile
    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
        return loss

    for seed in range(3):
        step(batch(seed))
    compare(model, trained_on_the_host(3, clip=0.05))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"compression": hvd.Compression.bf16},
        {"gradient_predivide_factor": 4.0},
        {"groups": 2},
    ],
    ids=str,
)
def test_the_options_compiled_are_those_eagerly(ranks: DeviceMesh, options: dict[str, Any]) -> None:
    results = []
    for compiled in (False, True):
        model = network().to("xla")
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), **options
        )

        def step(x: Any, model: Any = model, own: Any = optimizer) -> Any:
            own.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            own.step()
            return loss

        call = xd.compile(step) if compiled else step
        for seed in range(2):
            call(batch(seed))
        results.append([p.detach().cpu() for p in model.parameters()])
    for eager, one in zip(*results, strict=True):
        torch.testing.assert_close(one, eager, rtol=1e-5, atol=1e-6)


def test_collectives_and_the_rank(ranks: DeviceMesh) -> None:
    @xd.compile
    def step(x: Any) -> Any:
        handle = hvd.allreduce_async(x, op=hvd.Sum)
        y = x * hvd.rank()
        parts = hvd.reducescatter(y, op=hvd.Max), hvd.alltoall(x), hvd.broadcast(y, 3)
        return hvd.synchronize(handle), hvd.allgather(x), hvd.allreduce(x, op=hvd.Adasum), *parts

    total, gathered, adasum, most, swapped, third = step(given([8, 2]))
    whole = everyone([8, 2])
    check(total, same(whole.sum(0)))
    check(gathered, same(torch.cat(list(whole))))
    check(adasum, same(values_of(hvd.allreduce(given([8, 2]), op=hvd.Adasum))), rtol=1e-5)
    scaled = whole * torch.arange(8).reshape(8, 1, 1)
    check(most, lambda r: scaled.amax(0)[r : r + 1])
    check(swapped, lambda r: whole[:, r])
    check(third, same(scaled[3]))


def values_of(tensor: Any) -> torch.Tensor:
    return tensor.cpu()


def test_what_a_compiled_step_refuses(ranks: DeviceMesh) -> None:
    different = hvd.per_rank(lambda rank: torch.ones(rank + 1))

    with pytest.raises(NotImplementedError, match="compiled step"):
        xd.compile(lambda x: hvd.allgather(different))(given([2]))
    with pytest.raises(NotImplementedError, match="compiled step"):
        xd.compile(lambda x: hvd.join())(given([2]))
    with pytest.raises(xd.PerDeviceValueError, match="is_coordinator"):
        xd.compile(lambda x: x if hvd.rank() == 0 else -x)(given([2]))


def test_a_step_that_cannot_be_compiled_leaves_nothing(ranks: DeviceMesh) -> None:
    """Its trace had begun reductions; the next one, and eager code, begin anew."""
    model = network().to("xla")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    broken = True

    def step(x: Any) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if broken:
            raise KeyError("a mistake")
        optimizer.step()

    with pytest.raises(KeyError):
        xd.compile(step)(batch(0))
    broken = False
    xd.compile(step)(batch(0))
    broken = True
    with pytest.raises(KeyError):
        xd.compile(step)(batch(1))
    broken = False
    step(batch(1))
    compare(model, trained_on_the_host(2))


def test_backward_and_step_are_in_one_compiled_step(ranks: DeviceMesh) -> None:
    model = network().to("xla")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Sum
    )

    def backward(x: Any) -> None:
        model(x).square().mean().backward()

    xd.compile(backward)(batch(0))
    with pytest.raises(NotImplementedError, match="call both in the same step"):
        optimizer.step()
    optimizer.zero_grad()
    backward(batch(0))
    with pytest.raises(NotImplementedError, match="both outside"):
        xd.compile(optimizer.step)()
    optimizer.step()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_reduced_in_place_is_the_same_on_all(ranks: DeviceMesh, compiled: bool) -> None:
    """Also in another memory order, as gradients of linear layers have; so parameters and the
    optimizer's state stay what all devices have in common."""
    step: Any = lambda x: hvd.allreduce_(x, op=hvd.Sum)
    turned = given([2, 3]).t()
    (xd.compile(step) if compiled else step)(turned)
    assert turned.varying == () and turned.stride() == (1, 3)
    assert turned.tolist() == everyone([2, 3]).sum(0).t().tolist()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4, bias=False)).to("xla")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters()
    )

    def train(x: Any) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    call: Any = xd.compile(train) if compiled else train
    for seed in range(2):
        call(hvd.per_rank(lambda rank, s=seed: data(rank, [3], torch.int64, s).abs()))
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [t for s in optimizer.state.values() for t in s.values() if t.device.type == "xla"]
    assert [t.varying for t in tensors] == [()] * len(tensors)
    if compiled:
        assert not call.recompilations


def test_an_elastic_state_of_a_compiled_step(ranks: DeviceMesh) -> None:
    """A step that has run is gone back behind, and goes on."""
    model = network().to("xla")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )

    @xd.compile
    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    step(batch(0))
    state.commit()
    kept = copy.deepcopy({name: p.cpu() for name, p in model.state_dict().items()})
    step(batch(7))
    state.restore()
    for name, p in model.state_dict().items():
        assert torch.equal(p.cpu(), kept[name])
    step(batch(1))
    compare(model, trained_on_the_host(2))
