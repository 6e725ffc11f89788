"""`FSDPModule`: the class of modules under `fully_shard`, with the methods that torch's has."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.parallel._manage import check_modules
from xla_dtensor.parallel._state import State


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        model = xd.fully_shard(torch.nn.Linear(16, 8), mesh=mesh)
        model.unshard(async_op=True).wait()
        assert isinstance(model.weight, xd.XLATensor)  # the whole one
    """

    def wait(self) -> None:
        """Nothing to wait for: XLA schedules the communication, and uses wait for their values."""


class GradientReductionHandle:
    """What ``finalize_backward(async_op=True)`` returns."""

    def wait(self) -> None:
        """Nothing to wait for: uses of the gradients wait for their values."""


class FSDPModule(TorchFSDPModule):
    """A module under `fully_shard`. Also an instance of torch's ``FSDPModule``.

    Methods of torch's that only say when to communicate (prefetching, events, buffers, process
    groups) check their arguments and do nothing else: XLA schedules communication.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        model = xd.fully_shard(torch.nn.Linear(16, 8), mesh=mesh)
        assert isinstance(model, xd.FSDPModule) and isinstance(model, torch.nn.Linear)
        model.unshard()
        assert isinstance(model.weight, xd.XLATensor)  # the whole one
        model.reshard()
        assert isinstance(model.weight, xd.XLAShardedTensor)
    """

    _orig_cls_mro_index = 3
    _api: Any  # the function that made it one, which knows its state

    def _get_fsdp_state(self) -> State:
        return self._api.state(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        args, kwargs = state._pre_forward(cast(nn.Module, self), args, kwargs)
        try:
            output = super().__call__(*args, **kwargs)
        except BaseException:
            # Else the next forward would take this one for the one around it.
            state.leave()
            raise
        return state._post_forward(cast(nn.Module, self), args, output)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        # torch's version repairs its own padding of shards.
        return super(TorchFSDPModule, self)._apply(*args, **kwargs)

    def _states(self, recurse: bool) -> list[State]:
        """The states of this module and, with ``recurse``, of those inside it; about to change."""
        module = cast(nn.Module, self)
        modules = list(module.modules()) if recurse else [module]
        states = [m._get_fsdp_state() for m in modules if isinstance(m, FSDPModule)]
        for state in states:
            state.consult()
        return states

    # --- parameters ---------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Put whole tensors in place of this module's parameters, until `reshard`, the end of a
        forward with ``reshard_after_forward``, or backward. Not recursive."""
        self._get_fsdp_state().unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Put the sharded parameters back. Not recursive."""
        self._get_fsdp_state().reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: put the sharded parameters back and drop
        gradients that wait for their reduction, in all modules of this root.

        Raises:
            RuntimeError: this module is not the root.
        """
        self._root("reset_iter_state")
        for state in self._states(recurse=True):
            state.reshard()
            for parameter in state.parameters:
                parameter.release()
                parameter.accumulated.grad = None

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set ``reshard_after_forward``.

        Raises:
            ValueError: it isn't a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward puts the sharded parameters back after `unshard`."""
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    # --- gradients ----------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients over the devices. Without, they accumulate on each
        device; the next backward that reduces includes them."""
        for state in self._states(recurse):
            state.requires_sync = state.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over the replicas of a mesh with two dims. Without,
        they accumulate as without any reduction (torch would reduce-scatter them first)."""
        for state in self._states(recurse):
            state.requires_all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of the devices' gradients is divided by; by default their number."""
        for state in self._states(recurse=False):
            state.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Not supported: the reduction is one collective inside of XLA's program.

        Raises:
            UnsupportedOpError: always.
        """
        raise UnsupportedOpError(
            "set_all_reduce_hook: XLA runs the reduction, nothing can be called inside of it; "
            "register a hook on the parameter (register_post_accumulate_grad_hook)"
        )

    def set_custom_all_gather(self, comm: Any) -> None:
        """Not supported: XLA gathers.

        Raises:
            UnsupportedOpError: always.
        """
        raise UnsupportedOpError("set_custom_all_gather: XLA implements the collectives")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Not supported: XLA reduces.

        Raises:
            UnsupportedOpError: always.
        """
        raise UnsupportedOpError("set_custom_reduce_scatter: XLA implements the collectives")

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """No effect: one process computes for all devices, so that they use the same parameters."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Of torch 2.15: that `finalize_backward` will be called. No effect: it may be called
        anyway, and gradients that are to be reduced are so at the end of each backward pass.

        Raises:
            RuntimeError: this module is not the root.
        """
        self._root("set_manual_backward_finalization")

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Of torch 2.15: reduce the gradients that have waited since
        ``set_requires_gradient_sync(False)``, if they are to be reduced now, in all modules of this
        root. The next backward pass would do so, too.

        Raises:
            RuntimeError: this module is not the root.
        """
        self._root("finalize_backward")
        with torch.no_grad():
            for state in self._states(recurse=True):
                for parameter in state.parameters:
                    parameter.reduce_waiting()
        return GradientReductionHandle() if async_op else None

    def _root(self, method: str) -> None:
        if self._get_fsdp_state().is_root is False:
            raise RuntimeError(f"{method} must be called on the root FSDP module")

    # --- when to communicate: XLA decides ------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect."""

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """No effect."""
        check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """No effect."""
        check_modules(modules)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """No effect."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: the reduction is a sum, scaled after it."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """No effect.

        Raises:
            TypeError, ValueError: ``max_input_buffers`` isn't a positive int.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """No effect."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No effect."""

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """No effect: CUDA graphs want addresses that stay; a compiled step has none."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: backward gathers a parameter only where an operation has saved it."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect."""

    def set_symm_mem_for_comm(self, backend: Any = "NCCL") -> None:
        """No effect."""
