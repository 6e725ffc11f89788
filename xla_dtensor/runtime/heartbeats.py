"""Heartbeats of several processes: when one is gone, the others end and name it, and don't hang.

Each process gives signs of life through the key-value store, and process 0 looks at them. Who finds
a process gone, or ends with an exception, says so there; all listen, and end. JAX would end them
too, later, and names numbers of tasks only.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import time
import traceback
from typing import Any

from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.tables import counters
from xla_dtensor.errors import DistributedError
from xla_dtensor.runtime import last_words, processes, user_positions
from xla_dtensor.runtime.idle import is_idle
from xla_dtensor.runtime.network.links import LivingLinks
from xla_dtensor.runtime.user_positions import Whereabouts

logger = logging.getLogger("xla_dtensor")

EXIT_CODE = 1
STUCK = 15.0
"""Seconds after which a process that waits for a value, while another waits for it, is stuck. With
more processes than cores a value may take some (four on two busy cores took more than six)."""

_LISTEN = 0.5  # seconds; the end of the program waits for it
_GRACE = 1.0  # what a process that learns of an end has to come to its own
_AT_THE_END = 300.0  # how long a process that has finished waits for the others


class _Heartbeats:
    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.interval = min(2.0, timeout / 5)
        self.stopping = threading.Event()
        self.failing = False
        self.named: DistributedError | None = None  # the main thread's, see `NamingTheLost`
        self.heard = time.monotonic()  # when the store last answered
        self.of_first = ""  # process 0's last sign of life
        self.stacks = user_positions.StacksOnRequest(patience=4 * self.interval)
        # Where a host is gone altogether its missing signs of life are to come first.
        links = LivingLinks(timeout + 2 * self.interval, self.stopping, _lost_link)
        runs = (self._beat, "signs of life"), (self._listen, "listening"), (links.run, "links")
        self.threads = [
            threading.Thread(target=run, name=f"xla_dtensor {name}", daemon=True)
            for run, name in runs
        ]

    def _beat(self) -> None:
        store, me = processes.store(), processes.index()
        seen: dict[str, tuple[str, float]] = {}
        number = 0
        while not self.stopping.is_set():
            number += 1
            try:
                store.put(f"alive/{me}", f"{number} {user_positions.here().text()}", again=True)
                self.heard = time.monotonic()
                if me == 0:
                    self._look(store.all_of("alive"), seen)
                else:
                    self.of_first = store.look("alive/0") or ""
                self.stacks.look()
            except Exception as error:
                self._lost(error)
            self.stopping.wait(self.interval)

    def _look(self, alive: dict[str, str], seen: dict[str, tuple[str, float]]) -> None:
        now = time.monotonic()
        for index in map(str, range(1, processes.count())):
            value = alive.get(index, "")
            if index not in seen or seen[index][0] != value:
                seen[index] = value, now
            elif now - seen[index][1] > self.timeout:
                say_failed(
                    f"{processes.known(int(index))} has given no sign of life for "
                    f"{self.timeout:g} s: it was killed or stopped, or its host is gone"
                    f"{last_words.last_line(value)}"
                )

    def _listen(self) -> None:
        store = processes.store()
        while not self.stopping.is_set():
            try:
                text = store.wait_for("failed", _LISTEN)
            except Exception as error:
                self._lost(error)
                return
            if text is not None:
                self._end(text)
                return
            if time.monotonic() - self.heard > self.timeout:
                last = last_words.last_line(self.of_first)
                self._end(
                    f"{last_words.coordinator()} hasn't answered for {self.timeout:g} s{last}"
                )
                return

    def _lost(self, error: Exception) -> None:
        if self.stopping.is_set() or self.failing:
            return
        if not processes.store().is_open():
            self.stopping.set()  # Ray, or the user, has shut JAX's runtime down
            return
        said = f"({str(error).splitlines()[0]}){last_words.last_line(self.of_first)}"
        if "UNAVAILABLE" in str(error):
            self._end(f"{last_words.coordinator()} is gone {said}")
        elif time.monotonic() - self.heard > self.timeout:
            self._end(f"{last_words.coordinator()} doesn't answer {said}")

    def _end(self, text: str) -> None:
        """End this process, since another one has failed."""
        if self.failing or self.stopping.is_set():
            return
        last_words.say(text)
        end = time.monotonic() + _GRACE
        while time.monotonic() < end:
            if self.stopping.wait(0.1):
                return
            if self.failing:
                return  # the main thread is on its way
        leave()


_running: _Heartbeats | None = None


def start(timeout: float) -> None:
    """Watch over the other processes from now on.

    Args:
        timeout: seconds without a sign of life after which one counts as gone.
    """
    global _running
    _running = _Heartbeats(timeout)
    for thread in _running.threads:
        thread.start()
    previous = sys.excepthook

    def excepthook(kind: Any, value: Any, trace: Any) -> None:
        if not hasattr(sys, "ps1"):  # at a prompt an exception ends nothing
            ends_with(value)
        if _running is not None and value is _running.named:
            if last_words.are_said():
                return  # the same end, in a line
            last_words.cut(trace)
        previous(kind, value, trace)

    sys.excepthook = excepthook
    atexit.register(_at_exit)
    if processes.index():
        last_words.say_when_aborted(lambda: _running.of_first if _running else "")


def ends_with(error: BaseException) -> None:
    """Tell all processes that this one is about to end with an exception."""
    if _running is not None and not _running.stopping.is_set():
        _running.failing = True
        me = processes.known(processes.index())
        text = traceback.format_exception_only(error)[-1].strip()
        say_failed(f"{me} has ended with {text}{last_words.line(error.__traceback__)}")


def say_failed(text: str) -> None:
    """Tell all processes that one has failed; only what is said first counts."""
    try:
        processes.store().put("failed", text)
    except Exception as error:
        if "ALREADY_EXISTS" not in str(error):
            logger.warning("xla_dtensor: could not tell the others that %s (%s)", text, error)


# What JAX's errors have of Gloo (CPUs), NCCL (GPUs) and gRPC when another process is gone.
_OF_TRANSPORT = (
    *("Gloo ", "gloo/", "NCCL", "Connection reset", "Connection closed", "Broken pipe"),
    *("Socket closed", "UNAVAILABLE"),
)

# Each operation that waits for one that has failed says so before its text, a hundred in a row.
_REPEATED = re.compile(r"([^:\n]+: )\1+")


def is_of_transport(error: BaseException | None) -> bool:
    """Whether it is an error of JAX's that comes of another process's end, and doesn't name it."""
    return (
        _running is not None
        and isinstance(error, RuntimeError)
        and not isinstance(error, DistributedError)
        and any(word in str(error) for word in _OF_TRANSPORT)
    )


class NamingTheLost:
    """A block in which an error of JAX's that comes of another process's end says whose.

    Raises:
        DistributedError: at the end of the block: which process is gone, and where this one waited
            for it.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        running, text = _running, str(error)
        if running is None or not is_of_transport(error):
            return
        # The main thread's error ends the process; another one's doesn't, so listening does.
        is_main = threading.current_thread() is threading.main_thread()
        running.failing |= is_main
        try:
            gone = _gone(running)
        except Exception as failure:  # the store is process 0's
            gone = (
                f"{last_words.coordinator()} doesn't answer ({str(failure).splitlines()[0]})"
                f"{last_words.last_line(running.of_first)}"
            )
        say_failed(gone)
        me = processes.known(processes.index())
        where = str(Whereabouts(0, user_line().strip(), counters.total("steps")))
        here = f"\n  {where}" if where else ""
        said = _REPEATED.sub(r"\1", text.splitlines()[0])
        named = DistributedError(
            f"{gone}\n{me} computed something together with the others{here}\nJAX says: {said}",
            of_others=True,
        )
        if is_main:
            running.named = named
        raise named from None


def _gone(running: _Heartbeats) -> str:
    """Which process is gone, by missing signs of life. A connection was lost, so fewer of them will
    do than where nobody complains. If none is missing: who hasn't come to where this one is."""
    store, end = processes.store(), time.monotonic() + running.timeout
    others = [str(i) for i in range(processes.count()) if i != processes.index()]
    seen, changed = store.all_of("alive"), dict.fromkeys(others, time.monotonic())
    while True:
        said = store.look("failed")
        if said is not None:
            return said
        now, alive = time.monotonic(), store.all_of("alive")
        for other in others:
            if alive.get(other) != seen.get(other):
                changed[other] = now
        seen = alive
        longest = min(others, key=changed.__getitem__)
        if now - changed[longest] > 3 * running.interval:
            return (
                f"{processes.known(int(longest))} is gone: it was killed, or its host is gone"
                f"{last_words.last_line(seen.get(longest, ''))}"
            )
        if now > end:
            return _late(alive)
        time.sleep(0.1)


def _late(alive: dict[str, str]) -> str:
    """What to say where a connection failed, and all give signs of life: transports give up on who
    comes half a minute later than the others to the first collective that they have together."""
    found = [
        f"\n{processes.known(int(index))} was last seen {there}"
        for index, sign in sorted(alive.items())
        if not (there := user_positions.read(sign.partition(" ")[2])).reads_for
    ]
    return f"a connection has failed, though all processes give signs of life{''.join(found[:4])}"


def _lost_link(other: int, why: str) -> None:
    """End all, as a process that isn't 0 doesn't reach another one any more."""
    sign = processes.store().all_of("alive").get(str(other), "")
    say_failed(
        f"{processes.known(processes.index())} doesn't reach {processes.known(other)} any more "
        f"({why}), though both reach {processes.known(0)}: the network between them is dead"
        f"{last_words.last_line(sign)}"
    )


def leave() -> None:
    """End the process without waiting for the others, as JAX's own end would."""
    flush = threading.Thread(target=_flush, daemon=True)  # the main thread may hold their locks
    flush.start()
    flush.join(0.5)
    if processes.index() == 0:
        # The others hear through process 0; they may not have heard yet.
        time.sleep(_GRACE + 0.5)
    os._exit(EXIT_CODE)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def where(index: int) -> Whereabouts | None:
    """Where the main thread of a process was at its last sign of life; None before the first."""
    text = processes.store().all_of("alive").get(str(index))
    return None if text is None else user_positions.read(text.partition(" ")[2])


def has_ended(index: int) -> bool:
    """Whether a process has come to the end of its program."""
    return str(index) in processes.store().all_of("ended")


def _at_exit() -> None:
    """Come to the end together: process 0 is where the others hear from each other."""
    running = _running
    if running is None or running.stopping.is_set() or not processes.store().is_open():
        return
    if running.failing:
        leave()
    store = processes.store()
    try:
        store.put(f"ended/{processes.index()}", "")
        end = time.monotonic() + _AT_THE_END
        while len(ended := store.all_of("ended")) < processes.count():
            if time.monotonic() > end:
                logger.warning("xla_dtensor: not waiting for the other processes any longer")
                break
            time.sleep(0.02 if time.monotonic() < end - _AT_THE_END + 5 else 1)
            _look_for_waiting(ended)
    except Exception as error:
        running._lost(error)
    stop()


def _look_for_waiting(ended: dict[str, str]) -> None:
    """End all if another process waits, in a collective, for this one, which is at its end."""
    for index in range(processes.count()):
        if str(index) in ended or not is_idle():
            continue
        there = where(index)
        if there is not None and there.reads_for > STUCK:
            say_failed(
                f"{processes.known(processes.index())} has come to the end of its program, and "
                f"{processes.known(index)} waits for what they can compute together only "
                f"({there.line}): all processes have to do the same"
            )


def stop() -> None:
    """Watch no longer."""
    if _running is not None:
        _running.stopping.set()
        for thread in _running.threads:
            if thread is not threading.current_thread():
                thread.join(5)
