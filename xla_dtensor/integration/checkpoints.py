"""``torch.distributed.checkpoint`` with xla tensors.

Its planners would ask a mesh for the rank of the caller, which has no value here. Where saving and
loading begin, each xla tensor is replaced by what offers torch's protocol for tensors with several
local shards (`xla_dtensor.checkpoint.stand_ins`). Nothing happens to states without xla tensors.

Run on torch 2.13, and with the checkpoint code of 2.11 and 2.14 in its place.
"""

from __future__ import annotations

import inspect
from typing import Any

from xla_dtensor.integration.on_import import on_import
from xla_dtensor.integration.take_over import take_over

_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_LOADER = "torch.distributed.checkpoint.state_dict_loader"
_HELPERS = "torch.distributed.checkpoint.state_dict"


def install() -> None:
    """Take over where torch's calls begin, when they are imported."""
    on_import(_SAVER, _install_saving)
    on_import(_LOADER, lambda module: take_over(module._load_state_dict, _load))
    on_import(_HELPERS, lambda module: take_over(module._verify_options, _verify_options))


def _install_saving(module: Any) -> None:
    take_over(module._save_state_dict, _save)
    take_over(inspect.unwrap(module.async_save), _async_save)


def _bound(original: Any, args: Any, kwargs: Any) -> Any:
    return inspect.signature(original).bind(*args, **kwargs)


def _save(original: Any, args: Any, kwargs: Any) -> Any:
    from xla_dtensor.checkpoint import stand_ins, writing

    given = _bound(original, args, kwargs)
    state = given.arguments["state_dict"]
    if stand_ins.has_ours(state):
        storage = given.arguments["storage_writer"]
        # Of several shards of one name in a file, torch's writer of safetensors files keeps one.
        one_each = getattr(storage, "serialization_format", None) == _safetensors()
        saved = stand_ins.saved_whole if one_each else stand_ins.saved
        given.arguments["state_dict"] = stand_ins.replaced(state, saved)
        if writing.Writing.serves(storage):
            given.arguments["storage_writer"] = writing.Writing(storage)
    return _run(original, given)


def _safetensors() -> Any:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    return SerializationFormat.SAFETENSORS


def _async_save(original: Any, args: Any, kwargs: Any) -> Any:
    """Copies of the shards are made here, before the call returns: what trains on may donate the
    arrays. torch's stagers copy the rest."""
    from torch.distributed.checkpoint import state_dict_saver

    from xla_dtensor.checkpoint import stand_ins

    given = _bound(original, args, kwargs)
    state = state_dict_saver._stateful_to_state_dict(given.arguments["state_dict"])
    stand_ins.refuse_tuples(state)
    state = stand_ins.replaced(state, stand_ins.staged)
    given.arguments["state_dict"] = state
    return original(*given.args, **given.kwargs)


def _load(original: Any, args: Any, kwargs: Any) -> Any:
    from xla_dtensor.checkpoint import stand_ins

    given = _bound(original, args, kwargs)
    state = given.arguments["state_dict"]
    if not stand_ins.has_ours(state):
        return original(*args, **kwargs)
    from xla_dtensor.checkpoint import loading

    with loading.Loading(state, given.arguments) as load:
        return _run(original, given, load.error)


def _run(original: Any, given: Any, error_of: Any = None) -> Any:
    """torch's call; errors of ours as they are, where torch has made one of many ranks of them."""
    from torch.distributed.checkpoint.api import CheckpointException

    from xla_dtensor.errors import XlaDTensorError

    try:
        return original(*given.args, **given.kwargs)
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        if error_of is not None:
            causes.insert(0, error_of())
        for cause in causes:
            if isinstance(cause, XlaDTensorError | KeyboardInterrupt | SystemExit):
                raise cause from error
        raise


def _verify_options(original: Any, args: Any, kwargs: Any) -> Any:
    """``broadcast_from_rank0``: a process without others has what rank 0 has."""
    from torch import distributed

    info = original(*args, **kwargs)
    if info.broadcast_from_rank0 and not distributed.is_initialized():
        info.broadcast_from_rank0 = False
    return info
