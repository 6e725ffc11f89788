"""`config`: every switch of the package in one object, with environment variables as its defaults.

`switches` has the table of them. Neither imports anything, as everything may import them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from xla_dtensor.base.switches import SWITCHES, Switch, listed


class _Level:
    """A value of a switch, and where it is from. The first level is the process's; each block that
    has not ended has put one of its own on top."""

    def __init__(self, value: Any, source: str) -> None:
        self.value, self.source = value, source

    def become(self, other: _Level) -> None:
        self.value, self.source = other.value, other.source


class Config:
    """All switches of the package: ``xd.config.eager = "strict"``.

    Each begins with what its environment variable says when xla_dtensor is imported, or with its
    default; ``print(xd.config)`` shows them, and which of these it was. docs/config.md says what
    they do and when they are read. A value counts for the whole process: other threads see it, too.
    Threads may set switches at the same time. Processes that this one starts read their own
    environment.

    Attributes:
        eager: how eager operations are launched.
        checks: who looks for indices out of range.
        audit: in which calls of a compiled step its Python runs again.
        watch: what becomes of a compiled step whose Python can't be one program.
        logs: what is logged.
        cache: where compiled programs are kept.
        check_processes: what several processes compare.
        start_timeout: seconds in which processes have to come together.
        heartbeat_timeout: seconds without a sign of life after which a process is gone.
        torchtitan_step: what of a trainer's step is one program.
        expert_capacity: how much room experts have for rows.
        device_memory: how much of a device a step's layouts may take.
        reproducible: whether compiled steps give the same bits on any mesh.
        device: whether libraries that look for a device take "xla".

    Raises:
        AttributeError: (when assigned) there is no switch of this name.
        ValueError: (when assigned) it has no such value.
        RuntimeError: (when assigned) it has been read already, and isn't read again.

    Example::

        import torch, xla_dtensor as xd

        with xd.config.override(eager="strict"):
            x = torch.ones(3, device="xla") + 1  # launched here
        assert xd.config.eager == "lazy"
    """

    eager: Literal["lazy", "strict"]
    checks: Literal["off", "eager", "compiled", "all"]
    audit: int
    watch: Literal["auto", "trace"]
    logs: str
    cache: str
    check_processes: Literal["programs", "values", "launches"]
    start_timeout: float
    heartbeat_timeout: float
    torchtitan_step: Literal["parts", "whole"]
    expert_capacity: float | None
    device_memory: float | None
    reproducible: Literal["on a mesh", "across meshes"]
    device: Literal["auto", "xla", "never"]

    # To read one is to read a slot, on hot paths, too: what is kept there has been checked.
    __slots__ = (*SWITCHES, "_fixed", "_levels", "_listeners", "_lock")

    _lock: threading.RLock
    _levels: dict[str, list[_Level]]
    _listeners: dict[str, list[Callable[[], object]]]
    _fixed: set[str]

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        put = object.__setattr__
        put(self, "_lock", threading.RLock())
        put(self, "_levels", {})
        put(self, "_listeners", {name: [] for name in SWITCHES})
        put(self, "_fixed", set())
        for name, switch in SWITCHES.items():
            value = switch.of(environ)
            level = _Level(value, "environment")
            if value is None:
                level = _Level(switch.default, "default")
            self._levels[name] = [level]
            put(self, name, level.value)

    if not TYPE_CHECKING:  # or type checkers would take any name

        def __setattr__(self, name: str, value: Any) -> None:
            with self._lock:
                level = _Level(self._checked(name, value), "set")
                self._levels[name][-1].become(level)
                self._update([name])

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        """Have other values for a block, in the whole process: other threads see them, too. After
        it, however it ends, they are as they were, but for what is read once and was in the block.
        What is assigned to them meanwhile counts until its end. Where blocks of several threads
        overlap, the one that began last counts; when all have ended nothing is left of any.

        Args:
            values: by the names of switches.

        Raises:
            AttributeError: there is no switch of a name.
            ValueError: one has no such value. None of them is changed then.
            RuntimeError: one isn't read again.

        Example::

            import xla_dtensor as xd

            with xd.config.override(checks="all", audit=1):
                assert xd.config.audit == 1
            assert xd.config.audit == 0
        """
        with self._lock:
            new = {name: _Level(self._checked(name, v), "set") for name, v in values.items()}
            for name, level in new.items():
                self._levels[name].append(level)
        try:
            with self._lock:
                self._update(new)
            yield
        finally:
            with self._lock:
                for name, level in new.items():
                    levels = self._levels[name]
                    if name in self._fixed:  # in the block, which can't be taken back
                        levels[0].become(levels[-1])
                    levels.remove(level)
                self._update(new)

    def source(self, name: str) -> str:
        """Where the value of a switch is from.

        Args:
            name: of the switch.

        Returns:
            ``default``, ``environment`` or ``set``.

        Raises:
            AttributeError: there is no such switch.

        Example::

            import xla_dtensor as xd

            with xd.config.override(eager="strict"):
                assert xd.config.source("eager") == "set"
        """
        return self._levels[_switch(name).name][-1].source

    def _listen(self, name: str, listener: Callable[[], object]) -> None:
        self._listeners[name].append(listener)

    def _fix(self, *names: str) -> None:
        self._fixed.update(names)

    def __repr__(self) -> str:
        rows = [("switch", "value", "from", "allowed")]
        for name, switch in SWITCHES.items():
            source = self.source(name)
            if source == "environment":
                source = f"environment ({switch.variable})"
            rows.append((name, repr(getattr(self, name)), source, str(switch.kind)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    def __reduce__(self) -> Any:
        return _the_one, ()  # a copy would switch nothing

    def _checked(self, name: str, value: Any) -> Any:
        switch = _switch(name)
        value = switch.checked(value)
        now = getattr(self, name)
        if name in self._fixed and value != now:
            raise RuntimeError(
                f"xd.config.{name} = {value!r}: it is {now!r} in this process, as it is read "
                f"{switch.read}, which has happened; set it, or {switch.variable}, before that"
            )
        return value

    def _update(self, names: Iterable[str]) -> None:
        """Have the attributes say what the last levels do, and tell who listens."""
        now = {name: self._levels[name][-1].value for name in names}
        changed = [name for name, value in now.items() if value != getattr(self, name)]
        for name, value in now.items():
            object.__setattr__(self, name, value)
        for name in changed:
            for listener in self._listeners[name]:
                listener()


def _switch(name: str) -> Switch:
    if name not in SWITCHES:
        raise AttributeError(f"xd.config has no switch {name!r}; it has {listed(SWITCHES)}")
    return SWITCHES[name]


def _the_one() -> Config:
    return config


config = Config()


# For the package's own use.


def listen(name: str, listener: Callable[[], object]) -> None:
    """Call ``listener`` after each change of a switch, in the thread that makes it."""
    config._listen(name, listener)


def fix(*names: str) -> None:
    """These switches have been read, and aren't read again: to set another value raises now."""
    config._fix(*names)
