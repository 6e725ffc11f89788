"""huggingface_hub's saving, which looks for sharded tensors that share memory.

It takes a DTensor's local tensor to be the memory, and takes DTensors apart as ``torch.compile``
does. Ours have one memory, the whole tensor's, and local tensors only where dims divide. Read and
checked in 2.4.0.
"""

from __future__ import annotations

from typing import Any

from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over


def install() -> None:
    """When its module is imported."""
    on_import("huggingface_hub.serialization._torch", _hook)


def _hook(module: Any) -> None:
    take_over(module._get_unique_id, _identity)
    take_over(module._is_complete, _is_complete)


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "_form") and tensor._form.is_sharded


def _identity(original: Any, args: Any, kwargs: Any) -> Any:
    if not _is_sharded(args[0]):
        return original(*args, **kwargs)
    return args[0].untyped_storage().data_ptr()


def _is_complete(original: Any, args: Any, kwargs: Any) -> Any:
    if not _is_sharded(args[0]):
        return original(*args, **kwargs)
    memory = args[0].untyped_storage()
    return args[0].data_ptr() == memory.data_ptr() and args[0].nbytes == memory.nbytes()
