"""Layout rules: the placements of an op's results, from those of its arguments.

`infer_placements` is the entry point; `register_rule` adds a rule. See README.md.
"""

from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.families import (
    attention,
    conv,
    factory,
    foreach,
    indexing,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    recurrence,
    reduction,
    scan_sort,
    shape,
    view,
)
from xla_dtensor.rules.infer import infer, infer_placements
from xla_dtensor.rules.merging import DimSharding, Placements, TensorInfo
from xla_dtensor.rules.notation import Notation, infer_forward, parse
from xla_dtensor.rules.registry import (
    Registration,
    Rule,
    UserRule,
    add_names,
    changes,
    find_registration,
    find_rule,
    register,
    register_rule,
    registrations,
    replicate_rule,
    rules,
)

FAMILIES = (
    attention,
    conv,
    factory,
    foreach,
    indexing,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    recurrence,
    reduction,
    scan_sort,
    shape,
    view,
)
"""The modules that register the rules, by being imported."""

__all__ = [
    "FAMILIES",
    "Alternative",
    "Call",
    "DimSharding",
    "Merged",
    "Notation",
    "Placements",
    "Registration",
    "Rule",
    "TensorInfo",
    "UserRule",
    "add_names",
    "changes",
    "find_registration",
    "find_rule",
    "infer",
    "infer_forward",
    "infer_placements",
    "parse",
    "register",
    "register_rule",
    "registrations",
    "replicate_rule",
    "rules",
]
