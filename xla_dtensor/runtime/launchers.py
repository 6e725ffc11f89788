"""Reads from launchers' environment variables which process of how many this one is.

torchrun's and Horovod's are read here, those that JAX knows (SLURM, Open MPI, Cloud TPU,
Kubernetes) by JAX. Nothing here connects to anything.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from xla_dtensor.base import jax_private
from xla_dtensor.errors import DistributedError


@dataclass(frozen=True)
class Launch:
    """One process of several, as its launcher describes it.

    Attributes:
        launcher: its name, for messages.
        process_id: which one, from 0.
        num_processes: of how many, over all hosts.
        coordinator: ``"host:port"`` of process 0; None if the processes have to agree on it at a
            meeting place first.
        meeting: where that is: ``"torch"`` (a store at ``MASTER_ADDR:MASTER_PORT``), the URL of
            Horovod's key-value server, or ``"jax"`` (JAX works it out).
        local_id: which one of this host; None if the launcher doesn't say.
        local_count: of how many on this host; None if it doesn't say.
    """

    launcher: str
    process_id: int
    num_processes: int
    coordinator: str | None = None
    meeting: str = ""
    local_id: int | None = None
    local_count: int | None = None

    @property
    def local_device_ids(self) -> list[int] | None:
        """The accelerators of the host that are this process's; None for all of them."""
        if self.local_id is None or self.local_count == 1:
            return None
        return [self.local_id]


def find(environ: Mapping[str, str]) -> Launch | None:
    """The launch that the environment tells of; None for a process that is alone.

    The order: JAX's own variables with a number of processes, torchrun's, Horovod's, then what JAX
    detects.

    Raises:
        DistributedError: a variable is missing, isn't a number, or contradicts another.
    """
    for look in (_explicit, _torchrun, _horovod, _jax):
        launch = look(environ)
        if launch is not None:
            return launch if launch.num_processes > 1 else None
    if environ.get("WORLD_SIZE", "1") != "1":
        _numbers(environ, "RANK", "WORLD_SIZE")  # raises: nobody says which one this is
    return None


def _explicit(environ: Mapping[str, str]) -> Launch | None:
    """``JAX_COORDINATOR_ADDRESS`` with the two numbers that Kubeflow's JAX runtime sets beside
    it."""
    if "JAX_NUM_PROCESSES" not in environ or "JAX_PROCESS_ID" not in environ:
        return None
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    index, count = _numbers(environ, "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    if count > 1 and not address:
        raise DistributedError(
            f"JAX_NUM_PROCESSES={count} is set and JAX_COORDINATOR_ADDRESS isn't, on "
            f"{socket.gethostname()}: set it to host:port of process 0"
        )
    if address and ":" not in address:
        address = f"{address}:{environ.get('JAX_COORDINATOR_PORT', '1234')}"
    return Launch("JAX_NUM_PROCESSES", index, count, address)


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    if "WORLD_SIZE" not in environ or ("RANK" not in environ and "LOCAL_RANK" not in environ):
        return None
    index, count = _numbers(environ, "RANK", "WORLD_SIZE")
    local_id = local_count = None
    if "LOCAL_RANK" in environ:
        local_id = _number(environ, "LOCAL_RANK")
    if "LOCAL_WORLD_SIZE" in environ:
        local_count = _number(environ, "LOCAL_WORLD_SIZE")
    if count > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise DistributedError(
                    f"WORLD_SIZE={count} and RANK={index} are set, and {name} isn't, on "
                    f"{socket.gethostname()}: torchrun sets all four; without it, set MASTER_ADDR "
                    "to the host of rank 0 and MASTER_PORT to a free port there"
                )
        _number(environ, "MASTER_PORT")
    meeting = "torch" if count > 1 else ""
    return Launch("torchrun", index, count, None, meeting, local_id, local_count)


def _horovod(environ: Mapping[str, str]) -> Launch | None:
    if "HOROVOD_RANK" not in environ or "HOROVOD_SIZE" not in environ:
        return None
    index, count = _numbers(environ, "HOROVOD_RANK", "HOROVOD_SIZE")
    local_id = local_count = None
    if "HOROVOD_LOCAL_RANK" in environ and "HOROVOD_LOCAL_SIZE" in environ:
        local_id = _number(environ, "HOROVOD_LOCAL_RANK")
        local_count = _number(environ, "HOROVOD_LOCAL_SIZE")
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    meeting = ""
    if not address and count > 1:
        host = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        if not host or not port:
            raise DistributedError(
                f"HOROVOD_SIZE={count} is set, on {socket.gethostname()}, and neither "
                "JAX_COORDINATOR_ADDRESS nor HOROVOD_GLOO_RENDEZVOUS_ADDR and "
                "HOROVOD_GLOO_RENDEZVOUS_PORT are: set JAX_COORDINATOR_ADDRESS to host:port of "
                "rank 0"
            )
        meeting = f"http://{host}:{port}"
    return Launch("Horovod", index, count, address, meeting, local_id, local_count)


def _jax(environ: Mapping[str, str]) -> Launch | None:
    """What JAX detects; of the process's own environment only, as JAX reads no other."""
    if environ is not os.environ:
        return None

    for cluster in jax_private.cluster_types:
        if not cluster.opt_in_only_method and cluster.is_env_present():
            count = cluster.get_process_count()
            if count < 2:
                return Launch(cluster.name, 0, 1)
            local_id = cluster.get_local_process_id()
            index = cluster.get_process_id()
            return Launch(cluster.name, index, count, None, "jax", local_id, None)
    return None


def _numbers(environ: Mapping[str, str], index: str, count: str) -> tuple[int, int]:
    """The number of a process and of all processes."""
    if index not in environ:
        raise DistributedError(
            f"{count}={environ[count]} is set and {index} isn't, on {socket.gethostname()}: set "
            "both, or neither"
        )
    which, of = _number(environ, index), _number(environ, count)
    if of < 1 or not 0 <= which < of:
        raise DistributedError(
            f"{index}={which} of {count}={of} on {socket.gethostname()}: processes are numbered "
            f"from 0 to {count} - 1"
        )
    return which, of


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise DistributedError(
            f"{name}={environ.get(name)!r} on {socket.gethostname()} is no number"
        ) from None
