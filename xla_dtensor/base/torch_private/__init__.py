"""The private names of torch that we use, and how they differ between versions 2.11 to 2.15.

Nothing else in the package names something private of torch's.
Where a public name would do, the comment says which; most have none. Values of other modules that
change are asked for by the functions below, attributes of objects by those of `attributes.py`. Not
here: operators (``torch.ops.aten._to_copy``, ``torch._foreach_add_``).
`tests/base/test_private_apis.py` finds out whether a version has them all.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from xla_dtensor.base.tables.borrowed import Borrowed

NAMES = {
    # --- nested arguments ---
    # Tensors in lists, dicts and registered classes, as torch's own functions find them.
    "pytree": "torch.utils._pytree",
    # Who registers a way to make batches; `torch.utils.data.default_collate` only uses them.
    "collate_functions": "torch.utils.data._utils.collate:default_collate_fn_map",
    # --- operators, and who computes them ---
    # What `__torch_dispatch__` is called with, and its overloads together: in isinstance.
    "OpOverload": "torch._ops:OpOverload",
    "OpOverloadPacket": "torch._ops:OpOverloadPacket",
    # Operators that take functions (`flex_attention`), which debugging modes let through.
    "HigherOrderOperator": "torch._ops:HigherOrderOperator",
    # How kernels are told apart; torch.library takes these as strings, the rest as this enum.
    "DispatchKey": "torch._C:DispatchKey",
    "DispatchKeySet": "torch._C:DispatchKeySet",
    # Autocast, left out while a kernel of ours of that key calls the operator again.
    "without_keys": "torch._C:_ExcludeDispatchKeyGuard",
    # Whether a call is below autograd already.
    "is_key_excluded": "torch._C:_dispatch_tls_is_dispatch_key_excluded",
    # Keys in force again (`dispatch_keys`).
    "set_key_excluded": "torch._C:_dispatch_tls_set_dispatch_key_excluded",
    # Whether an operator is composed of others, by C++ or by Python, so that they can be run.
    "has_kernel": "torch._C:_dispatch_has_kernel_for_dispatch_key",
    "python_kernels": "torch.library:_impls",
    # What torch.compile takes operators apart to, for those that have no lowering.
    "core_aten_decompositions": "torch._decomp:core_aten_decompositions",
    "decomposition_table": "torch._decomp:decomposition_table",
    # The functions of a user's torch.library.custom_op, whose code a compiled step watches.
    "CustomOpDef": "torch._library.custom_ops:CustomOpDef",
    "custom_op_definitions": "torch._library.custom_ops:OPDEFS",
    # What memory_format=torch.preserve_format means for a tensor with these strides.
    "suggest_memory_format": "torch._prims_common:suggest_memory_format",
    # The operator behind torch.nn.attention.flex_attention, to give it a kernel; what it refuses
    # devices with; what tells kernels which results are asked for; the modifier that it has where
    # the user gives none; and the mode that lets a mask's function index by tensors.
    "flex_attention": "torch._higher_order_ops.flex_attention:flex_attention",
    "validate_device_of_flex_attention": "torch.nn.attention.flex_attention:_validate_device",
    "options_of_flex_attention": "torch.nn.attention.flex_attention:_apply_kernel_options",
    "no_score_mod": "torch.nn.attention.flex_attention:_identity",
    "TransformGetItemToIndex": (
        "torch._dynamo._trace_wrapped_higher_order_op:TransformGetItemToIndex"
    ),
    # Loops as functions, which are in no public module yet; beside them torch.cond.
    "while_loop": "torch._higher_order_ops.while_loop:while_loop",
    "scan": "torch._higher_order_ops.scan:scan",
    "map_along": "torch._higher_order_ops.map:map",
    # --- modes ---
    # Documented, though nowhere in public; our own modes are made of it.
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    # A block without any modes: what we compute for ourselves is none of theirs.
    "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
    # The innermost mode, taken off while it works, which an interrupt must not lose.
    "pop_dispatch_mode": "torch.utils._python_dispatch:_pop_mode_temporarily",
    "pop_function_mode": "torch.overrides:_pop_mode_temporarily",
    # Which modes are entered: another program for each.
    "count_of_function_modes": "torch._C:_len_torch_function_stack",
    "function_mode_at": "torch._C:_get_function_stack_at",
    "count_of_dispatch_modes": "torch._C:_len_torch_dispatch_stack",
    "dispatch_mode_at": "torch._C:_get_dispatch_stack_at",
    # A block in which no function mode hears of what is read of tensors. A read that one hears of
    # takes ten times as long, and a trace, which is under one, reads thousands for itself.
    "unseen": "torch._C:DisableTorchFunction",
    # A block in which subclasses aren't asked, for the same reason; modes are.
    "disable_function_of_subclasses": "torch._C:DisableTorchFunctionSubclass",
    # Whether the user is in such a block.
    "is_torch_function_enabled": "torch._C:_is_torch_function_enabled",
    # The documented value of `__torch_function__` of a class that wants none.
    "disabled_torch_function": "torch._C:_disabled_torch_function_impl",
    # --- tensors ---
    # A tensor of a subclass without memory, and one with another's.
    "make_wrapper_subclass": "torch:Tensor._make_wrapper_subclass",
    "make_subclass": "torch:Tensor._make_subclass",
    # What pickles of a subclass of torch.Tensor call: makes a plain one, then the subclass's.
    "rebuild_from_type": "torch._tensor:_rebuild_from_type_v2",
    # torch's own class: `torch.Generator` is replaced by one that makes ours, too.
    "CppGenerator": "torch._C:Generator",
    # Calls that have one among the arguments belong to its mode.
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    # What torch.set_printoptions has set, and a block with other options.
    "tensor_str": "torch._tensor_str",
    # The default device; torch.get_default_device() doesn't tell "cpu" from none. And that of a
    # `with torch.device(...)` block, which it does tell, as if it were the default.
    "default_device_context": "torch:_GLOBAL_DEVICE_CONTEXT",
    "device_mode": "torch.utils._device",
    # Writes that autograd isn't to count: those undone, and a batch norm's to its statistics.
    "set_version_counter": "torch._C._autograd:_unsafe_set_version_counter",
    "preserve_version_counter": "torch.autograd:_unsafe_preserve_version_counter",
    # --- autograd ---
    # The hooks of torch.autograd.graph.saved_tensors_hooks that are in force, to look at them and
    # to take off those of somebody else; that class only puts its own on and takes them off.
    "top_saved_tensors_hooks": "torch._C._autograd:_top_saved_tensors_default_hooks",
    "push_saved_tensors_hooks": "torch._C._autograd:_push_saved_tensors_default_hooks",
    "pop_saved_tensors_hooks": "torch._C._autograd:_pop_saved_tensors_default_hooks",
    # When a node was made: a number per thread, which says in which module.
    "sequence_number": "torch._C._autograd:_get_sequence_nr",
    # The node that backward is in.
    "current_autograd_node": "torch._C:_current_autograd_node",
    # The number of the backward pass under way, -1 outside of one; and what it calls at its end.
    "current_backward": "torch._C:_current_graph_task_id",
    "call_after_backward": "torch.autograd:Variable._execution_engine.queue_callback",
    # What every backward pass from Python goes through, replaced by ours: where it is, and where
    # torch.autograd has imported it.
    "run_backward": "torch.autograd.graph:_engine_run_backward",
    "run_backward_in_autograd": "torch.autograd:_engine_run_backward",
    # Whether torch.func transforms what runs: composites stay composed for it.
    "functorch_interpreter": "torch._C._functorch:peek_interpreter_stack",
    # The blocks that torch.utils.checkpoint runs in, first and again.
    "checkpoint_hook": "torch.utils.checkpoint:_checkpoint_hook",
    "recomputation_hook": "torch.utils.checkpoint:_recomputation_hook",
    # --- the device "xla" ---
    # Who has torch's slot for a device from outside.
    "privateuse1_name": "torch._C:_get_privateuse1_backend_name",
    # `torch.xla`: what backends are told to call.
    "register_device_module": "torch:_register_device_module",
    # What C++ asks a device, answered in Python: the API of torch's own example for backends.
    "register_device_hooks": "torch._C._acc:register_python_privateuseone_hook",
    "register_device_guard": "torch._C._acc:register_python_privateuseone_device_guard",
    "PrivateUse1Hooks": "torch._C._acc:PrivateUse1Hooks",
    "DeviceGuard": "torch._C._acc:DeviceGuard",
    "DeviceType": "torch._C._autograd:DeviceType",
    # --- modules, optimizers, data, files ---
    # Moves and casts a module's parameters; replaced, so that a shared one stays shared.
    "module_apply": "torch.nn:Module._apply",
    # Exchanges two tensors, in place; replaced, so that steps look at their tensors again.
    "swap_tensors": "torch._C:_swap_tensor_impl",
    # Moves a tensor of an optimizer's state to the parameter's device; replaced, for a parameter
    # that lies on many.
    "optimizer_state_on_device": "torch.optim:Optimizer._process_value_according_to_param_policy",
    # The class of all batch norms, also of those that torch adds.
    "BatchNorm": "torch.nn.modules.batchnorm:_BatchNorm",
    # Which attributes TorchScript has put into a module.
    "ConcreteModuleType": "torch._C:ConcreteModuleType",
    # Settings that are read by a compiled step, and have no public name to read them by: why hooks
    # on saved tensors are forbidden, whether views are made again of their bases, whether a
    # recomputation ends with the last tensor that is wanted, how tensors are printed.
    "saved_tensors_hooks_disabled": (
        "torch._C._autograd:_saved_tensors_hooks_get_disabled_error_message"
    ),
    "views_are_replayed": "torch._C:_is_view_replay_enabled",
    "stops_checkpoints_early": "torch.utils.checkpoint:_enable_checkpoint_early_stop",
    "print_options": "torch._tensor_str:PRINT_OPTS",
    # What torch.jit.script makes of lists and dicts.
    "ScriptList": "torch._C:ScriptList",
    "ScriptDict": "torch._C:ScriptDict",
    # torch's way to raise where a condition doesn't hold.
    "check": "torch:_check",
    "check_with": "torch:_check_with",
    "assert_in_python": "torch:_assert",
    "assert_async": "torch:_assert_async",
    # Whether torch.distributions looks at the values of its arguments; `find` says what it is now.
    "validates_distributions": "torch.distributions:Distribution._validate_args",
    # What the user may register with torch.distributions between two calls of a step.
    "kl_registry": "torch.distributions.kl:_KL_REGISTRY",
    "transform_registry": "torch.distributions:transform_to._registry",
    "bijection_registry": "torch.distributions:biject_to._registry",
    # What runs while a module does, whatever its class makes of ``__call__``.
    "call_of_module": "torch.nn:Module._call_impl",
    # What `torch.nn.init.trunc_normal_` draws with, until all values are between the bounds.
    "draw_truncated": "torch.nn.init:_no_grad_trunc_normal_",
    # Devices for which AveragedModel averages lists of tensors; replaced by one without "xla".
    "foreach_devices_of_averages": "torch.optim.swa_utils:_get_foreach_kernels_supported_devices",
    # Classes whose tensors optimizers, and clipping, put into lists; ours are added.
    "foreach_types_of_optimizers": "torch.optim.optimizer:_foreach_supported_types",
    "foreach_types": "torch.utils._foreach_utils:_foreach_supported_types",
    # A DataLoader's iterator that starts workers, of which JAX warns.
    "MultiProcessingIterator": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    # What torch.load goes through, replaced by ours: files, files of before torch 1.6, tensors.
    "load_file": "torch.serialization:_load",
    "load_legacy_file": "torch.serialization:_legacy_load",
    "rebuild_tensor": "torch._utils:_rebuild_tensor",
    # A pickled torch.layout: files name it.
    "get_layout": "torch.serialization:_get_layout",
    # --- meshes, DTensor ---
    # The meshes of `with mesh:` blocks.
    "mesh_resources": "torch.distributed.device_mesh:_mesh_resources",
    # One mesh of the dims of several, in any order.
    "concatenate_meshes": "torch.distributed.device_mesh:DeviceMesh._concatenate",
    # A shard of a mesh dim that cuts after mesh dims to its right have cut.
    "StridedShard": "torch.distributed.tensor.placement_types:_StridedShard",
    # Pending a p-norm of what the devices have, in torch's words.
    "NormPartial": "torch.distributed.tensor._ops._math_ops:_NormPartial",
    # A DTensor's layout, which it wants to have, and users' sharding functions are given.
    "DTensorSpec": "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "TensorMeta": "torch.distributed.tensor._dtensor_spec:TensorMeta",
    # The shape that DTensor.from_local gives.
    "compute_global_tensor_info": "torch.distributed.tensor._utils:compute_global_tensor_info",
    # What was registered by experimental.register_sharding, which has no list; context parallelism.
    "op_dispatcher": "torch.distributed.tensor:DTensor._op_dispatcher",
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop:ShardingPropagator",
    # What torch.distributed.tensor.zeros and its siblings end in; replaced by ours.
    "dtensor_init_helper": "torch.distributed.tensor._api:_dtensor_init_helper",
    # --- context parallelism: who deals out buffers, makes masks of them, and whether evenly ---
    "context_parallel_buffers": (
        "torch.distributed.tensor.experimental._context_parallel._attention"
        ":_context_parallel_buffers"
    ),
    "create_context_parallel_mask": (
        "torch.distributed.tensor.experimental._context_parallel._attention:_create_cp_block_mask"
    ),
    "context_parallel_options": (
        "torch.distributed.tensor.experimental._context_parallel._attention:_cp_options"
    ),
    # --- tools ---
    # A table of shards in colours, which takes them as we find them.
    "create_rich_table": "torch.distributed.tensor.debug._visualize_sharding:_create_rich_table",
    # What torch.testing.assert_close makes of DTensors first; new in torch 2.12.
    "unwrap_for_comparison": "torch.testing._comparison:_unwrap_dtensor_for_comparison",
    # --- groups, data parallelism ---
    # The collectives that DTensor and torchtitan call; they also register gradients.
    "functional_collectives": "torch.distributed._functional_collectives",
    # How they name groups, replaced by what knows xla meshes' groups, too. The second is new in
    # torch 2.12.
    "resolve_group_name": "torch.distributed._functional_collectives:_resolve_group_name",
    "resolve_group": "torch.distributed._functional_collectives:_resolve_group",
    "group_size_by_name": "torch.distributed.distributed_c10d:_get_group_size_by_name",
    "process_group_name": "torch.distributed.distributed_c10d:_get_process_group_name",
    # What fully_shard and replicate are made with, so that torch's checks see ours as theirs.
    "contract": "torch.distributed._composable:contract",
    "contract_registry": "torch.distributed._composable.contract:_get_registry",
    "CONTRACT_STATE": "torch.distributed._composable.contract:STATE_KEY",
    "ComposableState": "torch.distributed._composable_state:_State",
    # torch's two `replicate`, public nowhere, which programs call: something else for xla meshes.
    "composable_replicate": "torch.distributed._composable:replicate",
    "replicate_with_fsdp": "torch.distributed._composable.replicate_with_fsdp:replicate",
    # The classes of meshes that a shard_placement_fn may return.
    "fsdp_common": "torch.distributed.fsdp._fully_shard._fsdp_common",
    # Of several modules those that no other one contains.
    "get_root_modules": "torch.distributed.utils:_get_root_modules",
    # --- torchrun's agent ---
    # How it ends processes; replaced, as how long they may take can be said of its own end only.
    "close_processes": "torch.distributed.elastic.multiprocessing.api:PContext.close",
    # --- checkpoints ---
    # Where a tensor is in a file, which the files' metadata name, and what they name besides.
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "MemoryFormatEncoding": "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
    # A parameter's names without those of wrappers.
    "get_fqns": "torch.distributed.checkpoint.state_dict:_get_fqns",
    # `load` and `save` without what they ask of process groups.
    "load_state_dict": "torch.distributed.checkpoint.state_dict_loader:_load_state_dict",
    # What a GradScaler notes between unscale_, step and update; where it decides, makes its scale.
    "maybe_step_of_scaler": "torch.amp.grad_scaler:GradScaler._maybe_opt_step",
    "begin_of_scaler": "torch.amp.grad_scaler:GradScaler._lazy_init_scale_growth_tracker",
    "save_state_dict": "torch.distributed.checkpoint.state_dict_saver:_save_state_dict",
    # What `async_save` does first with objects that have a state.
    "stateful_to_state_dict": (
        "torch.distributed.checkpoint.state_dict_saver:_stateful_to_state_dict"
    ),
    # How torch's planners talk to other processes, which ours do by JAX: the class, and where it is
    # replaced.
    "DistWrapper": "torch.distributed.checkpoint.utils:_DistWrapper",
    "DistWrapper_of_saver": "torch.distributed.checkpoint.state_dict_saver:_DistWrapper",
    "DistWrapper_of_loader": "torch.distributed.checkpoint.state_dict_loader:_DistWrapper",
    # What get_model_state_dict and its siblings make of their options.
    "verify_options": "torch.distributed.checkpoint.state_dict:_verify_options",
    # --- pipelines ---
    # The bases of torch's schedules and stages, and so of ours.
    "PipelineScheduleBase": "torch.distributed.pipelining.schedules:_PipelineSchedule",
    "PipelineStageBase": "torch.distributed.pipelining.stage:_PipelineStageBase",
    # Microbatches as torch cuts them.
    "split_tensor": "torch.distributed.pipelining.microbatch:_split_tensor",
}

# Of these the ones that older supported versions lack: `find` gives None there.
SINCE = {"resolve_group": (2, 12), "unwrap_for_comparison": (2, 12)}

_borrowed = Borrowed("torch", NAMES, __name__)
find, replace = _borrowed.find, _borrowed.replace


def __getattr__(name: str) -> Any:
    return _borrowed.get(name)


# --- values that change --------------------------------------------------------------------------


def is_in_forward_ad() -> bool:
    """Whether a ``forward_ad.dual_level()`` block is open; `torch.func.jvp` opens one."""
    return forward_ad._current_level >= 0


def parametrizations_are_cached() -> bool:
    """Whether a ``torch.nn.utils.parametrize.cached()`` block is open."""
    return bool(parametrize._cache_enabled)


def set_compiling(value: bool) -> bool:
    """What ``torch.compiler.is_compiling()`` tells programs from now on.

    Returns:
        what it told before.
    """
    if value:
        # Operations of a trace import it, and what it notes of torch while this tells that
        # something is compiled lets later torch.compile calls fail (of `torch.utils._pytree`).
        importlib.import_module("torch._dynamo")
    compiler: Any = torch.compiler
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, value
    return bool(before)


def activation_memory_budget() -> float:
    """How much of what a compiled backward pass would find saved it may: 1, all, where nobody has
    set it. The module that has it is torch.compile's, and may never be imported."""
    config: Any = sys.modules.get(FUNCTORCH_CONFIG)
    return 1.0 if config is None else float(config.activation_memory_budget)


def load_functional_collectives() -> None:
    """Import what registers gradients of ``torch.ops._c10d_functional``."""
    _borrowed.get("functional_collectives")


# --- modules that hooks wait for: a program may never import them --------------------------------

# CommDebugMode, ExplicitRedistributionContext, DTensor's seed and its functions.
COMM_MODE = "torch.distributed.tensor.debug._comm_mode"
DTENSOR_UTILS = "torch.distributed.tensor._utils"
DTENSOR_RANDOM = "torch.distributed.tensor._random"
DTENSOR_API = "torch.distributed.tensor._api"
VISUALIZE_SHARDING = "torch.distributed.tensor.debug._visualize_sharding"
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"
# torch.testing.assert_close.
COMPARISON = "torch.testing._comparison"
# torch.compile's settings.
FUNCTORCH_CONFIG = "torch._functorch.config"
# torch.compile: what it looks into, and what it makes of a tensor.
DYNAMO_RULES = "torch._dynamo.trace_rules"
DYNAMO_VARIABLES = "torch._dynamo.variables.builder"


def debug_mode() -> str:
    """The module of ``DebugMode``, a package since torch 2.12."""
    found = importlib.util.find_spec("torch.utils._debug_mode")
    is_package = found is not None and found.submodule_search_locations is not None
    return "torch.utils._debug_mode" + ("._mode" if is_package else "")


# --- optimizers ----------------------------------------------------------------------------------

# The modules of torch.optim, and the functions in them that compute an update: of tensors one by
# one, or of lists of them, which ours run as one launch.
OPTIMIZER_FUNCTIONS = {
    "_adafactor": ("_single_tensor_adafactor", "_multi_tensor_adafactor"),
    "adadelta": ("_single_tensor_adadelta", "_multi_tensor_adadelta"),
    "adagrad": ("_single_tensor_adagrad", "_multi_tensor_adagrad", "_fused_adagrad"),
    "adam": ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"),  # AdamW's, too
    "adamax": ("_single_tensor_adamax", "_multi_tensor_adamax"),
    "_muon": ("_single_tensor_muon",),
    "asgd": ("_single_tensor_asgd", "_multi_tensor_asgd"),
    "nadam": ("_single_tensor_nadam", "_multi_tensor_nadam"),
    "radam": ("_single_tensor_radam", "_multi_tensor_radam"),
    "rmsprop": ("_single_tensor_rmsprop", "_multi_tensor_rmsprop"),
    "rprop": ("_single_tensor_rprop", "_multi_tensor_rprop"),
    "sgd": ("_single_tensor_sgd", "_multi_tensor_sgd", "_fused_sgd"),
}
# What the fused ones call, and the operations behind it, whose schemas have floats.
_FUSED = "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"
FUSED_OPTIMIZERS = {getattr(torch, name): getattr(torch.ops.aten, name) for name in _FUSED}


# --- versions ------------------------------------------------------------------------------------

# Checked on 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0; what differs is written where it matters.
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

# Overloads whose composite forgets ``out=`` of tensor subclasses, and before torch 2.13 of all
# tensors while a dispatch mode is on.
OUT_FORGOTTEN = (
    "linalg_matrix_rank.atol_rtol_float_out",
    "linalg_matrix_rank.atol_rtol_tensor_out",
    "linalg_matrix_rank.out",
    "linalg_matrix_rank.out_tol_tensor",
)

# Before torch 2.13, DTensor's C++ fast path took over for subclasses of DTensor too, and never
# called their ``__torch_dispatch__``.
SUBCLASSES_DISPATCH = TORCH_VERSION >= (2, 13)
