"""Names of the functions that XLA calls back when it partitions a program (`per_slice.py`).

A program's text has their addresses, which are others in each process, and each time that a step
is traced: nothing that is known by the text would be found again, neither in this process nor in
JAX's cache on disk nor in a file of programs (`CompiledStep.save_compiled`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xla_dtensor.base import jax_private

_CALLS = re.compile(r'(@CustomSPMDPartitioning\(.*?backend_config = ")(\d+)(?=")')
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Partition:
    """How XLA is to cut a call, as `jax.experimental.custom_partitioning` asks for it.

    Args:
        cut: gives the mesh, the function of shards, and how results and operands lie.
        function: of whole arrays, of which that of shards is a part.
        operands: those of the call, or their shapes and dtypes.
        more: what else it is known by, in words.
    """

    def __init__(
        self, cut: Callable[..., Any], function: Callable[..., Any], operands: Any, more: str
    ) -> None:
        self._cut, self._function, self._more = cut, function, more
        self._operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        self._name = ""

    def __call__(self, *arguments: Any) -> Any:
        return self._cut(*arguments)

    @property
    def name(self) -> str:
        """A digest of what the function computes: equal functions of equal arrays share it."""
        if not self._name:
            # It says all: JAX takes no function with constants other than numbers. Whoever asks
            # first may do so where 64-bit types are off, and the name would be another one.
            with jax.enable_x64(True):
                text = str(jax.make_jaxpr(self._function)(*self._operands))
            text = f"{self._more}\n{_ADDRESS.sub('', text)}"
            self._name = hashlib.sha256(text.encode()).hexdigest()
        return self._name


def with_names(text: str) -> tuple[str, Sequence[str] | None]:
    """A program's text with names in place of addresses.

    Args:
        text: in StableHLO, of a program that is still there.

    Returns:
        the text, and the names; None in their place if XLA calls back a function that has none:
        somebody else's.
    """
    names: list[str] = []
    of_others = False

    def name(found: re.Match[str]) -> str:
        nonlocal of_others
        called = jax_private.partitioning_callbacks.get(found[2].encode())
        partition = getattr(called, "partition", None)
        if not isinstance(partition, Partition):
            of_others = True
            return found[0]
        names.append(partition.name)
        return found[1] + partition.name

    text = _CALLS.sub(name, text)
    return text, None if of_others else names
