"""Torch modules and functions inside of JAX programs: ``xd.jax``."""

from xla_dtensor.jax_programs.functions import call
from xla_dtensor.jax_programs.modules import ModuleFunction, from_module
from xla_dtensor.jax_programs.values import array, view

__all__ = ["ModuleFunction", "array", "call", "from_module", "view"]
