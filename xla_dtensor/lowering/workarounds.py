"""Lowerings for some backends alone: workarounds for compilers' defects, and their own features.

A program's backend is known when it is lowered, so such a function is traced both ways, and one
of them is lowered. The defects are rows of `base/xla_faults.py`, as are those of XLA's partitioner,
which all backends share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from xla_dtensor.base import xla_faults
from xla_dtensor.lowering.context import here
from xla_dtensor.lowering.platform_primitives import refused


def is_among(platform: str, names: Sequence[str]) -> bool:
    """Whether devices' name of a platform is among those that lowerings have: ``"gpu"`` is
    ``"cuda"`` or ``"rocm"`` there."""
    return not {platform, *(("cuda", "rocm") if platform == "gpu" else ())}.isdisjoint(names)


@dataclass(frozen=True)
class _OnPlatforms:
    why: str
    platforms: tuple[str, ...]

    def choose(self, there: Callable[..., Any], plain: Callable[..., Any], *operands: Any) -> Any:
        """``there(*operands)`` on its platforms, ``plain(*operands)`` on others. Both
        return arrays of the same shapes and dtypes.

        Example::

            import jax.numpy as jnp
            from xla_dtensor.lowering.workarounds import Workaround

            rounding = Workaround("rounds wrongly", ("cpu",))
            assert rounding.choose(jnp.floor, jnp.round, 0.75) == 0  # 1 on a TPU
        """
        branches = dict.fromkeys(self.platforms, there)
        return lax.platform_dependent(*operands, default=plain, **branches)

    def holds(self) -> bool:
        """Whether the lowering that is being called computes for one of its platforms. For
        what needn't be traced both ways.

        Example::

            from xla_dtensor.lowering.workarounds import Workaround
            from xla_dtensor.lowering.context import Target, at

            with at(Target("tpu")):
                assert not Workaround("rounds wrongly", ("cpu",)).holds()
        """
        return self.concerns(here().platform)

    def concerns(self, platform: str) -> bool:
        """Whether it is for devices of this platform, as those name it (``"gpu"``)."""
        return is_among(platform, self.platforms)


class Workaround(_OnPlatforms):
    """What is done about a defect, where it is.

    Args:
        why: the defect.
        platforms: JAX's names of the backends that have it; ``cuda`` and ``rocm`` are GPUs. A
            backend that isn't among them has no defect.
    """


class Feature(_OnPlatforms):
    """What some backends have. A new one isn't among them, and is refused, or gets what needs no
    such feature, until its name is added.

    Args:
        why: the feature, or what the others do instead.
        platforms: JAX's names of the backends that have it; ``cuda`` and ``rocm`` are GPUs.
    """

    def only(self, text: str, function: Callable[..., Any], *operands: Any) -> Any:
        """``function(*operands)`` on its platforms; programs for others aren't lowered.

        Args:
            text: what the error says, an `UnsupportedOpError`.
        """
        refuse = functools.partial(refused, text, function)
        return self.choose(function, refuse, *operands)


def _for(fault: xla_faults.Fault) -> Workaround:
    return Workaround(fault.what, fault.platforms)


ROW_MAJOR_TRANSFORMS = _for(xla_faults.ROW_MAJOR_TRANSFORMS)
NORMAL_IN_DOUBLE = _for(xla_faults.NORMAL_IN_DOUBLE)
FACTORISATIONS_IN_32_BITS = _for(xla_faults.FACTORISATIONS_IN_32_BITS)
RAGGED_PRODUCTS = _for(xla_faults.RAGGED_PRODUCTS)
MANY_RAGGED_PRODUCTS = _for(xla_faults.MANY_RAGGED_PRODUCTS)
PRODUCTS_OF_BYTES = _for(xla_faults.PRODUCTS_OF_BYTES)
SUMS_IN_FLOAT32 = _for(xla_faults.SUMS_IN_FLOAT32)
SCATTERED_COLUMNS = _for(xla_faults.SCATTERED_COLUMNS)

CALLS_PER_SHARD = Feature(
    "They compute a function on each shard by itself (`per_slice`). libtpu has no emitter for such "
    "calls: its programs leave the function to the partitioner.",
    ("cpu", "cuda", "rocm"),
)
EIGENVALUES = Feature(
    "JAX has a factorisation of matrices that aren't symmetric for these alone.",
    ("cpu", "cuda", "rocm"),
)
BITS_OF_DOUBLES = Feature(
    "libtpu emulates 64-bit floating point by pairs of 32-bit numbers, which have other bits, and "
    "ends the process on some programs that ask for them.",
    ("cpu", "cuda", "rocm"),
)
DOUBLE_COMPLEX = Feature(
    "libtpu loses the layout of sharded results of 128-bit complex numbers.",
    ("cpu", "cuda", "rocm"),
)
