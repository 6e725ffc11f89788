"""``torch.distributed`` on xla tensors and groups, in one process without a process group.

``init_process_group("xla")`` makes all devices the default group. Its collectives take per-device
tensors and ``mesh.get_group(dim)``. What would be another number on each device raises, as it does
everywhere (docs/design.md).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed import distributed_c10d as c10d

from xla_dtensor.base.numbers.row_counts import has_counts
from xla_dtensor.errors import PerDeviceValueError, UnsupportedOpError
from xla_dtensor.integration.patching import callers
from xla_dtensor.integration.patching.take_over import take_over

_Arguments = dict[str, Any]

# The tensors of those that are served, and what else has to do with values; the rest is refused.
_COLLECTIVES: dict[str, Callable[[Any, _Arguments, Any], Any]] = {}  # first `movement.in_place`
_QUESTIONS: dict[str, Callable[[_Arguments, Any], Any]] = {}

_WAY_OUT = {
    "reduce": "all_reduce",
    "gather": "all_gather",
    "scatter": "all_to_all_single, or xla_dtensor.from_device_values",
    "all_gather_coalesced": "all_gather_into_tensor for each tensor",
    "all_reduce_coalesced": "all_reduce for each tensor",
    "send": "xla_dtensor.collectives.permute",
    "recv": "xla_dtensor.collectives.permute",
    "isend": "xla_dtensor.collectives.permute",
    "irecv": "xla_dtensor.collectives.permute",
    "P2POp": "xla_dtensor.collectives.permute",
    "batch_isend_irecv": "xla_dtensor.collectives.permute",
    "gather_object": "all_gather_object",
    "scatter_object_list": "the list itself: one process has it",
    "send_object_list": "the list itself: one process has it",
    "recv_object_list": "the list itself: one process has it",
    "new_group": "mesh.get_group(dim) of a mesh with such a dim, or mesh[dims]._flatten(name)",
    "new_subgroups": "mesh.get_group(dim) of a mesh with such a dim",
    "new_subgroups_by_enumeration": "mesh.get_group(dim) of a mesh with such a dim",
    "split_group": "mesh.get_group(dim) of a mesh with such a dim",
    "shrink_group": "a mesh of fewer devices",
    "get_group_rank": "coordinates along a mesh dim, group_src=",
    "get_global_rank": "coordinates along a mesh dim, group_src=",
    "_coalescing_manager": "the collectives one by one: a compiled step combines them",
}


def install(prepare: Callable[[], None]) -> None:
    """Take over what has to do with groups. Read in torch 2.11, checked on 2.13.

    Args:
        prepare: is called with the first default group.
    """
    take_over(c10d.init_process_group, functools.partial(_init, prepare))
    take_over(c10d.destroy_process_group, _destroy)
    take_over(c10d.is_initialized, _is_initialized)
    c10d.Backend.default_device_backend_map.setdefault("xla", "xla")
    for name in (*_COLLECTIVES, *_QUESTIONS, *_WAY_OUT):
        function: Any = getattr(c10d, name, None)
        if isinstance(function, type):
            function = vars(function)["__init__"]
        if function is not None:  # not in every version of torch
            target = getattr(function, "__wrapped__", function)
            handler = functools.partial(_call, name, inspect.signature(target))
            take_over(function, handler)


def is_default() -> bool:
    """Whether ``init_process_group("xla")`` is in force."""
    return getattr(c10d.GroupMember.WORLD, "is_world", False)


def _init(prepare: Callable[[], None], original: Any, args: Any, kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    backend = given.get("backend")
    device = given.get("device_id")
    of_device = isinstance(device, torch.device) and device.type == "xla"
    if not (isinstance(backend, str) and backend.lower() == "xla"):
        if of_device and backend is not None:
            raise ValueError(f"init_process_group({backend!r}, device_id={device}): give 'xla'")
        if not of_device:
            return original(*args, **kwargs)
    if c10d.GroupMember.WORLD is not None:
        raise ValueError("trying to initialize the default process group twice!")
    from xla_dtensor import runtime
    from xla_dtensor.mesh.group import world
    from xla_dtensor.runtime import distributed, processes

    distributed.initialize()
    rank, count = given.get("rank", -1), given.get("world_size", -1)
    if rank not in (-1, processes.index()):
        raise UnsupportedOpError(
            f"init_process_group('xla', rank={rank}): this is process {processes.index()} of "
            f"{processes.count()}. A launcher says which one a process is (torchrun, mpirun, "
            "srun), or xla_dtensor.distributed.initialize(address, num_processes, process_id)"
        )
    if processes.several():
        if count not in (-1, processes.count()):
            raise UnsupportedOpError(
                f"init_process_group('xla', world_size={count}): there are {processes.count()} "
                "processes; leave world_size out"
            )
        count = -1
    elif count > 0:
        runtime.devices(range(count))
    prepare()
    c10d.GroupMember.WORLD = world(count if count > 0 else None)
    return None


def _is_initialized(original: Any, args: Any, kwargs: Any) -> bool:
    if is_default() and callers.asks_about_processes(3):  # of torch's function, two calls away
        return False
    return original(*args, **kwargs)


def _destroy(original: Any, args: Any, kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    group = given.get("group")
    world = c10d.GroupMember.WORLD
    if group is None or group is world:
        if not is_default():
            return original(*args, **kwargs)
        c10d.GroupMember.WORLD = None
        return None
    from xla_dtensor.mesh.group import resolve_group

    # The name of a dim, which is as long there as its mesh is.
    return original(*args, **kwargs) if resolve_group(group) is None else None


def _call(name: str, signature: inspect.Signature, original: Any, args: Any, kwargs: Any) -> Any:
    """A call of the function ``name``: ours, if its group or a tensor is."""
    if not _names_xla(args, kwargs):
        return original(*args, **kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    group = arguments.get("group")
    if group is None or group is c10d.GroupMember.WORLD:
        if not is_default():
            _refuse_without_group(name, arguments)
        found: Any = c10d.GroupMember.WORLD
    else:
        from xla_dtensor.mesh.group import resolve_group

        found = resolve_group(group)
        if found is None:
            raise UnsupportedOpError(
                f"torch.distributed.{name} of an xla tensor with the process group {group!r}: give "
                "group=mesh.get_group(dim) of its mesh"
            )
    if name in _QUESTIONS:
        return _QUESTIONS[name](arguments, found)
    if name in _WAY_OUT:
        raise UnsupportedOpError(
            f"torch.distributed.{name} with group {str(found)!r}: one process drives all devices, "
            f"and has no call for one of them; use {_WAY_OUT[name]}"
        )
    from xla_dtensor.movement import in_place
    from xla_dtensor.runtime import processes

    if found is c10d.GroupMember.WORLD and processes.several() and not found.frame.one_each:
        raise UnsupportedOpError(
            f"torch.distributed.{name} without a group: the default group's ranks are the "
            f"{processes.count()} processes, and each drives several devices, which hold tensors "
            "of their own: say along which devices, group=mesh.get_group(dim)"
        )
    tensors = _COLLECTIVES[name](in_place, arguments, _of_tensors(found, arguments))
    return in_place.Work(tensors) if arguments.get("async_op") else None


def _of_tensors(group: Any, arguments: _Arguments) -> Any:
    """The group on the mesh that the tensors are of."""
    for value in arguments.values():
        for tensor in value if isinstance(value, list | tuple) else (value,):
            form = getattr(tensor, "_form", None)
            if form is not None and form.frame is not None:
                return group.within(form.frame)
    return group.within(None)


def _names_xla(args: Any, kwargs: Any) -> bool:
    """Whether there is a tensor or a group of ours, without loading what knows them."""
    if is_default():
        return True
    for value in (*args, *kwargs.values()):
        for each in value if type(value) in (list, tuple) else (value,):
            each = getattr(each, "tensor", each)  # of a P2POp
            if isinstance(each, torch.Tensor):
                if each.device.type == "xla":
                    return True
            elif getattr(each, "device_type", None) == "xla":  # a mesh, a group
                return True
    return False


def _refuse_without_group(name: str, arguments: _Arguments) -> NoReturn:
    raise UnsupportedOpError(
        f"torch.distributed.{name} of an xla tensor without a group: give "
        "group=mesh.get_group(dim), or call torch.distributed.init_process_group('xla') for a "
        "default group of all devices"
    )


def _serves(table: dict[str, Any], *names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        table.update(dict.fromkeys(names, function))
        return function

    return register


# --- collectives ---------------------------------------------------------------------------------


@_serves(_COLLECTIVES, "all_reduce")
def _all_reduce(in_place: Any, given: _Arguments, group: Any) -> Any:
    return in_place.all_reduce(given["tensor"], group, in_place.reduction_of(given["op"]))


@_serves(_COLLECTIVES, "all_gather_single", "all_gather_into_tensor")
def _all_gather_into_tensor(in_place: Any, given: _Arguments, group: Any) -> Any:
    return in_place.all_gather_into_tensor(given["output_tensor"], given["input_tensor"], group)


@_serves(_COLLECTIVES, "all_gather")
def _all_gather(in_place: Any, given: _Arguments, group: Any) -> Any:
    return in_place.all_gather(given["tensor_list"], given["tensor"], group)


@_serves(_COLLECTIVES, "reduce_scatter_single", "reduce_scatter_tensor")
def _reduce_scatter_tensor(in_place: Any, given: _Arguments, group: Any) -> Any:
    op = in_place.reduction_of(given["op"])
    return in_place.reduce_scatter_tensor(given["output"], given["input"], group, op)


@_serves(_COLLECTIVES, "reduce_scatter")
def _reduce_scatter(in_place: Any, given: _Arguments, group: Any) -> Any:
    op = in_place.reduction_of(given["op"])
    return in_place.reduce_scatter(given["output"], given["input_list"], group, op)


@_serves(_COLLECTIVES, "all_to_all_single")
def _all_to_all_single(in_place: Any, given: _Arguments, group: Any) -> Any:
    sizes = given["output_split_sizes"], given["input_split_sizes"]
    if any(map(has_counts, sizes)):
        from xla_dtensor.ragged.exchange import exchange_into

        return exchange_into(given["output"], given["input"], group, *sizes)
    return in_place.all_to_all_single(given["output"], given["input"], group, *sizes)


@_serves(_COLLECTIVES, "all_to_all")
def _all_to_all(in_place: Any, given: _Arguments, group: Any) -> Any:
    outputs, inputs = given["output_tensor_list"], given["input_tensor_list"]
    return in_place.all_to_all(outputs, inputs, group)


@_serves(_COLLECTIVES, "broadcast")
def _broadcast(in_place: Any, given: _Arguments, group: Any) -> Any:
    src = in_place.coordinate_of(given["src"], given["group_src"], group, "broadcast")
    return in_place.broadcast(given["tensor"], group, src)


# --- questions, and what one process does by itself ----------------------------------------------


@_serves(_QUESTIONS, "barrier", "monitored_barrier")
def _barrier(given: _Arguments, group: Any) -> Any:
    """All processes come here; nothing in one that is alone."""
    from xla_dtensor.movement.in_place import Work
    from xla_dtensor.runtime import agreement

    agreement.meet("comes to a barrier")
    return Work() if given.get("async_op") else None


@_serves(_QUESTIONS, "get_world_size")
def _world_size(given: _Arguments, group: Any) -> int:
    from xla_dtensor.runtime import processes

    if processes.several() and group is c10d.GroupMember.WORLD:
        return processes.count()
    return group.size()


@_serves(_QUESTIONS, "get_rank")
def _rank(given: _Arguments, group: Any) -> Any:
    from xla_dtensor.runtime import processes

    world = group is c10d.GroupMember.WORLD
    if world and (processes.several() or callers.asks_about_itself(4)):
        return processes.index()
    if not world and len(group.own_ranks()) != 1 and callers.asks_about_devices(4):
        from xla_dtensor.movement.collectives import index_in

        rank = index_in(group)
        for tell in callers.told:
            tell(rank, group)
        return rank
    return group.rank()  # raises where it differs


@_serves(_QUESTIONS, "get_backend", "get_backend_config")
def _backend(given: _Arguments, group: Any) -> str:
    return "xla"


@_serves(_QUESTIONS, "get_process_group_ranks")
def _ranks(given: _Arguments, group: Any) -> list[int]:
    from xla_dtensor.runtime import processes

    if processes.several() and group is c10d.GroupMember.WORLD:
        return list(range(processes.count()))
    devices = group.devices()
    if devices is None:
        raise PerDeviceValueError(
            f"get_process_group_ranks of group {str(group)!r}: each device is in one of several "
            "groups along that mesh dim; mesh.mesh has the numbers of all devices"
        )
    return list(devices)


@_serves(_QUESTIONS, "all_gather_object")
def _all_gather_object(given: _Arguments, group: Any) -> None:
    """Each device has the process's object; a copy for each, as torch's are. Of several
    processes, the default group's ranks."""
    from xla_dtensor.runtime import processes

    objects = given["object_list"]
    if processes.several():
        _check_objects("all_gather_object", group)
        count = processes.count()
        _check_places(objects, count)
        objects[:count] = _from_all("all_gather_object", given["obj"])
        return
    count = group.size()
    _check_places(objects, count)
    objects[:count] = [copy.deepcopy(given["obj"]) for _ in range(count)]


@_serves(_QUESTIONS, "broadcast_object_list")
def _broadcast_object_list(given: _Arguments, group: Any) -> None:
    """Those of the process ``src``; nothing where all devices have one process's."""
    from xla_dtensor.runtime import processes

    if processes.several():
        _check_objects("broadcast_object_list", group)
        src = given.get("group_src")
        src = given.get("src") if src is None else src
        objects = given["object_list"]
        everyone = _from_all(
            "broadcast_object_list", list(objects) if processes.index() == (src or 0) else None
        )
        objects[:] = everyone[src or 0]


def _from_all(name: str, value: Any) -> list[Any]:
    """Every process's object."""
    import base64
    import pickle

    from xla_dtensor.runtime import agreement

    texts = agreement.texts_of_all(f"calls {name}", base64.b64encode(pickle.dumps(value)).decode())
    return [pickle.loads(base64.b64decode(text)) for text in texts]


def _check_objects(name: str, group: Any) -> None:
    if group is not c10d.GroupMember.WORLD:
        raise UnsupportedOpError(
            f"torch.distributed.{name} with group {str(group)!r}: objects go between processes, "
            "which are the ranks of the default group; leave group out"
        )


def _check_places(objects: list[Any], count: int) -> None:
    if len(objects) < count:
        raise ValueError(
            f"all_gather_object: the list has {len(objects)} places, and the group {count} ranks"
        )
