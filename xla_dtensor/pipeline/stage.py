"""A stage of a pipeline: a module on the devices of one mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base.torch_private import PipelineStageBase, pytree
from xla_dtensor.base.torch_private.attributes import set_input_count
from xla_dtensor.compilation import compile as compile_step
from xla_dtensor.errors import MeshError, MeshMismatchError, PipelineError
from xla_dtensor.mesh import frame_of, root_mesh
from xla_dtensor.mesh.group import MeshGroup
from xla_dtensor.pipeline.transfer import to_stage
from xla_dtensor.tensors.of_form import is_ours


class _OneRank(MeshGroup):
    """The group that torch's stage class asks for its rank: one process has all stages."""

    def size(self) -> int:
        return 1

    def own_ranks(self) -> tuple[int, ...]:
        return (0,)

    def rank(self) -> int:
        return 0


def _one_rank(mesh: DeviceMesh) -> _OneRank:
    group = _OneRank("xla:pipeline")
    group.mesh, group.dim = mesh, 0
    return group


class PipelineStage(PipelineStageBase):
    """A part of a model on its own devices, for a `PipelineSchedule`. It is one of torch's stages;
    where torch's ``PipelineStage`` takes the device and the group of its rank, it takes a mesh.

    The module's parameters and buffers have to be on the devices of ``mesh``: lay them out with
    `distribute_module`, ``parallelize_module`` or `fully_shard` on the mesh or dims of it. Those
    that were moved by ``module.to("xla")`` alone are put on all devices of the mesh, the same on
    each.

    Args:
        submodule: it gets the previous stage's outputs as its positional arguments, and returns a
            tensor or a tuple of tensors (the last stage: anything).
        stage_index: from 0.
        num_stages: of the whole pipeline.
        mesh: one of `stage_meshes`. Several stages may have the same.
        compile: whether the module's forward is one program, and its backward another.
        dw_builder: torch's: makes the functions that compute the weights' gradients, for schedules
            that compute them apart.

    Attributes:
        mesh: as given.
        compiled: the `CompiledStep` of the module; None without ``compile``.

    Raises:
        MeshError: ``mesh`` is no xla mesh, or only a part of one (``mesh["tp"]``).
        MeshMismatchError: a parameter is on other devices.
        PipelineError: a parameter is on the CPU, or on the meta device.
        ValueError: ``stage_index`` is none of a pipeline of ``num_stages``.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("pp", "dp"))
        on = xd.pipeline.stage_meshes(mesh)
        first = xd.distribute_module(torch.nn.Linear(8, 8), on[0])
        stage = xd.pipeline.PipelineStage(first, 0, 2, on[0])
        assert stage.is_first and not stage.is_last
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        mesh: DeviceMesh,
        *,
        compile: bool = False,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise ValueError(
                f"PipelineStage(stage_index={stage_index}, num_stages={num_stages}): the index is "
                f"one of 0 to {num_stages - 1}"
            )
        if getattr(mesh, "device_type", None) != "xla":
            raise MeshError(f"PipelineStage {stage_index}: {mesh!r} is no xla mesh")
        if mesh.size() != root_mesh(mesh).size():
            raise MeshError(
                f"PipelineStage {stage_index}: {mesh!r} is a part of {root_mesh(mesh)!r}, and lies "
                "on all its devices; give a mesh of the stage's devices alone, one of "
                "xla_dtensor.pipeline.stage_meshes(mesh)"
            )
        self.mesh = mesh
        _place(submodule, mesh, f"PipelineStage {stage_index}")
        super().__init__(
            submodule,
            stage_index,
            num_stages,
            torch.device("xla"),
            _one_rank(mesh),
            dw_builder,
        )
        self.compiled = compile_step(submodule) if compile else None
        self._activations: dict[int, tuple[Any, ...]] = {}
        self._gradients: dict[int, tuple[Any, ...]] = {}
        self._divided: set[torch.Tensor] = set()

    # --- what torch's stages get from other ranks -------------------------------------------------

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: Any = None,
        kwargs: Any = None,
        has_backward: bool = False,
    ) -> None:
        """Nothing is sent or received, so there is nothing to find out about it."""
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.act_send_info.clear()

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        return ()

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """(torch 2.11) Tensors aren't received into buffers, so they may be any."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """(torch 2.11)"""

    def clear_runtime_states(self) -> None:
        """Forget the microbatches of the last step, also of one that failed."""
        super().clear_runtime_states()
        self._activations.clear()
        self._gradients.clear()
        self._divided = set()
        self.bwd_cache.clear()
        self.backward_state.clear()
        self.dw_runner.clear()

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the previous stage's outputs for a microbatch, to this stage's devices.

        Raises:
            PipelineError: they aren't tensors.
        """
        outputs = prev_stage_outputs
        outputs = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
        previous = self.stage_index - 1
        received = []
        for number, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                raise PipelineError(
                    f"stage {previous} gave a {type(output).__name__} as output {number}; a stage "
                    "that isn't the last returns a tensor or a tuple of tensors, which are the "
                    "next stage's arguments"
                )
            what = f"output {number} of stage {previous}"
            moved = to_stage(output.detach(), self.mesh, what)
            wanted = output.requires_grad and self.has_backward and torch.is_grad_enabled()
            # A leaf of its own: on the same devices it would share the output's memory.
            received.append(moved.detach().requires_grad_(wanted))
        self._activations[mb_index] = tuple(received)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the gradients of this stage's outputs, to this stage's devices."""
        what = f"the gradient of an output of stage {self.stage_index}"
        self._gradients[mb_index] = tuple(
            to_stage(grad, self.mesh, what) for grad in next_stage_bwd_outputs
        )

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Any, ...]:
        return self._activations.pop(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Any, ...]:
        return self._gradients.pop(bwd_chunk_id)

    # --- computing --------------------------------------------------------------------------------

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """torch's, with the arguments on this stage's devices."""
        what = f"an argument of stage {self.stage_index}"
        args, kwargs = pytree.tree_map(
            lambda value: to_stage(value, self.mesh, what), (args, kwargs or {})
        )
        if self.compiled is not None:  # the parts of a batch would be views in different places
            args, kwargs = pytree.tree_map_only(is_ours, _own, (args, kwargs))
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
                value.retain_grad()  # torch reads the gradients of all inputs
        count = len(args) if self.is_first else len(self._activations[fwd_chunk_id])
        set_input_count(self, count)
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return (self.compiled or self.submod)(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """torch's backward of a module that is not data-parallel: under `fully_shard` the gradients
        of each microbatch are reduced by themselves, and their sums added up."""
        module: Any = self.submod
        self.submod: Any = _Plain(module)
        try:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        finally:
            self.submod = module

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Divide the gradients by the number of microbatches, if the schedule wants it."""
        self.scale_grads(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients; of parameters that another stage shares, only one stage does."""
        if grad_scale_factor != 1:
            for parameter in self.submod.parameters():
                if parameter.grad is not None and parameter not in self._divided:
                    parameter.grad.div_(grad_scale_factor)


def _own(tensor: Any) -> Any:
    return tensor.clone() if tensor._steps else tensor


class _Plain:
    """A module's parameters, for torch's code that asks whether the module is data-parallel."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = module.parameters


def _place(module: nn.Module, mesh: DeviceMesh, what: str) -> None:
    """Check that a module is on the devices of ``mesh``, and put there what is on none yet."""
    frame = frame_of(mesh)
    loose = []
    named: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        ours = is_ours(tensor)
        if not ours or tensor.is_meta:
            raise PipelineError(
                f"{what}: {name!r} is on the {tensor.device.type} device: bring the module to its "
                "devices first, with xla_dtensor.distribute_module(module, mesh), "
                "parallelize_module or fully_shard on the stage's mesh, or module.to('xla')"
            )
        own = tensor._form.frame
        if own is None:
            loose.append(tensor)
        elif own.device_ids != frame.device_ids:
            raise MeshMismatchError(
                f"{what}: {name!r} of shape {list(tensor.shape)} is on {own.root!r} (devices "
                f"{list(own.device_ids)}), and the stage's mesh is {mesh!r} (devices "
                f"{list(frame.device_ids)}): lay the module out on that mesh"
            )
    for tensor in loose:
        tensor._storage_.place(frame)
