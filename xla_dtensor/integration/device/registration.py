"""The "xla" device: torch's out-of-tree backend (PrivateUse1), under the name that meshes use.

C++ then sees a real ``xla:0``: device arguments, ``.cpu()``, autograd's device thread, optimizers'
device checks and ``torch.accelerator`` work by themselves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import backend_registration

from xla_dtensor.base import interrupts
from xla_dtensor.base.ours import is_ours
from xla_dtensor.base.torch_private import (
    OUT_FORGOTTEN,
    DeviceGuard,
    DeviceType,
    PrivateUse1Hooks,
    privateuse1_name,
    register_device_guard,
    register_device_hooks,
    register_device_module,
)
from xla_dtensor.integration.device import device_module
from xla_dtensor.integration.operators import backward, composites
from xla_dtensor.tensors.backend import backend

_library: torch.library.Library | None = None


def install() -> None:
    """Register the device.

    Raises:
        RuntimeError: another backend owns PrivateUse1 already.
    """
    current = privateuse1_name()
    if current == "xla" and getattr(getattr(torch, "xla", None), "__xla_dtensor__", False):
        return
    if current != "privateuseone":
        raise RuntimeError(
            f"xla_dtensor needs torch's out-of-tree device slot (PrivateUse1), but {current!r} has "
            "taken it in this process. Run without that backend: don't import it (torch_npu, "
            "torchax, ...), and where torch imports it by itself, as it does with every backend "
            "that is installed (torch_tpu), set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
    # Not torch's generate_methods_for_privateuse1_backend: its is_xla collides with torch's own.
    backend_registration.rename_privateuse1_backend("xla")
    register_device_module("xla", device_module.make())
    register_device_hooks(_Hooks())
    register_device_guard(_DeviceGuard())
    _register_kernels()
    composites.install()
    backward.install()


# C++ asks these from ``noexcept`` functions, among others: nothing may be raised in them.
class _Hooks(PrivateUse1Hooks):
    @interrupts.atomic
    def is_available(self) -> bool:
        return True

    @interrupts.atomic
    def has_primary_context(self, dev_id: int) -> bool:
        return True

    @interrupts.atomic
    def is_built(self) -> bool:
        return True


_PRIVATEUSE1 = DeviceType.PrivateUse1
# A global name: while an exception is pending, CPython's look-up of an attribute clears it if the
# type's method cache doesn't know the name (``_PyType_Lookup``).
_EXHAUSTED = interrupts.EXHAUSTED


class _DeviceGuard(DeviceGuard):
    @interrupts.atomic
    def type_(self) -> Any:
        # `interrupts.put_error_aside`, which this is, would be a further call, and C++ asks a few
        # times for each operation.
        try:
            next(_EXHAUSTED, None)
        except BaseException as error:
            interrupts.put_aside(error)
        return _PRIVATEUSE1


# Overloads that take a device and no tensor. Everything else reaches the tensor classes themselves.
_FACTORIES = (
    "_efficientzerotensor",
    "arange",
    "arange.start",
    "arange.start_step",
    "empty.memory_format",
    "empty_strided",
    "eye",
    "eye.m",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "rand.generator",
    "randint",
    "randint.generator",
    "randint.low",
    "randint.low_generator",
    "randn",
    "randn.generator",
    "randperm",
    "randperm.generator",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)

# Overloads that torch would take apart above autograd if they had no kernel of ours, and must not:
# the composite is not what the CPU computes, or forgets its `out=`.
_WHOLE = (
    *OUT_FORGOTTEN,
    "mish_backward",
    "native_channel_shuffle",
    "set_.source_Tensor_storage_offset",
    "silu_backward",
)


def _register_kernels() -> None:
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES + _WHOLE:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        _library.impl(name, functools.partial(_dispatch, func), "PrivateUse1")
    # torch.tensor(..., device="xla") copies into the new tensor past its class's dispatch, and
    # torch.tensor([x[0], 2.0]) asks for numbers so.
    for name, kernel in {"copy_": _dispatch, "_local_scalar_dense": _number}.items():
        func = getattr(torch.ops.aten, name).default
        _library.impl(name, functools.partial(kernel, func), "PrivateUse1")


def _number(func: Any, tensor: torch.Tensor) -> Any:
    if not is_ours(tensor):  # torch asks past the dispatch of whatever it is
        raise NotImplementedError(
            f"torch.tensor of a list with a {type(tensor).__name__} on {tensor.device} in it: "
            "torch asks for its number past its class; give the number, x.item()"
        )
    return _dispatch(func, tensor)


@interrupts.atomic
def _dispatch(func: Any, *args: Any, **kwargs: Any) -> Any:
    from xla_dtensor import runtime

    runtime.start()
    return backend().dispatch(func, args, kwargs)
