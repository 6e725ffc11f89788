"""One parameter under data parallelism: sharded, gathered, and its gradient reduced."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import (
    Placement,
    Replicate,
    Shard,
)

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private import call_after_backward, concatenate_meshes, current_backward
from xla_dtensor.base.torch_private.attributes import make_parameter
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, device_form, sharded_form
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import frame_of
from xla_dtensor.mesh.placements import shard_after, unpartial
from xla_dtensor.movement.factories import distribute_tensor
from xla_dtensor.movement.local_view import as_sharded
from xla_dtensor.movement.relayout import move, relayout
from xla_dtensor.parallel._layouts import Keep, gather, reduce_over_devices
from xla_dtensor.parallel._settings import Settings
from xla_dtensor.parallel._unshard import Unshard
from xla_dtensor.parallel._whole import Accumulated, Location, UnshardedStorage, same_whole, wholes
from xla_dtensor.parallel.annotated import annotation_of
from xla_dtensor.parallel.offload import to_host
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.of_form import of_storage
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

if TYPE_CHECKING:
    from xla_dtensor.parallel._mesh import DataParallel


Placements = tuple[Placement, ...]


class ManagedParameter:
    """A parameter that `fully_shard` or `replicate` manages.

    Attributes:
        locations: the modules that hold it.
        parallel: the data-parallel mesh.
        layout: the mesh and placements of the ``DTensor`` that modules compute with; None for a
            plain tensor.
        accumulated: gradients that aren't reduced yet.
    """

    def __init__(
        self,
        state: Settings,
        locations: list[Location],
        parameter: nn.Parameter,
        parallel: DataParallel,
        dim: int,
    ) -> None:
        self._state = state
        self.locations = locations
        self.parallel = parallel
        self._dim = dim
        self.layout: tuple[DeviceMesh, Placements] | None = None
        self._annotation = annotation_of(parameter, parallel)
        if self._annotation is not None:
            whole = self._annotation.stored(parameter, parallel)
            parameter = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        if isinstance(parameter, XLAShardedTensor):
            self.layout = parameter.device_mesh, parameter.placements
        elif parallel.whole_mesh is not None:
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD "
                "mesh (e.g. via distribute_module) or have annotations of spmd_types. Got plain "
                f"tensor for parameter '{locations[0].name}'."
            )
        self.accumulated = Accumulated(parameter.shape)
        self._whole: Any = None
        self._alive: Any = lambda: None
        self._again: tuple[Any, Storage] | None = None
        self._sharded = parallel.shard_dim is not None
        self._parameter = self._shard(parameter) if self._sharded else self._place(parameter)
        for location in locations:
            location.put(self._parameter)

    # --- the sharded parameter ---------------------------------------------------------------

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter: the one in the module, which the user may have replaced."""
        if self.whole is None:
            self._parameter = self.locations[0].get()
        return self._parameter

    @property
    def spans_mesh(self) -> bool:
        """Whether modules compute with a ``DTensor`` on a mesh that includes data parallelism."""
        return self.parallel.whole_mesh is not None

    def _place(self, parameter: nn.Parameter) -> nn.Parameter:
        """Under `replicate`: the parameter itself, on the devices of the mesh."""
        if parameter.device.type == "cpu":
            value = parameter.detach().to("xla")
            parameter = nn.Parameter(value, requires_grad=parameter.requires_grad)
        if isinstance(parameter, XLATensor) and not parameter.is_meta:
            parameter._storage_.place(frame_of(self.parallel.mesh))
        return parameter

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        mesh, placements = self._sharded_layout(parameter)
        value = parameter.detach()
        if isinstance(value, XLAShardedTensor):
            value = value.redistribute(mesh, placements)
        else:
            value = distribute_tensor(value, mesh, placements, src_data_rank=None)  # as torch
        if self._state.offloads:
            value = to_host(value)
        return nn.Parameter(value, requires_grad=parameter.requires_grad)

    def _sharded_layout(self, parameter: nn.Parameter) -> tuple[DeviceMesh, Placements]:
        """As torch chooses it."""
        parallel, dim = self.parallel, self._dim
        over_dp: list[Placement] = [Replicate()] * parallel.mesh.ndim
        assert parallel.shard_dim is not None
        if self.layout is None:
            over_dp[parallel.shard_dim] = Shard(dim)
            return parallel.mesh, tuple(over_dp)
        mesh, placements = self.layout
        if parallel.whole_mesh is not None:
            return parallel.sharded_layout(mesh, placements, dim)
        over_dp[parallel.shard_dim] = shard_after(dim, mesh, placements, 0)
        return concatenate_meshes([parallel.mesh, mesh]), (*over_dp, *placements)

    # --- the whole parameter -----------------------------------------------------------------

    @property
    def whole(self) -> Any:
        """The tensor that is in place of the parameter, or None. (When a step fails while it is
        traced, modules get back what they held.)"""
        whole = self._whole
        if whole is None or any(location.get() is whole for location in self.locations):
            return whole
        return None

    def swap_in(self, global_view: bool) -> None:
        """Put the whole tensor in the modules, connected to the parameter by autograd."""
        if self.whole is None:
            parameter = self.parameter
            if parameter.is_meta:
                raise RuntimeError(
                    "FSDP parameters should be materialized from meta device before training, but "
                    f"{self.locations[0].name!r} is still on the meta device: call "
                    "module.to_empty(device='xla') and initialise the parameters"
                )
            self._put(Unshard.apply(parameter, self, global_view))

    def swap_in_again(self, global_view: bool) -> None:
        """The same for a recomputation in backward: a leaf of its own, as its gradient is that of
        the first computation."""
        if self.whole is None:
            parameter = self.parameter
            form = self.form(parameter._form, global_view)
            whole = UnshardedStorage(self, global_view, form, parameter._storage_.version)
            tensor = of_storage(self.gather_again(whole), form)
            with torch.enable_grad():  # backward's is off
                self._put(tensor.requires_grad_(parameter.requires_grad))

    def swap_out(self) -> None:
        """Put the parameter back."""
        if self._whole is not None:
            for location in self.locations:
                if location.get() is self._whole:
                    location.put(self._parameter)
            self._whole = None

    def _put(self, tensor: torch.Tensor) -> None:
        if self._annotation is not None:
            tensor = self._annotation.handed_out(tensor, self.parallel)
        elif self.spans_mesh:  # also what each device contributes by a to_local() of its own
            tensor._summed = self.parallel.numbers_in_whole_mesh
        make_parameter(tensor)
        for location in self.locations:
            location.put(tensor)
        self._whole = tensor

    def form(self, sharded: Form, global_view: bool) -> Form:
        """The form of the whole tensor.

        Args:
            sharded: the parameter's form.
            global_view: a ``DTensor`` replicated over the data-parallel devices, in place of a
                tensor that each of them holds.
        """
        dtype = self._state.policy.param_dtype
        if dtype is None or not sharded.dtype.is_floating_point:
            dtype = sharded.dtype
        about = sharded.shape, sharded.stride, 0, dtype
        if self.layout is None:
            if not global_view:
                return device_form(sharded.frame, *about, varying=sharded.varying)
            mesh = self.parallel.mesh
            return sharded_form(mesh, (Replicate(),) * mesh.ndim, *about)
        mesh, placements = self.layout
        if global_view and not self.spans_mesh:
            over_dp = (Replicate(),) * self.parallel.mesh.ndim
            placements = (*over_dp, *placements)
            mesh = concatenate_meshes([self.parallel.mesh, mesh])
        return sharded_form(mesh, placements, *about, varying=sharded.varying)

    def _gathered(self, parameter: Any, global_view: bool) -> Any:
        """A whole tensor, with the storage of an earlier one if that exists; below autograd."""
        form = self.form(parameter._form, global_view)
        if form is parameter._form:
            executor.current().touched(parameter)  # a gathering reads it, and says so by that
            parameter._storage_.introduce(parameter)
            return type(parameter)(parameter._storage_, form, parameter._steps)
        storage = self._alive()
        known = None if storage is None else wholes.get(storage)
        if (
            known is None
            or known.form is not form
            or known.version != parameter._storage_.version
            or known.trace is not executor.trace()
        ):
            whole = UnshardedStorage(self, global_view, form, parameter._storage_.version)
            storage = self._gather(parameter, form)
            wholes[storage] = whole
            self._alive = weakref.ref(storage)
        return of_storage(storage, form)

    def _gather(self, parameter: Any, form: Form) -> Storage:
        return relayout(parameter, parameter._form, form, gather)._storage_

    def keep(self, whole: UnshardedStorage, storage: Storage, count: int) -> None:
        """Shard the whole parameter in ``storage`` over ``count`` devices, for backward."""
        if whole.kept is None and self.parallel.shard_dim is not None:
            keep = Keep(self._dim, self.parallel.shard_axes, count)
            array = keep.array(storage.array, whole.form)
            if array is not None:
                whole.kept = Storage(array, whole.form)

    def gather_again(self, whole: UnshardedStorage) -> Storage:
        """The whole parameter once more, for backward. All uses in one backward share it."""
        parameter = self.parameter
        version, trace = parameter._storage_.version, executor.trace()
        if whole.kept is None and version != whole.version and trace is whole.trace:
            raise RuntimeError(
                f"the parameter {self.locations[0].name!r} of shape {list(parameter.shape)} has "
                "been modified by an inplace operation since forward; with "
                "reshard_after_forward=True backward needs the value that forward saw"
            )
        alive = self._alive()
        if alive is not None and same_whole(wholes.get(alive), whole, trace):
            return alive
        key = version, trace, whole.form
        if self._again is not None and self._again[0] == key:
            return self._again[1]
        source = parameter if whole.kept is None else of_storage(whole.kept, whole.form)
        if trace is not None:
            # Behind a barrier, or XLA would merge it with the first gathering.
            trace.begin_recomputation()
        try:
            with torch.no_grad():
                storage = self._gather(source, whole.form)
        finally:
            if trace is not None:
                trace.end_recomputation()
        if current_backward() != -1:
            self._again = key, storage
            call_after_backward(self.release)
        return storage

    def release(self) -> None:
        """Backward needs the whole parameter no longer."""
        self._again = None

    # --- the gradient ------------------------------------------------------------------------

    def reduces_by_forward(self) -> bool | None:
        """Whether backward is to reduce, if forward decides that; else None."""
        state = self._state
        return None if state.asked_in_forward is None else state.reduces

    def reduce(self, grad: Any, global_view: bool, reduces: bool | None) -> Any:
        """The sharded gradient from the whole tensor's, or None if that is for later.

        Args:
            reduces: as `reduces_by_forward` said.
        """
        state, parameter = self._state, self.parameter
        state.consult()
        reduces = state.reduces if reduces is None else reduces
        grad = self._as_handed_out(grad, parameter, global_view)
        reduce_dtype = state.policy.reduce_dtype or grad.dtype
        if state.local_gradients:
            earlier = self._take_local_gradient(parameter) if reduces else None
            if not reduces and not global_view and not self.spans_mesh:
                return grad if grad.dtype == parameter.dtype else grad.to(parameter.dtype)
        elif reduces:
            earlier = self.accumulated.take()
        else:
            self.accumulated.add(grad.to(reduce_dtype))
            return None
        if grad.dtype != reduce_dtype:
            grad = grad.to(reduce_dtype)
        if earlier is not None:
            grad = grad + earlier
        if global_view or self.spans_mesh:
            grad = self._land(grad, parameter)
        else:
            grad = self._reduce_over_devices(grad, parameter)
        grad = grad if grad.dtype == parameter.dtype else grad.to(parameter.dtype)
        return to_host(grad) if state.offloads else grad

    def reduce_waiting(self) -> None:
        """Reduce what waits for that, into ``.grad``, without another backward pass."""
        state, parameter = self._state, self.parameter
        state.consult()
        if not state.reduces:
            return
        local = state.local_gradients
        grad = self._take_local_gradient(parameter) if local else self.accumulated.take()
        if grad is not None:
            whole = isinstance(grad, XLAShardedTensor) or self.spans_mesh
            reduce = self._land if whole else self._reduce_over_devices
            grad = reduce(grad, parameter).to(parameter.dtype)
            grad = to_host(grad) if state.offloads else grad
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _take_local_gradient(self, parameter: Any) -> Any:
        """The parameter's ``.grad`` if it still differs between data-parallel devices, to be
        reduced with the new one; it is gone then."""
        grad = parameter.grad
        if grad is None or not set(self.parallel.axes) & set(grad._form.varying):
            return None
        parameter.grad = None
        return grad

    def _as_handed_out(self, grad: Any, parameter: Any, global_view: bool) -> Any:
        """The gradient as the same kind of tensor as the whole parameter's."""
        form = self.form(parameter._form, global_view)
        if not form.is_sharded:
            return grad.full_tensor() if isinstance(grad, XLAShardedTensor) else grad
        assert form.mesh is not None and form.placements is not None
        if isinstance(grad, XLATensor) and global_view and grad.varying:
            raise UnsupportedOpError(
                "the gradient of a parameter handed out as a DTensor differs from device to device "
                f"along {', '.join(grad.varying)}: a module under fully_shard takes either sharded "
                "tensors or per-device tensors, not both"
            )
        grad = as_sharded(grad, form.mesh)
        if global_view or self.spans_mesh:
            return grad  # its reduction over the data-parallel devices is to come
        wanted = unpartial(form.placements)
        return grad if grad.placements == wanted else grad.redistribute(placements=wanted)

    def _land(self, grad: Any, parameter: Any) -> Any:
        """The global gradient in the parameter's layout."""
        form = parameter._form
        if form.is_sharded:
            grad = move(grad, form.mesh, form.placements)
        else:
            grad = grad.full_tensor()
        # torch averages the parts of a DTensor's gradient, too.
        factor = self._state.divide_factor or (self.parallel.size if self.spans_mesh else 1)
        return grad if factor == 1 else grad / factor

    def _reduce_over_devices(self, grad: Any, parameter: Any) -> Any:
        factor = self._state.divide_factor or self.parallel.size
        dim = self._dim if self._sharded else None
        return reduce_over_devices(grad, parameter._form, self.parallel, dim, factor)
