"""Kernels of composites in inference mode and below other kernels, where autograd isn't reached.

They reach the dispatcher as they were called, and get there what `composites` gives them above.
"""

from __future__ import annotations

from typing import Any

from xla_dtensor.base.torch_private import DispatchKey, is_key_excluded
from xla_dtensor.integration.operators import composites, recurrent
from xla_dtensor.integration.operators.flash_attention import Attention
from xla_dtensor.plans.ops import handles
from xla_dtensor.rules.call import bind


def _is_below() -> bool:
    # torch tells of all autograd's keys together, by the one that has no backend.
    return is_key_excluded(DispatchKey.AutogradOther)


@handles("aten::scaled_dot_product_attention.default")
def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not _is_below():
        return NotImplemented  # the kernel above has decided
    return composites.attention_otherwise(Attention(**bind(func, args, kwargs)))


@handles("aten::_scaled_dot_product_attention_math.default")
def _attention_apart(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """With dropout it draws random numbers, which the lowering gets as a mask."""
    given = bind(func, args, kwargs)
    if given["dropout_p"] == 0 or given["dropout_mask"] is not None:
        return NotImplemented
    return func.decompose(*args, **kwargs)


@handles("aten::tensor_split.tensor_indices_or_sections")
def _tensor_split(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return composites.tensor_split(*args, **kwargs)


@handles("aten::rms_norm.default")
def _rms_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return composites.rms_norm_apart(*args, **kwargs)


@handles("aten::one_hot.default")
def _one_hot(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return composites.one_hot(*args, **kwargs)


def _recurrent(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return recurrent.KERNELS[func.name().removeprefix("aten::")](*args)


handles(*(f"aten::{name}" for name in recurrent.KERNELS))(_recurrent)
