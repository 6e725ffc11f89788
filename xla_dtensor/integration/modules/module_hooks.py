"""``module.to("xla")`` and back: parameters stay the same objects, shared and in optimizers.

torch puts another value into the same ``nn.Parameter`` where the types of tensors allow that, as
from the CPU to CUDA. From a plain tensor to ours they don't; it then makes new parameters, one for
each module that has one: tied weights come apart, and an optimizer made before trains what nobody
uses.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from xla_dtensor.base import torch_private
from xla_dtensor.base.ours import is_ours
from xla_dtensor.base.torch_private.attributes import parameters_of
from xla_dtensor.integration.modules import lazy as lazy_modules
from xla_dtensor.integration.patching.take_over import seen_through


class _Moved(threading.local):
    """What the outermost call has moved so far where the same object couldn't be kept; None outside
    of one. With each the object that was there, whose id would be another's if it were gone."""

    by_id: dict[int, tuple[nn.Parameter, nn.Parameter]] | None = None


_moved = _Moved()
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def install() -> None:
    """Hook ``nn.Module._apply``, which ``to``, ``cpu``, ``half`` and the like are made of."""
    init = torch.optim.Optimizer.__init__

    @functools.wraps(init)
    def made(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _optimizers.add(self)

    torch.optim.Optimizer.__init__ = made
    original = torch_private.module_apply

    @functools.wraps(original)
    def apply(self: nn.Module, fn: Any, *args: Any, **kwargs: Any) -> nn.Module:
        lazy = lazy_modules.set_aside(self, fn)
        before = {key: p for key, p in parameters_of(self).items() if p is not None}
        outermost = _moved.by_id is None
        if outermost:
            _moved.by_id = {}
        try:
            result = original(self, fn, *args, **kwargs)
            for key, parameter in before.items():
                now = parameters_of(self)[key]
                if now is None or now is parameter:
                    continue
                if "xla" in (now.device.type, parameter.device.type):
                    parameters_of(self)[key] = _same(parameter, now)
        finally:
            lazy_modules.put_back(lazy)
            if outermost:
                _moved.by_id = None
        return result

    torch_private.replace("module_apply", apply)
    for using in (torch_module, parametrize):
        using.is_traceable_wrapper_subclass = _but_ours(using.is_traceable_wrapper_subclass)
    lazy_modules.install()


def _but_ours(is_wrapper: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """``double()`` or ``register_parametrization`` give our tensors other memory (``.data =``), as
    plain ones. torch swaps tensors of wrapper classes, which it can't of what a graph holds: of a
    model whose last loss somebody keeps."""

    def wraps_others(tensor: Any) -> bool:
        return is_wrapper(tensor) and not is_ours(tensor)

    return seen_through(wraps_others, is_wrapper)


def _same(parameter: nn.Parameter, moved: nn.Parameter) -> nn.Parameter:
    """``parameter`` with what ``moved`` is; if something else holds it (a graph, a weak
    reference), the new one, the same for each module and optimizer that shares it."""
    from xla_dtensor.tensors.attributes import OWN_ATTRIBUTES  # these need the device's name
    from xla_dtensor.tensors.subclasses import of_class_of

    assert _moved.by_id is not None
    known = _moved.by_id.get(id(parameter))
    if known is not None:
        return known[1]
    of_class_of(moved, parameter)
    try:
        torch.utils.swap_tensors(parameter, moved)
    except RuntimeError:
        _moved.by_id[id(parameter)] = parameter, moved
        _replace_in_optimizers(parameter, moved)
        parameter, moved = moved, parameter
    for key, value in vars(moved).items():  # the user's marks, which are swapped as well
        if key not in OWN_ATTRIBUTES:
            setattr(parameter, key, value)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        _take_hooks(parameter, moved, hooks)
    return parameter


def _take_hooks(parameter: Any, moved: Any, name: str) -> None:
    """Let C++, which keeps them beside the values, run the hooks of a parameter that has got other
    values. The dict stays the same one: from it a handle removes its hook."""
    for known in (parameter, moved):
        hooks = getattr(known, name, None)
        if hooks:
            setattr(known, name, None)
            setattr(parameter, name, hooks)
            return


def _replace_in_optimizers(parameter: nn.Parameter, moved: nn.Parameter) -> None:
    for optimizer in list(_optimizers):
        for group in optimizer.param_groups:
            group["params"][:] = [moved if p is parameter else p for p in group["params"]]
        if parameter in optimizer.state:
            optimizer.state[moved] = optimizer.state.pop(parameter)
