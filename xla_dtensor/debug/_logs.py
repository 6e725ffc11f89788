"""Log lines, switched on by ``xd.config.logs`` or `set_logs`."""

from __future__ import annotations

import logging
import sys

from xla_dtensor.base.config import config
from xla_dtensor.base.switches import SWITCHES, NameList
from xla_dtensor.debug._recorder import recorder
from xla_dtensor.debug._records import Operation


class _Artifact:
    """Something that can be logged, to the logger ``xla_dtensor.<name>``."""

    def __init__(self, name: str) -> None:
        self.logger = logging.getLogger(f"xla_dtensor.{name}")
        self.is_on = False
        self._level = logging.NOTSET
        self._handler = _Fallback(self.logger)

    def switch(self, on: bool) -> None:
        if on == self.is_on:
            return
        self.is_on = on
        if on:
            self._level = self.logger.level
            self.logger.setLevel(logging.INFO)
            self.logger.addHandler(self._handler)
            recorder.add(self._log)
        else:
            self.logger.setLevel(self._level)
            self.logger.removeHandler(self._handler)
            recorder.remove(self._log)

    def _log(self, operation: Operation) -> None:
        self.logger.info("%s%s", "  " * operation.depth, operation)


class _Fallback(logging.Handler):
    """Writes to standard error while no other handler would see the record."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self.setFormatter(logging.Formatter("[%(name)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_alone():
            return
        print(self.format(record), file=sys.stderr)

    def _is_alone(self) -> bool:
        logger: logging.Logger | None = self._logger
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


_KIND = SWITCHES["logs"].kind
assert isinstance(_KIND, NameList)
_ARTIFACTS = {name: _Artifact(name) for name in _KIND.known}


def set_logs(**artifacts: bool) -> None:
    """Switch log lines on or off, for the whole process; those that aren't named stay as they are.

    ``set_logs(layouts=True)``, or ``xd.config.logs = "layouts"``, which it sets, logs what
    `explain` prints as the operations run: one line each, to the logger "xla_dtensor.layouts" at
    level INFO. Without any logging handler the lines go to standard error. Lines of all threads are
    logged; switch while no other thread runs operations.

    Args:
        artifacts: by name whether to log; ``layouts`` is the one that there is.

    Raises:
        ValueError: no such artifact.

    Example::

        import logging, torch, xla_dtensor as xd

        lines = logging.Handler()
        lines.emit = lambda record: seen.append(record.getMessage())
        seen = []
        logging.getLogger("xla_dtensor.layouts").addHandler(lines)
        xd.debug.set_logs(layouts=True)
        torch.ones(3, device="xla") * 2
        xd.debug.set_logs(layouts=False)
        logging.getLogger("xla_dtensor.layouts").removeHandler(lines)
        assert any("aten::mul" in line for line in seen)
    """
    unknown = [name for name in artifacts if name not in _ARTIFACTS]
    if unknown:
        raise ValueError(
            f"set_logs: nothing to log is called {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(map(repr, _ARTIFACTS))}"
        )
    known = {name: name in config.logs.split(",") for name in _ARTIFACTS} | artifacts
    config.logs = ",".join(name for name, on in known.items() if on)


def switch_logs() -> None:
    """Log what ``config.logs`` names, and nothing else."""
    names = config.logs.split(",")
    for name, artifact in _ARTIFACTS.items():
        artifact.switch(name in names)
