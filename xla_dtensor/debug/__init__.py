"""Shows which layouts operations have, and why: `explain`, `set_logs`, `rules`; and `caches`.

``_recorder.py`` is told of operations by the places that run them (`xla_dtensor.base.events`) and
makes an `Operation` of each; ``_explain.py`` collects them, ``_logs.py`` logs them.
"""

from xla_dtensor.base.config import listen
from xla_dtensor.debug._caches import CacheTable, caches, clear_caches
from xla_dtensor.debug._explain import Explanation, explain
from xla_dtensor.debug._logs import set_logs, switch_logs
from xla_dtensor.debug._records import Operation, Redistribution, Transfer
from xla_dtensor.debug._rematerializations import Rematerialization, rematerializations
from xla_dtensor.debug._rules import RegisteredRule, RuleTable, rules

__all__ = [
    "CacheTable",
    "Explanation",
    "Operation",
    "Redistribution",
    "RegisteredRule",
    "Rematerialization",
    "RuleTable",
    "Transfer",
    "caches",
    "clear_caches",
    "explain",
    "rematerializations",
    "rules",
    "set_logs",
]

switch_logs()
listen("logs", switch_logs)
