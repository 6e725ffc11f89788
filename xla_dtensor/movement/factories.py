"""Making sharded tensors: ``distribute_tensor``, ``distribute_module`` and torch's six factories.

Users reach these through ``torch.distributed.tensor``; ``integration`` connects them.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.nn.parameter import is_lazy

from xla_dtensor import runtime
from xla_dtensor.base import executor
from xla_dtensor.base.random import rng
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.base.torch_private import mesh_resources
from xla_dtensor.base.torch_private.attributes import (
    buffers_of,
    is_distributed,
    parameters_of,
    set_distributed,
)
from xla_dtensor.errors import (
    MeshMismatchError,
    PlacementError,
    UnsupportedOpError,
)
from xla_dtensor.forms.form import Form, sharded_form
from xla_dtensor.forms.host_values import from_numpy, to_numpy
from xla_dtensor.forms.storage import Storage
from xla_dtensor.lowering.ops import random
from xla_dtensor.mesh import frame_of, mesh_dim_axes, normalize_placements
from xla_dtensor.mesh.domains import warn_of_crossing
from xla_dtensor.movement import source_rank
from xla_dtensor.movement.distribute import lay_out
from xla_dtensor.movement.local_view import from_local
from xla_dtensor.movement.relayout import constrain
from xla_dtensor.movement.shared_parameters import share_again, shared_slots
from xla_dtensor.runtime import agreement
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import (
    DTENSORS,
    XLAShardedTensor,
)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> XLAShardedTensor:
    """Lay out a leaf tensor, the logical value, over an xla mesh: ``distribute_tensor`` of
    ``torch.distributed.tensor``, which comes here for xla meshes.

    Args:
        tensor: a CPU tensor, an `XLATensor`, a meta tensor (the result has no value either), or a
            tensor that already has this layout. Any shape; dims needn't divide by the devices.
        device_mesh: an xla mesh; by default the current one (``with mesh:``).
        placements: one per mesh dim; replicated by default. A ``Partial`` tensor's value, once
            reduced, is ``tensor``.
        src_data_rank: of several processes, whose value it is: that of the process with the device
            of this rank along each mesh dim, by default the first, which is sent to all; with None
            each process's devices take their shards of its own, and what several of them hold has
            to be the same. In one process, and in a compiled step (where all have to have the
            same), it has no effect.

    Returns:
        an `XLAShardedTensor` of ``tensor``'s shape, dtype and ``requires_grad``, with these
        placements: a leaf with a copy of the value. ``tensor`` itself if it has the layout already.

    Raises:
        RuntimeError: ``tensor`` isn't a leaf (as in torch), or there is no mesh.
        PlacementError: the placements don't fit mesh or tensor, or a sharded tensor has others.
        MeshMismatchError: ``tensor`` is sharded over another mesh.
        PerDeviceValueError: ``tensor`` is another one on each device.
        UnsupportedOpError: ``tensor`` has a sparse layout.
        DivergenceError: processes have different values, shapes or dtypes where these have to be
            the same.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        x = xd.distribute_tensor(torch.randn(8, 16), mesh, [xd.Shard(0), xd.Replicate()])
        assert x.shape == (8, 16) and x.placements == (xd.Shard(0), xd.Replicate())
        assert x.to_local().shape == (4, 16)
    """
    mesh = device_mesh or mesh_resources.get_current_mesh()
    if not tensor.is_leaf:
        raise RuntimeError(
            "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf "
            "tensor! Use from_local or redistribute inside an autograd computation"
        )
    placements = normalize_placements(placements, mesh, tensor.ndim, "distribute_tensor")
    if isinstance(tensor, DTENSORS):
        if tensor.device_mesh != mesh:
            raise MeshMismatchError(
                f"distribute_tensor: the tensor is on {tensor.device_mesh!r} already, not on "
                f"{mesh!r}; use redistribute(device_mesh, placements)"
            )
        if tensor.placements != placements:
            raise PlacementError(
                f"distribute_tensor: the tensor on {mesh!r} has placements "
                f"{list(tensor.placements)}, not {list(placements)}; use redistribute(placements=)"
            )
        return tensor
    if tensor.layout is not torch.strided:
        raise UnsupportedOpError(
            f"distribute_tensor of a tensor with layout {tensor.layout}: XLA has dense arrays "
            "only; distribute tensor.to_dense()"
        )
    if isinstance(tensor, XLATensor) and _varies_outside(tensor, mesh):
        return _dealt_in_groups(tensor, mesh, placements)
    own = None
    if source_rank.is_own(tensor):
        own = to_numpy(tensor.detach().cpu())
        if src_data_rank is not None and source_rank.take(own, mesh, src_data_rank):
            whole = from_numpy(own).requires_grad_(tensor.requires_grad)
            return _dealt_in_groups(whole, mesh, placements)
    return lay_out(tensor, mesh, placements, own, check=src_data_rank is None)


def _dealt_in_groups(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> XLAShardedTensor:
    """Of each group of the mesh's devices it is one value."""
    whole = from_local(tensor.detach(), mesh)
    dealt = whole.redistribute(placements=placements).detach()
    return dealt.requires_grad_(tensor.requires_grad)


def _varies_outside(tensor: XLATensor, mesh: DeviceMesh) -> bool:
    """Whether the devices' values differ, and those along the dims of ``mesh`` don't."""
    own = {name for names in mesh_dim_axes(mesh) for name in names}
    return bool(tensor.varying) and not own & set(tensor._form.placed(frame_of(mesh)).varying)


def _warn_of_tensor_parallelism(mesh: DeviceMesh) -> None:
    """Where a dim over which ``parallelize_module`` cuts leaves a slice or a host, whatever it is
    called."""
    names = mesh.mesh_dim_names or tuple(f"dim {i}" for i in range(mesh.ndim))
    devices = runtime.devices(mesh.mesh.flatten().tolist())
    warn_of_crossing(names, mesh.shape, devices, names)


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Make a module's parameters and buffers sharded tensors, in place, with the semantics of
    torch's ``distribute_module``, which comes here for xla meshes.

    Args:
        module: any module; parameters and buffers that are ``DTensor``s already stay as they are.
        device_mesh: an xla mesh; by default the current one.
        partition_fn: called with each submodule's name, the submodule and the mesh; shards what it
            wants. Parameters and buffers that it leaves alone are replicated.
        input_fn: forward pre-hook ``(module, inputs, mesh) -> inputs``.
        output_fn: forward hook ``(module, outputs, mesh) -> outputs``.

    Returns:
        ``module``. Its parameters are new objects; make optimizers after it. What several modules
        share they share afterwards. Of several processes all take the parameters and buffers of the
        first, as `distribute_tensor` does.

    Raises:
        RuntimeError: the module was distributed before, or there is no mesh.
        ValueError: ``input_fn`` or ``output_fn`` takes a wrong number of arguments;
            ``partition_fn`` has placed a shared parameter differently in two modules; a lazy
            module's parameters have no shape yet.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        model = xd.distribute_module(torch.nn.Linear(16, 4), mesh)
        x = xd.distribute_tensor(torch.randn(8, 16), mesh, [xd.Shard(0)])
        assert model.weight.placements == (xd.Replicate(),)
        assert model(x).placements == (xd.Shard(0),)
    """
    if is_distributed(module):
        raise RuntimeError(
            "distribute_module should only be called once on a module, but it has already been "
            "called on this module!"
        )
    mesh = device_mesh or mesh_resources.get_current_mesh()
    own = itertools.chain(module.named_parameters(), module.named_buffers())
    shapeless = [name for name, tensor in own if is_lazy(tensor)]
    if shapeless:
        raise ValueError(
            f"distribute_module of a lazy module: {', '.join(shapeless)} have no shape before its "
            "first batch; call the module once, on any device, then distribute it"
        )
    if isinstance(getattr(partition_fn, "__self__", None), ParallelStyle):
        _warn_of_tensor_parallelism(mesh)
    shared = shared_slots(module)
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate_rest(submodule, mesh)
    share_again(shared)
    if input_fn is not None:
        hook = _with_mesh(input_fn, mesh, "input_fn", "inputs")
        module.register_forward_pre_hook(lambda m, inputs: hook(m, inputs))
    if output_fn is not None:
        hook_out = _with_mesh(output_fn, mesh, "output_fn", "outputs")
        module.register_forward_hook(lambda m, inputs, outputs: hook_out(m, outputs))
    set_distributed(module)
    return module


def _replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in parameters_of(module).items():
        if parameter is not None and not isinstance(parameter, DTENSORS):
            replicated = nn.Parameter(
                distribute_tensor(parameter.data, mesh, None), requires_grad=parameter.requires_grad
            )
            module.register_parameter(key, replicated)
    for key, buffer in buffers_of(module).items():
        if buffer is not None and not isinstance(buffer, DTENSORS):
            buffers_of(module)[key] = distribute_tensor(buffer, mesh, None)


def _with_mesh(function: Callable[..., Any], mesh: DeviceMesh, name: str, value: str) -> Any:
    count = len(inspect.signature(function).parameters)
    if count == 3:
        return lambda module, x: function(module, x, mesh)
    if count == 2:
        warnings.warn(
            f"Deprecating {name} that takes two arguments ({value}, device_mesh), please use "
            f"{name} that takes in (module, {value}, device_mesh) instead!",
            FutureWarning,
            stacklevel=4,
        )
        return lambda module, x: function(x, mesh)
    raise ValueError(f"{name} should take in 3 arguments, but got {count} arguments!")


_makers: Cache[tuple[str, Form, Any], Any] = Cache("factories", 512)


def make_sharded(
    init_op: Any,
    size: tuple[int, ...],
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    layout: torch.layout = torch.strided,
    fill_value: Any = None,
) -> XLAShardedTensor:
    """``torch.distributed.tensor.zeros/ones/empty/full/rand/randn``: each device makes its shard.

    Args:
        init_op: the torch factory that the result equals.
        size: global shape.

    Raises:
        UnsupportedOpError: a layout other than ``torch.strided``.
        PlacementError: placements that don't fit.
    """
    name = init_op.__name__
    if layout is not torch.strided:
        raise UnsupportedOpError(f"{name}: layout {layout} is not supported on xla meshes")
    mesh = device_mesh or mesh_resources.get_current_mesh()
    placements = normalize_placements(placements, mesh, len(size), name)
    if dtype is None:
        dtype = torch.get_default_dtype()
        if name == "full":
            dtype = torch.full((), fill_value).dtype
    partial = next((p for p in placements if isinstance(p, Partial)), None)
    if partial is not None and name != "zeros":
        # torch fills each rank's part, so that the sum depends on the number of ranks: refuse.
        raise UnsupportedOpError(
            f"{name} with {partial!r} on {mesh!r}: what is filled, the parts or the sum? Make it "
            "Replicate() and shard or reduce it"
        )
    form = sharded_form(mesh, placements, tuple(size), dtype=dtype)

    def traced(trace: Any) -> Any:
        key = trace.random_key() if name in _RANDOM else None
        with jax.enable_x64(True):
            return constrain(_make(name, form, key, fill_value), form)

    array = executor.current().new_array(form, lambda: _made(name, form, fill_value), traced)
    result = XLAShardedTensor(Storage(array, form), form)
    return result.requires_grad_(True) if requires_grad else result


_RANDOM = frozenset({"rand", "randn"})


def _made(name: str, form: Form, fill_value: Any) -> Any:
    # The number is an input of the program, so its type alone is in the key.
    maker = _makers.get((name, form, type(fill_value)))
    if maker is None:
        seed = f" of the seed and position {rng.position()}" if name in _RANDOM else ""
        agreement.agree(f"makes {name}{seed}, {form}")

        def function(state: Any, fill_value: Any) -> Any:
            key = rng.key_of(state) if name in _RANDOM else None
            return form.physical(_make(name, form, key, fill_value))

        jitted = jax.jit(function, out_shardings=form.sharding)
        maker = _makers.put((name, form, type(fill_value)), jitted)
    state = rng.default.take(name in _RANDOM)
    try:
        with jax.enable_x64(True):
            return maker(state, fill_value)
    except BaseException:
        rng.default.give_back(state, name in _RANDOM)
        raise


def _make(name: str, form: Form, key: Any, fill_value: Any) -> Any:
    import jax.numpy as jnp

    if name in _RANDOM:
        # The same numbers as torch.rand(..., device="xla").
        make = random.rand if name == "rand" else random.randn
        return make(key, form.shape, dtype=form.dtype)
    value = {"zeros": 0, "empty": 0, "ones": 1, "full": fill_value}[name]
    return jnp.full(form.shape, value, dtype=form.jax_dtype)


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Replicated on every dim of ``mesh``."""
    return (Replicate(),) * mesh.ndim
