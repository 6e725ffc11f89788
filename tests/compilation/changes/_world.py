"""Where a row's program runs, and what is seen of it after every call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import xla_dtensor as xd

ROWS = [Shard(0), Replicate()]
COLUMNS = [Replicate(), Shard(0)]
# What an optimizer's group says about how it computes, and not about what.
HOW = {"params", "foreach", "fused", "capturable"}


class World:
    """Plain torch on the CPU: nothing is placed, a step is called as it is.

    Args:
        changes: whether the program makes its changes; without them it shows what a compiled step
            that doesn't see them would compute.
    """

    device = "cpu"

    def __init__(self, changes: bool = True) -> None:
        self.changes = changes
        self.watched: dict[str, Any] = {}

    def tensor(self, value: torch.Tensor, placements: list | None = ROWS) -> torch.Tensor:
        """``value`` on the devices; None replicates it."""
        return value.clone()

    def parameter(self, value: torch.Tensor, placements: list | None = COLUMNS) -> nn.Parameter:
        return nn.Parameter(self.tensor(value, placements))

    def module(self, module: nn.Module) -> nn.Module:
        """The same module with its parameters on the devices, those of linears sharded."""
        return module

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return step

    def at_most(self, programs: int, step: Callable[..., Any]) -> None:
        """Fails where ``step`` was compiled more often."""

    def traced_at_most(self, traces: int, step: Callable[..., Any]) -> None:
        """Fails where the Python of ``step`` was run more often."""

    def change(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function``, in a run that makes its changes."""
        return function(*args, **kwargs) if self.changes else None

    def fail(self, step: Callable[..., Any], *args: Any) -> None:
        """Calls ``step`` where it is compiled, so that it raises ``ValueError``. Nothing of the
        call has happened then; eagerly, what came before the error has."""

    def watch(self, **named: Any) -> None:
        """Modules, optimizers, tensors and objects that are looked at after every call."""
        self.watched.update(named)

    def batch(self, seed: int = 0, shape: tuple[int, ...] = (4, 6)) -> torch.Tensor:
        """Random numbers that depend on ``seed`` alone."""
        return self.tensor(numbers(seed, *shape))


class Mesh(World):
    """Tensors and parameters on a mesh; steps compiled."""

    device = "xla"

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def tensor(self, value: torch.Tensor, placements: list | None = ROWS) -> torch.Tensor:
        return distribute_tensor(value.clone(), self.mesh, placements)

    def module(self, module: nn.Module) -> nn.Module:
        return distribute_module(module, self.mesh, _shard_linears)

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return xd.compile(step)

    def fail(self, step: Callable[..., Any], *args: Any) -> None:
        with pytest.raises(ValueError):
            step(*args)

    def at_most(self, programs: int, step: Callable[..., Any]) -> None:
        assert step.compilations <= programs, step.recompilations

    def traced_at_most(self, traces: int, step: Callable[..., Any]) -> None:
        assert step.traces <= traces, (step.traces, step.recompilations)


class EagerMesh(Mesh):
    """Tensors and parameters on a mesh; steps called as they are."""

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return step

    def fail(self, step: Callable[..., Any], *args: Any) -> None:
        pass

    def at_most(self, programs: int, step: Callable[..., Any]) -> None:
        pass

    def traced_at_most(self, traces: int, step: Callable[..., Any]) -> None:
        pass


class ReplayMesh(EagerMesh):
    """Tensors and parameters on a mesh; steps whose Python runs in every call."""

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return xd.compile(step, watch="replay")


def _shard_linears(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        for key, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.data, mesh, COLUMNS)
            module.register_parameter(key, nn.Parameter(sharded, parameter.requires_grad))


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers on the CPU that depend on ``seed`` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Observation:
    """What is seen after one call: what the program yielded, and everything it watches."""

    results: dict[str, Any]
    state: dict[str, Any]


def observe(program: Iterator[Any], world: World) -> Iterator[Observation]:
    """An observation for each value that the program yields."""
    for results in program:
        with torch.no_grad():
            yield Observation(dict(_leaves("result", results)), dict(_leaves("", world.watched)))


def assert_same(actual: Observation, expected: Observation, where: str) -> None:
    """Every value of ``actual`` is that of ``expected``, and none is missing."""
    for kind in ("results", "state"):
        ours, theirs = getattr(actual, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys(), f"{where}: {sorted(ours.keys() ^ theirs.keys())}"
        for path, value in theirs.items():
            if not same(ours[path], value):
                raise AssertionError(f"{where}: {path} is {ours[path]}, in torch {value}")


def same(actual: Any, expected: Any) -> bool:
    """Whether two observed values are equal, numbers up to rounding."""
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return actual.dtype == expected.dtype and _close(actual, expected)
    if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor):
        return False
    if isinstance(expected, bool | str | None) or isinstance(actual, bool | str | None):
        return type(actual) is type(expected) and actual == expected
    return _close(torch.tensor(actual), torch.tensor(expected))


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Up to rounding, which among large numbers is larger for the small ones, too."""
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.double(), expected.double()
    finite = expected[expected.isfinite()].abs()
    largest = max(1.0, finite.max().item()) if finite.numel() else 1.0
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-5 * largest, equal_nan=True)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The numbers, strings and tensors (on the CPU) in ``value``, each with where it is."""
    if isinstance(value, torch.Tensor):
        yield path, value.detach().cpu().clone()
        if value.is_leaf and value.requires_grad:
            yield from _leaves(f"{path}.grad", value.grad)
    elif isinstance(value, nn.Module):
        yield from _module(path, value)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _optimizer(path, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list | tuple):
        yield f"len({path})", len(value)
        for i, item in enumerate(value):
            yield from _leaves(f"{path}[{i}]", item)
    elif isinstance(value, SimpleNamespace) or dataclasses.is_dataclass(value):
        yield from _leaves(path, vars(value))
    elif isinstance(value, np.ndarray | np.generic):
        yield path, value.tolist()
    else:
        assert isinstance(value, bool | int | float | str | None), f"{path}: {value!r}"
        yield path, value


def _module(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        where = f"{path}.{name}"
        yield where, parameter.detach().cpu().clone()
        yield f"{where}.requires_grad", parameter.requires_grad
        yield from _leaves(f"{where}.grad", parameter.grad)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield f"{path}.{name}", buffer.detach().cpu().clone()
    for name, child in module.named_modules():
        yield f"{path}.{name}.training", child.training


def _optimizer(path: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for i, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in HOW:
                yield from _leaves(f"{path}.param_groups[{i}].{key}", _number(value))
        for j, parameter in enumerate(group["params"]):
            where = f"{path}.group{i}.param{j}"
            yield where, parameter.detach().cpu().clone()
            for key, value in optimizer.state.get(parameter, {}).items():
                yield from _leaves(f"{where}.{key}", _number(value))


def _number(value: Any) -> Any:
    """A step count or learning rate is a number, however it is held."""
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
