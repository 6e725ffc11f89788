"""torch's own table of optimizers and their settings, eagerly and compiled, against CPU torch.

Every setting in `optim_db` runs as torch chooses by default, one tensor at a time, with ``foreach``
and, where there is one, fused; on a (2, 4) mesh, with two sharded parameters. The reference is CPU
torch, one tensor at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import LBFGS, Muon, Optimizer, SparseAdam

import xla_dtensor as xd
from tests.compilation.changes._world import numbers

with warnings.catch_warnings():  # torch misses packages that its own tests use
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_optimizers import optim_db

SHAPES = ((8, 6), (6, 8))
PLACEMENTS = ([Replicate(), Shard(0)], [Shard(0), Shard(1)])
WAYS = {
    "default": {},
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A setting of an optimizer, and the way it computes."""

    optimizer: type[Optimizer]
    settings: dict[str, Any]
    way: dict[str, bool]

    def make(self, parameters: list[nn.Parameter]) -> Optimizer:
        return self.optimizer(parameters, **copy.deepcopy(self.settings), **self.way)

    def reference(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Without ``capturable``, which is for accelerators, and changes no number."""
        settings = {k: v for k, v in copy.deepcopy(self.settings).items() if k != "capturable"}
        return self.optimizer(parameters, **settings)


def cases() -> list[Any]:
    params = []
    for info in optim_db:
        if info.optim_cls in (SparseAdam, LBFGS):  # below
            continue
        for i, setting in enumerate(info.optim_inputs_func(device="cuda")):
            for name, way in WAYS.items():
                implementation = "foreach" if name == "single" else name
                if way and implementation not in info.supported_impls:
                    continue
                words = setting.desc.replace(",", "").replace(" ", "_")
                label = f"{info.optim_cls.__name__}-{i}_{words}-{name}"
                params.append(pytest.param(Case(info.optim_cls, setting.kwargs, way), id=label))
    return params


def train(optimizer: Optimizer, parameters: list[nn.Parameter], compile: Callable) -> list[float]:
    """The losses of three steps, whose gradients come from the parameters."""

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p - 0.5).pow(2).mul(i + 1).mean() for i, p in enumerate(parameters))
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = compile(step)
    return [run().item() for _ in range(3)]


def parameters_on(mesh: DeviceMesh | None) -> list[nn.Parameter]:
    values = [numbers(i, *shape) for i, shape in enumerate(SHAPES)]
    if mesh is not None:
        values = [distribute_tensor(v, mesh, p) for v, p in zip(values, PLACEMENTS, strict=True)]
    return [nn.Parameter(value) for value in values]


def assert_same(
    actual: list[nn.Parameter], optimizer: Optimizer, expected: list[nn.Parameter], other: Optimizer
) -> None:
    """Parameters and state are the same; a count of steps may be held in another way."""
    rough = {"rtol": 3e-2, "atol": 1e-3}  # Muon computes in bfloat16
    close = rough if isinstance(other, Muon) else {"rtol": 1e-4, "atol": 1e-5}
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), **close)
        assert optimizer.state[ours].keys() == other.state[theirs].keys()
        for key, value in other.state[theirs].items():
            mine = torch.as_tensor(optimizer.state[ours][key]).detach().cpu()
            torch.testing.assert_close(mine, torch.as_tensor(value), check_dtype=False, **close)


@pytest.mark.one_in(77)
@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_as_cpu_torch(mesh_2x4: DeviceMesh, compiled: bool, case: Case) -> None:
    expected, actual = parameters_on(None), parameters_on(mesh_2x4)
    reference, optimizer = case.reference(expected), case.make(actual)
    losses = train(reference, expected, lambda step: step)
    found = train(optimizer, actual, xd.compile if compiled else lambda step: step)
    assert found == pytest.approx(losses, rel=1e-2 if case.optimizer is Muon else 1e-4)
    assert_same(actual, optimizer, expected, reference)


def test_the_settings_make_a_difference() -> None:
    """The reference is another one for most settings of a class: a mix-up would show."""
    for info in optim_db:
        if info.optim_cls in (SparseAdam, LBFGS):
            continue
        ends = set()
        settings = info.optim_inputs_func(device="cpu")
        for setting in settings:
            parameters = parameters_on(None)
            train(
                Case(info.optim_cls, setting.kwargs, {}).reference(parameters),
                parameters,
                lambda f: f,
            )
            ends.add(parameters[0].detach().sum().item())
        assert len(ends) > 0.6 * len(settings), info.name


LBFGS_SETTINGS = {
    "default": {"lr": 0.5},
    "wolfe": {"lr": 0.5, "line_search_fn": "strong_wolfe"},
}


def closure_of(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Callable:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p - 0.5).pow(2).mul(i + 1).mean() for i, p in enumerate(parameters))
        loss.backward()
        return loss

    return closure


_DOUBLE: dict[str, Callable[..., Optimizer]] = {
    "Adam": torch.optim.Adam,
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": functools.partial(torch.optim.AdamW, fused=True),
    "AdamW, single": functools.partial(torch.optim.AdamW, foreach=False),
    "RAdam": torch.optim.RAdam,  # not NAdam, whose float32 product is rounded later here: 4e-11
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("make", _DOUBLE)
def test_in_double_precision(make: str) -> None:
    """What is made of the step count has as many digits as the parameters."""
    generator = torch.Generator().manual_seed(0)
    start, data = (torch.randn(6, 4, generator=generator).double() for _ in range(2))

    def trained(device: str) -> torch.Tensor:
        weight = nn.Parameter(start.to(device))
        optimizer = _DOUBLE[make]([weight], lr=1e-2)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            (weight * x).tanh().square().sum().backward()
            optimizer.step()

        run = xd.compile(step) if device == "xla" else step
        for i in range(5):
            run(data.to(device) + i)
        return weight.detach().cpu()

    torch.testing.assert_close(trained("xla"), trained("cpu"), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("setting", list(LBFGS_SETTINGS))
def test_lbfgs_runs_eagerly(mesh_2x4: DeviceMesh, setting: str) -> None:
    expected, actual = parameters_on(None), parameters_on(mesh_2x4)
    for parameters in (expected, actual):
        optimizer = LBFGS(parameters, max_iter=4, **LBFGS_SETTINGS[setting])
        for _ in range(2):
            optimizer.step(closure_of(optimizer, parameters))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-3, atol=1e-4)


def test_lbfgs_is_refused_when_compiled(mesh_2x4: DeviceMesh) -> None:
    """It asks for values to decide what to do next."""
    parameters = parameters_on(mesh_2x4)
    before = [p.detach().cpu() for p in parameters]
    optimizer = LBFGS(parameters, lr=0.5)
    step = xd.compile(lambda: optimizer.step(closure_of(optimizer, parameters)))
    with pytest.raises(xd.DataDependentError, match="item"):
        step()
    for old, parameter in zip(before, parameters, strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), old, rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_closure(mesh_2x4: DeviceMesh, compiled: bool) -> None:
    """Other optimizers take a closure, too."""
    expected, actual = parameters_on(None), parameters_on(mesh_2x4)
    losses = []
    for parameters in (expected, actual):
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        step = lambda o=optimizer, p=parameters: o.step(closure_of(o, p)).detach()
        run = xd.compile(step) if compiled and parameters is actual else step
        losses.append([run().item() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sparse_gradients(mesh_2x4: DeviceMesh, compiled: bool) -> None:
    """There are no sparse tensors on the mesh: `SparseAdam` says that it wants one."""
    table = nn.Parameter(distribute_tensor(numbers(0, 8, 6), mesh_2x4, PLACEMENTS[0]))
    rows = distribute_tensor(torch.tensor([1, 2]), mesh_2x4, None)
    optimizer = SparseAdam([table])

    def step() -> None:
        nn.functional.embedding(rows, table, sparse=True).sum().backward()
        optimizer.step()

    with pytest.raises(xd.UnsupportedOpError, match=r"give an embedding sparse=False.*SparseAdam"):
        (xd.compile(step) if compiled else step)()
