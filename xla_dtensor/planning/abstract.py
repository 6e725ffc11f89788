"""``xd.abstract``: models, layouts and optimizers without data, for devices that aren't here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_dtensor import runtime
from xla_dtensor.base import executor, torch_private
from xla_dtensor.base.torch_private import device_mode
from xla_dtensor.execution import lazy
from xla_dtensor.runtime import topologies
from xla_dtensor.runtime.abstract import enter, leave


class abstract:
    """In the block, tensors on ``"xla"`` have shapes, dtypes and layouts, and no data: models,
    ``fully_shard``, ``parallelize_module``, ``distribute_tensor``, factories and optimizers work as
    ever, on meshes of ``topology``'s devices, which need not exist, and cost no memory. `plan` says
    what a step on them would need.

    Tensors that torch makes without a ``device=`` (parameters, ``torch.randn``) are made on
    ``"xla"`` there; those with ``device="cpu"``, with a generator, or from values
    (``torch.tensor``, ``torch.arange``) are the CPU's, as ever, and so is the one integer
    (``torch.empty((), dtype=torch.int64)``) with which torch's loaders draw their seeds. Meshes and
    tensors of the block are of no use outside of it.

    Args:
        topology: a kind and a shape in chips: ``"v5e:16x16"``, ``"v5p:4x4x4"``, ``"v6e:8x8"``,
            ``"tpu7x:2x2x1"`` (these need libtpu, and no TPU); hosts and the GPUs of each:
            ``"h100:8x8"`` (these need XLA's GPU compiler, and no GPU); ``"cpu:64"`` for simulated
            devices, ``"gpu:8"`` for this machine's.

    Raises:
        TopologyError: there is no such topology here; another thread is in such a block; or, in the
            block, a mesh doesn't fit into it.
        DataDependentError: in the block, Python wants the value of such a tensor.

    Example::

        import torch, xla_dtensor as xd

        with xd.abstract("cpu:8"):
            mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            model = torch.nn.Linear(2**20, 2**20)  # four terabytes, if it were there
            xd.distribute_module(model, mesh)
            assert model.weight.placements == (xd.Replicate(), xd.Replicate())
    """

    def __init__(self, topology: str) -> None:
        self.topology = topologies.topology(topology)
        self._before: list[Any] = []

    def __enter__(self) -> abstract:
        lazy.flush_all()
        elsewhere = not self.topology.is_here
        if elsewhere:
            runtime.start()  # JAX reads XLA's flags when it starts
        before = enter(self.topology)
        # Hidden from libtpu, which ends the process at a flag that it doesn't know. It has
        # LIBTPU_INIT_ARGS.
        flags = os.environ.pop("XLA_FLAGS", None) if elsewhere else None
        mode = _OnDevices()
        mode.__enter__()
        draw = torch_private.draw_truncated
        torch_private.replace("draw_truncated", _without_data(draw))
        self._before.append((before, mode, flags, draw))
        return self

    def __exit__(self, *exc_info: object) -> None:
        before, mode, flags, draw = self._before.pop()
        torch_private.replace("draw_truncated", draw)
        leave(before)
        mode.__exit__(*exc_info)
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


# What makes a tensor without being given its values.
_FACTORIES = frozenset(
    {
        *(torch.empty, torch.empty_strided, torch.empty_permuted, torch.zeros, torch.ones),
        *(torch.full, torch.rand, torch.randn, torch.randint),
    }
)


class _OnDevices(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in _FACTORIES
            and kwargs.get("device") is None
            and kwargs.get("generator") is None
            and kwargs.get("out") is None
            and device_mode.CURRENT_DEVICE is None  # `with torch.device(...)`
            and executor.trace() is None  # a step does what it would do outside
            and not _is_for_python(func, args, kwargs)
        ):
            kwargs = {**kwargs, "device": "xla"}
        return func(*args, **kwargs)


def _is_for_python(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is the one integer with which torch's loaders and samplers draw their seeds."""
    return func is torch.empty and args == ((),) and kwargs.get("dtype") is torch.int64


def _without_data(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``draw``, but for tensors of the block: it draws again what is out of bounds, so it asks
    whether anything is, and here there are no values."""

    def draw_truncated(
        tensor: torch.Tensor, mean: float, std: float, *bounds: float, generator: Any = None
    ) -> torch.Tensor:
        if tensor.device.type != "xla" or executor.trace() is not None:
            return draw(tensor, mean, std, *bounds, generator=generator)
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator)

    return draw_truncated
