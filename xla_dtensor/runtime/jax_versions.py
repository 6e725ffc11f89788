"""What differs between the supported JAX versions (0.9 to 0.12), in one place.

Checked on 0.9.0, 0.9.2, 0.10.2, 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src.interpreters import pxla

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


def manual_axes(equation: Any) -> frozenset[str]:
    """The mesh axes along which a ``shard_map`` equation runs each device by itself."""
    parameters = equation.params
    # Named ``newly_`` since 0.10.
    found: frozenset[str] = parameters.get("newly_manual_axes", parameters.get("manual_axes"))
    return found


def let_empty_results_be_sharded() -> None:
    """XLA calls an empty result replicated, whatever was asked for. JAX before 0.10 takes that for
    a mistake of XLA's and refuses the program; later it looks at results with values alone."""
    if JAX_VERSION >= (0, 10):
        return
    unspecified = jax._src.sharding_impls.UNSPECIFIED
    original = pxla._maybe_get_and_check_out_shardings

    def check(executable: Any, shardings: Any, devices: Any, avals: Any, effects: int) -> Any:
        empty = [getattr(aval, "size", 1) == 0 for aval in avals]
        asked = [
            unspecified if none else sharding
            for none, sharding in zip(empty, shardings, strict=True)
        ]
        found = original(executable, asked, devices, avals, effects)
        return [
            sharding if none and not isinstance(sharding, type(unspecified)) else own
            for none, sharding, own in zip(empty, shardings, found, strict=True)
        ]

    pxla._maybe_get_and_check_out_shardings = check


let_empty_results_be_sharded()
