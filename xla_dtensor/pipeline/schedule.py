"""A pipeline's step: torch's schedules, executed for all ranks by one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from xla_dtensor.base.torch_private import PipelineScheduleBase, pytree, split_tensor
from xla_dtensor.base.torch_private.attributes import (
    chunk_specs,
    has_backward,
    internal_losses,
    loss_function,
    merge_outputs,
    microbatch_count,
    split_inputs,
)
from xla_dtensor.errors import PipelineError
from xla_dtensor.mesh import frame_of
from xla_dtensor.pipeline.order import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    actions_of_ranks,
    merged,
)
from xla_dtensor.pipeline.stage import PipelineStage
from xla_dtensor.pipeline.transfer import to_stage


class PipelineSchedule(PipelineScheduleBase):
    """All stages of a pipeline, run in the order of one of torch's schedules.

    Under torchrun each rank makes a schedule of its own stages. Here one process has all of them:
    the class is torch's, and is asked what each rank would do; the stages' devices do that, at the
    same time. ``step`` and ``eval`` are torch's, too.

    Args:
        schedule: one of torch's classes: ``ScheduleGPipe``, ``Schedule1F1B``,
            ``ScheduleInterleaved1F1B``, ``ScheduleLoopedBFS``, ``ScheduleInterleavedZeroBubble``,
            ``ScheduleZBVZeroBubble``, ``ScheduleDualPipeV``, or your own.
        stages: all of them, in order. Which stages share a mesh has to be as the schedule has it:
            stage ``i`` on mesh ``i % n``, or up and down again for those with a V in their name.
        n_microbatches: into how many parts the batch is cut.
        loss_fn: ``loss_fn(output, target)``, on the last stage's devices; None for a pipeline that
            computes forward alone.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads: torch's. With
            ``scale_grads`` gradients are divided by ``n_microbatches``: the loss is a mean.
        options: further arguments of the schedule's class.

    Raises:
        PipelineError: stages are missing, come twice, or lie on other meshes than the schedule
            needs; the schedule is none of torch's kind; a compiled stage under a schedule that
            computes the gradients of weights apart.
        ValueError: what torch's class raises for a number of microbatches.

    Example::

        import torch, xla_dtensor as xd
        from torch.distributed.pipelining import Schedule1F1B

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("pp", "dp"))
        stages = [
            xd.pipeline.PipelineStage(xd.distribute_module(torch.nn.Linear(8, 8), on), i, 2, on)
            for i, on in enumerate(xd.pipeline.stage_meshes(mesh))
        ]
        pipeline = xd.pipeline.PipelineSchedule(
            Schedule1F1B, stages, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss
        )
        losses = []
        output = pipeline.step(torch.randn(16, 8), target=torch.randn(16, 8), losses=losses)
        assert output.shape == (16, 8) and len(losses) == 4
        assert str(pipeline.order[1]) == "forward of microbatch 0 in stage 1"
    """

    def __init__(
        self,
        schedule: Any,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **options: Any,
    ) -> None:
        if not (
            isinstance(schedule, type)
            and issubclass(schedule, PipelineScheduleSingle | PipelineScheduleMulti)
        ):
            raise PipelineError(
                f"PipelineSchedule({schedule!r}, ...): give the class of a schedule, one of "
                "torch.distributed.pipelining's"
            )
        if n_microbatches < 1:
            raise PipelineError(f"PipelineSchedule(n_microbatches={n_microbatches}): 1 or more")
        super().__init__(
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
        )
        self._stages = _in_order(stages)
        ranks = _ranks(self._stages)
        noted = actions_of_ranks(schedule, ranks, n_microbatches, options)
        self._order = merged(noted, len(self._stages), n_microbatches)
        self._check_compiled(schedule)

    @property
    def order(self) -> list[Action]:
        """What the stages do in a step with a loss, in the order in which it is launched."""
        return list(self._order)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run all microbatches of a batch: forward, and with a loss backward.

        Args:
            args: the first stage's arguments. Tensors are cut along dim 0 into microbatches; those
                on other devices go to the stage's, with their layout.
            target: the loss function's second argument, cut likewise.
            losses: a list, which gets the microbatches' losses in place of what it had.
            return_outputs: whether to return the last stage's outputs.
            loss_kwargs: keyword arguments of the loss function.
            kwargs: keyword arguments of every stage, cut likewise.

        Returns:
            the last stage's outputs, put together; or None.

        Raises:
            PipelineError: a batch that doesn't divide into the microbatches; a loss function and no
                target; a list for losses, and no loss function.
            RuntimeError: a loss function, and no gradients, under ``torch.no_grad()``.
        """
        if has_backward(self) and not torch.is_grad_enabled():
            raise RuntimeError(
                "step() of a pipeline with a loss function computes gradients, which are switched "
                "off here (torch.no_grad()); call eval()"
            )
        if (
            loss_function(self) is not None
            and target is None
            and (has_backward(self) or losses is not None)
        ):
            raise PipelineError(
                "step() of a pipeline with a loss function needs target=, its second argument"
            )
        if loss_function(self) is None and (losses is not None or target is not None):
            raise PipelineError(
                "step(target=, losses=) of a pipeline that has no loss function: give "
                "PipelineSchedule(..., loss_fn=...)"
            )
        first, last = self._stages[0], self._stages[-1]
        args = tuple(to_stage(value, first.mesh, "an argument of stage 0") for value in args)
        self._check_batch(args, kwargs, target)
        for stage in self._stages:
            stage.has_backward = has_backward(self)
            stage.clear_runtime_states()
            stage._prepare_forward_infra(microbatch_count(self))
        args_split, kwargs_split = split_inputs(self, args, kwargs)
        targets = None
        if target is not None:
            target = to_stage(target, last.mesh, "the target")
            targets = list(split_tensor(target, TensorChunkSpec(0), microbatch_count(self)))
        try:
            self._step_microbatches(
                args_split, kwargs_split, targets, losses, return_outputs, loss_kwargs
            )
            return merge_outputs(self, last.output_chunks) if return_outputs else None
        finally:
            internal_losses(self).clear()
            for stage in self._stages:
                stage.clear_runtime_states()

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        found: dict[int, Any] = {}
        outputs: dict[int, Any] = {}
        reduced: list[PipelineStage] = []
        for action in self._order:
            kind, index, microbatch = action
            stage = self._stages[index]
            if kind == FORWARD:
                output = stage.forward_one_chunk(
                    microbatch, arg_mbs[microbatch], kwarg_mbs[microbatch], False
                )
                if not stage.is_last:
                    self._stages[index + 1].set_local_fwd_input(output, microbatch)
                    continue
                if target_mbs is not None:
                    loss_of = loss_function(self)
                    assert loss_of is not None
                    found[microbatch] = loss_of(
                        output, target_mbs[microbatch], **(loss_kwargs or {})
                    )
                if return_outputs:
                    outputs[microbatch] = output
            elif not has_backward(self):
                continue
            elif kind in (BACKWARD, BACKWARD_INPUT):
                loss = found[microbatch] if stage.is_last else None
                stage.backward_one_chunk(microbatch, loss, full_backward=kind == BACKWARD)
                if not stage.is_first:
                    gradients = stage.get_local_bwd_output(microbatch)
                    self._stages[index - 1].set_local_bwd_input(gradients, microbatch)
            elif kind == BACKWARD_WEIGHT:
                stage.backward_weight_one_chunk(microbatch)
            else:
                reduced.append(stage)
        # When all stages are done, and each parameter once: stages may share them.
        done: set[torch.Tensor] = set()
        for stage in reduced:
            stage._divided = done
            stage.perform_reduce_grad(microbatch_count(self) if self.scale_grads else 1)
            done = done | set(stage.submod.parameters())
        # In the order of the batch, whatever the schedule's.
        last = self._stages[-1]
        last.output_chunks[:] = [outputs[i] for i in sorted(outputs)]
        if losses is not None:
            losses[:] = [found[i] for i in range(microbatch_count(self))]

    def _check_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> None:
        """See that every microbatch has the same size: a mean of their means is the batch's."""
        specs, named_specs = chunk_specs(self)
        named: list[tuple[str, Any, Any]] = []
        for i, value in enumerate(args):
            named.append((f"argument {i}", value, None if specs is None else specs[i]))
        for name, value in kwargs.items():
            spec = None if named_specs is None else named_specs[name]
            named.append((f"argument {name!r}", value, spec))
        if target is not None:
            named.append(("the target", target, None))
        for name, value, spec in named:
            if spec is not None and not isinstance(spec, TensorChunkSpec):
                continue  # the same for all microbatches
            dim = 0 if spec is None else spec.split_dim
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._check_divides(name, tensor, dim)

    def _check_divides(self, name: str, tensor: torch.Tensor, dim: int) -> None:
        count = microbatch_count(self)
        if not tensor.ndim:
            raise PipelineError(
                f"{name} is a tensor without dims, which can't be cut into {count} microbatches: "
                "give a number, or TensorChunkSpec for the others and _Replicate for it"
            )
        shards = 1
        if isinstance(tensor, DTensor):
            for i, placement in enumerate(tensor.placements):
                if placement.is_shard(dim):
                    shards *= tensor.device_mesh.size(i)
        size = tensor.shape[dim]
        if not size:
            raise PipelineError(
                f"{name} of shape {list(tensor.shape)}: an empty batch can't be cut into {count} "
                "microbatches; leave out the step"
            )
        if size % (count * shards):
            each = f" on each of {shards} devices" if shards > 1 else ""
            raise PipelineError(
                f"{name} of shape {list(tensor.shape)}: its dim {dim} of size {size} doesn't "
                f"divide into {count} microbatches{each}; the mean over microbatches of other "
                "sizes would not be that of the batch. Give a batch of a size that divides, or "
                "another n_microbatches"
            )

    def _check_compiled(self, schedule: Any) -> None:
        if not any(action.kind == BACKWARD_WEIGHT for action in self._order):
            return
        for stage in self._stages:
            if stage.compiled is not None:
                raise PipelineError(
                    f"{schedule.__name__} computes the gradients of weights after those of "
                    f"inputs, and stage {stage.stage_index} is compiled: its backward is one "
                    "program, which computes both. Use a schedule without zero bubbles, or "
                    "PipelineStage(compile=False)"
                )


def _in_order(stages: Sequence[PipelineStage]) -> list[PipelineStage]:
    """All stages of one pipeline, by index."""
    stages = list(stages) if isinstance(stages, Sequence) else [stages]
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise PipelineError(
                f"PipelineSchedule: {type(stage).__name__} is no "
                "xla_dtensor.pipeline.PipelineStage. torch's stages are those of one rank; one "
                "process has all stages here"
            )
    found = [stage.stage_index for stage in stages]
    count = stages[0].num_stages if stages else 0
    if (
        sorted(found) != list(range(count))
        or any(s.num_stages != count for s in stages)
        or not count
    ):
        raise PipelineError(
            f"PipelineSchedule: the stages {found} of pipelines of "
            f"{sorted({s.num_stages for s in stages})}; give all stages of one pipeline, each "
            "once: one process has all of them, where under torchrun a rank has its own"
        )
    return sorted(stages, key=lambda stage: stage.stage_index)


def _ranks(stages: list[PipelineStage]) -> list[list[int]]:
    """The stages of each rank of a torchrun program: those on the same devices. Ranks are numbered
    by their first stages."""
    by_devices: dict[tuple[int, ...], list[int]] = {}
    for stage in stages:
        by_devices.setdefault(frame_of(stage.mesh).device_ids, []).append(stage.stage_index)
    taken: dict[int, tuple[int, ...]] = {}
    for devices, indices in by_devices.items():
        for device in devices:
            other = taken.setdefault(device, devices)
            if other != devices:
                raise PipelineError(
                    f"PipelineSchedule: stages {indices} are on the devices {list(devices)}, "
                    f"stages {by_devices[other]} on {list(other)}: stages have the same devices or "
                    "none in common; take their meshes from xla_dtensor.pipeline.stage_meshes(mesh)"
                )
    return list(by_devices.values())
