"""The rendezvous: how processes find the coordinator of ``jax.distributed``, process 0.

Errors of networks name the variable that says where to go. JAX's own end the process, so what can
go wrong is tried first.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import urllib.error
import urllib.request
import warnings
from datetime import datetime, timedelta
from typing import Any

from xla_dtensor.base import jax_private
from xla_dtensor.errors import DistributedError
from xla_dtensor.runtime.launchers import Launch

_NO_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
_stores: list[Any] = []  # torch's store ends with its object, and others may still ask it


def address_of_coordinator(launch: Launch, patience: float) -> str:
    """``"host:port"`` of process 0.

    Raises:
        DistributedError: the meeting place isn't there, or a process of this number has been.
    """
    if launch.coordinator is not None:
        return launch.coordinator
    if launch.meeting == "torch":
        return _by_torch_store(launch, patience)
    if launch.meeting == "jax":
        return _by_jax(launch, patience)
    return _by_horovod_server(launch, patience)


def check_free(address: str, launch: Launch) -> None:
    """See that process 0 can listen where the others will look for it.

    Raises:
        DistributedError: it can't.
    """
    port = int(address.rpartition(":")[2])
    try:
        try:
            _listen(socket.AF_INET6, port)
        except OSError as error:
            if error.errno not in _NO_IPV6:  # the kernel may be without
                raise
            _listen(socket.AF_INET, port)
    except OSError as error:
        raise DistributedError(
            f"process 0 ({launch.launcher}) on {socket.gethostname()} can't listen on port {port} "
            f"of the coordinator's address {address}: {error.strerror}. Another program uses it, "
            "or there is a second process 0: give another port "
            f"({_where_from(launch)})",
            of_others=True,  # mostly one that is about to end
        ) from error


def _listen(family: int, port: int) -> None:
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def wait_until_there(address: str, launch: Launch, patience: float) -> None:
    """Wait until process 0 listens.

    Raises:
        DistributedError: it doesn't in that time.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise DistributedError(
                    f"process {launch.process_id} of {launch.num_processes} ({launch.launcher}) on "
                    f"{socket.gethostname()} finds no coordinator at {address}: "
                    f"{error.strerror or error}. Process 0 has to run there, and its port to be "
                    f"reachable ({_where_from(launch)})",
                    of_others=True,
                ) from error
            time.sleep(0.1)


def _where_from(launch: Launch) -> str:
    """Which variable has the address."""
    if launch.meeting == "torch":
        return "JAX_COORDINATOR_PORT sets it, and else a free one is taken"
    if launch.meeting == "jax":
        return "JAX_COORDINATOR_ADDRESS or JAX_COORDINATOR_PORT"
    if launch.launcher == "initialize()":
        return "coordinator_address="
    return "JAX_COORDINATOR_ADDRESS"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _chosen_port() -> int:
    return int(os.environ.get("JAX_COORDINATOR_PORT") or free_port())


def _by_torch_store(launch: Launch, patience: float) -> str:
    """Through the store that torchrun's agent keeps at ``MASTER_ADDR:MASTER_PORT``, or that process
    0 opens there: ``MASTER_PORT`` itself is the store's."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    where = f"MASTER_ADDR={host}, MASTER_PORT={port}"
    me = f"process {launch.process_id} of {launch.num_processes} on {socket.gethostname()}"
    store = _torch_store(where, me, patience, launch.process_id == 0)
    _stores.append(store)
    own = f"{host}:{_chosen_port()}" if launch.process_id == 0 else None
    meeting = _Meeting(store, f"xla_dtensor/{launch.num_processes}", launch, own)
    end = time.monotonic() + patience
    while True:
        address = meeting.address()
        if address is not None:
            return address
        if time.monotonic() > end:
            meeting.check_own()
            raise DistributedError(
                f"{me} ({where}) has waited {patience:.0f} s for RANK "
                f"{', '.join(map(str, meeting.missing() or [0]))}: "
                f"WORLD_SIZE={launch.num_processes} processes have to be started within that time",
                of_others=True,
            )
        time.sleep(0.05)


class _Meeting:
    """The processes of one start find each other in a store that may know earlier ones.

    torchrun keeps its store when it starts all processes again, and its agents count restarts each
    for itself. So what a process finds there may be of processes that are gone. Process 0
    therefore opens a round of its own; the others answer in the newest one, again when there is a
    newer one; and a round counts when all have answered, for those it names.

    Args:
        store: of torch.
        prefix: of the keys.
        launch: which process this is.
        own: the address that process 0 listens at; None of others.
    """

    def __init__(self, store: Any, prefix: str, launch: Launch, own: str | None) -> None:
        self._store, self._prefix, self._launch, self._own = store, prefix, launch, own
        # In containers a process that takes another's place may have its number, so: since when.
        now = datetime.now().isoformat(" ")
        self._who = f"{socket.gethostname()} (pid {os.getpid()}, since {now})"
        self._round = 0  # that this process has answered in
        if own is not None:
            self._enter(store.add(f"{prefix}/rounds", 1))
            store.set(f"{prefix}/newest", str(self._round))

    def address(self) -> str | None:
        """The coordinator's address, if all are there.

        Raises:
            DistributedError: another process is process 0, too.
        """
        if not self._store.check([f"{self._prefix}/newest"]):
            return None  # process 0 hasn't come
        newest = int(self._store.get(f"{self._prefix}/newest"))
        if newest != self._round:
            if self._own is not None:
                self._round = newest
                raise self._twice(0)
            self._enter(newest)
        if self._own is None:
            return self._answered()
        if self.missing():
            return None
        everyone = [self._process(i) for i in range(self._launch.num_processes)]
        self._store.set(self._key("all"), "\n".join([self._own, *everyone]))
        return self._own

    def missing(self) -> list[int]:
        """The processes that haven't answered in this round."""
        everyone = range(self._launch.num_processes)
        return [i for i in everyone if not self._store.check([self._key(f"process/{i}")])]

    def _enter(self, number: int) -> None:
        self._round = number
        self._store.set(self._key(f"process/{self._launch.process_id}"), self._who)

    def _answered(self) -> str | None:
        """The address, once process 0 has named all; not if this process came when it had."""
        if not self._store.check([self._key("all")]):
            return None
        address, *everyone = self._store.get(self._key("all")).decode().split("\n")
        return address if everyone[self._launch.process_id] == self._who else None

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._round}/{name}"

    def check_own(self) -> None:
        """See that nobody else has answered as this process.

        Raises:
            DistributedError: somebody has.
        """
        mine = self._launch.process_id
        if self._round and self._process(mine) != self._who:
            raise self._twice(mine)

    def _process(self, number: int) -> str:
        return self._store.get(self._key(f"process/{number}")).decode()

    def _twice(self, number: int) -> DistributedError:
        return DistributedError(
            f"RANK={number} is asked for twice: by {self._process(number)} and by {self._who}. "
            "Each process needs its own RANK below "
            f"WORLD_SIZE={self._launch.num_processes}",
            of_others=True,
        )


def _torch_store(where: str, me: str, patience: float, first: bool) -> Any:
    import torch.distributed as dist

    try:
        # Who comes to it tries twice.
        timeout = timedelta(seconds=patience if first else patience / 2.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
    except Exception as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            text = "the port is in use there, by another program or by a second process 0"
        raise DistributedError(
            f"{me} can't meet the others at {where}: {text}. MASTER_ADDR is the host of RANK 0, "
            "MASTER_PORT a port there that is free and that the others can reach, and all "
            "WORLD_SIZE processes have to be started within some seconds of each other "
            "(XLA_DTENSOR_START_TIMEOUT)",
            of_others=True,
        ) from error


def _by_jax(launch: Launch, patience: float) -> str:

    known = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if known:
        return known
    for cluster in jax_private.cluster_types:
        if cluster.name == launch.launcher:
            port = os.environ.get("JAX_COORDINATOR_PORT")
            try:
                return cluster.get_coordinator_address(
                    timeout_secs=int(patience), override_coordinator_port=port
                )
            except Exception as error:
                raise DistributedError(
                    f"process {launch.process_id} of {launch.num_processes} ({launch.launcher}) on "
                    f"{socket.gethostname()}: JAX doesn't find out where process 0 is: {error}. "
                    "JAX_COORDINATOR_ADDRESS, its host:port, says it"
                ) from error
    raise AssertionError(f"JAX has lost its cluster {launch.launcher}")


def _by_horovod_server(launch: Launch, patience: float) -> str:
    """Through the key-value server that ``horovodrun`` keeps for its workers to meet at."""
    url = f"{launch.meeting}/xla_dtensor/coordinator"
    error: Exception | None = None
    if launch.process_id == 0:
        address = f"{socket.gethostname()}:{_chosen_port()}"
        request = urllib.request.Request(url, data=address.encode(), method="PUT")
        try:
            urllib.request.urlopen(request, timeout=patience).close()
            return address
        except OSError as failed:
            error = failed
    end = time.monotonic() + patience
    while launch.process_id and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=patience) as answer:
                return answer.read().decode()
        except OSError as failed:  # 404 until process 0 has been there
            error = failed
            if isinstance(failed, urllib.error.HTTPError):
                failed.close()
            time.sleep(0.1)
    raise DistributedError(
        f"process {launch.process_id} of {launch.num_processes} (Horovod) on "
        f"{socket.gethostname()} can't meet the others at HOROVOD_GLOO_RENDEZVOUS_ADDR and "
        f"HOROVOD_GLOO_RENDEZVOUS_PORT, {launch.meeting}: {error}. JAX_COORDINATOR_ADDRESS, "
        "host:port of rank 0, takes their place"
    ) from error
