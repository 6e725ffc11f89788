"""`zero`: optimizer state and gradients sharded over data-parallel devices (ZeRO 1 and 2).

Parameters stay whole (arXiv:1910.02054; stage 3 is `fully_shard`).

A parameter is in its shards' layout while the optimizer steps, and in no other moment. So its state
is made in that layout, each device updates its shard, and the whole parameter is gathered once. All
of it is `redistribute` and torch's own step: what holds the parameter or its gradient (modules,
schedulers, clipping, compiled steps) sees the same objects as without.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.optim import Optimizer

from xla_dtensor.base import interrupts
from xla_dtensor.base.torch_private import concatenate_meshes
from xla_dtensor.errors import MeshError, UnsupportedOpError
from xla_dtensor.mesh import mesh_dim_axes, root_mesh
from xla_dtensor.mesh.placements import shard_after
from xla_dtensor.movement.local_view import as_sharded
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.marked_tensor import shard_in_place, unshard_in_place
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

Layout = tuple[DeviceMesh, tuple[Placement, ...]]


def zero(optimizer: Optimizer, mesh: DeviceMesh, *, stage: int = 1) -> Optimizer:
    """Shard an optimizer's state over data-parallel devices, and with ``stage=2`` the gradients,
    while the parameters stay whole on each of them.

    Args:
        optimizer: any of ``torch.optim`` but LBFGS, or one that is written like them. What state it
            has is sharded now.
        mesh: the data-parallel devices: an xla mesh of one dim.
        stage: 1, or 2: gradients are sharded when they reach their parameter, so that a sum over
            the devices is a reduce-scatter where the backend has one.

    Returns:
        ``optimizer``; its ``step`` is another one. Parameters that are sharded over ``mesh``
        already, and those with fewer elements than it has devices, are updated as ever.

    Raises:
        MeshError: ``mesh`` has several dims, or is no xla mesh.
        ValueError: ``stage`` is neither 1 nor 2, or the optimizer is sharded so already.
        UnsupportedOpError: LBFGS, which needs all of the parameters at once; in a step: a closure
            that is called twice, or after the step has changed parameters.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        model = xd.distribute_module(torch.nn.Linear(16, 8), mesh)  # whole on every device
        optimizer = xd.parallel.zero(torch.optim.AdamW(model.parameters()), mesh["dp"])
        x = xd.distribute_tensor(torch.randn(8, 16), mesh, [xd.Shard(0)])
        model(x).square().mean().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        assert state["exp_avg"].placements == (xd.Shard(0),)
        assert model.weight.placements == (xd.Replicate(),)
    """
    if getattr(mesh, "device_type", None) != "xla" or mesh.ndim != 1:
        raise MeshError(
            f"zero(mesh={mesh!r}): give the data-parallel devices, an xla mesh of one dim: "
            "mesh['dp']"
        )
    if stage not in (1, 2):
        raise ValueError(
            f"zero(stage={stage}): 1 shards the optimizer's state, 2 gradients as well; stage 3, "
            "parameters too, is xla_dtensor.fully_shard"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOpError(
            "zero of LBFGS, which computes with all parameters as one vector: shard the parameters "
            "themselves, xla_dtensor.fully_shard"
        )
    if getattr(optimizer, "_zero", None) is not None:
        raise ValueError("zero: this optimizer's state is sharded already")
    sharding = _Sharding(optimizer, mesh, stage)
    for parameter in sharding.parameters():
        sharding.layout_of(parameter)  # or it raises, and nothing has been done
    optimizer._zero = sharding
    optimizer.step = types.MethodType(_sharded_step(optimizer.step), optimizer)
    optimizer.register_load_state_dict_post_hook(lambda loaded: sharding.shard_state())
    sharding.shard_state()
    if stage == 2:
        sharding.shard_gradients()
    return optimizer


class _Sharding:
    """How an optimizer's parameters are laid out while it steps."""

    def __init__(self, optimizer: Optimizer, mesh: DeviceMesh, stage: int) -> None:
        self._optimizer, self._mesh, self.stage = optimizer, mesh, stage

    def parameters(self) -> Iterator[Any]:
        """The optimizer's parameters."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def layout_of(self, parameter: Any) -> Layout | None:
        """The layout of a parameter's shards; None if it stays as it is.

        Raises:
            MeshError: the parameter is on other devices.
        """
        count = self._mesh.size()
        if not is_ours(parameter):
            return None
        if not parameter.ndim or parameter.numel() < count:
            return None
        if not isinstance(parameter, XLAShardedTensor):
            return self._mesh, (Shard(_dim(parameter.shape, [], count)),)
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        if root_mesh(mesh) != root_mesh(self._mesh):
            raise MeshError(
                f"zero over {self._mesh!r}: a parameter of shape {list(parameter.shape)} is on "
                f"{mesh!r}; give a dim of its mesh"
            )
        taken = [p.dim for p in placements if hasattr(p, "dim")]
        dim = _dim(parameter.shape, taken, count)
        (wanted,) = mesh_dim_axes(self._mesh)
        axes = mesh_dim_axes(mesh)
        if wanted in axes:
            number = axes.index(wanted)
            if not isinstance(placements[number], Replicate):
                return None
            new = shard_after(dim, mesh, placements, number + 1)
            return mesh, (*placements[:number], new, *placements[number + 1 :])
        if {name for names in axes for name in names} & set(wanted):
            return None  # it is sharded over these devices by a dim that has more of them
        both = concatenate_meshes([self._mesh, mesh])
        return both, (shard_after(dim, mesh, placements, 0), *placements)

    def shard_state(self) -> None:
        """Give the state of each parameter that has its shape the layout of its shards."""
        with torch.no_grad():
            for parameter in self.parameters():
                layout = self.layout_of(parameter)
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if layout is not None and _is_like(value, parameter):
                        self._optimizer.state[parameter][key] = _laid_out(value, layout)

    def shard_gradients(self) -> None:
        """Let gradients that reach the parameters take on the layout of the shards."""
        for parameter in self.parameters():
            layout = self.layout_of(parameter)
            if layout is not None and parameter.requires_grad:
                _land(parameter, layout)


def _dim(shape: Any, taken: list[int], count: int) -> int:
    """Which dim to shard: the first that divides and isn't sharded yet, else the largest."""
    free = [dim for dim in range(len(shape)) if dim not in taken] or list(range(len(shape)))
    even = [dim for dim in free if shape[dim] and shape[dim] % count == 0]
    return even[0] if even else max(free, key=lambda dim: shape[dim])


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    ours = is_ours(value)
    return ours and value.shape == parameter.shape


def _laid_out(value: Any, layout: Layout) -> Any:
    mesh, placements = layout
    is_sharded = isinstance(value, XLAShardedTensor)
    if is_sharded and (value.device_mesh, tuple(value.placements)) == layout:
        return value
    return as_sharded(value, mesh).redistribute(mesh, placements)


def _land(parameter: Any, layout: Layout) -> None:
    """Stage 2's hook in place of the one that brings a gradient to its leaf's layout."""
    hook = getattr(parameter, "_xla_grad_hook", None)
    if getattr(hook, "of_zero", False):
        return
    if hook is not None:
        hook.remove()
    handle: Any = parameter.register_hook(lambda grad: _laid_out(grad, layout))
    is_sharded = isinstance(parameter, XLAShardedTensor)
    handle.layout = (parameter.device_mesh, parameter.placements) if is_sharded else None
    handle.of_zero = True
    parameter._xla_grad_hook = handle


def _sharded_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @interrupts.completed
    def complete(optimizer: Any, args: Any, kwargs: Any, evaluated: _Evaluated | None) -> Any:
        shards = _Shards(optimizer._zero)
        try:
            shards.take()
            if evaluated is not None:
                evaluated.begin(shards)
            try:
                return step(*args, **kwargs)
            finally:
                shards.finish()  # also what a step that fails on its way has written
        finally:
            shards.put_back()

    @functools.wraps(step)
    def sharded(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        evaluated = None
        if closure is not None:
            # Before the parameters are in shards: it is a forward and a backward pass.
            with torch.enable_grad():
                evaluated = _Evaluated(closure())
            args, kwargs = (
                (evaluated, *args[1:]),
                {key: value for key, value in kwargs.items() if key != "closure"},
            )
        return complete(optimizer, args, kwargs, evaluated)

    return sharded


class _Evaluated:
    """In place of a step's closure: the loss, which has been computed before the step.

    Args:
        loss: what the closure returned.
    """

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._shards: _Shards | None = None

    def begin(self, shards: _Shards) -> None:
        """The step begins, with these parameters."""
        self._shards = shards

    def __call__(self) -> Any:
        if self._shards is None or self._shards.are_written():
            raise UnsupportedOpError(
                "zero: the optimizer's step calls its closure again, or after it has changed "
                "parameters, and zero has computed it once, before the step; shard the parameters "
                "themselves, xla_dtensor.fully_shard"
            )
        self._shards = None
        return self._loss


class _Shards:
    """The parameters of a step, while it runs."""

    def __init__(self, sharding: _Sharding) -> None:
        self._sharding = sharding
        self._taken: list[_Taken] = []

    def take(self) -> None:
        """Put every parameter that has a gradient, and the gradient, in the shards' layout."""
        with torch.no_grad():
            for parameter in self._sharding.parameters():
                grad = parameter.grad
                layout = None if grad is None else self._sharding.layout_of(parameter)
                if layout is None:
                    continue
                taken = _Taken(parameter, grad, _laid_out(grad, layout))
                placed = _laid_out(taken.whole, layout)
                self._taken.append(taken)
                parameter._xla_grad_hook = _NoGradHook(
                    (placed.device_mesh, tuple(placed.placements))
                )
                shard_in_place(parameter, placed)
                parameter.grad = taken.placed_grad
                taken.begin()

    def are_written(self) -> bool:
        """Whether the step has written to a parameter already."""
        return any(taken.is_written() for taken in self._taken)

    def finish(self) -> None:
        """Gather what the step has computed."""
        with torch.no_grad():
            for taken in self._taken:
                taken.finish()

    def put_back(self) -> None:
        """Make the parameters whole again, with what the step has written to them, and their
        gradients as it leaves them."""
        with torch.no_grad():
            for taken in self._taken:
                taken.put_back()
        if self._sharding.stage == 2:
            self._sharding.shard_gradients()  # of parameters that have come, or moved, since


class _Taken:
    """A parameter that is in shards, and what it was.

    Args:
        parameter: before.
        grad: its gradient.
        placed_grad: the gradient in the shards' layout.
    """

    def __init__(self, parameter: Any, grad: Any, placed_grad: Any) -> None:
        self._parameter, self._grad, self.placed_grad = parameter, grad, placed_grad
        self.whole = parameter.detach()
        self._grad_hook = getattr(parameter, "_xla_grad_hook", None)
        self._version = self._grad_version = 0
        self._updated = self._updated_grad = None

    def begin(self) -> None:
        """The parameter is in shards now."""
        # The memory's: torch's counters don't count writes to `parameter.data`.
        self._version = self._parameter._storage_.version
        self._grad_version = self.placed_grad._storage_.version

    def is_written(self) -> bool:
        """Whether the parameter has been written to since."""
        return self._parameter._storage_.version != self._version

    def finish(self) -> None:
        """Gather what has been written."""
        if self.is_written():
            self._updated = _like(self._parameter.detach(), self.whole)
        # A hook of the step's may clip gradients, or make them zero.
        written = self.placed_grad._storage_.version != self._grad_version
        if written and self.placed_grad is not self._grad:
            self._updated_grad = _like(self.placed_grad, self._grad)

    def put_back(self) -> None:
        """Make the parameter whole again."""
        parameter: Any = self._parameter
        grad = parameter.grad
        parameter.grad = None  # which wouldn't fit for a moment
        if isinstance(self.whole, XLATensor):
            unshard_in_place(parameter, self.whole)
        if self._grad_hook is not None:
            parameter._xla_grad_hook = self._grad_hook
        if not isinstance(self.whole, XLATensor):
            parameter._become(self.whole)
        # None, or another one, is what a hook of the step's has left.
        parameter.grad = self._grad if grad is self.placed_grad else grad
        if self._updated is not None:
            parameter.copy_(self._updated)
        if self._updated_grad is not None:
            self._grad.copy_(self._updated_grad)


def _like(value: Any, whole: Any) -> Any:
    """``value`` in the layout of ``whole``."""
    if isinstance(whole, XLAShardedTensor):
        return value.redistribute(whole.device_mesh, whole.placements)
    return value.full_tensor()


class _NoGradHook:
    """In place of the hook that brings gradients to a leaf's layout: while it is another for a
    moment, none is to come and go, for compiled steps look at a parameter's hooks."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def remove(self) -> None:
        """Nothing."""
