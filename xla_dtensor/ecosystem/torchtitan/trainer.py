"""torchtitan on xla meshes: hooks into its trainer, models and losses.

Nothing of torchtitan is copied or changed on disk. It is hooked when it is imported, and does for
other devices what it did. Read and checked in torchtitan 0.3.0 and 0.2.2. docs/torchtitan.md says
what runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from xla_dtensor.base import torch_private
from xla_dtensor.ecosystem.torchtitan import budget, data, step
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching import callers
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over

# Modules of Triton kernels that torchtitan imports with everything else, also where none is called.
_TRITON_KERNELS = (
    "torchtitan.distributed.minimal_async_ep.kernels",  # 0.3.0
    "torchtitan.models.moe.kernels",  # 0.2.2
)


def install() -> None:
    """When its modules are imported."""
    for name in ("torchtitan", "torchtitan.models"):  # 0.2.2's imports its kernels itself
        on_import(name, _stand_in_for_triton)
    on_import("torchtitan.components.loss", _hook_loss)
    on_import("torchtitan.config.configurable", _hook_building)
    on_import("torchtitan.distributed.parallel_dims", _hook_meshes)
    on_import("torchtitan.distributed.cudagraph", _hook_graphs)
    on_import("torchtitan.distributed.compile", _hook_compile)
    on_import("torchtitan.distributed.activation_checkpoint", budget.hook_activations)
    on_import("torchtitan.tools.profiler", _hook_profiler)
    on_import("torchtitan.trainer", step.hook_trainer)
    on_import("torchtitan.distributed.utils", _hook_utils)
    on_import("torchtitan.components.checkpointer.base", _hook_checkpoints)
    on_import("torchtitan.components.quantization", _hook_quantization)
    on_import("torchtitan.models.common.moe", _hook_experts)
    on_import("torchtitan.models.common.token_dispatcher", _hook_dispatcher)
    callers.rank_means_process("torchtitan.")
    callers.rank_may_be_a_tensor("torchtitan.models.common.embedding")


def _stand_in_for_triton(module: Any) -> None:
    """Where there is no Triton, modules whose kernels raise when they are launched."""
    if importlib.util.find_spec("triton") is not None:
        return
    for name in _TRITON_KERNELS:
        sys.modules.setdefault(name, _Kernels(name))


class _Kernels(types.ModuleType):
    """A module that has a kernel of every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")


class _Kernel:
    """A kernel, which can be imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedOpError(
            f"{self._name} is a Triton kernel, and there is no Triton here: choose a part of "
            "torchtitan that does without (the standard token dispatcher for expert parallelism)"
        )

    __call__ = __getitem__ = _refuse


# --- what is refused -----------------------------------------------------------------------------


def _hook_quantization(module: Any) -> None:
    for name in getattr(module, "__all__", ()):  # 0.2.2 has none: its converters want torchao
        if name.endswith("Converter") and "__init__" in vars(getattr(module, name)):
            message = (
                f"torchtitan's {name}: its kernels are CUDA's, and XLA has no counterpart here; "
                "train in bfloat16 (training.mixed_precision_param), without the converter"
            )
            _refuse_on_xla(getattr(module, name).__init__, message)


def _hook_compile(module: Any) -> None:
    _refuse_on_xla(
        module.apply_compile,
        "torchtitan's compile.enable: torch.compile makes no programs for XLA. Leave it out: "
        "forward and backward are one XLA program without (training.disable_cuda_graphs=False). A "
        "memory budget of activation checkpointing, which wants it, may have it",
        unless=budget.is_within,
    )


def _hook_profiler(module: Any) -> None:
    _refuse_on_xla(
        module.MemoryProfiler.__init__,
        "torchtitan's profiler.enable_memory_snapshot: the allocator is XLA's, which keeps no "
        "history; xla_dtensor.plan says what a step needs, and the metrics have the peak where "
        "the devices report it",
    )


def _refuse_on_xla(
    function: Any, message: str, unless: Callable[[Any], bool] | None = None
) -> None:
    """Let a function raise where torchtitan trains on xla devices; where ``unless`` says so of its
    first argument, it does nothing there."""

    def refuse(original: Any, args: Any, kwargs: Any) -> Any:
        from torchtitan.tools.utils import device_type

        if device_type != "xla":
            return original(*args, **kwargs)
        if unless is not None and unless(args[0]):
            return None
        raise UnsupportedOpError(message)

    take_over(function, refuse)


# --- the model ------------------------------------------------------------------------------------


def _hook_experts(module: Any) -> None:
    from xla_dtensor.ecosystem.torchtitan import experts

    experts.hook_experts(module)


def _hook_dispatcher(module: Any) -> None:
    from xla_dtensor.ecosystem.torchtitan import experts

    experts.hook_dispatcher(module)


def _hook_loss(module: Any) -> None:
    budget.hook_loss(module)
    function = getattr(module, "_LossParallelCrossEntropy", None)
    if function is not None:
        take_over(function.forward, functools.partial(_cross_entropy, module.IGNORE_INDEX))


def _cross_entropy(ignored: int, original: Any, args: Any, kwargs: Any) -> Any:
    """``_LossParallelCrossEntropy.forward`` of per-device logits, each device's part of the
    classes. torchtitan's makes Python numbers of the rank (``min``, ``max``, ``if``); the gradient,
    which doesn't, is its own.
    """
    logits = args[1] if len(args) > 1 else kwargs["logits"]
    if logits.device.type != "xla":
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    ctx, logits, labels, group, classes, reduction = given.arguments.values()
    from xla_dtensor.mesh.group import resolve_group
    from xla_dtensor.movement import collectives

    found = resolve_group(group)
    assert found is not None
    own = logits.shape[-1]
    if own * found.size() != classes:
        raise UnsupportedOpError(
            f"the vocab-parallel loss of {classes} classes over {found.size()} devices of {own} "
            "each: all devices need as many classes; pad the vocabulary"
        )
    first = collectives.index_in(found) * own
    scores, targets = logits.flatten(0, -2).float(), labels.flatten()
    funcol = torch_private.functional_collectives
    highest = funcol.all_reduce(scores.amax(-1, keepdim=True), "max", group)
    shifted = scores - highest
    log_total = funcol.all_reduce(shifted.exp().sum(-1, keepdim=True), "sum", group).log()
    log_probabilities = shifted - log_total
    counts = targets != ignored
    place = torch.where(counts, targets, 0) - first
    elsewhere = (place < 0) | (place >= own)
    picked = log_probabilities.gather(-1, place.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    loss = -funcol.all_reduce(picked.masked_fill(elsewhere, 0), "sum", group)
    loss = torch.where(counts, loss, 0)
    ctx.save_for_backward(log_probabilities, targets)
    ctx.logits_shape, ctx.logits_dtype = logits.shape, logits.dtype
    ctx.vocab_start, ctx.local_vocab_size, ctx.reduction = first, own, reduction
    return loss if reduction == "none" else loss.sum()


# --- the trainer ---------------------------------------------------------------------------------


def _hook_building(module: Any) -> None:
    take_over(module.Configurable.Config.build, data.build_loaders)


def _hook_meshes(module: Any) -> None:
    take_over(module.ParallelDims.get_mesh, _get_mesh)


def _get_mesh(original: Any, args: Any, kwargs: Any) -> Any:
    """The trainer, when it is made, asks the mesh of the batch for the rank whose data to read."""
    mesh = original(*args, **kwargs)
    if mesh.device_type != "xla" or mesh.mesh_dim_names != ("batch",):
        return mesh
    caller = sys._getframe(3).f_code.co_qualname
    return data.RanksOfBatch(mesh) if caller == "Trainer.__init__" else mesh


def _hook_graphs(module: Any) -> None:
    take_over(module.wrap_with_cuda_graph, _compile)


def _compile(original: Any, args: Any, kwargs: Any) -> Any:
    """What a CUDA graph is on a GPU, forward and backward without Python: one compiled program."""
    from torchtitan.tools.utils import device_type

    if device_type != "xla":
        return original(*args, **kwargs)
    from xla_dtensor.compilation import compile as compile_step

    return compile_step(args[0])


def _hook_utils(module: Any) -> None:
    take_over(module.set_pg_timeouts, _set_timeouts)
    take_over(module.init_distributed, _count_devices)
    take_over(module.set_determinism, _seeded)
    if hasattr(module, "get_spmd_context"):  # not in 0.2.2
        take_over(module.get_spmd_context, _enter_once)


def _enter_once(original: Any, args: Any, kwargs: Any) -> Any:
    """The context of forward and backward names its meshes when it is entered: it is before the
    first step, which then finds what the others find, and is the same program."""
    context, dims = original(*args, **kwargs), kwargs.get("parallel_dims")
    typed = dims is not None and dims.spmd_backend == "spmd_types"
    if typed and dims.world_mesh.device_type == "xla":
        with context():
            pass
    return context


def _count_devices(original: Any, args: Any, kwargs: Any) -> Any:
    """torchtitan's world has a rank for each device; a launcher's, one for each process."""
    from torchtitan.tools.utils import device_type

    world_size = original(*args, **kwargs)
    if device_type != "xla":
        return world_size
    from xla_dtensor import runtime
    from xla_dtensor.runtime import distributed, processes

    distributed.initialize()
    if not processes.several():
        return world_size
    runtime.start()
    return runtime.device_count()


def _seeded(original: Any, args: Any, kwargs: Any) -> Any:
    """Where no seed is given the ranks agree on one, and read it from the devices. In `xd.abstract`
    nothing comes of a seed."""
    from xla_dtensor.runtime import abstract

    call = inspect.signature(original).bind(*args, **kwargs)
    given = call.arguments.get("debug_config")
    if abstract.current() is not None and given is not None and given.seed is None:
        call.arguments["debug_config"] = dataclasses.replace(given, seed=0)
    return original(*call.args, **call.kwargs)


def _set_timeouts(original: Any, args: Any, kwargs: Any) -> Any:
    """After the first step collectives are to time out earlier. XLA's don't time out; that all
    have come so far is waited for, as there."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if given["parallel_dims"].world_mesh.device_type != "xla":
        return original(*args, **kwargs)
    torch.distributed.barrier()
    return None


def _hook_checkpoints(module: Any) -> None:
    take_over(module._shares_storage, _share_storage)


def _share_storage(original: Any, args: Any, kwargs: Any) -> Any:
    """Whether two entries of a state are one memory; torchtitan looks at addresses."""
    storages = [getattr(tensor, "_storage_", None) for tensor in args]
    if None in storages:
        return original(*args, **kwargs)
    return storages[0] is storages[1]
