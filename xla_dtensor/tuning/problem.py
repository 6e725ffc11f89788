"""Chooses the placements of a step's parameters on one mesh, by an integer program.

It is the one that lays out all other values, too (`layouts/README.md`).

The step is traced with whole parameters, so that its program is the logical one. Then the
parameters, and the optimizer's state, are values like all others: a value that several operations
want is gathered once, a gradient is summed to where its parameter lies, and what doesn't fit into
the memory is cut. FSDP, tensor parallelism and their mixtures are what comes out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import torch
from jax.interpreters import partial_eval
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xla_dtensor.compilation import CompiledStep
from xla_dtensor.compilation.call.sources import ArgumentSource, StateSource
from xla_dtensor.compilation.scan.casts import casts_outside
from xla_dtensor.layouts.choice import Choice
from xla_dtensor.layouts.choose import choices
from xla_dtensor.layouts.joined import kept_apart
from xla_dtensor.layouts.memory import Alive
from xla_dtensor.layouts.parts import DimAxes
from xla_dtensor.layouts.prices import Prices
from xla_dtensor.mesh.domains import slow_axes
from xla_dtensor.tuning.configuration import Dims, divided, pattern_of


class Problem:
    """A traced step.

    Args:
        step: compiled, of a model that is whole on all devices of a mesh.
        batch: its arguments, whole likewise.
        model: that it trains.
        replaced: the parameters that it had before it was laid out.

    Attributes:
        first: of each parameter's name the one that it is called by, where it has several (tied
            weights).
        sizes: the mesh's, by the names of its dims.
        devices: JAX's, in the mesh's shape.
    """

    def __init__(
        self,
        step: CompiledStep,
        batch: Sequence[Any],
        model: nn.Module,
        replaced: Sequence[nn.Parameter],
    ) -> None:
        self._names: dict[int, str] = {}
        self.first: dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            laid_out: Any = parameter
            self.first[name] = self._names.setdefault(id(laid_out._storage_), name)
        with _optimizers_have_none_of(replaced):
            step.looked_at(tuple(batch), {}, self._look)

    def _look(self, program: Any) -> None:
        traced, frame = program.traced, program.frame
        self.sizes, self.devices = dict(frame.sizes), frame.jax_mesh.devices
        with jax.enable_x64(True):
            needed, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
            jaxpr = casts_outside(needed)
            self._jaxprs = kept_apart(jaxpr, [*self.sizes.values()])
        self._sources = traced.inputs.sources

    def solutions(
        self,
        batch: Dims,
        memories: Sequence[float | None],
        prices: Prices,
        pinned: Mapping[str, Dims],
    ) -> Iterator[Solution]:
        """How everything should lie, for each of several sizes of memory, when it is asked for.

        Args:
            batch: for each mesh dim which dim of the arguments it shards.
            memories: bytes of a device; None if nobody knows how many it has.
            prices: what collectives cost.
            pinned: by a parameter's first name how it has to lie.
        """
        every = [self._solved(j, batch, memories, prices, pinned) for j in self._jaxprs]
        first = [next(solutions) for solutions in every]
        best = min(range(len(first)), key=lambda i: first[i].choice.price())
        yield first[best]
        yield from every[best]

    def _solved(
        self,
        jaxpr: Any,
        batch: Dims,
        memories: Sequence[float | None],
        prices: Prices,
        pinned: Mapping[str, Dims],
    ) -> Iterator[Solution]:
        known: dict[Any, DimAxes | None] = {}
        arguments, parameters = [], {}
        for variable, source in zip(jaxpr.constvars, self._sources, strict=True):
            known[variable] = None
            ndim = len(variable.aval.shape)
            if isinstance(source, ArgumentSource):
                own = divided(batch, variable.aval.shape, [*self.sizes.values()])
                known[variable] = self._axes(own, ndim)
                arguments.append(variable)
            elif isinstance(source, StateSource):
                name = self._names.get(id(source.storages[0]))
                if name is not None:
                    parameters[name] = variable
                    wanted = pinned.get(name)
                    known[variable] = None if wanted is None else self._axes(wanted, ndim)
        alike: dict[Any, list[Any]] = {}
        for name, variable in parameters.items():
            alike.setdefault((pattern_of(name), variable.aval.shape), []).append(variable)
        required = [None] * len(jaxpr.outvars)
        found = choices(
            *(jaxpr, known, required, self.sizes, arguments, ()),
            *(memories, prices, [*alike.values()]),
            slow=slow_axes(self.devices, self.sizes),
            adds=self.devices.flat[0].platform != "cpu",
        )
        for _ in memories:
            with jax.enable_x64(True):
                choice = next(found)
                alive = Alive(jaxpr, choice.graph)
                needed = alive.most(choice.share)[0] if choice.found else 0.0
                on_host = alive.on_host(choice.share) if choice.found else 0.0
            parameters_lie = {n: self._dims(choice.of(v)) for n, v in parameters.items()}
            yield Solution(choice, needed, parameters_lie, on_host)

    def _axes(self, dims: Dims, ndim: int) -> DimAxes:
        pairs = [pair for pair in zip(self.sizes, dims, strict=True) if self.sizes[pair[0]] > 1]
        return tuple(tuple(axis for axis, d in pairs if d == place) for place in range(ndim))

    def _dims(self, axes: DimAxes | None) -> Dims:
        placed = {axis: d for d, names in enumerate(axes or ()) for axis in names}
        return tuple(placed.get(axis) for axis in self.sizes)


class Solution:
    """How everything lies, by a problem's integer program.

    Attributes:
        choice: all layouts.
        memory: bytes of a device, by an estimate (`layouts/memory.py`).
        parameters: by name for each mesh dim which of a parameter's it shards.
        on_host: bytes that a device keeps in its host's memory meanwhile.
    """

    def __init__(
        self, choice: Choice, memory: float, parameters: Mapping[str, Dims], on_host: float
    ) -> None:
        self.choice, self.memory, self.parameters = choice, memory, dict(parameters)
        self.on_host = on_host


@contextlib.contextmanager
def _optimizers_have_none_of(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Refuses an optimizer that steps what the model no longer has: nothing would train."""
    gone = {id(each) for each in parameters}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(own) in gone for group in optimizer.param_groups for own in group["params"]):
            raise ValueError(
                "build(parallelize) has made an optimizer before it called parallelize(model): it "
                "has the parameters of before, and would train nothing"
            )

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
