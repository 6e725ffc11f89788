"""A program that runs probes on this machine's devices, and writes each outcome to a pipe.

It writes one line of JSON when a probe starts and one when it ends. `device.py` runs it, since a
backend may end the process or never come back.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import runpy
import sys
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from xla_dtensor.debug._probe_programs import AXIS
from xla_dtensor.debug._probes import PROBES, Probe
from xla_dtensor.lowering.workarounds import is_among
from xla_dtensor.runtime import jax_runtime


def table(path: str | None) -> dict[str, Probe]:
    """Probes by name: those of the file ``path``, which has its own ``PROBES``, or ours."""
    found: Sequence[Probe] = PROBES if path is None else runpy.run_path(path)["PROBES"]
    return {probe.name: probe for probe in found}


def main(pipe: int, devices: int, path: str, names: Sequence[str]) -> None:
    """Run probes.

    Args:
        pipe: the file descriptor of its end for writing.
        devices: how many devices to simulate, if they are the CPU's.
        path: of a file with ``PROBES``; empty for ours.
        names: which, in this order.
    """
    os.set_inheritable(pipe, False)  # a compiler that goes on in a process of its own isn't us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    probes = table(path or None)
    try:
        jax_runtime.start(devices)
        mesh = Mesh(np.array(jax.devices()), (AXIS,))
        _tell(pipe, backend=_described(mesh))
    except Exception as error:  # whatever a plugin raises
        _tell(pipe, failed=_in_words(error))
        return
    for name in names:
        # Standard error is a file: what is said from here on, this probe's program has said.
        _tell(pipe, start=name, logged=os.fstat(2).st_size)
        word, said = outcome(probes[name], mesh)
        _tell(pipe, end=name, word=word, said=said)


def _end_with_parent() -> None:
    """Nothing is ever written to standard input: it ends with the process that has started us."""
    os.read(0, 1)
    os._exit(1)


def _tell(pipe: int, **what: Any) -> None:
    os.write(pipe, f"{json.dumps(what)}\n".encode())


def _described(mesh: Mesh) -> dict[str, Any]:
    first = mesh.devices.flat[0]
    version = getattr(first.client, "platform_version", "")
    plugins = [one.dist for one in importlib.metadata.entry_points(group="jax_plugins") if one.dist]
    return {
        "platform": first.platform,
        "device_kind": first.device_kind,
        "devices": mesh.size,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "version": (version.strip().splitlines() or [""])[0],  # the platform's own word
        "plugins": sorted({f"{one.name} {one.version}" for one in plugins}),
    }


def _in_words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # What is quoted from a callback is said at its traceback's end.
    said = lines[-1] if "Traceback (most recent call last)" in lines[0] else lines[0]
    return f"{type(error).__name__}: {said}"[:300]


def outcome(probe: Probe, mesh: Mesh) -> tuple[str, str]:
    """How it went in a word, and what there is to say of it.

    Args:
        probe: which.
        mesh: the devices.
    """
    platform = mesh.devices.flat[0].platform
    if probe.platforms and not is_among(platform, probe.platforms):
        return "unused", f"the package does without on {platform}"
    try:
        with jax.enable_x64(True):  # as the package's own operations are lowered
            got, right = probe.program(mesh)
    except Exception as error:  # whatever a backend raises
        return "failed", _in_words(error)
    assert len(got) == len(right)
    for one, other in zip(got, right, strict=True):
        said = difference(np.asarray(one), np.asarray(other), probe.tolerance)
        if said:
            return "wrong", said
    return "ok", ""


def difference(got: np.ndarray, right: np.ndarray, tolerance: float) -> str:
    """In which way an array isn't the right one; empty if it is.

    Args:
        got: the array.
        right: what it should be.
        tolerance: how far a number may be off, absolutely and relative to the right one.
    """
    if (got.shape, got.dtype) != (right.shape, right.dtype):
        found, wanted = (f"{x.dtype}{re.sub(' ', '', str(list(x.shape)))}" for x in (got, right))
        return f"the result is {found}, not {wanted}"
    if tolerance:
        wrong = ~np.isclose(got, right, tolerance, tolerance)
    else:
        wrong = got != right
    if not wrong.any():
        return ""
    first = tuple(np.argwhere(wrong)[0])
    return (
        f"{wrong.sum()} of {wrong.size} numbers, the first {got[first]} in place of {right[first]}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
