"""The "xla" device: torch's out-of-tree backend (PrivateUse1), under the name that meshes use.

C++ then sees a real ``xla:0``: device arguments, ``.cpu()``, autograd's device thread, optimizers'
device checks and ``torch.accelerator`` work by themselves.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration

from xla_dtensor.base import assertions, interrupts, rng, thread_state
from xla_dtensor.integration import backward, composites
from xla_dtensor.tensors.backend import backend

_library: torch.library.Library | None = None


def install() -> None:
    """Register the device.

    Raises:
        RuntimeError: another backend owns PrivateUse1 already.
    """
    current = torch._C._get_privateuse1_backend_name()
    if current == "xla" and getattr(getattr(torch, "xla", None), "__xla_dtensor__", False):
        return
    if current != "privateuseone":
        raise RuntimeError(
            f"xla_dtensor needs torch's out-of-tree device slot (PrivateUse1), but {current!r} has "
            "taken it in this process; import xla_dtensor without that backend (torch_npu, "
            "torchax, ...)"
        )
    # Not torch's generate_methods_for_privateuse1_backend: its is_xla collides with torch's own.
    backend_registration.rename_privateuse1_backend("xla")
    torch._register_device_module("xla", _device_module())
    torch._C._acc.register_python_privateuseone_hook(_Hooks())
    torch._C._acc.register_python_privateuseone_device_guard(_DeviceGuard())
    _register_kernels()
    composites.install()
    backward.install()


# C++ asks these from ``noexcept`` functions, among others: nothing may be raised in them.
class _Hooks(torch._C._acc.PrivateUse1Hooks):
    @interrupts.atomic
    def is_available(self) -> bool:
        return True

    @interrupts.atomic
    def has_primary_context(self, dev_id: int) -> bool:
        return True

    @interrupts.atomic
    def is_built(self) -> bool:
        return True


_PRIVATEUSE1 = torch._C._autograd.DeviceType.PrivateUse1


class _DeviceGuard(torch._C._acc.DeviceGuard):
    @interrupts.atomic
    def type_(self) -> Any:
        interrupts.put_error_aside()
        return _PRIVATEUSE1


class _DeviceContext:
    """``torch.xla.device(index)``: there is one device, so entering it changes nothing."""

    def __init__(self, device: Any) -> None:
        _set_device(device)
        self.index = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


def _device_module() -> types.ModuleType:
    """``torch.xla``. The process's devices act as one torch device, ``xla:0``."""
    module = types.ModuleType("torch.xla")
    functions: dict[str, Callable[..., Any]] = {
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": _set_device,
        "_is_in_bad_fork": lambda: False,
        "synchronize": _synchronize,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "initial_seed": rng.initial_seed,
        "get_rng_state": lambda device="xla": rng.get_state(),
        "set_rng_state": lambda state, device="xla": rng.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    module.device = _DeviceContext  # type: ignore[attr-defined]
    module._initialized = True  # type: ignore[attr-defined]
    module.__xla_dtensor__ = True  # type: ignore[attr-defined]
    module.__doc__ = "The xla device of xla_dtensor."
    return module


def _set_device(device: Any) -> None:
    if isinstance(device, int):
        device = f"xla:{device}" if device > 0 else "xla"  # a negative one: as it is
    if device is not None:
        from xla_dtensor.dispatch import refuse_other_device

        refuse_other_device("torch.xla", torch.device(device))


def _manual_seed(seed: int) -> None:
    trace = thread_state.current()
    if trace is not None:
        trace.refuse(
            "torch.manual_seed (seed outside of the step, or every step is the same), which"
        )
    rng.manual_seed(seed)


def _synchronize(device: Any = None) -> None:
    """Wait until the devices have done what was asked of them."""
    import jax

    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])
    assertions.look()


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
    "randint",
    "randint.low",
    "randn",
    "randperm",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)

# Overloads that torch would take apart above autograd if they had no kernel of ours, and must not:
# the composite is not what the CPU computes, or doesn't write its `out=` for tensor subclasses.
_WHOLE = (
    "linalg_matrix_rank.atol_rtol_float_out",
    "linalg_matrix_rank.atol_rtol_tensor_out",
    "linalg_matrix_rank.out",
    "linalg_matrix_rank.out_tol_tensor",
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
    # torch.tensor(..., device="xla") copies into the new tensor past its class's dispatch.
    _library.impl(
        "copy_", functools.partial(_dispatch, torch.ops.aten.copy_.default), "PrivateUse1"
    )


@interrupts.atomic
def _dispatch(func: Any, *args: Any, **kwargs: Any) -> Any:
    from xla_dtensor import runtime

    runtime.start()
    return backend().dispatch(func, args, kwargs)
