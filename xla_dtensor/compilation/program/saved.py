"""Compiled programs saved to a file on one machine, and loaded on another that has the devices.

A step's program is known by its text, as it is among the executables of a process: a call traces
and lowers the step as ever, and finds the executable in place of compiling it. So a file can't give
a step another program than its own. What JAX writes of an executable is a pickle, though.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import pickle
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from xla_dtensor.base import jax_private
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.compilation.program.cache_keys import inputs_of, text_of
from xla_dtensor.errors import CompiledFileError
from xla_dtensor.layouts.report import report
from xla_dtensor.runtime import agreement, jax_runtime, processes
from xla_dtensor.runtime.program_cache import machine
from xla_dtensor.version import VERSION

FORMAT = 2
_ABOUT, _SEAL = "about.json", "about.sha256"
_LEFT = 3600.0  # seconds, after which an unfinished file counts as left by a killed process
# Prefixes of XLA flags that don't change the compiled program.
_NO_CODE = ("--xla_dump", "--xla_force_host_platform_device_count", "--xla_gpu_cuda_data_dir")
# Errors of writing a program; pickle's come from Python functions that it calls back.
_NOT_WRITTEN = (
    *(ValueError, NotImplementedError, jax.errors.JaxRuntimeError),
    *(AttributeError, TypeError, pickle.PicklingError),
)


@dataclass(frozen=True)
class Written:
    """A program to be written.

    Attributes:
        text: the hash of what was compiled (`text_of`).
        inputs: the hash of what goes in (`inputs_of`).
        devices: of JAX, in the mesh's order.
        mesh: whether they are a mesh's, which processes share, or one of this process's own.
        compiled: the ``jax.stages.Compiled``.
        layouts: those that were chosen, in words.
    """

    text: str
    inputs: str
    devices: list[Any]
    mesh: bool
    compiled: Any
    layouts: str


@dataclass(frozen=True)
class Saved:
    """A program that is in a file.

    Attributes:
        path: the file.
        text, inputs, mesh: as of `Written`.
        topology: its devices (`_topology`).
        outputs: how many arrays it gives.
        payload: what JAX has written of it.
    """

    path: Path
    text: str
    inputs: str
    mesh: bool
    topology: tuple[tuple[int, ...], ...]
    outputs: int
    payload: bytes

    def loaded(self, in_tree: Any, devices: list[Any]) -> Any:
        """The ``jax.stages.Compiled``.

        Raises:
            CompiledFileError: JAX can't read what it has written.
        """
        out_tree = jax.tree.structure([0] * self.outputs)
        try:
            return serialize_executable.deserialize_and_load(
                self.payload, in_tree, out_tree, devices[0].client, devices
            )
        except Exception as error:  # of the pickle, of JAX, of the backend
            raise CompiledFileError(
                f"{self.path}: JAX can't load the program {self.text[:16]} here ({error!r}): "
                "write it where it runs, step.save_compiled(path, ...), or call the step without "
                "xd.load_compiled, which compiles it"
            ) from error


class Executables(Cache[Any, Any]):
    """A step's executables by text, devices and inputs. Those of a file are loaded when they are
    asked for."""

    def __init__(self, name: str, limit: int, **options: Any) -> None:
        self._saved: dict[Any, Saved] = {}
        super().__init__(name, limit, **options)

    def add(self, programs: Sequence[Saved]) -> None:
        """Let these be found."""
        self._saved.update({(one.text, one.topology, one.inputs): one for one in programs})

    def get(self, key: Any) -> Any:
        """The executable, or None."""
        found = super().get(key)
        if found is None and self._saved:
            text, positions, in_tree, inputs = key
            devices = _devices(positions)
            saved = self._saved.get((text, _topology(devices), inputs_of(inputs)))
            found = None if saved is None else self.put(key, saved.loaded(in_tree, devices))
        return found

    def clear(self) -> None:
        """Forget all."""
        self._saved.clear()
        super().clear()


def compiled_for_file(program: Any, options: dict[str, Any]) -> Written:
    """A program that was lowered alone (`CompiledStep.looked_at`), compiled: what `write` takes."""
    frame, executable = program.frame, program.executable
    text, _ = text_of(executable.lowered)
    if frame is not None:
        agreement.agree(f"saves a compiled step (digest {text[:16]}) on {frame}")
    with jax.enable_x64(True):
        compiled = executable.compile(options)
    devices = _devices(None if frame is None else frame.device_ids)
    words = "" if executable.layouts is None else report(executable.layouts)
    inputs = inputs_of(executable.inputs)
    return Written(text, inputs, devices, frame is not None, compiled, words)


def check_place(path: str | Path) -> None:
    """See that a file can be written there, before what goes into it is compiled.

    Raises:
        CompiledFileError: it can't.
    """
    path = Path(path)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        what = "is a folder" if path.is_dir() else "is in a folder that can't be written to"
        raise CompiledFileError(f"{path} {what}: step.save_compiled takes the name of a new file")


def write(path: str | Path, step: str, options: Any, programs: Sequence[Written]) -> None:
    """Write programs to a file. Of several processes that share them the first one writes, and
    the others go on when it has.

    Args:
        path: where it goes.
        step: the name of the step.
        options: those that XLA was given.
        programs: they.

    Raises:
        CompiledFileError: this backend's executables can't be written down, or the file can't be
            written, as on a full disk; what was there stays.
    """
    shared = any(one.mesh for one in programs)
    if not shared or processes.index() == 0:
        _write(Path(path), step, options, programs)
    if shared:
        agreement.agree("has saved a compiled step, and goes on")


def _write(path: Path, step: str, options: Any, programs: Sequence[Written]) -> None:
    listed: list[dict[str, Any]] = []
    payloads: list[bytes] = []
    device: Any = None
    for one in programs:
        device = one.devices[0]
        try:
            jax_private.forget_partitioning(one.compiled)
            payload, _, out_tree = serialize_executable.serialize(one.compiled)
        except _NOT_WRITTEN as error:
            raise CompiledFileError(
                f"{path}: JAX can't write down what {device.device_kind} runs ({error}); compile "
                "where it runs"
            ) from error
        payloads.append(payload)
        listed.append(
            {
                "text": one.text,
                "inputs": one.inputs,
                "mesh": one.mesh,
                "topology": _topology(one.devices),
                "processes": _processes(one.devices),
                "outputs": out_tree.num_leaves,
                "sha256": hashlib.sha256(payload).hexdigest(),
                "layouts": one.layouts,
            }
        )
    about = {
        **_versions(),
        **_machine(device),
        **_asked(step, options),
        "devices": jax_runtime.device_count(),
        "programs": listed,
    }
    with (
        _replaced(path) as unfinished,
        zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
    ):
        words = json.dumps(about, indent=1).encode()
        file.writestr(_ABOUT, words)
        file.writestr(_SEAL, hashlib.sha256(words).hexdigest())
        for number, payload in enumerate(payloads):
            file.writestr(f"{number}.bin", payload)


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of another one when all of it is there: an
    interrupt, or a full disk, leaves what was there. Each writer has its own."""
    own = f"{os.getpid()}-{threading.get_ident()}"
    unfinished = path.with_name(f".{path.name}.{own}.unfinished")
    try:
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.unfinished"):
            if time.time() - left.stat().st_mtime > _LEFT:
                left.unlink(missing_ok=True)
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise CompiledFileError(
            f"{path} can't be written ({error}): save it elsewhere, or make room; a file that was "
            "there still is"
        ) from error
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
        DivergenceError: another process reads another one.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as file:
            words = file.read(_ABOUT)
            about = json.loads(words)
            _compare(path, about, {"format": FORMAT})
            if file.read(_SEAL).decode() != hashlib.sha256(words).hexdigest():
                raise CompiledFileError(
                    f"{path}: what it says of itself isn't what was written; the file is damaged, "
                    "or somebody has changed it"
                )
            _compare(path, about, {**_versions(), **_asked(step, options)})
            listed = about["programs"]
            payloads = [file.read(f"{number}.bin") for number in range(len(listed))]
        found = [
            Saved(
                path,
                one["text"],
                one["inputs"],
                one["mesh"],
                tuple(map(tuple, one["topology"])),
                one["outputs"],
                payload,
            )
            for one, payload in zip(listed, payloads, strict=True)
        ]
        hashes = [one["sha256"] for one in listed]
    except CompiledFileError:
        raise
    except Exception as error:  # whatever zipfile, zlib and json say of bytes that are no file
        raise CompiledFileError(
            f"{path} is no file of compiled programs, or part of one ({error!r}): write it with "
            "step.save_compiled(path, ...)"
        ) from error
    for one, wanted_hash in zip(found, hashes, strict=True):
        if hashlib.sha256(one.payload).hexdigest() != wanted_hash:
            raise CompiledFileError(
                f"{path}: the program {one.text[:16]} isn't the one that was written; the file is "
                "damaged, or somebody has changed it"
            )
    jax_runtime.start(about["devices"])  # nothing may have started JAX yet
    _compare(path, about, _machine(jax_runtime.all_devices()[0]))
    for one, said in zip(found, listed, strict=True):
        _see_devices(one, said["processes"])
    if any(one.mesh for one in found):
        text = hashlib.sha256("".join(hashes).encode()).hexdigest()
        agreement.agree(
            f"loads {len(found)} compiled programs (digest {text[:16]})",
            "All have to load the same file, xd.load_compiled(path, step): copy it to all machines",
        )
    return found


def _compare(path: Path, about: dict[str, Any], here: dict[str, Any]) -> None:
    """See that the file says what is wanted here."""
    for name, value in here.items():
        if about.get(name) != value:
            raise CompiledFileError(
                f"{path} was compiled with {name} {about.get(name)!r}, and here it is {value!r}: "
                "compile it once more for that, step.save_compiled(path, ...)"
            )


def _see_devices(one: Saved, count: int) -> None:
    """See that the devices of a program are here, by JAX's numbers and at the same places."""
    devices = jax_runtime.all_devices() if one.mesh else [jax_runtime.own_device()]
    here = _topology(devices)
    missing = [device for device in one.topology if device not in here]
    if missing:
        raise CompiledFileError(
            f"{one.path} was compiled for {len(one.topology)} device(s) of {count} process(es), of "
            f"which JAX's device {_place(missing[0])} isn't among the {len(here)} of "
            f"{_processes(devices)} here. Compile it in as many processes, or for the topology, on "
            "which it runs: step.save_compiled(path, ...)"
        )


def _place(device: tuple[int, ...]) -> str:
    """A device in words."""
    number, *coords = device
    return f"{number} at {tuple(coords)}" if coords else str(number)


def _processes(devices: Sequence[Any]) -> int:
    """How many processes have these devices."""
    return len({device.process_index for device in devices})


def _devices(positions: Sequence[int] | None) -> list[Any]:
    """The JAX devices at these positions; for None this process's own."""
    return [jax_runtime.own_device()] if positions is None else jax_runtime.devices(positions)


def _topology(devices: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """The numbers by which programs know devices, and for TPUs where these are: programs know
    their links."""
    return tuple((each.id, *(each.coords if each.platform == "tpu" else ())) for each in devices)


def _versions() -> dict[str, Any]:
    """What a program depends on, wherever it runs."""
    import jaxlib

    return {
        "format": FORMAT,
        "xla_dtensor": VERSION,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
    }


def _machine(device: Any) -> dict[str, Any]:
    """What a program that was compiled for a device depends on there."""
    given = os.environ.get("XLA_FLAGS", "").split()
    if device.platform == "tpu":
        given += os.environ.get("LIBTPU_INIT_ARGS", "").split()
    return {
        "device": device.device_kind,
        "processor": machine() if device.platform == "cpu" else "",
        "flags": sorted(
            flag for flag in given if flag.startswith("--xla") and not flag.startswith(_NO_CODE)
        ),
    }


def _asked(step: str, options: Any) -> dict[str, Any]:
    """What the user has said of a program."""
    words = {name: str(value) for name, value in sorted((options or {}).items())}
    return {"step": step, "options": words}
