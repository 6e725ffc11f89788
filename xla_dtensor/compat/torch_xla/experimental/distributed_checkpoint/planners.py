"""torch_xla's checkpoint planners: torch's, that also say which tensors are sharded.

They can be called without ``torch.distributed.checkpoint.save`` and ``load``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from xla_dtensor.checkpoint.shards import own_chunks
from xla_dtensor.checkpoint.stand_ins import (
    Arriving,
    StandIn,
    arriving,
    has_ours,
    replaced,
    saved,
)
from xla_dtensor.tensors.of_form import is_ours


def _is_sharded(value: Any) -> bool:
    """Whether no device of this process has all of it."""
    if not (isinstance(value, StandIn) or is_ours(value)):
        return False
    own = value.own if isinstance(value, StandIn) else own_chunks(value._form)
    return any(chunk.sizes != tuple(own.size) for chunk in own.chunks)


class _Separated:
    """A planner's state, by whether values are sharded."""

    state_dict: Any

    @property
    def sharded_state_dict(self) -> dict[str, Any]:
        """What is sharded of the state that the planner was set up with, by its dotted name."""
        return {name: value for name, value in self.state_dict.items() if _is_sharded(value)}

    @property
    def unsharded_state_dict(self) -> dict[str, Any]:
        """All else: also tensors that are marked and whole on every device."""
        return {name: value for name, value in self.state_dict.items() if not _is_sharded(value)}


class SPMDSavePlanner(_Separated, DefaultSavePlanner):
    """A save planner for ``torch.distributed.checkpoint``.

    Example::

        import torch
        from xla_dtensor.compat.torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

        planner = SPMDSavePlanner()
        planner.set_up_planner({"x": torch.ones(2, device="xla")}, True)
        assert list(planner.unsharded_state_dict) == ["x"]
    """

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """torch's; and torch_xla's ``set_up_planner(state_dict, is_coordinator)``."""
        if isinstance(storage_meta, bool):
            storage_meta, is_coordinator = None, storage_meta
        if has_ours(state_dict):  # called by the user
            state_dict = replaced(state_dict, saved)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class SPMDLoadPlanner(_Separated, DefaultLoadPlanner):
    """A load planner for ``torch.distributed.checkpoint``. A tensor has its new value when all of
    its parts have been committed.

    Example::

        import torch
        from torch.distributed.checkpoint.default_planner import (
            create_default_global_save_plan, create_default_local_save_plan
        )
        from xla_dtensor.compat.torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner

        plan = create_default_local_save_plan({"x": torch.zeros(2)}, True)
        _, metadata = create_default_global_save_plan([plan])
        x = torch.ones(2, device="xla")
        planner = SPMDLoadPlanner()
        planner.set_up_planner({"x": x}, metadata, True)
        (item,) = planner.create_local_plan().items
        part = planner.resolve_tensor(item).fill_(5.0)
        planner.commit_tensor(item, part)
        assert x.tolist() == [5.0, 5.0]
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_alone = False
        self._missing: Counter[str] = Counter()

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """torch's."""
        self._is_alone = has_ours(state_dict)  # called by the user: nobody else puts values in
        if self._is_alone:
            state_dict = replaced(state_dict, arriving)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """torch's."""
        plan = super().create_local_plan()
        self._missing = Counter(item.dest_index.fqn for item in plan.items)
        return plan

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """torch's; with the last part of a tensor it gets its value."""
        super().commit_tensor(read_item, tensor)
        name = read_item.dest_index.fqn
        self._missing[name] -= 1
        target = self.state_dict[name]
        if self._is_alone and not self._missing[name] and isinstance(target, Arriving):
            target.loaded.finish()
