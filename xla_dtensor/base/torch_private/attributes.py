"""Private attributes of torch's objects (`x._schema`) under public names that say what they are.

`tests/base/test_private_attributes.py` uses each once, which `tools/versions.py` runs with every
supported torch (2.11 to 2.15); what differs between them is said at the line. Those that are
`operator.attrgetter` or `operator.methodcaller` cost what reading the attribute costs: no Python
function is called, so hot paths may use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

if TYPE_CHECKING:
    from torch._C import FunctionSchema

# --- operators -----------------------------------------------------------------------------------

# An overload's arguments and results, and which of them it writes.
schema_of: Callable[[Any], FunctionSchema] = attrgetter("_schema")
# "aten::add", of all overloads together.
packet_name: Callable[[Any], str] = attrgetter("_qualified_op_name")
# "mylib::myop", of what torch.library.custom_op returned.
custom_op_name: Callable[[Any], str] = attrgetter("_qualname")


def kernel_of(func: Any, key: Any) -> Callable[..., Any]:
    """The kernel of an overload for one dispatch key."""
    return partial(func._op_dk, key)


# --- tensors -------------------------------------------------------------------------------------

# The address of the C++ object of a storage or a generator: the same for all Python objects of it.
cpp_address: Callable[[Any], int] = attrgetter("_cdata")
# The storage without a dtype behind a `torch.TypedStorage`, whose public `untyped()` warns.
untyped_storage_of: Callable[[Any], torch.UntypedStorage] = attrgetter("_untyped_storage")
is_view: Callable[[torch.Tensor], bool] = methodcaller("_is_view")
# What `register_hook` and `register_post_accumulate_grad_hook` have registered, by number.
hooks_of_tensor: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
hooks_after_accumulation: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)


def make_parameter(tensor: Any) -> None:
    """Let ``isinstance(tensor, nn.Parameter)`` be true of a tensor of another class."""
    tensor._is_param = True


# --- autograd ------------------------------------------------------------------------------------

# When a node of the graph was made, see `torch_private.sequence_number`.
sequence_number_of: Callable[[Any], int] = methodcaller("_sequence_nr")


def is_leaf(tensor: torch.Tensor) -> bool:
    """``tensor.is_leaf``; True of a view whose history torch can't make anew now that its base has
    been written to, as of one made under `no_grad`: it refuses to say."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return True


# --- modules, data, files ------------------------------------------------------------------------

# A module's own, by name, to be replaced without the checks of `setattr`; None where there is none.
parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
# Unlike `children()`, also None, and a module that has two names twice.
submodules_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")


def forward_hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """What is called before and after a module's ``forward``, but for global hooks."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def global_forward_hooks() -> list[Callable[..., Any]]:
    """What is called before and after the ``forward`` of all modules."""
    hooks = nn.modules.module
    return [*hooks._global_forward_pre_hooks.values(), *hooks._global_forward_hooks.values()]


def step_hooks_of(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """The functions that run around an optimizer's steps: its own, and those of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    tables = (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return [hook for table in tables for hook in table.values()]


def names_that_ddp_ignores(module: nn.Module) -> set[str]:
    """The parameters and buffers that the user told DistributedDataParallel to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def is_distributed(module: nn.Module) -> bool:
    """Whether ``distribute_module`` was called on a module."""
    return bool(getattr(module, "_distribute_module_applied", False))


def set_distributed(module: Any) -> None:
    """From now on `is_distributed`."""
    module._distribute_module_applied = True


def scripted_module(module: Any) -> Any:
    """The C++ module of one of TorchScript's; of what torch.jit.trace gives, which is around the
    module that it stands for, that one's."""
    return getattr(module, "_actual_script_module", module)._c


# The type of such a C++ module.
type_of_scripted: Callable[[Any], Any] = methodcaller("_type")


def set_scripted_as(update: Any, function: Callable[..., Any]) -> None:
    """Let TorchScript take ``function`` where it meets ``update``, as it does for what
    `torch.jit.script_if_tracing` returns."""
    update.__original_fn, update.__script_if_tracing_wrapper = function, True


def notes_of_scaler(scaler: Any) -> Any:
    """What a `GradScaler` notes of each optimizer until its ``update()``: a dict."""
    return scaler._per_optimizer_states


def set_notes_of_scaler(scaler: Any, notes: Any) -> None:
    """Have a `GradScaler` note that in this dict."""
    scaler._per_optimizer_states = notes


def batches_yielded(iterator: Any) -> int | None:
    """How many batches a DataLoader's iterator has given; None of other iterators."""
    found: int | None = getattr(iterator, "_num_yielded", None)
    return found


def metadata_path(reader: Any, rank: int | None) -> Any:
    """Where a FileSystemReader finds the metadata, of one rank or of all."""
    return reader._get_metadata_path(rank)


# --- meshes --------------------------------------------------------------------------------------

# The mesh that a mesh was cut from, itself if it wasn't; and None if it wasn't.
root_mesh: Callable[[DeviceMesh], DeviceMesh] = methodcaller("_get_root_mesh")
cut_from: Callable[[DeviceMesh], DeviceMesh | None] = attrgetter("_root_mesh")
# The device numbers of the root, of which a mesh's layout picks its own.
device_numbers: Callable[[DeviceMesh], torch.Tensor] = attrgetter("_rank_map")
layout_of_mesh: Callable[[DeviceMesh], Any] = attrgetter("_layout")
# Of a root: the meshes that were made of several of its dims as one, by name.
flattened_meshes: Callable[[DeviceMesh], dict[str, DeviceMesh]] = attrgetter("_flatten_mapping")


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh of one dim, ``name``, of all of a mesh's devices."""
    return mesh._flatten(name)


def mesh_of(
    layout: Any,
    numbers: Sequence[int],
    names: tuple[str, ...] | None,
    root: DeviceMesh | None,
) -> DeviceMesh:
    """An xla mesh of a layout of these device numbers: a root, or one that is cut from ``root``."""
    rank_map = torch.tensor(numbers, dtype=torch.int, device="cpu")
    mesh = DeviceMesh(
        "xla", _layout=layout, _rank_map=rank_map, mesh_dim_names=names, _root_mesh=root
    )
    mesh._rank_map = rank_map  # as given, which a new mesh may choose for itself
    return mesh


def device_numbers_of_layout(mesh: DeviceMesh) -> torch.Tensor:
    """The lists of device numbers of all meshes that are cut from the root as this one is, one at
    each coordinate of the dims left out: of shape ``(lists, *mesh.shape)``."""
    found: torch.Tensor = mesh._layout.remap_to_tensor(mesh._rank_map)
    return found


def layout_pieces(mesh: DeviceMesh) -> list[list[tuple[int, int]]]:
    """Per mesh dim its (size, stride) pieces in the root's flat device list, major to minor.

    torch >= 2.13 keeps a canonical layout object per mesh dim; before, the mesh's layout had nested
    ``shape`` and ``stride`` tuples.
    """
    return _pieces(mesh._layout)


def layout_sizes(layout: Any) -> list[int]:
    """Per mesh dim of a mesh's layout its size."""
    return [math.prod(size for size, _ in pieces) for pieces in _pieces(layout)]


def _pieces(layout: Any) -> list[list[tuple[int, int]]]:
    if hasattr(layout, "axes"):
        return [list(zip(axis.shape, axis.stride, strict=True)) for axis in layout.axes]
    return [
        list(zip(_flat(shape), _flat(stride), strict=True))
        for shape, stride in zip(_as_tuple(layout.shape), _as_tuple(layout.stride), strict=True)
    ]


def _as_tuple(x: object) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def _flat(x: object) -> list[int]:
    if isinstance(x, tuple):
        return [leaf for item in x for leaf in _flat(item)]
    return [x]  # type: ignore[list-item]


# --- pipelines: what the base class of torch's schedules keeps -----------------------------------

microbatch_count: Callable[[Any], int] = attrgetter("_n_microbatches")
has_backward: Callable[[Any], bool] = attrgetter("_has_backward")
loss_function: Callable[[Any], Callable[..., Any] | None] = attrgetter("_loss_fn")
# How arguments are cut into microbatches: by position, and by name.
chunk_specs: Callable[[Any], tuple[Any, dict[str, Any] | None]] = attrgetter(
    "_args_chunk_spec", "_kwargs_chunk_spec"
)
# The losses of the step that runs.
internal_losses: Callable[[Any], list[Any]] = attrgetter("_internal_losses")


def split_inputs(schedule: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The microbatches' arguments, positional and by name."""
    return schedule._split_inputs(args, kwargs)


def merge_outputs(schedule: Any, chunks: list[Any]) -> Any:
    """One output of the microbatches'."""
    return schedule._merge_outputs(chunks)


def set_input_count(stage: Any, count: int) -> None:
    """Say how many arguments of a stage gradients go back to. torch 2.11 and 2.12 don't ask."""
    meta = getattr(stage, "_stage_meta", None)
    if meta is not None:
        meta.inputs = (None,) * count


# --- context parallelism, debugging --------------------------------------------------------------


# What DTensor's dispatcher calls in place of operators, in use now: each call of a step asks.
custom_op_handlers: Callable[[Any], Any] = attrgetter("_custom_op_handlers")


def indices_dealt(balancer: Any) -> Any:
    """Which positions a load balancer of context parallelism deals to which device."""
    return balancer._generate_indices()


def record_call(mode: Any, call: Any) -> None:
    """Have a DebugMode write down an operation."""
    mode._record_call(call)


def record_result(mode: Any, call: Any, result: Any) -> None:
    """Have it write down what such an operation gave."""
    mode._record_call_output(call, result)


def explicit_redistribution(context_class: Any) -> tuple[bool, bool] | None:
    """Of the thread's innermost ``ExplicitRedistributionContext``: whether it is strict, and
    whether it raises; None if there is none or it is switched off."""
    active = getattr(context_class._local, "_active", None)
    if active is None or not getattr(active, "_enable", True):
        return None
    strict = getattr(active, "_strict", False)
    return bool(strict), bool(getattr(active, "_raise_on_redistribution", True))
