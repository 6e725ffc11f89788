"""`initialize`: makes this process one of several that run one program.

JAX's multi-controller (``jax.distributed``) does the work: every process runs the same script, and
all their devices are one list. The processes are started by torchrun, mpirun, srun, Kubernetes,
Cloud TPU or Ray; `launchers` reads what these say. Nothing has to be called: the first mesh or
tensor does it.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from xla_dtensor.base import jax_private
from xla_dtensor.base.config import config, fix
from xla_dtensor.errors import DistributedError
from xla_dtensor.runtime import heartbeats, launchers, processes
from xla_dtensor.runtime.launchers import Launch
from xla_dtensor.runtime.network import rendezvous

__all__ = [
    "initialize",
    "is_initialized",
    "process_count",
    "process_index",
    "shutdown",
]

logger = logging.getLogger("xla_dtensor")

_LIBRARIES = ("torch", "jax", "jaxlib", "xla-dtensor")

_lock = threading.RLock()


class _Done:
    """What `initialize` has found; None before."""

    launch: Launch | None = None
    happened = False


_done = _Done()


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    *,
    heartbeat_timeout: float | None = None,
) -> int:
    """Make this process one of several that run the same program, or find that it is alone.

    The first mesh, the first tensor on "xla" and ``init_process_group("xla")`` call it without
    arguments. It takes what is given here, else what torchrun says (``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR``, ``MASTER_PORT``), else Horovod's variables, else what JAX detects (SLURM, Open
    MPI 4, Cloud TPU, Kubernetes); where nobody says anything the process is alone. A second call
    does nothing.

    Args:
        coordinator_address: ``"host:port"`` of process 0, where the processes meet.
        num_processes: how many there are; 1 for a process that is to be alone, whatever its
            launcher says.
        process_id: which one this is, from 0.
        local_device_ids: the accelerators of this host that are this process's; by default the one
            numbered ``LOCAL_RANK`` where processes share a host, else all. Not for simulated
            devices.
        heartbeat_timeout: after how many seconds without a sign of life a process counts as gone,
            and the others end; ``xd.config.heartbeat_timeout`` by default. The same in all.

    Returns:
        the number of processes.

    Raises:
        DistributedError: the coordinator isn't there, its port is in use, a process is missing or
            there twice, the processes have different versions of libraries, a variable makes no
            sense, JAX has been started before, or an earlier call said something else.

    Example::

        import xla_dtensor as xd

        assert xd.distributed.initialize() == 1  # nobody has launched this one with others
        assert xd.distributed.process_index() == 0
    """
    with _lock:
        given = _given(coordinator_address, num_processes, process_id)
        if _done.happened:
            _compare(given, num_processes)
            return processes.count()
        launch = given
        if launch is None and num_processes != 1:
            launch = launchers.find(os.environ)
        if launch is not None or num_processes is None:
            launch = _adopted() or launch
        _done.launch, _done.happened = launch, True
        if launch is None or launch.num_processes == 1:
            return 1
        try:
            _join(launch, local_device_ids, heartbeat_timeout)
        except BaseException:
            _done.happened = False
            raise
        return processes.count()


def is_initialized() -> bool:
    """Whether this process is one of several.

    Returns:
        True once `initialize` has joined it with others.

    Example::

        import xla_dtensor as xd

        assert not xd.distributed.is_initialized()
    """
    return processes.several()


def process_index() -> int:
    """The number of this process; 0 where it is alone. Process 0 is the one to print and to write
    files.

    Returns:
        from 0 to ``process_count() - 1``.

    Example::

        import xla_dtensor as xd

        if xd.distributed.process_index() == 0:
            print("one line, however many processes there are")
        assert xd.distributed.process_index() < xd.distributed.process_count()
    """
    initialize()
    return processes.index()


def process_count() -> int:
    """How many processes there are.

    Returns:
        1 for a process that is alone.

    Example::

        import xla_dtensor as xd

        assert xd.distributed.process_count() == 1
    """
    return initialize()


def shutdown() -> None:
    """Leave the other processes, once all have come here; the end of the program does it.

    Example::

        import xla_dtensor as xd

        xd.distributed.shutdown()  # alone: nothing to leave
        assert not xd.distributed.is_initialized()
    """
    import jax

    if processes.several():
        heartbeats.stop()
        jax.distributed.shutdown()


def _given(address: str | None, count: int | None, index: int | None) -> Launch | None:
    """The launch that the arguments describe, if they do."""
    if count == 1 or (address is None and count is None and index is None):
        return None
    if address is None or count is None or index is None:
        raise DistributedError(
            f"initialize({address!r}, num_processes={count}, process_id={index}): give all three, "
            "or none of them to take what the launcher says"
        )
    if not 0 <= index < count:
        raise DistributedError(
            f"initialize(num_processes={count}, process_id={index}): processes are numbered from "
            f"0 to {count - 1}"
        )
    if ":" not in address:
        raise DistributedError(
            f"initialize(coordinator_address={address!r}): give host:port, as "
            f'"{address}:1234"; the port has to be free on process 0\'s host'
        )
    return Launch("initialize()", index, count, address)


def _compare(given: Launch | None, count: int | None) -> None:
    known = _done.launch
    asked = count if given is None else given.num_processes
    alike = asked is None or asked == processes.count()
    if given is not None and known is not None and alike:
        alike = given.process_id == known.process_id
    if not alike:
        who = "this process is alone" if known is None else f"this is {_who(known)}"
        raise DistributedError(
            f"initialize(num_processes={asked}"
            + ("" if given is None else f", process_id={given.process_id}")
            + f"): {who} already, since the first mesh, tensor or call of initialize(); call it "
            "before these"
        )


def _adopted() -> Launch | None:
    """What somebody has told ``jax.distributed`` before us, as Ray does."""
    global_state = jax_private.global_state
    if global_state.client is None:
        return None
    return Launch(
        "jax.distributed", global_state.process_id, global_state.num_processes, meeting="adopted"
    )


def _who(launch: Launch) -> str:
    return f"process {launch.process_id} of {launch.num_processes} on {socket.gethostname()}"


def _join(
    launch: Launch, local_device_ids: Sequence[int] | None, heartbeat_timeout: float | None
) -> None:
    import jax

    global_state = jax_private.global_state
    timeout = heartbeat_timeout or config.heartbeat_timeout
    if launch.meeting != "adopted":
        if jax_private.backends_are_initialized():
            raise DistributedError(
                f"{launch.launcher} started this as {_who(launch)}, but JAX has been started "
                "before: make the mesh, or call xla_dtensor.distributed.initialize(), before "
                "anything asks JAX for devices"
            )
        address = rendezvous.address_of_coordinator(launch, config.start_timeout)
        if launch.process_id == 0:
            rendezvous.check_free(address, launch)
        else:
            rendezvous.wait_until_there(address, launch, config.start_timeout)
        ids = launch.local_device_ids if local_device_ids is None else list(local_device_ids)
        _connect(jax, address, launch, ids, timeout)
    store = processes.Store(global_state.client)
    table = _table(launch, store)
    address = global_state.coordinator_address or ""
    processes.join(launch.process_id, table, store, address)
    heartbeats.start(timeout)
    fix("start_timeout", "heartbeat_timeout")


def described() -> str:
    """Which process this is, of how many, who started and who coordinates them."""
    assert _done.launch is not None
    return (
        f"{_who(_done.launch)}, started by {_done.launch.launcher} and coordinated by "
        f"{processes.known(0)} at {processes.coordinator()}"
    )


def _connect(
    jax: Any, address: str, launch: Launch, ids: Sequence[int] | None, timeout: float
) -> None:
    """Start JAX's distributed runtime. Our own heartbeats (`heartbeats.py`) are read more often
    than JAX's, which end the process without saying whose are missing."""
    # JAX looks at the environment again where it isn't told everything.
    arguments: dict[str, Any] = {
        "coordinator_address": address,
        "num_processes": launch.num_processes,
        "process_id": launch.process_id,
        "cluster_detection_method": "deactivate",
        "initialization_timeout": int(config.start_timeout),
        "heartbeat_timeout_seconds": int(2 * timeout) + 5,
    }
    if ids is not None and os.environ.get("JAX_LOCAL_DEVICE_IDS") is None:
        arguments["local_device_ids"] = list(ids)
    try:
        jax.distributed.initialize(**arguments)
    except Exception as error:
        raise DistributedError(
            f"{_who(launch)} ({launch.launcher}) could not join the others at {address}: {error}",
            of_others=True,
        ) from error


def _facts() -> dict[str, str]:
    facts = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _LIBRARIES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts


def _table(launch: Launch, store: processes.Store) -> tuple[processes.Process, ...]:
    """All the processes.

    Raises:
        DistributedError: one has other versions of libraries than process 0.
    """
    own = json.dumps([socket.gethostname(), os.getpid(), _facts()])
    store.put(f"process/{launch.process_id}", own)
    table = []
    for index in range(launch.num_processes):
        text = store.wait_for(f"process/{index}", config.start_timeout)
        if text is None:
            raise DistributedError(
                f"{_who(launch)}: process {index} hasn't come within {config.start_timeout:g} "
                "s (XLA_DTENSOR_START_TIMEOUT)",
                of_others=True,
            )
        host, pid, facts = json.loads(text)
        table.append(processes.Process(index, host, pid, facts))
    first = table[0]
    for other in table[1:]:
        for name in first.facts.keys() | other.facts.keys():
            one, two = first.facts.get(name), other.facts.get(name)
            if one != two:
                raise DistributedError(
                    f"{first} has {name} {one}, {other} has {two}: the processes compile the same "
                    "programs only with the same versions; install the same on all hosts"
                )
    return tuple(table)
