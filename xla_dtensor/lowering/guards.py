"""What works around a defect of one backend's compiler, and where: there alone.

A program's backend is known when it is lowered, so a guarded function is traced both ways, and one
of them is lowered. Workarounds for XLA's partitioner, which all backends share, are no guards of
this kind: pins (`dispatch/result_placements.py`), full coordinates and masks of scatters
(`scatter.py`), what `view.py` and `convolution.py` keep from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

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


ROW_MAJOR_TRANSFORMS = Guard(
    "XLA leaves the layout of a Fourier transform open, and the CPU's kernel refuses what layout "
    "assignment then chooses. The TPU's compiler has no layout constraints on complex numbers.",
    ("cpu",),
)
NORMAL_IN_DOUBLE = Guard(
    "XLA's single-precision erf_inv rounds differently in the CPU's vectorised and scalar loops, "
    "so that a random number would depend on the tensor's layout.",
    ("cpu",),
)
NOT_PARTITIONABLE = Guard(
    "No defect of these, which can compute a function on each shard by itself (`per_slice`): "
    "libtpu has no emitter for such calls, and its programs leave the function to the partitioner.",
    ("cpu", "cuda", "rocm"),
)
FACTORISATIONS_IN_32_BITS = Guard(
    "JAX writes the TPU's singular values, and eigenvalues of large matrices, as loops that carry "
    "a 64-bit number if 64-bit types are on, and libtpu can't rewrite those.",
    ("tpu",),
)
RAGGED_PRODUCTS = Guard(
    "JAX takes the CPU's ragged products apart into one of all rows per group.",
    ("cpu",),
)
MANY_RAGGED_PRODUCTS = Guard(
    "As RAGGED_PRODUCTS; and of 16 groups in float32 the TPU's compiler runs out of its cores' "
    "memory (libtpu 0.0.52).",
    ("cpu", "tpu"),
)
SUMS_IN_FLOAT32 = Guard(
    "The CPU's backend adds up what devices have of 16-bit numbers in 32 bits, so that a product "
    "which gives float32 moves no more there, and depends less on how many devices share it.",
    ("cpu",),
)
SCATTERED_COLUMNS = Guard(
    "The TPU's compiler gives each device all of a sum of 16-bit numbers of which the device then "
    "keeps 128 columns. Of any other width it makes a reduce-scatter.",
    ("tpu",),
)
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
