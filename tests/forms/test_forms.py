"""Forms and steps of views, by which operations on them are looked up."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from xla_dtensor.forms.views import Step, leave_open
from xla_dtensor.mesh import frame_of


def test_the_start_of_a_memory(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(8, 6), mesh_2x4, [Shard(0), Replicate()])
    form = x[:, 2:4]._form
    start = form.at_start()
    assert (form.offset, start.offset) == (2, 0) and start is form.at_start()
    assert start.at_start() is start and x._form.at_start() is x._form
    assert (start.shape, start.stride, start.placements) == (form.shape, form.stride, x.placements)


def test_the_start_has_the_axes_that_the_mesh_has_by_now() -> None:
    value = torch.arange(32.0).reshape(8, 4)
    root = init_device_mesh("xla", (8,), mesh_dim_names=("refined_later",))
    x = distribute_tensor(value, root, [Shard(0)])
    form = x[:, 1:]._form
    before = form.at_start()
    assert before.frame is form.frame and before is form.at_start()
    frame_of(root._unflatten("refined_later", (2, 2, 2), ("a", "b", "c")))
    after = form.at_start()
    assert after.frame is not before.frame and after.frame.is_current
    assert torch.equal((x[:, 1:] + 1).full_tensor().cpu(), value[:, 1:] + 1)


def test_equal_steps_have_equal_hashes(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(8, 6, 4), mesh_2x4, [Replicate(), Shard(0)])
    views = [lambda: x.transpose(1, 2), lambda: x[:, 2:4], lambda: x[:, 3:5], lambda: x[:, 2]]
    steps = [view()._steps for view in views]
    for equal in ([view()._steps for view in views], [copied(one) for one in steps]):
        assert equal == steps and list(map(hash, equal)) == list(map(hash, steps))
    assert len({*steps}) == len(views)
    # Without their positions the two ranges are one.
    assert len({leave_open(one)[0] for one in steps}) == len(views) - 1


def copied(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple(dataclasses.replace(step) for step in steps)
