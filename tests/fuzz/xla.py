"""Whether a wrong result is XLA's fault: the programs that XLA was given, run again by JAX alone.

Each is run as it was, with the layouts that were asked for, and without any, operation by operation
on one device. Where the two differ, the partitioner is at fault, and the program is written down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

CONSTRAINTS = ("sharding_constraint", "pin")


@dataclass
class Launch:
    """A function as it was jitted, and the arrays of one call."""

    function: Callable[..., Any]
    options: dict[str, Any]
    arguments: tuple[Any, ...]


@dataclass
class Launches:
    found: list[Launch] = field(default_factory=list)


class _Jitted:
    """What `jax.jit` returns, and a note of each call with arrays."""

    def __init__(self, launches: Launches, function: Any, options: dict[str, Any]) -> None:
        self._launches, self._function, self._options = launches, function, options
        self._jitted = _jit(function, **options)
        self.__name__ = getattr(function, "__name__", "function")

    def __call__(self, *arguments: Any) -> Any:
        self._note(arguments)
        return self._jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        self._note(arguments)
        return self._jitted.lower(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    def _note(self, arguments: tuple[Any, ...]) -> None:
        leaves = jax.tree.leaves(arguments)
        if leaves and not any(
            isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in leaves
        ):
            options = {k: v for k, v in self._options.items() if k.endswith("shardings")}
            # (what is donated is gone after the call)
            copies = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, arguments)
            self._launches.found.append(Launch(self._function, options, copies))


_jit = jax.jit


@contextlib.contextmanager
def noted() -> Iterator[Launches]:
    """What is jitted and launched in the block."""
    launches = Launches()
    with mock.patch("jax.jit", lambda function, **options: _Jitted(launches, function, options)):
        yield launches


def differences(launch: Launch) -> list[str]:
    """The results of a launch that JAX gives otherwise without layouts.

    Raises:
        NotImplementedError: part of it is written for each device (``shard_map``).
    """
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(launch.function)(*launch.arguments)
        sharded = jax.tree.leaves(_jit(launch.function, **launch.options)(*launch.arguments))
        whole = [
            jax.device_put(np.asarray(x), jax.devices()[0])
            for x in jax.tree.leaves(launch.arguments)
        ]
        plain = jaxpr_as_fun(_unconstrained(jaxpr))(*whole)
        found = []
        for i, (ours, theirs) in enumerate(zip(sharded, plain, strict=True)):
            ours, theirs = np.asarray(ours), np.asarray(theirs)
            if ours.dtype.kind in "fc" or ours.dtype.kind == "V":
                ours, theirs = (np.asarray(x, np.complex128) for x in (ours, theirs))
            scale = np.abs(theirs).max(initial=1.0) if ours.dtype.kind == "c" else 0.0
            if not np.allclose(ours, theirs, rtol=0, atol=1e-3 * scale, equal_nan=True):
                found.append(f"result {i}: with layouts {ours.tolist()}, without {theirs.tolist()}")
        return found


def _unconstrained(jaxpr: Any) -> Any:
    """A jaxpr, closed or not, that asks for no layouts."""
    if isinstance(jaxpr, ClosedJaxpr):
        return ClosedJaxpr(_unconstrained(jaxpr.jaxpr), jaxpr.consts)
    same: dict[Any, Any] = {}
    find = lambda atom: same.get(atom, atom) if isinstance(atom, Var) else atom
    kept = []
    for eqn in jaxpr.eqns:
        inputs = [find(atom) for atom in eqn.invars]
        if eqn.primitive.name == "shard_map":
            raise NotImplementedError("shard_map")
        if eqn.primitive.name in CONSTRAINTS:
            same[eqn.outvars[0]] = inputs[0]
        else:
            params = {name: _inside(value) for name, value in eqn.params.items()}
            kept.append(eqn.replace(invars=inputs, params=params))
    return jaxpr.replace(eqns=kept, outvars=[find(atom) for atom in jaxpr.outvars])


def _inside(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_inside, value))
    return _unconstrained(value) if isinstance(value, ClosedJaxpr | Jaxpr) else value


def blamed(run: Callable[[], Any], path: Path) -> str:
    """Run something that gives wrong numbers, and say what its launches show.

    Args:
        run: does it; nothing of it is compiled yet.
        path: where to write the first program that differs: jaxpr, layouts and StableHLO.
    """
    with noted() as launches, contextlib.suppress(Exception):  # an error is shown elsewhere
        run()
    unclear = 0
    for launch in launches.found:
        try:
            found = differences(launch)
        except Exception:  # what JAX doesn't run without layouts says nothing
            unclear += 1
            continue
        if found:
            path.write_text(_text(launch, found))
            return f"XLA's fault: a program gives other numbers with layouts than without, {path}"
    return (
        f"{len(launches.found)} programs of XLA, {unclear} unclear, the others right by JAX alone"
    )


def _text(launch: Launch, found: list[str]) -> str:
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(launch.function)(*launch.arguments)
        lowered = _jit(launch.function, **launch.options).lower(*launch.arguments)
    inputs = [
        f"# input {i}: {x.dtype}{list(x.shape)} on {getattr(x, 'sharding', None)}: {x.tolist()}"
        for i, x in enumerate(map(np.asarray, jax.tree.leaves(launch.arguments)))
    ]
    shardings = [
        f"# {leaf.sharding}"
        for leaf in jax.tree.leaves(launch.arguments)
        if hasattr(leaf, "sharding")
    ]
    outputs = [f"# {name}: {value}" for name, value in launch.options.items()]
    return "\n".join([*found, *inputs, *shardings, *outputs, str(jaxpr), lowered.as_text()])
