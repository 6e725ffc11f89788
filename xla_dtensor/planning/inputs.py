"""The inputs of a compiled step by name: parameters, optimizer state, arguments."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from xla_dtensor.compilation.call.sources import ArgumentSource, GradientSource
from xla_dtensor.tensors.of_form import is_ours


@dataclass(frozen=True)
class NamedInput:
    """An array that a program is given.

    Attributes:
        label: what XLA calls it: ``"donated[3]"``.
        name: ``"model.layers.0.weight"``, ``"model.layers.0.weight exp_avg"``, ``"argument 0"``.
        kind: ``"parameter"``, ``"state"`` (buffers, optimizer state), ``"argument"`` or
            ``"gradient"``.
        shape, dtype: of the whole array.
        bytes: on one device.
        along: the mesh dims that it is sharded along.
        batch: those that its first dim is sharded along.
    """

    label: str
    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    along: tuple[str, ...]
    batch: tuple[str, ...]


def inputs(program: Any) -> list[NamedInput]:
    """The inputs of a lowered step.

    Args:
        program: `xla_dtensor.compilation.Program`.
    """
    names = _names(program)
    found = []
    for group, sources in program.input_sources().items():
        for i, source in enumerate(sources):
            form = source.form
            if form is None:
                continue
            form = form.placed(program.frame)
            name, kind = _name(source, names)
            spec = () if form.sharding is None else tuple(form.sharding.spec)
            parts = [() if p is None else (p,) if isinstance(p, str) else tuple(p) for p in spec]
            shards = 1
            if form.sharding is not None:
                sizes = form.sharding.mesh.shape
                shards = math.prod(sizes[name] for part in parts for name in part)
            size = math.prod(form.array_shape) * form.jax_dtype.itemsize
            found.append(
                NamedInput(
                    f"{group}[{i}]",
                    name,
                    kind,
                    tuple(form.shape),
                    str(form.dtype).removeprefix("torch."),
                    size // shards,
                    tuple(name for part in parts for name in part),
                    parts[0] if parts else (),
                )
            )
    return found


def _names(program: Any) -> dict[int, tuple[str, str]]:
    """By the storage's id what a tensor is called, and what it is."""
    found: dict[int, tuple[str, str]] = {}
    of_tensor: dict[int, str] = {}
    for tensor, path in program.watch.reached.tensors.values():
        if is_ours(tensor):
            name = tidy(path)
            of_tensor[id(tensor)] = name
            kind = "parameter" if tensor.is_leaf and tensor.requires_grad else "state"
            found[id(tensor._storage_)] = name, kind
    for optimizer in program.watch.reached.optimizers.values():
        for parameter, state in optimizer.state.items():
            owner = of_tensor.get(id(parameter), "?")
            for key, value in state.items():
                if is_ours(value):
                    found[id(value._storage_)] = f"{owner} {key}", "state"
    return found


def _name(source: Any, names: dict[int, tuple[str, str]]) -> tuple[str, str]:
    if isinstance(source, ArgumentSource):
        return f"argument {source.argument}", "argument"
    if isinstance(source, GradientSource):
        leaf = source.leaf.get()
        owner = names.get(id(getattr(leaf, "_storage_", None)), ("?", ""))[0]
        return f"{owner}.grad", "gradient"
    for storage in source.storages:
        if id(storage) in names:
            name, kind = names[id(storage)]
            if len(source.storages) > 1:
                name = f"{name.rpartition(' ')[2]} of {len(source.storages)} parameters"
            return name, kind
    return "?", "state"


_MODULES = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_ITEMS = re.compile(r"\[['\"]?([\w.]+)['\"]?\]")


def tidy(path: str) -> str:
    """A path as the watch of compiled steps has it, as a name."""
    path = _MODULES.sub(r".\1", path)
    path = _ITEMS.sub(r".\1", path)
    return path.removeprefix("the step's ").strip(".")
