"""`hvd.init` and `hvd.shutdown`, `hvd.rank` and `hvd.size`, and registering process sets."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.horovod.ranks.devices import Devices
from xla_dtensor.horovod.ranks.several import Several
from xla_dtensor.horovod.world import current_world
from xla_dtensor.horovod.world.process_sets import ProcessSet
from xla_dtensor.horovod.world.rank_number import PerRank
from xla_dtensor.horovod.world.timeline import VARIABLE, timeline
from xla_dtensor.horovod.world.world import World
from xla_dtensor.runtime import distributed

_lock = threading.Lock()


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | None = None
) -> None:
    """Find out which ranks there are; a second call does nothing.

    In a process that a launcher started with others (torchrun, mpirun, srun, horovodrun, Ray) the
    ranks are the processes. In one that is alone they are the devices of the current mesh
    (``xd.set_mesh``), or all devices. In a thread of `run` they are the threads.

    Args:
        comm: None. A list of ranks, or an MPI communicator, is Horovod's; ranks that aren't to take
            part are left out by a `ProcessSet`.
        process_sets: sets to register, the same on all ranks.

    Raises:
        ValueError: ``comm`` is given.
        DistributedError: the processes don't find each other.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        assert hvd.is_initialized() and hvd.size() >= 1
    """
    if comm:
        raise ValueError(
            f"hvd.init(comm={comm!r}): the ranks are all processes that the launcher started; "
            "collectives among some of them take process_set=hvd.ProcessSet(ranks)"
        )
    with _lock:
        world = current_world.current_or_none()
        if world is None:
            world = _begin()
            path = os.environ.get(VARIABLE)
            if path and world.is_coordinator and not timeline.is_on:
                timeline.start(path, bool(os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES")))
    if process_sets is not None and process_sets != "dynamic":
        for each in process_sets:
            _register(world, each)


def _begin() -> World:
    mine = current_world.of_thread()
    if mine is not None:
        current_world.enter_thread(mine)
        return mine
    world: World = Several() if distributed.initialize() > 1 else Devices()
    current_world.enter(world)
    return world


def shutdown() -> None:
    """Be none of the ranks any more, once what they do together is done. `init` begins anew.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
    """
    world = current_world.current_or_none()
    if world is None:
        return
    world.sets.forget()
    if world.is_coordinator:
        timeline.stop()
    if current_world.of_thread() is not None:
        current_world.leave_thread()
        return
    world.close()
    current_world.enter(None)


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` hasn't since.

    Returns:
        True or False.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        assert hvd.is_initialized()
    """
    return current_world.current_or_none() is not None


def size() -> int:
    """How many ranks there are.

    Returns:
        the number of processes, of devices, or of threads.

    Raises:
        ValueError: before `init`, as all that follow.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        assert hvd.size() == hvd.local_size() * hvd.cross_size()
    """
    return current_world.current().size


def rank() -> Any:
    """The caller's rank.

    Returns:
        a number from 0 in processes and threads. In one process that drives all ranks, a
        `RankNumber`: another number on each device, which computes with tensors, and raises in
        ``if``, ``range`` and as an index.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.ones(3, device="xla") * hvd.rank()
        n = hvd.size()
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == [n * (n - 1) / 2] * 3
    """
    return current_world.current().rank


def local_size() -> int:
    """How many ranks there are on this host.

    Returns:
        a number.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        assert 1 <= hvd.local_size() <= hvd.size()
    """
    return current_world.current().local_size


def local_rank() -> Any:
    """The caller's rank among those of its host.

    Returns:
        as of `rank`.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        assert repr(hvd.local_rank()) != ""
    """
    return current_world.current().local_rank


def cross_size() -> int:
    """How many hosts there are.

    Returns:
        a number.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        assert hvd.cross_size() == 1
    """
    return current_world.current().cross_size


def cross_rank() -> int:
    """The number of the caller's host.

    Returns:
        a number from 0.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        assert hvd.cross_rank() == 0
    """
    return current_world.current().cross_rank


def is_coordinator() -> bool:
    """Whether the caller is the one to print and to save: rank 0, or the process that drives all
    ranks. (Not in Horovod; there it is ``hvd.rank() == 0``.)

    Returns:
        True or False.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        if hvd.is_coordinator():
            print("once")
        assert hvd.is_coordinator() in (True, False)
    """
    return current_world.current().is_coordinator


def mesh() -> DeviceMesh:
    """The mesh of the ranks' devices, for `xla_dtensor`'s own functions. (Not in Horovod.)

    Returns:
        a mesh, in the order of the ranks: the current one at `init`, or all devices; of several
        processes all devices of all.

    Raises:
        UnsupportedOpError: in a thread of `run`.

    Example::

        import xla_dtensor as xd, xla_dtensor.horovod as hvd

        hvd.init()
        assert hvd.mesh().size() == hvd.size()
    """
    return current_world.current().mesh


def per_rank(fn: Any, device: str | None = None) -> Any:
    """What depends on the rank, made for each rank there is here. (Not in Horovod, where it is
    ``fn(hvd.rank())``.)

    Args:
        fn: is called with the number of a rank.
        device: "xla" for tensors on the rank's device, as a compiled step takes them: where each of
            several processes has one device, one that varies from process to process.

    Returns:
        ``fn(hvd.rank())`` where the rank is a number. In one process that drives all ranks, a
        per-device tensor of the values if they are CPU tensors of one shape and dtype, or numbers;
        else a `PerRank`, the list of them.

    Raises:
        ValueError: another device.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        rows = hvd.per_rank(lambda rank: torch.full((rank + 1,), float(rank)))  # shapes differ
        n = hvd.size()
        assert hvd.allgather(rows).shape == (n * (n + 1) // 2,)
    """
    world = current_world.current()
    value = world.per_rank(fn)
    if device is None or isinstance(value, PerRank):
        return value
    if torch.device(device).type != "xla":
        raise ValueError(f"per_rank(device={device!r}): give 'xla', or leave it out")
    return world.on_devices(torch.as_tensor(value))


def _register(world: World, given: ProcessSet | Sequence[int]) -> ProcessSet:
    new = given if isinstance(given, ProcessSet) else ProcessSet(given)
    world.agree_on_set("add", new.ranks)
    return world.sets.add(new)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; all ranks have to call it with the same.

    Args:
        process_set: a `ProcessSet`, or the ranks of one.

    Returns:
        the set.

    Raises:
        ValueError: a member is no rank, or there is a set of these ranks.
        HorovodInternalError: the ranks differ.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        first = hvd.add_process_set([0])
        assert first.size() == 1
        hvd.remove_process_set(first)
    """
    return _register(current_world.current(), process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; all ranks have to call it with the same.

    Args:
        process_set: a registered set.

    Returns:
        False for one that isn't registered, or that of all ranks.

    Raises:
        HorovodInternalError: the ranks differ.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        assert not hvd.remove_process_set(hvd.global_process_set)
    """
    world = current_world.current()
    if not process_set.process_set_id or not world.sets.has(process_set):
        return False
    world.agree_on_set("remove", process_set.ranks)
    world.sets.remove(process_set)
    return True
