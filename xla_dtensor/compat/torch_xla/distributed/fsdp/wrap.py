"""Auto-wrap policies: torch's own, called as torch_xla calls its."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import always_wrap_policy, transformer_auto_wrap_policy

__all__ = [
    "always_wrap_policy",
    "recursive_wrap",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int | None = None,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
    **kwargs: Any,
) -> bool:
    """Wrap modules that have ``min_num_params`` parameters or more that nothing inside has wrapped.

    Args:
        module: the module.
        recurse: whether the question is if its children are to be looked at.
        unwrapped_params: the number of its parameters that aren't wrapped yet.
        min_num_params: how many are enough.
        force_leaf_modules: whose children aren't looked at; ``nn.MultiheadAttention`` by default.
        exclude_wrap_modules: which are never wrapped; lists and dicts by default.
        kwargs: ``nonwrapped_numel``, torch's name of ``unwrapped_params``.
    """
    count = kwargs.get("nonwrapped_numel", unwrapped_params) or 0
    leaves = (nn.MultiheadAttention,) if force_leaf_modules is None else tuple(force_leaf_modules)
    excluded: tuple[Any, ...] = (nn.ModuleList, nn.ModuleDict)
    if exclude_wrap_modules is not None:
        excluded = tuple(exclude_wrap_modules)
    enough = count >= min_num_params
    if recurse:
        return enough and not isinstance(module, leaves)
    return enough and not isinstance(module, excluded)


def recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper: Callable[..., nn.Module],
    only_wrap_children: bool = True,
) -> tuple[nn.Module, int]:
    """Wrap the modules inside of a module that a policy picks, innermost first.

    Args:
        module: changed in place.
        auto_wrap_policy: called with ``module``, ``recurse`` and ``nonwrapped_numel``.
        wrapper: makes a wrapper of a module.
        only_wrap_children: leave ``module`` itself alone.

    Returns:
        ``module``, or what wraps it, and the number of parameters that are wrapped.
    """
    own = sum(parameter.numel() for parameter in module.parameters())
    if not auto_wrap_policy(module=module, recurse=True, nonwrapped_numel=own):
        return module, 0
    wrapped = 0
    for name, child in module.named_children():
        replacement, count = recursive_wrap(child, auto_wrap_policy, wrapper, False)
        setattr(module, name, replacement)
        wrapped += count
    rest = own - wrapped
    if not only_wrap_children and auto_wrap_policy(
        module=module, recurse=False, nonwrapped_numel=rest
    ):
        return wrapper(module), own
    return module, wrapped
