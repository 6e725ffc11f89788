"""Connections between processes that don't coordinate: they say when the network there is dead.

Signs of life go to process 0. Where two others don't reach each other any more all give them still,
and wait in a collective for ever. So each keeps an idle connection to a few of the others, which
the kernel looks after (TCP's keep-alive): also while Python stands still, and at no cost here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable

from xla_dtensor.runtime import processes

logger = logging.getLogger("xla_dtensor")

_LISTEN = 0.5  # seconds; the end of the program waits for it
_CONNECT = 10.0  # seconds
# Of a connection that is dead; one that the other end has closed says nothing of the network.
_DEAD = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}


def peers(me: int, count: int) -> list[int]:
    """Whom a process keeps a connection to: 1, 2, 4, 8... numbers further on, so of few processes
    each pair, and of many some between any two parts. Process 0 hears of all others anyway."""
    found = {(me + (1 << k)) % count for k in range(count.bit_length()) if 1 << k < count}
    return sorted(found - {0, me}) if me else []


class LivingLinks:
    """The connections of this process. There are none between processes of one host, or where
    something (a firewall) refuses them from the start.

    Args:
        patience: seconds after which a connection without an answer is dead.
        stopping: set when it is time to end.
        lost: called with the number of a process that isn't reached any more, and why.
    """

    def __init__(
        self, patience: float, stopping: threading.Event, lost: Callable[[int, str], None]
    ) -> None:
        self._patience, self._stopping, self._lost = max(2, round(patience)), stopping, lost

    def run(self) -> None:
        """Keep connections until it is time to end."""
        address = _own_address()
        if address is None or not hasattr(socket, "TCP_KEEPIDLE"):
            return
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with selectors.DefaultSelector() as selector, socket.socket(family) as listening:
            try:
                listening.bind((address, 0))
                listening.listen()
                listening.setblocking(False)  # who has called may be gone again
                port = listening.getsockname()[1]
                processes.store().put(f"reach/{processes.index()}", f"{address} {port}")
                selector.register(listening, selectors.EVENT_READ)
                missing = peers(processes.index(), processes.count())
                while not self._stopping.is_set():
                    if missing:
                        # One that never says where it is mustn't keep the others waiting.
                        other = missing.pop(0)
                        if not self._connect(selector, other):
                            missing.append(other)
                    for key, _ in selector.select(0 if missing else _LISTEN):
                        self._look(selector, key)
            except Exception as error:  # of the store, when process 0 is gone, which is told
                logger.info("xla_dtensor: connections to other processes aren't watched: %s", error)
            finally:
                for key in [*selector.get_map().values()]:
                    key.fileobj.close()  # type: ignore[union-attr]

    def _connect(self, selector: selectors.BaseSelector, other: int) -> bool:
        """Connect to another process, if it has said where; whether that is done with."""
        told = processes.store().wait_for(f"reach/{other}", _LISTEN)
        if told is None:
            return False
        host, port = told.split()
        try:
            link = socket.create_connection((host, int(port)), timeout=_CONNECT)
        except OSError as error:
            logger.info(
                "xla_dtensor: the connection to %s isn't watched: %s", processes.known(other), error
            )
            return True
        pause = max(1, self._patience // 5)
        for option, value in (
            (socket.TCP_KEEPIDLE, pause),
            (socket.TCP_KEEPINTVL, pause),
            (socket.TCP_KEEPCNT, max(1, self._patience // pause - 1)),
        ):
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setblocking(False)
        selector.register(link, selectors.EVENT_READ, other)
        return True

    def _look(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        link = key.fileobj
        assert isinstance(link, socket.socket)
        if link.type == socket.SOCK_STREAM and link.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            with contextlib.suppress(OSError):
                accepted, _ = link.accept()
                accepted.setblocking(False)
                selector.register(accepted, selectors.EVENT_READ)
            return
        why = ""
        try:
            if link.recv(1):
                return  # nobody sends anything; a stranger may
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _DEAD and key.data is not None:
                why = os.strerror(error.errno)
        selector.unregister(link)
        link.close()
        if why and not self._stopping.is_set():
            self._lost(key.data, why)


def _own_address() -> str | None:
    """Where others reach this process, by what it reaches process 0 with; None on its host."""
    host, _, port = processes.coordinator().rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own: str = probe.getsockname()[0]
    except (OSError, ValueError):
        return None
    return None if own.startswith("127.") or own == "::1" else own
