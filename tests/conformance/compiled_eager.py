"""The programs of eager calls, compiled for devices that aren't here.

What decides a shape by its values (`torch.nonzero`) is in no compiled step, and without data it
can't be called. So it is called with data on simulated devices, and each program that it launches
there is compiled once more, for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xla_dtensor as xd
from xla_dtensor.base.tables import cache
from xla_dtensor.execution import lazy
from xla_dtensor.plans.computation import Computation
from xla_dtensor.runtime.program_cache import not_kept

Launch = tuple[Any, tuple[Any, ...]]


class _Recorder:
    """A jitted function that notes its calls."""

    def __init__(self, function: Any, launches: list[Launch]) -> None:
        self._function, self._launches = function, launches

    def __call__(self, *args: Any) -> Any:
        self._launches.append((self._function, jax.tree.map(_described, args)))
        return self._function(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _described(leaf: Any) -> Any:
    """Shape, dtype and sharding of an array, which may be overwritten."""
    if not isinstance(leaf, jax.Array):
        return leaf
    # An array that is on no mesh goes where others are.
    sharding = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@contextmanager
def _recorded() -> Iterator[list[Launch]]:
    launches: list[Launch] = []
    compiled = Computation.compiled
    cache.clear("plans")
    try:
        with (
            xd.config.override(eager="strict"),
            mock.patch.object(
                Computation,
                "compiled",
                lambda self, words: _Recorder(compiled(self, words).jitted, launches),
            ),
        ):
            yield launches
    finally:
        cache.clear("plans")


def compile_launches(function: Callable[[], Any], topology: str) -> int:
    """Run ``function`` and compile what it launches for ``topology``; how many programs that were.

    Raises:
        JaxRuntimeError: the compiler refuses one.
    """
    lazy.flush_all()
    with _recorded() as launches:
        function()
        lazy.flush_all()
    with xd.abstract(topology) as there, not_kept(), jax.enable_x64(True):
        for jitted, args in launches:
            _compile(jitted, args, there.topology.devices)
    return len(launches)


def _compile(jitted: Any, args: tuple[Any, ...], devices: Any) -> None:
    platform = devices[0].platform
    # Of JAX's names of a platform lowering wants the one by maker, which there may be none of here.
    platform = "cuda" if platform == "gpu" else platform
    exported = jax.export.export(jitted, platforms=[platform])(*args)
    count = exported.nr_devices
    on_mesh = [
        leaf.sharding
        for leaf in jax.tree.leaves(args)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    ]
    here = on_mesh[0].mesh if on_mesh else Mesh(np.array(jax.devices()[:count]), ("all",))
    mesh = Mesh(np.array(devices[:count]).reshape(here.devices.shape), here.axis_names)

    def there(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    given = jax.tree.map(there, args)
    # Where no argument says on which devices.
    nothing = not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(given))
    options = {"out_shardings": NamedSharding(mesh, PartitionSpec())} if nothing else {}
    jax.jit(exported.call, **options).lower(*given).compile()
