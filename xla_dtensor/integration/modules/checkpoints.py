"""``torch.distributed.checkpoint`` with xla tensors.

Its planners would ask a mesh for the rank of the caller, which has no value here. Where saving and
loading begin, each xla tensor is replaced by what offers torch's protocol for tensors with several
local shards (`xla_dtensor.checkpoint.stand_ins`). Nothing happens to states without xla tensors.

Run on torch 2.13, and with the checkpoint code of 2.11 and 2.14 in its place.
"""

from __future__ import annotations

import inspect
from typing import Any

from xla_dtensor.base import torch_private
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over

_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_LOADER = "torch.distributed.checkpoint.state_dict_loader"
_HELPERS = "torch.distributed.checkpoint.state_dict"


def install() -> None:
    """Take over where torch's calls begin, when they are imported."""
    on_import(_SAVER, _install_saving)
    on_import(_LOADER, _install_loading)
    on_import(_HELPERS, _install_options)


def _install_saving(module: Any) -> None:
    take_over(torch_private.save_state_dict, _save)
    take_over(inspect.unwrap(module.async_save), _async_save)
    wrapper = torch_private.DistWrapper_of_saver
    torch_private.replace("DistWrapper_of_saver", _wrapper(wrapper))


def _install_loading(module: Any) -> None:
    take_over(torch_private.load_state_dict, _load)
    wrapper = torch_private.DistWrapper_of_loader
    torch_private.replace("DistWrapper_of_loader", _wrapper(wrapper))


def _install_options(module: Any) -> None:
    take_over(torch_private.verify_options, _verify_options)


def _wrapper(original: Any) -> Any:
    """torch's way to ask a process group for something, or ours where there is none."""

    def made(group: Any, *args: Any) -> Any:
        from xla_dtensor.checkpoint import coordination

        if isinstance(group, coordination.Together):
            return coordination.Collectives(group)
        return original(group, *args)

    return made


def _bound(original: Any, args: Any, kwargs: Any) -> Any:
    return inspect.signature(original).bind(*args, **kwargs)


def _save(original: Any, args: Any, kwargs: Any) -> Any:
    from xla_dtensor.checkpoint import stand_ins
    from xla_dtensor.checkpoint.files import writing

    given = _bound(original, args, kwargs)
    state = given.arguments["state_dict"]
    ours = stand_ins.has_ours(state)
    _have_processes(given, "storage_writer", ours)
    if ours:
        storage = given.arguments["storage_writer"]
        # Of several shards of one name in a file, torch's writer of safetensors files keeps one.
        one_each = getattr(storage, "serialization_format", None) == _safetensors()
        saved = stand_ins.saved_whole if one_each else stand_ins.saved
        given.arguments["state_dict"] = stand_ins.replaced(state, saved)
        if writing.Writing.serves(storage):
            given.arguments["storage_writer"] = writing.Writing(storage)
    return _run(original, given)


def _have_processes(given: Any, storage: str, ours: bool) -> None:
    """Let all processes save or load together, though torch knows of no others; and a process alone
    that torch takes for one of several."""
    from torch import distributed

    from xla_dtensor.checkpoint import coordination
    from xla_dtensor.runtime import processes

    group = given.arguments.get("process_group")
    asked = group, distributed.is_initialized()
    if ours and asked[1] and not processes.several() and distributed.get_backend(group) == "fake":
        # The ranks that it pretends to are this process's devices, of which it has all shards:
        # asked for their plans, each would be this one's, and their files nobody's.
        given.arguments |= {"process_group": None, "no_dist": True, "coordinator_rank": 0}
    elif processes.several() and not any(asked):
        place = getattr(given.arguments[storage], "checkpoint_id", "")
        given.arguments["process_group"] = coordination.of_call(storage, str(place))
        given.arguments["no_dist"] = False


def _safetensors() -> Any:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    return SerializationFormat.SAFETENSORS


def _async_save(original: Any, args: Any, kwargs: Any) -> Any:
    """Copies of the shards are made here, before the call returns: what trains on may donate the
    arrays. torch's stagers copy the rest."""

    from xla_dtensor.checkpoint import stand_ins

    given = _bound(original, args, kwargs)
    state = torch_private.stateful_to_state_dict(given.arguments["state_dict"])
    stand_ins.refuse_tuples(state)
    state = stand_ins.replaced(state, stand_ins.staged)
    given.arguments["state_dict"] = state
    return original(*given.args, **given.kwargs)


def _load(original: Any, args: Any, kwargs: Any) -> Any:
    from xla_dtensor.checkpoint import stand_ins

    given = _bound(original, args, kwargs)
    state = given.arguments["state_dict"]
    ours = stand_ins.has_ours(state)
    _have_processes(given, "storage_reader", ours)
    if not ours:
        return original(*given.args, **given.kwargs)
    from xla_dtensor.checkpoint import loading

    with loading.Loading(state, given.arguments) as load:
        return _run(original, given, load.error)


def _run(original: Any, given: Any, error_of: Any = None) -> Any:
    """torch's call; errors of ours as they are, where torch has made one of many ranks of them."""
    from torch.distributed.checkpoint.api import CheckpointException

    from xla_dtensor.errors import CheckpointError, XlaDTensorError
    from xla_dtensor.runtime import processes

    try:
        return original(*given.args, **given.kwargs)
    except CheckpointException as error:
        causes = {rank: failure[0] for rank, failure in error.failures.items()}
        own = None if error_of is None else error_of()
        for cause in (own, causes.pop(processes.index(), None)):
            if isinstance(cause, XlaDTensorError | KeyboardInterrupt | SystemExit):
                raise cause from error
        for rank, cause in causes.items():
            if processes.several():  # torch may have made another error of it there
                raise CheckpointError(f"{processes.known(rank)}: {cause}") from error
            if isinstance(cause, XlaDTensorError):  # of another process of torch's
                raise cause from error
        raise


def _verify_options(original: Any, args: Any, kwargs: Any) -> Any:
    """``broadcast_from_rank0``: a process without others has what rank 0 has."""
    from torch import distributed

    info = original(*args, **kwargs)
    if info.broadcast_from_rank0 and not distributed.is_initialized():
        info.broadcast_from_rank0 = False
    return info
