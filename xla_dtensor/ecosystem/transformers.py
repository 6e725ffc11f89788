"""``from_pretrained(tp_plan="auto")`` of Hugging Face transformers on xla meshes.

transformers starts a process per device, which reads its shards of a checkpoint and asks the mesh
for its rank. Here one process, or each of several, reads the checkpoint as it is without a plan,
and transformers' own plan is applied to the model that is there. Nothing of transformers is copied
or changed on disk. Read and checked in 5.23.0. docs/transformers.md says what runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xla_dtensor.base import ours
from xla_dtensor.base.torch_private.attributes import parameters_of
from xla_dtensor.ecosystem import accelerate_sharding, transformers_generate
from xla_dtensor.errors import MeshMismatchError, UnsupportedOpError
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import Handler, take_over

logger = logging.getLogger("xla_dtensor")


def install() -> None:
    """When its modules are imported."""
    for name, (path, handler) in _functions().items():
        on_import(name, functools.partial(_hook, path, handler))
    on_import("transformers.cache_utils", _is_attributes("Cache", "CacheLayerMixin"))
    on_import("transformers.generation.logits_process", _is_attributes("LogitsProcessor"))
    on_import("transformers.generation.utils", transformers_generate.install)
    on_import("transformers.integrations.sdpa_attention", _groups)


def _groups(module: Any) -> None:
    """Attention takes groups of queries with a mask, which torch's CUDA kernels don't: keys and
    values aren't repeated for them, a copy of the whole cache for each token."""

    def in_groups(original: Any, args: Any, kwargs: Any) -> Any:
        key, value = args[1:3] if len(args) > 2 else (kwargs.get("key"), kwargs.get("value"))
        if ours.is_ours(key) and key.shape[-1] == value.shape[-1]:
            return True
        return original(*args, **kwargs)

    function = getattr(module, "use_gqa_in_sdpa", None)
    if function is not None:
        take_over(function, in_groups)


def _is_attributes(*names: str) -> Callable[[Any], None]:
    """Among a compiled step's arguments objects of these classes are their tensors and numbers:
    other ones in each ``generate`` are no other program."""

    def tell(module: Any) -> None:
        from xla_dtensor.compilation.objects.kinds import made_of_attributes

        made_of_attributes(*(getattr(module, name) for name in names if hasattr(module, name)))

    return tell


def _functions() -> dict[str, tuple[str, Handler]]:
    """Per module the function that does something else, and what."""
    return {
        "transformers.distributed.configuration_utils": (
            "DistributedConfig._resolve_parallelism",
            _sizes,
        ),
        "transformers.distributed.utils": ("initialize_distributed_mesh", _meshes),
        "transformers.distributed.mixin": (
            "DistributedMixin.maybe_distribute_model.__func__",
            _later,
        ),
        "transformers.modeling_utils": ("PreTrainedModel._finalize_model_loading", _loaded),
    }


_hooked: set[str] = set()


def _hook(path: str, handler: Handler, module: Any) -> None:
    """Let a function of ``module`` do something else, if this version of transformers has it."""
    function = module
    for name in path.split("."):
        function = getattr(function, name, None)
    if function is not None:
        take_over(function, handler)
        _hooked.add(path)


def _ours() -> bool:
    """Whether models are distributed over xla devices: unless the processes talk by another
    backend, or transformers is one that does it in other functions."""
    from torch import distributed

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "xla":
        return False
    for name in _functions():  # a plan may be made before there is a model
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if len(_hooked) < len(_functions()):
        return False
    return not distributed.is_initialized() or distributed.get_backend() == "xla"


def _sizes(original: Any, args: Any, kwargs: Any) -> Any:
    """Where ``tp_size`` is left open, it is what the current mesh has, or all devices."""
    config = args[0]
    if config.tp_size is None and config.tp_plan is not None and _ours():
        config.tp_size = _open_size(config)
    return original(*args, **kwargs)


def _open_size(config: Any) -> int:
    from xla_dtensor import runtime

    mesh = _current()
    if mesh is not None:
        return int(mesh.size())
    runtime.start()
    others = (config.pp_size or 1) * (config.dp_replicate_size or 1) * (config.fsdp_size or 1)
    size = max(1, runtime.device_count() // others)
    if size == 1:
        logger.warning(
            "xla_dtensor: transformers' tp_plan over one device shards nothing; make a mesh current"
            " (with xd.init_device_mesh('xla', (4,)): ...), or give tp_size"
        )
    return size


def _current() -> Any:
    """The tensor-parallel mesh that the user has made current, or accelerate's, or None."""
    from xla_dtensor.mesh import current_mesh

    mesh = current_mesh() or accelerate_sharding.tensor_parallel_mesh()
    if mesh is None or mesh.device_type != "xla" or mesh.ndim == 1:
        return mesh
    if "tp" not in (mesh.mesh_dim_names or ()):
        raise MeshMismatchError(
            f"transformers' tensor parallelism, and the current mesh {mesh!r} has no dim 'tp': "
            "make the mesh of the devices that share a layer current (with mesh['model']: ...)"
        )
    return mesh["tp"]


def _meshes(original: Any, args: Any, kwargs: Any) -> Any:
    config: Any = args[0] if args else kwargs["distributed_config"]
    if not _ours():
        return original(*args, **kwargs)
    others = {
        "pp_size": "stages of torch's schedules on meshes of their own, docs/pipeline.md",
        "ep_size": "xd.parallel.shard_by_size(model, mesh), which cuts experts as well",
        "fsdp_size": "xd.fully_shard(model, mesh=mesh['dp']) of the model that was loaded",
        "dp_replicate_size": "xd.replicate(model, mesh=mesh['dp']) of the model that was loaded",
    }
    for name, way in others.items():
        if getattr(config, name) > 1:
            raise UnsupportedOpError(
                f"transformers' DistributedConfig({name}={getattr(config, name)}) is for meshes "
                f"that it makes itself, one process per device; use {way}"
            )
    if config.tp_size == 1:
        return original(*args, **kwargs)
    return None, _Meshes(config.tp_size)


class _Meshes:
    """What transformers has its meshes in (``TransformersDeviceMesh``): the user's, or a new one.

    Raises:
        MeshMismatchError: the user's has another size.
    """

    def __init__(self, size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = _current()
        if mesh is not None and mesh.size() != size:
            raise MeshMismatchError(
                f"transformers' DistributedConfig(tp_size={size}), and the current mesh {mesh!r} "
                f"has {mesh.size()} devices for it: leave tp_size out, or make another one current"
            )
        self._mesh = mesh or init_device_mesh("xla", (size,), mesh_dim_names=("tp",))

    def get_mesh(self, dims: Any) -> Any:
        """The mesh of these dims, of which "tp" alone has devices."""
        return self._mesh


def _later(original: Any, args: Any, kwargs: Any) -> Any:
    """The plan is applied to a model without values; here to one that has been loaded."""
    _, model, _, manager = args
    if not isinstance(manager, _Meshes):
        return original(*args, **kwargs)
    model.__dict__["_xla_plan"] = original, args
    return model


def _loaded(original: Any, args: Any, kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    model = args[0]
    plan = model.__dict__.pop("_xla_plan", None)
    if plan is not None:
        _untie(model)  # a plan has a rule for each name
        distribute, arguments = plan
        distribute(*arguments)
        model.to("xla")
        model.tie_weights()
    return result


def _untie(model: nn.Module) -> None:
    """Let each name have a parameter object of its own, over the memory that it had."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is None:
                continue
            if id(parameter) in seen:
                parameters_of(module)[name] = nn.Parameter(
                    parameter.detach(), requires_grad=parameter.requires_grad
                )
            seen.add(id(parameter))
