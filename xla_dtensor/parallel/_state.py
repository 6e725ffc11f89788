"""The state of `fully_shard` on a module, and its hooks around the module's forward."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xla_dtensor.base import recomputation, torch_private
from xla_dtensor.base.torch_private import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    pytree,
    top_saved_tensors_hooks,
)
from xla_dtensor.mesh import mesh_dim_axes
from xla_dtensor.parallel._parameter import ManagedParameter
from xla_dtensor.parallel._settings import Settings
from xla_dtensor.parallel._whole import UnshardedStorage, wholes
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


class State(Settings):
    """The state of one call of `fully_shard` or `replicate`.

    Attributes:
        parameters: the managed parameters.
        reshard_after_backward: whether backward undoes `unshard`.
        is_root: whether its module is the outermost one; None until the first forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[ManagedParameter] = []
        self.reshard_after_backward = True
        self.is_root: bool | None = None
        self._of_module: dict[int, list[ManagedParameter]] = {}

    @property
    def reshards(self) -> bool | int:
        """``reshard_after_forward``, decided."""
        if self.reshard_after_forward is None:
            return not self.is_root
        return self.reshard_after_forward

    def parameters_of(self, module: nn.Module) -> list[ManagedParameter]:
        """The managed parameters in ``module``, one of ``modules``."""
        found = self._of_module.get(id(module))
        if found is None:
            inside = {id(m) for m in module.modules()}
            found = [
                p for p in self.parameters if any(id(at.module) in inside for at in p.locations)
            ]
            self._of_module[id(module)] = found
        return found

    # --- forward -----------------------------------------------------------------------------

    # These two names are what torch's register_fsdp_forward_method calls.
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.consult()
        outer = _running.frames[-1] if _running.frames else None
        if self.is_root is None:
            self._find_root(module)
        if outer is None:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _to_device, (args, kwargs))
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            cast = functools.partial(_cast, dtype=dtype)
            args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
        frame = _Frame(self, module, self._view(args, kwargs, outer))
        frame.swap_in()
        frame.record_saved_tensors()
        _running.frames.append(frame)
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.leave()
        dtype = self.policy.output_dtype
        if dtype is not None:
            output = pytree.tree_map_only(
                torch.Tensor, functools.partial(_cast, dtype=dtype), output
            )
        return output

    def leave(self) -> None:
        """Undo what the innermost forward's `_pre_forward` did."""
        frame = _running.frames.pop()
        frame.stop_recording()
        frame.swap_out()

    def _find_root(self, module: nn.Module) -> None:
        """The first module to run is the root of those inside it."""
        self.is_root = True
        for inner in module.modules():
            for state in states_of(inner):
                if state is not self:
                    state.is_root = False

    def _view(self, args: Any, kwargs: Any, outer: _Frame | None) -> bool:
        """Whether the module computes on global tensors: its inputs are laid out over the
        data-parallel devices."""
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not inputs:
            return outer is not None and outer.global_view
        own = {name for p in self.parameters for name in p.parallel.axes}
        for tensor in inputs:
            if isinstance(tensor, XLAShardedTensor):
                axes = mesh_dim_axes(tensor.device_mesh)
                if own & {name for names in axes for name in names}:
                    return True
        return False

    # --- unshard and reshard -----------------------------------------------------------------

    def unshard(self) -> None:
        """Put the whole parameters in the modules until `reshard`."""
        self.consult()
        self.unsharded = True
        for parameter in self.parameters:
            parameter.swap_in(parameter.spans_mesh)

    def after_backward(self, parameter: ManagedParameter) -> None:
        """The gradient of ``parameter`` is there."""
        if self.unsharded and self.reshard_after_backward:
            parameter.swap_out()
            self.unsharded = any(p.whole is not None for p in self.parameters)

    def reshard(self) -> None:
        """Put the sharded parameters back."""
        self.consult()
        self.unsharded = False
        for parameter in self.parameters:
            parameter.swap_out()


@dataclass
class _Frame:
    """One forward that is running."""

    state: State
    module: nn.Module
    global_view: bool
    recording: bool = False

    def swap_in(self, again: bool = False) -> None:
        reshards = self.state.reshards
        # Those that are in place already are an outer call's, or the user's (`unshard`).
        self.swapped = [p for p in self.state.parameters_of(self.module) if p.whole is None]
        for parameter in self.swapped:
            if again:
                parameter.swap_in_again(self.global_view)
                continue
            parameter.swap_in(self.global_view)
            whole = wholes.get(parameter.whole._storage_)
            if whole is not None:
                whole.reshard = bool(reshards)
                if reshards and reshards is not True and torch.is_grad_enabled():
                    parameter.keep(whole, parameter.whole._storage_, reshards)

    def swap_out(self) -> None:
        if self.state.unsharded and self.state.reshards:
            self.state.reshard()
        for parameter in self.swapped:
            parameter.swap_out()

    def record_saved_tensors(self) -> None:
        if not self.state.reshards or not torch.is_grad_enabled():
            return
        beneath = top_saved_tensors_hooks(True)
        # The hooks of an outer forward pack this one's parameters, too.
        if beneath is not None and getattr(beneath[0], "keeps_sharded", False):
            return
        pack, unpack = _hooks(beneath)
        push_saved_tensors_hooks(pack, unpack)
        self.recording = True

    def stop_recording(self) -> None:
        if self.recording:
            pop_saved_tensors_hooks()
            self.recording = False


class _Running(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_running = _Running()


def states_of(module: nn.Module) -> list[State]:
    """The states of the calls that ``module`` was passed to."""
    return [
        s
        for s in module.__dict__.get(torch_private.CONTRACT_STATE, {}).values()
        if isinstance(s, State)
    ]


def _to_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("xla") if tensor.device.type == "cpu" else tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# --- what autograd saves -------------------------------------------------------------------------


@dataclass
class _Recipe:
    """A whole parameter, or a view of it, that autograd would have kept."""

    whole: UnshardedStorage
    cls: type
    form: Any
    steps: Any

    def tensor(self) -> torch.Tensor:
        storage = self.whole.parameter.gather_again(self.whole)
        return self.cls(storage, self.form, self.steps)


def _hooks(
    beneath: tuple[Callable[..., Any], Callable[..., Any]] | None,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks that save whole parameters as recipes, and anything else as the hooks ``beneath`` do
    (activation checkpointing around the module)."""

    def pack(tensor: torch.Tensor) -> Any:
        if is_ours(tensor):
            whole = wholes.get(tensor._storage_)
            if whole is not None and whole.reshard:
                return _Recipe(whole, type(tensor), tensor._form, tensor._steps)
        if beneath is not None:
            return _Beneath(beneath[0](tensor))
        if is_ours(tensor) and tensor.grad_fn is not None:
            # It may be the result of the very node that saves it: kept itself, they would keep each
            # other alive for ever. torch puts the history back.
            return type(tensor)(tensor._storage_, tensor._form, tensor._steps)
        return tensor

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, _Recipe):
            return saved.tensor()
        if isinstance(saved, _Beneath):
            assert beneath is not None
            return beneath[1](saved.value)
        return saved

    pack.keeps_sharded = True  # type: ignore[attr-defined]
    return pack, unpack


@dataclass
class _Beneath:
    value: Any


# --- activation checkpointing inside of the module -----------------------------------------------


@contextlib.contextmanager
def _recomputing(first: tuple[_Frame, ...]) -> Iterator[None]:
    """The recomputation of a block has whole parameters in place, as when it ran first."""
    outside = _running.frames
    frames = [_Frame(frame.state, frame.module, frame.global_view) for frame in first]
    _running.frames = [*frames]
    try:
        for frame in frames:
            frame.swap_in(again=True)
        yield
    finally:
        for frame in frames:
            frame.swap_out()
        _running.frames = outside


recomputation.watch(lambda: tuple(_running.frames), _recomputing)
