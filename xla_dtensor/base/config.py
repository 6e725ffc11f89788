"""`config`: every switch of the package in one object, with environment variables as its defaults.

`switches` has the table of them. Neither imports anything, as everything may import them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from xla_dtensor.base.switches import SWITCHES, Switch, listed


class Config:
    """All switches of the package: ``xd.config.eager = "strict"``.

    Each begins with what its environment variable says when xla_dtensor is imported, or with its
    default; ``print(xd.config)`` shows them, and which of these it was. docs/config.md says what
    they do and when they are read. A value counts for the whole process: other threads see it, too.
    Processes that this one starts read their own environment.

    Attributes:
        eager: how eager operations are launched.
        checks: who looks for indices out of range.
        audit: in which calls of a compiled step its Python runs again.
        logs: what is logged.
        cache: where compiled programs are kept.
        check_processes: what several processes compare.
        start_timeout: seconds in which processes have to come together.
        heartbeat_timeout: seconds without a sign of life after which a process is gone.
        torchtitan_step: what of a trainer's step is one program.
        expert_capacity: how much room experts have for rows.

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
    logs: str
    cache: str
    check_processes: Literal["programs", "values", "launches"]
    start_timeout: float
    heartbeat_timeout: float
    torchtitan_step: Literal["parts", "whole"]
    expert_capacity: float | None

    # To read one is to read a slot, on hot paths, too: what is kept there has been checked.
    __slots__ = (*SWITCHES, "_fixed", "_listeners", "_sources")

    _sources: dict[str, str]
    _listeners: dict[str, list[Callable[[], object]]]
    _fixed: set[str]

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        put = object.__setattr__
        put(self, "_sources", {})
        put(self, "_listeners", {name: [] for name in SWITCHES})
        put(self, "_fixed", set())
        for name, switch in SWITCHES.items():
            value = switch.of(environ)
            self._sources[name] = "default" if value is None else "environment"
            put(self, name, switch.default if value is None else value)

    if not TYPE_CHECKING:  # or type checkers would take any name

        def __setattr__(self, name: str, value: Any) -> None:
            value = self._checked(name, value)
            self._put({name: (value, "set")})

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        """Have other values for a block, in the whole process: other threads see them, too. After
        it, however it ends, they are as they were, but for what is read once and was in the block.

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
        new = {name: (self._checked(name, value), "set") for name, value in values.items()}
        before = {name: (getattr(self, name), self._sources[name]) for name in new}
        try:
            self._put(new)
            yield
        finally:
            # What has been read once in the block can't be taken back.
            self._put({name: then for name, then in before.items() if name not in self._fixed})

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
        return self._sources[_switch(name).name]

    def listen(self, name: str, listener: Callable[[], object]) -> None:
        """Call ``listener`` after each change of a switch, in the thread that makes it: for the
        package's own use."""
        self._listeners[name].append(listener)

    def fix(self, *names: str) -> None:
        """These have been read, and aren't read again: whoever sets them later gets an error. For
        the package's own use."""
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

    def _put(self, new: Mapping[str, tuple[Any, str]]) -> None:
        changed = [name for name, (value, _) in new.items() if value != getattr(self, name)]
        for name, (value, source) in new.items():
            object.__setattr__(self, name, value)
            self._sources[name] = source
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
