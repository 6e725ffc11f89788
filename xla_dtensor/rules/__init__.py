"""Layout rules: the placements of an op's results, from those of its arguments.

`infer_placements` is the entry point; `register_rule` adds a rule. See README.md.
"""

from . import (
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
    reduction,
    scan_sort,
    shape,
    view,
)
from ._types import DimSharding, Placements, TensorInfo
from .alternatives import Alternative, Merged
from .backward import infer_arguments
from .names import SpmdRule, TensorSpec, spmd_rule
from .notation import Notation, infer_backward, infer_forward, parse
from .registry import (
    Call,
    Registration,
    Rule,
    UserRule,
    find_registration,
    find_rule,
    infer,
    infer_placements,
    on_change,
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
    "SpmdRule",
    "TensorInfo",
    "TensorSpec",
    "UserRule",
    "find_registration",
    "find_rule",
    "infer",
    "infer_arguments",
    "infer_backward",
    "infer_forward",
    "infer_placements",
    "on_change",
    "parse",
    "register",
    "register_rule",
    "registrations",
    "replicate_rule",
    "rules",
    "spmd_rule",
]
