"""Paddle's sharding rules: by Paddle's names, and asked backwards, from results to arguments.

Nothing else in the package imports it; `register_rule` knows the names.
"""

from xla_dtensor.rules.paddle.backward import infer_arguments
from xla_dtensor.rules.paddle.names import SpmdRule, TensorSpec, rule_of_name, spmd_rule

__all__ = ["SpmdRule", "TensorSpec", "infer_arguments", "rule_of_name", "spmd_rule"]
