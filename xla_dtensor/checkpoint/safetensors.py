"""Weights in Hugging Face's format, onto sharded parameters and from them."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

from xla_dtensor.base.torch_private.attributes import buffers_of, parameters_of
from xla_dtensor.checkpoint.coordination import Together
from xla_dtensor.checkpoint.files.records import StoredBox, StoredTensor, read_parts
from xla_dtensor.checkpoint.files.safetensors_format import files_of, read_header, write_files
from xla_dtensor.checkpoint.shards import LoadedTensor, check_whole, host_value, own_chunks
from xla_dtensor.checkpoint.states import memory_of
from xla_dtensor.errors import CheckpointError, UnsupportedOpError
from xla_dtensor.runtime import agreement, processes
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.sharded_tensor import DTENSORS

Rename = Mapping[str, str] | Callable[[str], str | None]

_saves = itertools.count()  # the same in all processes
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def load_safetensors(
    model: nn.Module,
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    rename: Rename | None = None,
    strict: bool = True,
) -> tuple[list[str], list[str]]:
    """Load weights into a model's parameters and buffers, wherever they are: each device gets its
    part, and no more than one tensor is in the memory of the host at a time. Another dtype is
    converted on the way. Parameters on the meta device get their values, too.

    Args:
        model: its parameters may be sharded.
        source: a file, several, a ``model.safetensors.index.json``, or the folder of one.
        rename: from the names in the files to the model's: a mapping of those that differ, or a
            function; None for a tensor that isn't wanted.
        strict: whether names that only the model or only the files have are an error.

    Returns:
        names of the model that the files don't have, and names of the files that it doesn't.

    Raises:
        CheckpointError: a file can't be read, isn't what it says it is, or has a tensor of another
            shape; with ``strict``, names are missing or unexpected.

    Example::

        import tempfile, torch, xla_dtensor as xd

        model, other = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8)
        xd.fully_shard(other, mesh=xd.init_device_mesh("xla", (8,)))
        with tempfile.TemporaryDirectory() as folder:
            xd.checkpoint.save_safetensors(model, folder)
            xd.checkpoint.load_safetensors(other, folder)
        assert torch.equal(other.weight.full_tensor().cpu(), model.weight)
    """
    own = torch_state_dict.get_model_state_dict(model)
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    found: dict[str, tuple[Path, StoredTensor]] = {}
    unexpected = []
    per_file: dict[Path, list[str]] = {}
    for path in files_of(source):
        for name, stored in read_header(path)[0].items():
            wanted = _renamed(name, rename)
            if wanted is None:
                continue
            if wanted in found:
                raise CheckpointError(
                    f"{path}: {name!r} is another tensor for {wanted!r}; {found[wanted][0]} has one"
                )
            if wanted not in tensors:
                unexpected.append(name)
                continue
            if stored.sizes != tuple(tensors[wanted].shape):
                raise CheckpointError(
                    f"{path}: {name!r} is of shape {list(stored.sizes)}, and the model's "
                    f"{wanted!r} of {list(tensors[wanted].shape)}"
                )
            found[wanted] = path, stored
            per_file.setdefault(path, []).append(wanted)
    # Tied weights are in the files once.
    there = {memory_of(tensors[name]) for name in found if not tensors[name].is_meta}
    missing = [
        name
        for name, value in tensors.items()
        if name not in found and (value.is_meta or memory_of(value) not in there)
    ]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{source}: the files don't have {missing[:5]}, and the model not {unexpected[:5]} "
            f"({len(missing)} and {len(unexpected)}): rename= says what they are called there, "
            "strict=False leaves them"
        )
    for path, names in per_file.items():
        try:
            with path.open("rb", buffering=0) as file:
                for name in sorted(names, key=lambda n: found[n][1].begin):
                    _load(model, name, tensors[name], file, found[name][1])
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
    return missing, unexpected


def _load(model: nn.Module, name: str, tensor: Any, file: Any, stored: StoredTensor) -> None:
    if not is_ours(tensor):
        if tensor.is_meta:
            raise UnsupportedOpError(
                f"load_safetensors: {name!r} is on the meta device, and nothing says where it is "
                "to be: distribute_tensor it, or call model.to_empty(device=...)"
            )
        value = tensor.detach()
        if value.device.type != "cpu":
            value = torch.empty_like(value, device="cpu")
        read_parts(file, stored, [StoredBox((0,) * value.ndim, value)])
        if value.device != tensor.device:
            tensor.detach().copy_(value)
        return
    check_whole(tensor, f"load_safetensors of {name!r}")
    if tensor._form.varying:
        raise UnsupportedOpError(
            f"load_safetensors: {name!r} has another value on each device; a file has one"
        )
    loaded = LoadedTensor(tensor)
    parts = [StoredBox(chunk.offsets, loaded.buffer(chunk)) for chunk in loaded.own.chunks]
    read_parts(file, stored, parts)
    loaded.finish()
    if loaded.tensor is not tensor:  # it was on the meta device
        _assign(model, name, loaded.tensor)


def _assign(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    old = parameters_of(module).get(last)
    if old is not None:
        module.register_parameter(last, nn.Parameter(value.detach(), old.requires_grad))
    else:
        buffers_of(module)[last] = value


def save_safetensors(
    model: nn.Module | Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a model's weights as ``transformers`` reads them: ``model.safetensors``, or several
    files with an index. One tensor at a time is gathered, in the memory of the host. Tied weights
    are written once, under their first name. Of several processes, which all have to call this,
    process 0 writes, and each device holds one whole tensor at a time.

    Args:
        model: a module, or its state dict.
        folder: made if it isn't there.
        max_shard_size: of a file, in bytes, or as "500MB"; a larger tensor has one of its own.
        rename: from the model's names to those in the files; None for what isn't wanted.
        dtype: of floating-point tensors in the files; by default their own.
        metadata: text that the files say about themselves.

    Returns:
        the files that were written, without the index.

    Raises:
        CheckpointError: a file can't be written.
        TypeError: a value is no tensor, or of a dtype that the format doesn't have.
        UnsupportedOpError: a tensor has pending reductions, or varies.
        ValueError: ``max_shard_size`` is no size, or two tensors get one name.

    Example::

        import tempfile, torch, xla_dtensor as xd

        model = torch.nn.Linear(4, 8).to("xla")
        with tempfile.TemporaryDirectory() as folder:
            (file,) = xd.checkpoint.save_safetensors(model, folder, dtype=torch.bfloat16)
            assert file.name == "model.safetensors"
            size = file.stat().st_size
        assert 2 * 40 < size < 2 * 40 + 300
    """
    state = model
    if isinstance(model, nn.Module):
        state = torch_state_dict.get_model_state_dict(model)
    assert isinstance(state, Mapping)
    sources: dict[str, torch.Tensor] = {}
    seen: dict[Any, torch.Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"save_safetensors: {name!r} is a {type(value).__name__}; these files have tensors "
                "alone"
            )
        wanted = _renamed(name, rename)
        if wanted is None or (value.numel() and _is_known(value, seen)):
            continue
        if wanted in sources:
            raise ValueError(f"save_safetensors: two tensors would be named {wanted!r}")
        if value.is_meta:
            raise UnsupportedOpError(f"save_safetensors: {name!r} is on the meta device")
        if is_ours(value):
            check_whole(value, f"save_safetensors of {name!r}")
            if value._form.varying:
                raise UnsupportedOpError(
                    f"save_safetensors: {name!r} has another value on each device; a file has one"
                )
        sources[wanted] = value.detach()

    def dtype_of(value: torch.Tensor) -> torch.dtype:
        return dtype if dtype is not None and value.is_floating_point() else value.dtype

    most_bytes = bytes_of_size(max_shard_size)

    def write(value_of: Callable[[str], torch.Tensor]) -> list[Path]:
        return write_files(
            Path(folder),
            {name: (dtype_of(value), tuple(value.shape)) for name, value in sources.items()},
            lambda name: value_of(name).to(dtype_of(sources[name])),
            most_bytes,
            {"format": "pt"} | dict(metadata or {}),
        )

    if not processes.several():
        return write(lambda name: whole_value(sources[name]))
    return _written_by_first(write, sources)


def _written_by_first(
    write: Callable[[Callable[[str], torch.Tensor]], list[Path]],
    sources: Mapping[str, torch.Tensor],
) -> list[Path]:
    """Let process 0 write what all processes gather, in the order in which it asks for it."""
    together = Together(f"safetensors/{next(_saves)}")
    turns = itertools.count()
    with together.telling():
        if together.first:

            def gathered(name: str) -> torch.Tensor:
                together.share(f"turn/{next(turns)}", name)
                return _gathered(sources[name]).cpu()

            paths = write(gathered)
            together.share(f"turn/{next(turns)}", paths)
        else:
            while isinstance(paths := together.share(f"turn/{next(turns)}"), str):
                _gathered(sources[paths])
    agreement.meet("has saved safetensors")
    together.forget()
    return paths


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor on each device; the others do the same."""
    return tensor.full_tensor() if isinstance(tensor, DTENSORS) else tensor


def whole_value(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's value on the host, chunk by chunk from the devices."""
    if not is_ours(tensor):
        return tensor.cpu()
    own = own_chunks(tensor._form)
    if len(own.chunks) == 1:
        (chunk,) = own.chunks
        return host_value(tensor, own, chunk)
    whole = torch.empty(own.size, dtype=tensor.dtype)
    for chunk in own.chunks:
        whole[chunk.box] = host_value(tensor, own, chunk)
    return whole


def _is_known(value: torch.Tensor, seen: dict[Any, torch.Tensor]) -> bool:
    """Whether the same view of the same memory has been met."""
    key = *memory_of(value), value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
    return seen.setdefault(key, value) is not value


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    return rename(name) if callable(rename) else rename.get(name, name)


def bytes_of_size(size: int | str) -> int:
    """A size as "500MB", in bytes.

    Raises:
        ValueError: it is none.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)?\s*", size.upper())
        if match is None:
            raise ValueError(f"max_shard_size={size!r}: write it like 500MB, 5GB or 2GiB")
        size = int(float(match.group(1)) * _UNITS[match.group(2) or ""])
    if size < 1:
        raise ValueError(f"max_shard_size={size}: give a positive number of bytes")
    return size
