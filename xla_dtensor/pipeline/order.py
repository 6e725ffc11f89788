"""Merges the actions of all ranks of torch's pipeline schedules into one order, for one process.

torch's schedules are programs of one rank. Each is run for every rank, with stages that compute
nothing and note what they are asked to do; the ranks' lists are then merged so that every action
comes after what it needs. Devices do what is launched on them in that order, and those of different
stages don't wait for each other, so each rank's devices follow the rank's own list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from xla_dtensor.errors import PipelineError

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, REDUCE = (
    "forward",
    "backward",
    "backward of inputs",
    "backward of weights",
    "reduction of gradients",
)


class Action(NamedTuple):
    """What one stage does with one microbatch.

    Attributes:
        kind: `FORWARD` and its siblings.
        stage: the stage's index.
        microbatch: -1 for `REDUCE`.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        of = "" if self.microbatch < 0 else f" of microbatch {self.microbatch}"
        return f"{self.kind}{of} in stage {self.stage}"


class _Noting:
    """A stage that computes nothing and records what a schedule asks of it, for one rank. (Read in
    torch 2.13.)"""

    def __init__(self, index: int, count: int, rank: int, ranks: int, noted: list[Action]) -> None:
        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size, self.group = rank, ranks, None
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.device = torch.device("cpu")
        self.submod = nn.Module()
        self.has_backward = True
        self.output_chunks: list[Any] = []
        self.p2p_per_edge = False  # torch 2.15
        # What torch looks at to see whether stages send to others than their neighbours.
        self.args_recv_info: dict[int, tuple[Any, ...]] = defaultdict(tuple)
        self.act_send_info: dict[int, list[int]] = {}
        self._noted = noted

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def _note(self, kind: str, microbatch: int) -> None:
        self._noted.append(Action(kind, self.stage_index, microbatch))

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> Any:
        self._note(FORWARD, index)
        return torch.empty(0)

    def backward_one_chunk(
        self, index: int, loss: Any = None, full_backward: bool = True, **kwargs: Any
    ) -> None:
        self._note(BACKWARD if full_backward else BACKWARD_INPUT, index)

    def backward_weight_one_chunk(self, index: int, **kwargs: Any) -> None:
        self._note(BACKWARD_WEIGHT, index)

    def perform_reduce_grad(self, factor: int) -> None:
        self._note(REDUCE, -1)

    def scale_grads(self, factor: int) -> None:
        self._note(REDUCE, -1)

    # Nothing is sent: values pass from stage to stage as they are.
    def _nothing(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing
    _get_init_p2p_neighbors_ops = _nothing

    def _none(self, *args: Any, **kwargs: Any) -> None:
        return None

    clear_runtime_states = set_local_fwd_input = set_local_bwd_input = _none
    release_fwd_send_outputs = _none  # torch 2.15
    get_local_bwd_output = _prepare_forward_infra = _prepare_backward_infra = _none


def actions_of_ranks(
    schedule: Any, ranks: Sequence[Sequence[int]], n_microbatches: int, options: dict[str, Any]
) -> list[list[Action]]:
    """What each rank does under one of torch's schedules.

    Args:
        schedule: the class.
        ranks: per rank the indices of its stages.
        options: further keyword arguments of the class.

    Raises:
        PipelineError: the schedule has one stage per rank, and a rank has several; or none.
    """
    count = sum(map(len, ranks))
    single = issubclass(schedule, PipelineScheduleSingle)
    result = []
    for rank, indices in enumerate(ranks):
        if single and len(indices) != 1:
            raise PipelineError(
                f"{schedule.__name__} has one stage for each coordinate of the pipeline's mesh dim,"
                f" and coordinate {rank} of {len(ranks)} has {len(indices)} "
                f"({list(indices)}): use ScheduleInterleaved1F1B or another of torch's schedules "
                "of several stages, or a mesh with as many coordinates as there are stages"
            )
        noted: list[Action] = []
        stages = [_Noting(i, count, rank, len(ranks), noted) for i in indices]
        made = schedule(
            stages[0] if single else stages, n_microbatches, loss_fn=_no_loss, **options
        )
        if not single:
            _check_where(schedule.__name__, made.stage_index_to_group_rank, ranks)
        every = range(n_microbatches)
        made._step_microbatches([() for _ in every], [{} for _ in every], [None for _ in every])
        result.append(noted)
    return result


def _check_where(name: str, wanted: dict[int, int], ranks: Sequence[Sequence[int]]) -> None:
    """See that the stages lie where the schedule expects them."""
    found = {stage: rank for rank, indices in enumerate(ranks) for stage in indices}
    if any(wanted.get(stage) != rank for stage, rank in found.items()):
        raise PipelineError(
            f"{name} has stages 0 to {len(found) - 1} on the meshes "
            f"{[wanted[stage] for stage in sorted(wanted)]} of the pipeline's {len(ranks)}, and "
            f"they are on {[found[stage] for stage in sorted(found)]}: give stage i the mesh that "
            "the schedule has for it"
        )


def _no_loss(output: Any, target: Any) -> None:
    return None


def merged(ranks: list[list[Action]], count: int, n_microbatches: int) -> list[Action]:
    """One order for the actions of all ranks, each after what it needs.

    Args:
        count: of the stages.

    Raises:
        PipelineError: ranks wait for one another, or an action is missing or comes twice.
    """
    queues = [list(reversed(actions)) for actions in ranks]
    order: list[Action] = []
    done: set[Action] = set()
    while any(queues):
        before = len(order)
        for queue in queues:
            if queue and _is_ready(queue[-1], done, count):
                action = queue.pop()
                if action in done:
                    raise PipelineError(f"the schedule has the {action} twice")
                order.append(action)
                done.add(action)
        if len(order) == before:
            waiting = "; ".join(str(queue[-1]) for queue in queues if queue)
            raise PipelineError(
                f"the schedule can't go on: each of these waits for what never comes: {waiting}"
            )
    _check_complete(done, count, n_microbatches)
    return order


def _is_ready(action: Action, done: set[Action], count: int) -> bool:
    kind, stage, microbatch = action
    if kind == FORWARD:
        return stage == 0 or Action(FORWARD, stage - 1, microbatch) in done
    if kind == BACKWARD_WEIGHT:
        return Action(BACKWARD_INPUT, stage, microbatch) in done
    if kind == REDUCE:
        return True
    following = stage + 1
    return Action(FORWARD, stage, microbatch) in done and (
        following == count
        or Action(BACKWARD, following, microbatch) in done
        or Action(BACKWARD_INPUT, following, microbatch) in done
    )


def _check_complete(done: set[Action], count: int, n_microbatches: int) -> None:
    for stage in range(count):
        for microbatch in range(n_microbatches):
            if Action(FORWARD, stage, microbatch) not in done:
                raise PipelineError(
                    f"the schedule leaves out the {Action(FORWARD, stage, microbatch)}"
                )
            whole = Action(BACKWARD, stage, microbatch)
            halves = {Action(k, stage, microbatch) for k in (BACKWARD_INPUT, BACKWARD_WEIGHT)}
            if (whole in done) + (halves <= done) != 1:
                raise PipelineError(f"the schedule hasn't the {whole} exactly once")
