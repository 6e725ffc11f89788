"""Installs every hook into torch. Each does nothing for other device types.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import Any

import torch
import torch.nn.utils.clip_grad
import torch.overrides
import torch.utils.dlpack
import torch.utils.hooks
from torch.distributed import device_mesh as torch_device_mesh

from xla_dtensor.base import epoch, interrupts, torch_private
from xla_dtensor.base.numbers.python_numbers import as_float
from xla_dtensor.base.ours import is_ours
from xla_dtensor.base.torch_private import (
    TorchDispatchMode,
    mesh_resources,
    pop_dispatch_mode,
    pop_function_mode,
)
from xla_dtensor.integration.debugging import debug_modes, observers, tools
from xla_dtensor.integration.device import accelerator, generators, pinning, registration
from xla_dtensor.integration.distributed import context_parallel, data_parallel, process_groups
from xla_dtensor.integration.modules import (
    checkpoints,
    cpu_copies,
    loaders,
    loading,
    module_hooks,
)
from xla_dtensor.integration.operators import (
    autocast,
    control_flow,
    flex_attention,
    recomputation,
    subclasses,
)
from xla_dtensor.integration.optimizers import grad_scaler, optimizer_steps
from xla_dtensor.integration.optimizers import loading as optimizer_loading
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import hide_builtin, take_over
from xla_dtensor.runtime.jax_runtime import keep_quiet
from xla_dtensor.tensors import backend

_installed = False


def install() -> None:
    """Install the hooks that must exist from the start, once per process."""
    global _installed
    if _installed:
        return
    # First: XLA reads its log level when JAX is imported.
    keep_quiet()
    _keep_modes_whole()
    registration.install()
    autocast.install()
    flex_attention.install()
    control_flow.install()
    optimizer_steps.install()
    optimizer_loading.install()
    grad_scaler.install()
    _hook_mesh_class()
    _hook_current_mesh()
    _hook_distribute()
    recomputation.install()
    subclasses.install()
    accelerator.install()
    generators.install()
    pinning.install()
    _hook_handles()
    _hook_swapping()
    loaders.install()
    loading.install()
    checkpoints.install()
    module_hooks.install()
    cpu_copies.install()
    observers.install()
    process_groups.install(data_parallel.install_for_modules)
    data_parallel.install()
    debug_modes.install()
    tools.install()
    context_parallel.install()
    backend.bind(_backend)
    _hook_clipping()
    _hook_averages()
    _hook_dlpack()
    # Before the first mesh, too: a rule may be registered under "relu" where an op is defined.
    on_import("xla_dtensor.rules", lambda rules: rules.add_names(_paddle_rule))
    _installed = True


def _backend() -> backend.Backend:
    from torch.fx.experimental import proxy_tensor

    from xla_dtensor import custom_ops  # noqa: F401  (a rule that comes later would drop plans)
    from xla_dtensor.integration.operators import below_autograd  # noqa: F401  (registers handlers)
    from xla_dtensor.movement import backend as found
    from xla_dtensor.ragged import operations
    from xla_dtensor.tensors.device_tensor import XLATensor

    # make_fx, and torch.func.linearize, would leave out what is done with one that is no argument.
    if XLATensor not in proxy_tensor.HANDLED_TYPES:
        proxy_tensor.HANDLED_TYPES = (*proxy_tensor.HANDLED_TYPES, XLATensor)
    operations.install()
    data_parallel.install_for_modules()
    optimizer_steps.make_foreach_the_default()
    return found


def _hook_dlpack() -> None:
    """``to_dlpack`` of our tensors: torch's makes a capsule without a value of what it takes for
    the memory, and of that a tensor that is on "xla" and none of ours."""
    original = torch.utils.dlpack.to_dlpack

    @functools.wraps(original)
    def to_dlpack(tensor: Any) -> Any:
        return tensor.__dlpack__() if is_ours(tensor) else original(tensor)

    for owner in (torch, torch.utils.dlpack):
        owner.to_dlpack = to_dlpack


def _hook_averages() -> None:
    """``AveragedModel`` without a function of the user's averages tensor by tensor, as on the CPU:
    torch's loop over lists gives a tensor for a number, and refuses buffers of ints."""
    original = torch_private.find("foreach_devices_of_averages")
    if original is None:  # a newer torch, which asks nobody
        return

    @functools.wraps(original)
    def supported() -> list[str]:
        return [name for name in original() if name != "xla"]

    torch_private.replace("foreach_devices_of_averages", supported)


def _hook_handles() -> None:
    """Hooks of any kind, of tensors, modules and optimizers: compiled steps look at them again when
    one has come or gone. All have such a handle."""
    handle = torch.utils.hooks.RemovableHandle
    init, remove = handle.__init__, handle.remove

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        epoch.tensors.moved()
        init(self, *args, **kwargs)

    @functools.wraps(remove)
    def removed(self: Any) -> None:
        epoch.tensors.moved()
        remove(self)

    handle.__init__, handle.remove = made, removed


def _hook_swapping() -> None:
    """``torch.utils.swap_tensors``: each of the two has the other's memory, flags and hooks."""
    original = torch_private.swap_tensors

    @functools.wraps(original)
    def swap(*tensors: Any) -> None:
        epoch.tensors.moved()
        original(*tensors)

    torch_private.replace("swap_tensors", swap)


def _hook_clipping() -> None:
    """``clip_grad_norm_`` and its siblings make a float of their limit, which in a compiled step
    may be an input."""
    hide_builtin(torch.nn.utils.clip_grad, "float", as_float)


@functools.cache
def _install_for_dtensor() -> None:
    """The hooks into torch.distributed.tensor, which takes long to import: with the first mesh."""
    from xla_dtensor.integration.distributed import custom_sharding, functional_collectives
    from xla_dtensor.integration.operators.dispatch_mode import let_subclasses_dispatch

    let_subclasses_dispatch()
    functional_collectives.install()
    custom_sharding.install()
    _hook_factories()
    _hook_from_local()
    data_parallel.install_for_modules()


def _paddle_rule(name: str) -> Any:
    from xla_dtensor.rules.paddle import rule_of_name

    return rule_of_name(name)


def _keep_modes_whole() -> None:
    """While a mode works, torch has taken it from its stack, in Python; an interrupt that came just
    then would lose it, and the end of the mode's block would fail."""
    for pop, mode in (
        (pop_function_mode, torch.overrides.TorchFunctionMode),
        (pop_dispatch_mode, TorchDispatchMode),
    ):
        interrupts.atomic_context(pop)
        interrupts.atomic(mode.__enter__)
        interrupts.atomic(mode.__exit__)


def _hook_mesh_class() -> None:
    """``DeviceMesh("xla", ...)``, also from ``init_device_mesh``, makes an `XLADeviceMesh`."""
    mesh_class = torch_device_mesh.DeviceMesh

    def new(cls: Any, device_type: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is not mesh_class or device_type != "xla":
            return object.__new__(cls)
        from xla_dtensor.mesh import XLADeviceMesh

        _install_for_dtensor()
        # A subclass of what was asked for, so Python goes on to call its __init__.
        return object.__new__(XLADeviceMesh)

    mesh_class.__new__ = staticmethod(new)


def _hook_current_mesh() -> None:
    """Functions of torch that are given no mesh ask for that of a ``with`` block; outside of one it
    is that of `set_mesh`."""
    environment: Any = type(mesh_resources)
    original = environment.get_current_mesh

    @functools.wraps(original)
    def get_current_mesh(self: Any) -> Any:
        if not self.mesh_stack and "xla_dtensor.mesh.current" in sys.modules:
            from xla_dtensor.mesh import current_mesh

            mesh = current_mesh()
            if mesh is not None:
                return mesh
        return original(self)

    environment.get_current_mesh = get_current_mesh


def _hook_distribute() -> None:
    """torch's own call-out for xla meshes: it imports this module and calls the two functions.

    With the real torch_xla installed its module is left in place.
    """
    name = "torch_xla.distributed.spmd"
    if name in sys.modules:
        return
    spmd = types.ModuleType(name)
    spmd.__doc__ = "Provided by xla_dtensor for torch.distributed.tensor."

    def xla_distribute_tensor(
        tensor: Any, device_mesh: Any, placements: Any = None, *, src_data_rank: int | None = 0
    ) -> Any:
        from xla_dtensor.movement.factories import distribute_tensor

        return distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)

    def xla_distribute_module(
        module: Any,
        device_mesh: Any = None,
        partition_fn: Any = None,
        input_fn: Any = None,
        output_fn: Any = None,
    ) -> Any:
        from xla_dtensor.movement.factories import distribute_module

        return distribute_module(module, device_mesh, partition_fn, input_fn, output_fn)

    spmd.xla_distribute_tensor = xla_distribute_tensor  # type: ignore[attr-defined]
    spmd.xla_distribute_module = xla_distribute_module  # type: ignore[attr-defined]
    # This name alone: find_spec("torch_xla") stays None, by which others ask whether it is
    # installed.
    sys.modules[name] = spmd

    on_import(torch_private.DTENSOR_API, _take_over_sources)


def _take_over_sources(api: Any) -> None:
    """torch doesn't tell the function that it calls out to whose value it is."""
    signature = inspect.signature(api.distribute_tensor)

    def with_source(original: Any, args: Any, kwargs: Any) -> Any:
        source = kwargs.get("src_data_rank", 0)
        if source != 0:
            given = signature.bind(*args, **kwargs).arguments
            mesh = given.get("device_mesh")
            mesh = mesh or mesh_resources.get_current_mesh()
            if mesh.device_type == "xla":
                from xla_dtensor.movement.factories import distribute_tensor

                placements = given.get("placements")
                return distribute_tensor(given["tensor"], mesh, placements, src_data_rank=source)
        return original(*args, **kwargs)

    take_over(api.distribute_tensor, with_source)


def _hook_factories() -> None:
    """``torch.distributed.tensor.zeros`` and its five siblings end in this helper."""

    original = torch_private.dtensor_init_helper

    @functools.wraps(original)
    def init_helper(
        init_op: Any, size: Any, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> Any:
        mesh = device_mesh or mesh_resources.get_current_mesh()
        if mesh.device_type != "xla":
            return original(init_op, size, device_mesh, placements, **kwargs)
        from xla_dtensor.movement.factories import make_sharded

        return make_sharded(init_op, tuple(size), mesh, placements, **kwargs)

    torch_private.replace("dtensor_init_helper", init_helper)


def _hook_from_local() -> None:
    from torch.distributed.tensor import DTensor

    original = DTensor.from_local

    @functools.wraps(original)
    def from_local(
        local_tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> Any:
        mesh = device_mesh or mesh_resources.get_current_mesh()
        if mesh.device_type != "xla":
            return original(local_tensor, device_mesh, placements, **kwargs)
        from xla_dtensor.movement.local_view import from_local as xla_from_local

        return xla_from_local(local_tensor, mesh, placements, **kwargs)

    DTensor.from_local = staticmethod(from_local)
