"""The executors (lazy, strict, batched, abstract, tracing), and the one that threads start with.

README.md here has the table of them.
"""

from xla_dtensor.base import events, executor
from xla_dtensor.base.config import config, listen
from xla_dtensor.execution import lazy
from xla_dtensor.execution.abstract import Abstract
from xla_dtensor.execution.batch import Batch
from xla_dtensor.execution.blocks import batched, writing_down
from xla_dtensor.execution.strict import Strict
from xla_dtensor.runtime import abstract, processes

__all__ = ["Batch", "batched", "writing_down"]

_STRICT, _ABSTRACT = Strict(), Abstract()


def _choose() -> None:
    """Set the executors that threads start with. Called again whenever a setting that decides this
    changes: to ask in each operation would cost each operation."""
    at_once = _ABSTRACT if abstract.current() is not None else _STRICT
    may_wait = (
        config.eager == "lazy"
        and at_once is _STRICT
        and events.observer is None  # an observer is called for each operation
        and not processes.several()  # garbage collection must not change what they launch
    )
    executor.at_once = lambda: at_once
    executor.default = lazy.of_this_thread if may_wait else executor.at_once


executor.choose = _choose
listen("eager", _choose)
_choose()
