"""``fully_shard``: parameters, gradients and optimizer state sharded over data-parallel devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed._composable import contract
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor.placement_types import Shard
from torch.distributed.utils import _get_root_modules

from xla_dtensor.base.cache import Interned
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.parallel._mesh import DataParallel, data_parallel
from xla_dtensor.parallel._parameter import Location, ManagedParameter
from xla_dtensor.parallel._state import State, states_of


@contract(state_cls=State)
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (torch's signature)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """``torch.distributed.fsdp.fully_shard`` for xla meshes: shard the parameters of ``module``
    over data-parallel devices, gather them where they are used, reduce-scatter their gradients.

    Outside of forward the module's parameters are ``DTensor``s with ``Shard(0)`` on the mesh (one
    that was a ``DTensor`` on a tensor-parallel mesh: on both). In forward the module has whole
    tensors in their place. If its inputs are per-device tensors (each device has its own batch),
    these are tensors that each device holds, and the gradient is the average over the devices, as
    under torch. If its inputs are ``DTensor``s that are laid out over ``mesh`` (one global batch),
    they are ``DTensor``s too, and the gradient is that of the global loss;
    `FSDPModule.set_gradient_divide_factor` then divides it.

    Args:
        module: a module, or a list of modules that are to be one group.
        mesh: of one dim (shards), or two (replicates over the first, shards over the second); by
            default the current mesh, else all devices.
        reshard_after_forward: whether backward gathers the parameters again, in place of keeping
            them from forward; an int: keeps them sharded over that many devices; None: True but for
            the root, the first module to run.
        shard_placement_fn: gives for a parameter the ``Shard`` to use, a ``ShardPlacementResult``
            whose ``mesh_info`` is a mesh or has one as ``.mesh``, or None.
        mp_policy: dtypes of the whole parameters, of the reduction and of the outputs.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: the names of the data-parallel dims in ``mesh``, on which all parameters are
            ``DTensor``s then. As under torch the gradient is that of the global loss divided by the
            number of data-parallel devices; ``set_gradient_divide_factor(1)`` turns that off.

    Returns:
        ``module``, now an `FSDPModule`.

    Raises:
        ValueError: as torch: a container without forward, a scalar parameter, a parameter that
            another group manages, a mesh with a wrong number of dims.
        UnsupportedOpError: an offload policy; parameters that live in host memory aren't supported.
        MeshError: ``mesh`` is not an xla mesh.
    """
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise UnsupportedOpError(
            "fully_shard(offload_policy=CPUOffloadPolicy()): parameters and optimizer state stay "
            "on the devices; leave offload_policy out and shard over more devices"
        )
    parallel = data_parallel(mesh, dp_mesh_dims, "fully_shard", shard=True)
    reshard = _reshard(reshard_after_forward, parallel)
    state = _manage(
        fully_shard, module, parallel, mp_policy, ignored_params, shard_placement_fn, "fully_shard"
    )
    state.reshard_after_forward = reshard
    _become(state.modules, FSDPModule, "FSDP")
    return module


def _reshard(value: Any, parallel: DataParallel) -> bool | int | None:
    """``reshard_after_forward``, checked; an int only where it is neither of the bools."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {value}"
        )
    if parallel.whole_mesh is not None:
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    assert parallel.shard_dim is not None
    size = parallel.mesh.size(parallel.shard_dim)
    if value < 1 or size % value:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{size}, not {value}"
        )
    if value in (1, size):
        return value == size
    return value


def _manage(
    function: Any,
    module: Any,
    parallel: DataParallel,
    policy: MixedPrecisionPolicy,
    ignored_params: set[nn.Parameter] | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    call: str,
) -> State:
    """Move, shard and register the parameters that no other group has."""
    roots = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))
    for root in roots:
        if (
            isinstance(root, nn.ModuleList | nn.ModuleDict)
            and type(root).forward is nn.Module.forward
        ):
            raise ValueError(
                f"{call} does not support containers that do not implement forward: {root}"
            )
    state: State = function.state(roots[0])
    state.modules, state.policy = roots, policy
    found = _locations(roots, ignored_params or set())
    _move_buffers(roots)
    for parameter, locations in found:
        name = locations[0].name
        if parameter.ndim == 0 and parallel.shard_dim is not None:
            raise ValueError(
                "fully_shard doesn't support scalar parameters. Change "
                f"{name} to a 1D tensor with numel equal to 1."
            )
        if getattr(parameter, "_managed", None) is not None:
            raise ValueError(
                f"Parameter '{name}' is shared with a parameter already managed by another FSDP "
                "group. For shared/tied parameters, use fully_shard([module_a, module_b]) to place "
                "them in the same FSDP group."
            )
        own, dim = parallel, 0
        if shard_placement_fn is not None:
            own, dim = _placement(shard_placement_fn(parameter), parameter, parallel)
        managed = ManagedParameter(state, locations, parameter, own, dim)
        parameter._managed = managed
        managed.parameter._managed = managed
        state.parameters.append(managed)
    for holder in {at.module for p in state.parameters for at in p.locations}:
        holder.register_state_dict_pre_hook(lambda *args: state.reshard())
        holder.register_load_state_dict_pre_hook(lambda *args: state.reshard())
    return state


def _move_buffers(roots: Sequence[nn.Module]) -> None:
    moved: dict[int, torch.Tensor] = {}
    for module in _managed_modules(roots):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to("xla"))


def _managed_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules inside ``roots`` that no earlier call manages."""
    modules: list[nn.Module] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        registry = _get_registry(module) or {}
        if not any(module is root for root in roots) and (
            states_of(module) or "fully_shard" in registry or "replicate" in registry
        ):
            return
        for child in module.children():
            visit(child)
        modules.append(module)

    for root in roots:
        visit(root)
    return modules


def _locations(
    roots: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> list[tuple[nn.Parameter, list[Location]]]:
    found: dict[int, tuple[nn.Parameter, list[Location]]] = {}
    skipped = {id(parameter) for parameter in ignored}
    for module in _managed_modules(roots):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in skipped:
                found.setdefault(id(parameter), (parameter, []))[1].append(Location(module, name))
    return list(found.values())


def _placement(
    result: Any, parameter: nn.Parameter, default: DataParallel
) -> tuple[DataParallel, int]:
    """The mesh and the tensor dim that a ``shard_placement_fn`` has chosen."""
    parallel = default
    if result is not None and not isinstance(result, Shard):
        info = getattr(result, "mesh_info", None)
        mesh = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None)
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(f"Invalid shard_placement_fn result: {result}")
        parallel = data_parallel(mesh, None, "fully_shard", shard=True)
        result = result.placement
    dim = 0 if result is None else result.dim
    if not -parameter.ndim <= dim < parameter.ndim:
        raise ValueError(
            f"Shard dim {dim} is invalid for {parameter.ndim}D tensor: {parameter.shape}"
        )
    return parallel, dim % parameter.ndim


# A module's class is told from another's by identity, so one that modules have isn't made anew.
_classes: Interned[tuple[type, type], type] = Interned("classes of managed modules", 64)


def _no_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def _become(modules: Sequence[nn.Module], mixin: type, prefix: str) -> None:
    """Put ``mixin`` first in the classes of ``modules``."""
    for module in modules:
        cls = type(module)
        new = _classes.get((cls, mixin))
        if new is None:
            body = {"__deepcopy__": _no_deepcopy}
            new = _classes.put((cls, mixin), type(f"{prefix}{cls.__name__}", (mixin, cls), body))
        module.__class__ = new


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def wait(self) -> None:
        """Nothing to wait for: XLA schedules the communication, and uses wait for their values."""


class FSDPModule(TorchFSDPModule):
    """A module under `fully_shard`. Also an instance of torch's ``FSDPModule``.

    Methods of torch's that only say when to communicate (prefetching, events, buffers, process
    groups) check their arguments and do nothing else: XLA schedules communication.
    """

    _orig_cls_mro_index = 3
    _api: Any = staticmethod(fully_shard)

    def _get_fsdp_state(self) -> State:
        return self._api.state(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        args, kwargs = state._pre_forward(cast(nn.Module, self), args, kwargs)
        try:
            output = super().__call__(*args, **kwargs)
        except BaseException:
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
        if self._get_fsdp_state().is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
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

    # --- when to communicate: XLA decides ------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect."""

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """No effect."""
        _check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """No effect."""
        _check_modules(modules)

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

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: backward gathers a parameter only where an operation has saved it."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect."""

    def set_symm_mem_for_comm(self, backend: Any = "NCCL") -> None:
        """No effect."""


def _check_modules(modules: Any) -> None:
    for module in modules:
        if not isinstance(module, TorchFSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}")
