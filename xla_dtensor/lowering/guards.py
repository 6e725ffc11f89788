"""What works around a defect of one backend's compiler, and where: there alone.

A program's backend is known when it is lowered, so a guarded function is traced both ways, and one
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
from xla_dtensor.lowering.place import here
from xla_dtensor.lowering.when_lowered import refused


def is_among(platform: str, names: Sequence[str]) -> bool:
    """Whether devices' name of a platform is among those that lowerings have: ``"gpu"`` is
    ``"cuda"`` or ``"rocm"`` there."""
    return not {platform, *(("cuda", "rocm") if platform == "gpu" else ())}.isdisjoint(names)


@dataclass(frozen=True)
class Guard:
    """A workaround.

    Attributes:
        why: the defect.
        platforms: JAX's names of the backends that have it; ``cuda`` and ``rocm`` are GPUs.
    """

    why: str
    platforms: tuple[str, ...]

    def choose(self, guarded: Callable[..., Any], plain: Callable[..., Any], *operands: Any) -> Any:
        """``guarded(*operands)`` on the guard's platforms, ``plain(*operands)`` on others. Both
        return arrays of the same shapes and dtypes.

        Example::

            import jax.numpy as jnp
            from xla_dtensor.lowering.guards import Guard

            guard = Guard("rounds wrongly", ("cpu",))
            assert guard.choose(jnp.floor, jnp.round, 0.75) == 0  # 1 on a TPU
        """
        branches = dict.fromkeys(self.platforms, guarded)
        return lax.platform_dependent(*operands, default=plain, **branches)

    def holds(self) -> bool:
        """Whether the lowering that is being called computes for one of the guard's platforms. For
        what needn't be traced both ways.

        Example::

            from xla_dtensor.lowering.guards import Guard
            from xla_dtensor.lowering.place import Place, at

            with at(Place("tpu")):
                assert not Guard("rounds wrongly", ("cpu",)).holds()
        """
        return self.concerns(here().platform)

    def concerns(self, platform: str) -> bool:
        """Whether the guard is for devices of this platform, as those name it (``"gpu"``)."""
        return is_among(platform, self.platforms)

    def only(self, text: str, function: Callable[..., Any], *operands: Any) -> Any:
        """``function(*operands)`` on the guard's platforms; programs for others aren't lowered.

        Args:
            text: what the error says, an `UnsupportedOpError`.
        """
        refuse = functools.partial(refused, text, function)
        return self.choose(function, refuse, *operands)


def _guard(fault: xla_faults.Fault) -> Guard:
    return Guard(fault.what, fault.platforms)


ROW_MAJOR_TRANSFORMS = _guard(xla_faults.ROW_MAJOR_TRANSFORMS)
NORMAL_IN_DOUBLE = _guard(xla_faults.NORMAL_IN_DOUBLE)
NOT_PARTITIONABLE = Guard(
    "No defect of these, which can compute a function on each shard by itself (`per_slice`): "
    "libtpu has no emitter for such calls, and its programs leave the function to the partitioner.",
    ("cpu", "cuda", "rocm"),
)
FACTORISATIONS_IN_32_BITS = _guard(xla_faults.FACTORISATIONS_IN_32_BITS)
RAGGED_PRODUCTS = _guard(xla_faults.RAGGED_PRODUCTS)
MANY_RAGGED_PRODUCTS = _guard(xla_faults.MANY_RAGGED_PRODUCTS)
SUMS_IN_FLOAT32 = _guard(xla_faults.SUMS_IN_FLOAT32)
SCATTERED_COLUMNS = _guard(xla_faults.SCATTERED_COLUMNS)
# What only these platforms have; the others refuse (`Guard.only`).
EIGENVALUES = Guard(
    "JAX has a factorisation of matrices that aren't symmetric for these alone.",
    ("cpu", "cuda", "rocm"),
)
BITS_OF_DOUBLES = Guard(
    "libtpu emulates 64-bit floating point by pairs of 32-bit numbers, which have other bits, and "
    "ends the process on some programs that ask for them.",
    ("cpu", "cuda", "rocm"),
)
DOUBLE_COMPLEX = Guard(
    "libtpu loses the layout of sharded results of 128-bit complex numbers.",
    ("cpu", "cuda", "rocm"),
)
