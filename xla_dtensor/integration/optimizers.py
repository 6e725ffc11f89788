"""torch's optimizers on xla tensors: updating all parameters of a group together is one launch.

With ``foreach`` (the default) or ``fused=True`` an optimizer's ``step`` hands its lists of tensors
to a function like ``torch.optim.adam._multi_tensor_adam``. The operations in it run as a batch; the
formula and its Python stay torch's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from xla_dtensor import _context

# The modules of torch.optim, and which of the two functions they have.
_FUNCTIONS = {
    "_adafactor": ("_multi_tensor_adafactor",),
    "adadelta": ("_multi_tensor_adadelta",),
    "adagrad": ("_multi_tensor_adagrad", "_fused_adagrad"),
    "adam": ("_multi_tensor_adam", "_fused_adam"),  # AdamW's, too
    "adamax": ("_multi_tensor_adamax",),
    "asgd": ("_multi_tensor_asgd",),
    "nadam": ("_multi_tensor_nadam",),
    "radam": ("_multi_tensor_radam",),
    "rmsprop": ("_multi_tensor_rmsprop",),
    "rprop": ("_multi_tensor_rprop",),
    "sgd": ("_multi_tensor_sgd", "_fused_sgd"),
}


def install() -> None:
    """Wrap the functions."""
    for module_name, names in _FUNCTIONS.items():
        module = importlib.import_module(f"torch.optim.{module_name}")
        for name in names:
            setattr(module, name, _in_one_launch(getattr(module, name)))


def make_foreach_the_default() -> None:
    """As torch has it for its own DTensor. Not at once: torch's DTensor takes long to import."""
    from xla_dtensor.device_tensor import XLATensor
    from xla_dtensor.sharded_tensor import XLAShardedTensor

    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        module: Any = importlib.import_module(name)
        module._foreach_supported_types += [XLAShardedTensor, XLATensor]


def _in_one_launch(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def update(params: Any, *args: Any, **kwargs: Any) -> None:
        traced = _context.current() is not None  # one program already
        if traced or not params or not hasattr(params[0], "_storage_"):
            return function(params, *args, **kwargs)
        from xla_dtensor.dispatch import batched

        _bring_together(params, args, kwargs)
        with batched():
            return function(params, *args, **kwargs)

    return update


def _bring_together(params: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Move per-device state (step counts) from one device to all of the parameters'.

    The program would leave it there anyway; moved before, the first step's program is that of the
    later steps.
    """
    frame = next((p._form.frame for p in params if p._form.frame is not None), None)
    if frame is None:
        return
    for values in (*args, *kwargs.values()):
        if isinstance(values, list):
            for tensor in values:
                if hasattr(tensor, "_storage_"):
                    tensor._storage_.place(frame)
