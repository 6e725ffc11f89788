"""Starts a training function on the hosts that there are, and again when these have changed.

torch's elastic agent, which is what torchrun is, does it: it finds the hosts, starts processes and
ends them. This is how it has to be set up so that XLA's processes can meet again, and when it isn't
worth starting again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
)
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from xla_dtensor.base import torch_private
from xla_dtensor.base.config import Config
from xla_dtensor.base.source_line import is_users
from xla_dtensor.checkpoint.memory import FOLDER
from xla_dtensor.checkpoint.stopping import progress
from xla_dtensor.errors import DistributedError, HostsError
from xla_dtensor.runtime import distributed, heartbeats

_log = logging.getLogger("xla_dtensor.elastic")

_IN_MEMORY = "/dev/shm"  # where copies of the state are kept (`xla_dtensor.checkpoint.memory`)
_START = "TORCHELASTIC_RESTART_COUNT"
_HEARTBEAT = "XLA_DTENSOR_HEARTBEAT_TIMEOUT"
_PREFIX, _LOCK, _FAILURE = "xla_dtensor_elastic_", "lock", "failure_{}.json"
_AT_EXIT = 5.0  # seconds
_STOPPED = 75  # the exit code of a process that another one is to take the place of (EX_TEMPFAIL)


def run(
    train: Callable[[int], Any],
    *,
    hosts: int | tuple[int, int] = 1,
    endpoint: str | None = None,
    processes_per_host: int = 1,
    restarts: int = 1000,
    heartbeat_timeout: float = 8.0,
    settle: float = 12.0,
    grace: float = 30.0,
) -> None:
    """Run a training function on the hosts that there are, and again whenever these change.

    Start the script on every host. When a process or a host is lost, the others end their
    processes within ``heartbeat_timeout``, and all start again with the hosts that are left; when a
    host comes (the script is started there, or again), they stop after a step, with a checkpoint,
    and start again with it. ``train`` is called anew each time, in new processes: it makes its
    mesh of the devices that there are by then, and goes on where
    `xla_dtensor.checkpoint.CheckpointManager` finds it.

    Where torchrun or Ray has started the processes, ``train`` is called and nothing else.

    Args:
        train: called with the number of devices of all hosts.
        hosts: how many there have to be, and may be.
        endpoint: ``"host:port"`` at which they meet: another machine, on which ``python -m
            xla_dtensor.elastic PORT`` runs, or one of them, which is then the one that can't be
            lost. Not needed for one host.
        processes_per_host: started on this host; each has a part of its devices.
        restarts: how often the processes of this host may be lost. An exception, or a
            ``sys.exit`` with a text or a code, that comes twice in the same line, with no step done
            in between, isn't tried again on this host.
        heartbeat_timeout: seconds after which a process without a sign of life counts as lost.
        settle: seconds that hosts are waited for when there are enough, but not all; of several
            hosts more than ``heartbeat_timeout``, or those that notice a loss last come when the
            rest has started.
        grace: seconds that processes have to stop after a step, and save, when a host comes; and to
            end when one is lost. Those that haven't ended by then are killed.

    Raises:
        DistributedError: there aren't enough hosts, ``train`` fails again and again, or the
            endpoint's host is lost.
        SystemExit: a signal has come, with 128 and its number.
        HostsError: a number makes no sense, the endpoint has no port, or an environment variable of
            `xla_dtensor.config` has no such value. Nothing is started.

    Example::

        import os, unittest.mock, xla_dtensor as xd

        def train(devices):
            mesh = xd.init_device_mesh("xla", (devices,))
            found.append(mesh.size())  # CheckpointManager(...).restore(), and train

        found = []
        torchrun = {"RANK": "0", "WORLD_SIZE": "1"}  # has started this one
        with unittest.mock.patch.dict(os.environ, torchrun):
            xd.elastic.run(train, hosts=(1, 4), endpoint="host-a:29500")
        assert len(found) == 1
    """
    least, most = (hosts, hosts) if isinstance(hosts, int) else hosts
    if not 1 <= least <= most:
        raise HostsError(f"elastic.run(hosts={hosts}): give how many there are, or (least, most)")
    _check_numbers(processes_per_host, restarts, heartbeat_timeout, settle, grace)
    if most > 1 and settle <= heartbeat_timeout:
        raise HostsError(
            f"elastic.run(settle={settle:g}, heartbeat_timeout={heartbeat_timeout:g}): hosts that "
            "notice a loss last would come when the rest has started; give a settle of more than "
            f"heartbeat_timeout, such as {1.5 * heartbeat_timeout:g}"
        )
    _check_endpoint(endpoint)
    if "RANK" in os.environ or jax.distributed.is_initialized():
        _work(train)
        return
    if endpoint is None and most > 1:
        raise HostsError(f'elastic.run(hosts={hosts}): give endpoint="host:port", where they meet')
    config = LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=processes_per_host,
        run_id="xla_dtensor",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint or "localhost:0",
        rdzv_configs={
            "last_call_timeout": max(int(settle), 1),
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 3,
        },
        max_restarts=restarts,
    )
    with _folder() as folder, _closing_within(grace):
        os.environ[FOLDER] = folder
        os.environ[_HEARTBEAT] = str(heartbeat_timeout)
        # torch's agents keep the address of the first round's process 0, though it may be gone.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        try:
            launch_agent(config, sys.executable, sys.orig_argv[1:])
        except RendezvousClosedError:
            _log.warning("the hosts that meet at %s have come to their end", endpoint)
        except (RendezvousConnectionError, dist.DistNetworkError) as error:
            raise DistributedError(_unreached(config.rdzv_endpoint, error)) from None
        except ChildFailedError as error:
            raise DistributedError(_told(Path(folder), restarts)) from error
        except SignalException as error:
            if _final(Path(folder)):
                raise DistributedError(_told(Path(folder), restarts)) from error
            sys.exit(128 + error.sigval)


def _check_numbers(
    processes_per_host: int, restarts: int, heartbeat_timeout: float, settle: float, grace: float
) -> None:
    """See that processes that are started with these could run.

    Raises:
        HostsError: they couldn't.
    """
    if processes_per_host < 1:
        raise HostsError(f"elastic.run(processes_per_host={processes_per_host}): give 1 or more")
    if restarts < 0:
        raise HostsError(f"elastic.run(restarts={restarts}): give 0, for one start only, or more")
    seconds = {"heartbeat_timeout": heartbeat_timeout, "settle": settle, "grace": grace}
    for name, value in seconds.items():
        if not 0 < value < math.inf:
            raise HostsError(f"elastic.run({name}={value}): give a number of seconds above 0")
    try:
        # What the processes read when they import us, where an error would come in every start.
        Config(os.environ | {_HEARTBEAT: str(heartbeat_timeout)})
    except ValueError as error:
        raise HostsError(f"elastic.run: no process could start: {error}") from None


def _check_endpoint(endpoint: str | None) -> None:
    """See that an endpoint, where there is one, is a host and a port.

    Raises:
        HostsError: it isn't.
    """
    if endpoint is None:
        return
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise HostsError(
            f"elastic.run(endpoint={endpoint!r}): give host:port, as "
            f'"{host or port or "host-a"}:29500", with a port that is free on that host'
        )


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder as long as this agent lives; of those that were killed none stays in memory."""
    place = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else tempfile.gettempdir()
    for lock in Path(place).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open() as file:  # one that is locked is in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place) as folder,
        tempfile.NamedTemporaryFile(dir=folder, delete=False) as file,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        os.rename(file.name, Path(folder) / _LOCK)
        yield folder


@contextlib.contextmanager
def _closing_within(seconds: float) -> Iterator[None]:
    """A block in which torch's agent kills processes that haven't ended so long after SIGTERM."""
    close = torch_private.close_processes

    def close_within(
        context: PContext, death_sig: signal.Signals | None = None, timeout: float = 0
    ) -> None:
        # Before it starts them again, the agent gives them 30 s, whatever it was told.
        close(context, death_sig, seconds)

    torch_private.replace("close_processes", close_within)
    try:
        yield
    finally:
        torch_private.replace("close_processes", close)


def keep_store(port: int) -> dist.TCPStore:
    """The store at which hosts meet, as long as the object is there.

    Args:
        port: of this machine; 0 for one that is free.

    Returns:
        torch's store.
    """
    host = socket.gethostname()
    timeout = timedelta(days=365)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout)


def _work(train: Callable[[int], Any]) -> None:
    """What a process that was started does."""
    folder = os.environ.get(FOLDER)
    try:
        distributed.initialize()
        train(len(jax.devices()))
    except (Exception, SystemExit) as error:
        is_end = isinstance(error, SystemExit) and error.code in (None, 0)
        if folder is not None and not is_end:
            if isinstance(error, SystemExit):
                heartbeats.ends_with(error)  # as of other exceptions it does by itself
            if not _is_of_others(error):
                _note(Path(folder), error)
        if not is_end or folder is None or progress.stopped_by is None:
            raise
    if folder is not None and progress.stopped_by is not None:
        # All stop together, the first of them because its agent wants to start again. The other
        # agents may not know that yet, and must not take it for the end of the training.
        _end_in(_AT_EXIT, _STOPPED)
        sys.exit(_STOPPED)


def _is_of_others(error: BaseException) -> bool:
    """Whether it comes of another process's loss, and need not come again."""
    if isinstance(error, DistributedError):
        return error.of_others
    # What asks the store of a process 0 that is gone gets JAX's own.
    return isinstance(error, jax.errors.JaxRuntimeError) and heartbeats.is_of_transport(error)


def _end_in(seconds: float, code: int) -> None:
    """End this process, whatever it waits for: at exit JAX waits for processes that may be gone."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _note(folder: Path, error: BaseException) -> None:
    """Keep an exception for the next start; end this host's agent if it is the last one's again."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "?"
    found: dict[str, Any] = {"error": text, "kind": kind, "line": line}
    found |= {"step": progress.step or 0, "start": os.environ.get(_START)}
    found |= {"process": os.environ["LOCAL_RANK"]}
    if _final(folder):
        return
    found["final"] = any(_is_again(found, note) for note in _notes(folder))
    path = folder / _FAILURE.format(found["process"])
    own = path.with_suffix(".new")
    own.write_text(json.dumps(found))
    own.replace(path)  # others may read it at the same time
    if found["final"]:
        traceback.print_exception(error)
        os.kill(os.getppid(), signal.SIGTERM)


def _is_again(found: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether it is the same exception as one of an earlier start, with no step done in between."""
    # A text may have a time, an address or the number of a process in it, so it isn't compared.
    is_same = all(found[key] == before[key] for key in ("kind", "line"))
    # Another process of this start has mostly raised the same: that is not again. One process's are
    # of two starts, though their numbers are the same where hosts have come or gone in between.
    is_earlier = found["process"] == before["process"] or found["start"] != before["start"]
    return is_same and is_earlier and found["step"] <= before["step"]


def _notes(folder: Path) -> list[dict[str, Any]]:
    """The last exception of each process of this host."""
    return [json.loads(path.read_text()) for path in folder.glob(_FAILURE.format("*"))]


def _final(folder: Path) -> list[dict[str, Any]]:
    """Of these the one for which nothing is started again, if there is one."""
    return [note for note in _notes(folder) if note["final"]]


def _unreached(endpoint: str, error: Exception) -> str:
    why = str(error.__cause__ or error).splitlines()[0]
    return (
        f"{socket.gethostname()} doesn't reach the endpoint {endpoint}, where the hosts meet, and "
        f"the run can't go on without it: {why}\nCopies of the state in the hosts' memory are "
        "gone with the run, so the next one begins with the newest checkpoint on the disk: start "
        "the script on all hosts again, with an endpoint that is there. To be able to lose any of "
        f"the hosts, run python -m xla_dtensor.elastic {endpoint.rpartition(':')[2]} on a machine "
        "that is none of them, which keeps the store apart, and give that as the endpoint"
    )


def _told(folder: Path, restarts: int) -> str:
    host, final = socket.gethostname(), _final(folder)
    if final:
        return (
            f"the training function has raised the same twice on {host}, and isn't started again: "
            f"{final[0]['error']}\n  at {final[0]['line']}"
        )
    return f"the processes of {host} have been lost {restarts} times, and aren't started again"
