"""Compiled programs in a file: compiled where the compiler is, loaded where the devices are.

A step's program is known by its text, as it is among the executables of a process: a call traces
and lowers the step as ever, and finds the executable in place of compiling it. So a file can't give
a step another program than its own. What JAX writes of an executable is a pickle, though.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from xla_dtensor.base import jax_private
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.errors import CompiledFileError
from xla_dtensor.layouts import report
from xla_dtensor.lowering.partitioned.named import with_names
from xla_dtensor.runtime import jax_runtime
from xla_dtensor.runtime.program_cache import machine
from xla_dtensor.version import VERSION

FORMAT = 1
_ABOUT = "about.json"


@dataclass(frozen=True)
class Saved:
    """A program that is in a file.

    Attributes:
        text: the hash of what was compiled (`executable.py`).
        devices: their positions; None for the default one.
        outputs: how many arrays it gives.
        payload: what JAX has written of it.
    """

    text: str
    devices: tuple[int, ...] | None
    outputs: int
    payload: bytes

    def loaded(self, in_tree: Any) -> Any:
        """The ``jax.stages.Compiled``."""
        devices = jax_runtime.devices(self.devices or [0])
        out_tree = jax.tree.structure([0] * self.outputs)
        return serialize_executable.deserialize_and_load(
            self.payload, in_tree, out_tree, devices[0].client, devices
        )


class Executables(Cache[Any, Any]):
    """A step's executables by text, devices and inputs. Those of a file are loaded when they are
    asked for."""

    def __init__(self, name: str, limit: int, **options: Any) -> None:
        self._saved: dict[Any, Saved] = {}
        super().__init__(name, limit, **options)

    def add(self, programs: Sequence[Saved]) -> None:
        """Let these be found."""
        self._saved.update({(one.text, one.devices): one for one in programs})

    def get(self, key: Any) -> Any:
        """The executable, or None."""
        found = super().get(key)
        if found is None and self._saved:
            text, devices, in_tree, *_ = key
            saved = self._saved.get((text, devices))
            found = None if saved is None else self.put(key, saved.loaded(in_tree))
        return found

    def clear(self) -> None:
        """Forget all."""
        self._saved.clear()
        super().clear()


def compiled_for_file(program: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """A program that was lowered alone (`StepTraces.looked_at`), compiled, as `write` takes it."""
    frame, executable = program.frame, program.executable
    with jax.enable_x64(True):
        compiled = executable.compile(options)
    devices = None if frame is None else tuple(frame.device_ids)
    first = jax_runtime.devices([0])[0] if frame is None else frame.jax_mesh.devices.flat[0]
    words = "" if executable.layouts is None else report(executable.layouts)
    text, _ = text_of(executable.lowered)
    return text, devices, first, compiled, words


def text_of(lowered: Any) -> tuple[str, Sequence[str] | None]:
    """What a program is known by: a hash of its text, which doesn't say on which devices; and the
    names of the functions in it that XLA calls back (`lowering/partitioned/named.py`)."""
    text, names = with_names(lowered.as_text())
    return hashlib.sha256(text.encode()).hexdigest(), names


def write(path: str | Path, step: str, options: Any, programs: Sequence[tuple[Any, ...]]) -> None:
    """Write programs to a file.

    Args:
        path: where it goes.
        step: the name of the step.
        options: those that XLA was given.
        programs: each as (the hash of its text, its devices' positions, their kind of JAX device,
            what was compiled, its layouts in words).

    Raises:
        CompiledFileError: this backend's executables can't be written down.
    """
    path = Path(path)
    listed: list[dict[str, Any]] = []
    payloads: list[bytes] = []
    device: Any = None
    for text, devices, device, compiled, layouts in programs:
        try:
            jax_private.forget_partitioning(compiled)
            payload, _, out_tree = serialize_executable.serialize(compiled)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            raise CompiledFileError(
                f"{path}: JAX can't write down what {device.device_kind} runs ({error}); compile "
                "where it runs"
            ) from error
        payloads.append(payload)
        listed.append(
            {
                "text": text,
                "devices": None if devices is None else list(devices),
                "outputs": out_tree.num_leaves,
                "sha256": hashlib.sha256(payload).hexdigest(),
                "layouts": layouts,
            }
        )
    about = {**_here(device), "step": step, "options": _in_words(options), "programs": listed}
    unfinished = path.with_name(f".{path.name}.unfinished")  # an interrupt leaves what was there
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            file.writestr(_ABOUT, json.dumps(about, indent=1))
            for number, payload in enumerate(payloads):
                file.writestr(f"{number}.bin", payload)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: str | Path, step: str, options: Any) -> list[Saved]:
    """The programs of a file.

    Args:
        path: where it is.
        step: the name of the step that they are wanted for.
        options: those that it gives XLA.

    Raises:
        CompiledFileError: it is no such file, isn't what it says it is, or is of another step, of
            other devices, versions or options.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as file:
            about = json.loads(file.read(_ABOUT))
            listed = about["programs"]
            payloads = [file.read(f"{number}.bin") for number in range(len(listed))]
        found = [
            Saved(
                one["text"],
                None if one["devices"] is None else tuple(one["devices"]),
                one["outputs"],
                payload,
            )
            for one, payload in zip(listed, payloads, strict=True)
        ]
        hashes = [one["sha256"] for one in listed]
    except (OSError, zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise CompiledFileError(
            f"{path} is no file of compiled programs, or part of one ({error!r}): write it with "
            "step.save_compiled(path, ...)"
        ) from error
    jax_runtime.start()
    wanted = {**_here(jax_runtime.all_devices()[0]), "step": step, "options": _in_words(options)}
    for name, value in wanted.items():
        if about.get(name) != value:
            raise CompiledFileError(
                f"{path} was compiled with {name} {about.get(name)!r}, and here it is {value!r}: "
                "compile it once more for that, step.save_compiled(path, ...)"
            )
    for one, wanted_hash in zip(found, hashes, strict=True):
        if hashlib.sha256(one.payload).hexdigest() != wanted_hash:
            raise CompiledFileError(
                f"{path}: the program {one.text[:16]} isn't the one that was written; the file is "
                "damaged, or somebody has changed it"
            )
    return found


def _here(device: Any) -> dict[str, Any]:
    """What a program that was compiled for a device depends on."""
    import jaxlib

    return {
        "format": FORMAT,
        "xla_dtensor": VERSION,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "device": device.device_kind,
        "processor": machine() if device.platform == "cpu" else "",
    }


def _in_words(options: Any) -> dict[str, str]:
    return {name: str(value) for name, value in sorted((options or {}).items())}
