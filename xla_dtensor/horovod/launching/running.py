"""`hvd.run`: calls a function once for each rank, in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_dtensor.horovod.ranks.threads import Rendezvous, Thread
from xla_dtensor.horovod.world import current_world
from xla_dtensor.mesh import current_mesh, frame_of, root_mesh
from xla_dtensor.runtime import all_devices, device_count, devices, processes, start

# What says how processes are started on hosts.
_OF_A_LAUNCHER = frozenset(
    [
        "disable_cache",
        "executable",
        "min_np",
        "max_np",
        "min_num_proc",
        "max_num_proc",
        "mpi_args",
        "network_interface",
        "network_interfaces",
        "output_filename",
        "ssh_identity_file",
        "ssh_port",
        "start_timeout",
        "use_gloo",
        "use_mpi",
        "verbose",
        "slots",
        "reset_limit",
        "cooldown_range",
    ]
)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    np: int | None = None,
    **settings: Any,
) -> list[Any]:
    """Call a function once for each rank, each in a thread, where ``hvd.rank()`` is a number.

    As ``horovod.run``, without processes: rank ``i`` has device ``i``. The threads take turns, one
    runs until it waits for another; each has the caller's random numbers to begin with. They share
    what processes don't: global variables, and the tensors that they are given.

    Args:
        func: what each rank calls; `init` may be called in it.
        args, kwargs: what it is called with.
        num_proc, np: the number of ranks; by default that of the devices.
        settings: Horovod's other arguments, which say how processes are started, have no effect.

    Returns:
        what the ranks returned, in order.

    Raises:
        ValueError: more ranks than devices, or ``hosts=``, which is a launcher's.
        Exception: what a rank raised first; the others get a `HorovodInternalError` where they wait
            for it.

    Example::

        import torch, xla_dtensor.horovod as hvd

        def train():
            hvd.init()
            rows = torch.full((hvd.rank() + 1,), float(hvd.rank()))  # shapes may differ
            return hvd.allgather(rows).tolist()

        assert hvd.run(train, np=2) == [[0, 1, 1], [0, 1, 1]]
    """
    given = set(settings) - _OF_A_LAUNCHER
    if given:
        raise ValueError(
            f"hvd.run({', '.join(f'{name}=' for name in sorted(given))}...): it runs threads of "
            "this process; for several hosts start the script with torchrun, mpirun, srun or "
            "horovodrun"
        )
    if processes.several():
        raise ValueError(
            "hvd.run in one of several processes: these are the ranks, call the function itself"
        )
    rendezvous = Rendezvous(_devices(np if num_proc is None else num_proc))
    results: list[Any] = [None] * rendezvous.size
    errors: list[tuple[int, BaseException]] = []

    def one(rank: int) -> None:
        world = Thread(rank, rendezvous)
        rendezvous.turns.begin(rank)
        current_world.enter_thread(world)
        try:
            results[rank] = func(*args, **(kwargs or {}))
            why = "has come to its end"
        except BaseException as error:
            errors.append((rank, error))
            why = f"has raised {type(error).__name__}: {error}"
        finally:
            current_world.enter_thread(None)
        rendezvous.end(rank, why)

    threads = [
        threading.Thread(target=one, args=(rank,), name=f"horovod rank {rank}", daemon=True)
        for rank in range(rendezvous.size)
    ]
    for thread in threads:
        thread.start()
    rendezvous.turns.give(0)
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        rendezvous.turns.is_over = True
        raise
    if errors:
        rank, error = errors[0]
        error.add_note(f"raised by rank {rank} of {rendezvous.size} of hvd.run")
        raise error
    return results


def _devices(count: int | None) -> list[Any]:
    """The devices of the current mesh, or of the machine; so many of them."""
    mesh = current_mesh()
    if mesh is not None:
        found = list(frame_of(root_mesh(mesh)).jax_mesh.devices.flat)
    else:
        start(count or 1)
        if count is not None and count <= device_count():
            return devices(range(count))
        found = all_devices()
    count = len(found) if count is None else count
    if not 1 <= count <= len(found):
        raise ValueError(
            f"hvd.run(np={count}): there are {len(found)} devices, and each rank has one. "
            f"Simulated ones: set JAX_NUM_CPU_DEVICES={count}"
        )
    return found[:count]
