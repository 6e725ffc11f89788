"""``torch.nn.attention.flex_attention`` on xla tensors.

torch's function checks its arguments, then hands them to a higher-order operator through
``torch.compile``, for the kernel that inductor writes. XLA is the compiler here, so the operator is
called without: the score and mask modifiers run once, mapped over all positions, and become
operations like any others. With a mask alone it is `scaled_dot_product_attention`, which keeps no
scores. The function itself stays torch's (it may have been imported under any name before us), so
four names that it looks up when it is called are ours: what tells which devices it supports, what
tells a kernel which results are asked for, the flag by which it leaves ``torch.compile`` out, and
the operator's kernels.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_module
from torch.nn.functional import scaled_dot_product_attention

from xla_dtensor.base import torch_private
from xla_dtensor.base.torch_private import DispatchKey, flex_attention
from xla_dtensor.integration.patching.take_over import seen_through, take_over

_FLAG = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
_WHOLE = 1 << 30  # the block size of a mask that torch makes where none is given


def install() -> None:
    """Let the function take xla tensors; for those of other devices nothing changes."""
    module: Any = torch_module
    original = torch_private.validate_device_of_flex_attention

    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "xla":
            return original(query, key, value)
        if not isinstance(getattr(module, _FLAG), _Flag):  # the user's own, which we go on to heed
            setattr(module, _FLAG, _Flag(getattr(module, _FLAG)))
        _register_classes()
        return None

    torch_private.replace(
        "validate_device_of_flex_attention", seen_through(validate_device, original)
    )
    options = torch_private.options_of_flex_attention
    bind = inspect.signature(options).bind

    def kernel_options(*args: Any, **kwargs: Any) -> Any:
        found = options(*args, **kwargs)
        given = bind(*args, **kwargs).arguments
        if given["query"].device.type == "xla":
            # torch's kernels need the sums in backward, whoever asks for them.
            found["OUTPUT_LOGSUMEXP"] = given["return_lse"] or getattr(
                given.get("return_aux"), "lse", False
            )
        return found

    torch_private.replace("options_of_flex_attention", seen_through(kernel_options, options))
    flex_attention.py_impl(DispatchKey.AutogradPrivateUse1)(_attend)
    flex_attention.py_impl(DispatchKey.AutocastPrivateUse1)(_attend_in_lower_precision)
    take_over(torch.compile, _compile)


def _compile(original: Any, args: Any, kwargs: Any) -> Any:
    """``torch.compile(flex_attention)``, as models have it at the top of a file, long before there
    is a tensor: on xla tensors it is the function itself. So is ``create_block_mask``."""
    compiled = original(*args, **kwargs)
    function = args[0] if args else kwargs.get("model")
    if function not in (torch_module.flex_attention, torch_module.create_block_mask):
        return compiled
    bind = inspect.signature(function).bind

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        of_xla = any(map(_is_xla, bind(*args, **kwargs).arguments.values()))
        return (function if of_xla else compiled)(*args, **kwargs)

    return call


def _is_xla(value: Any) -> bool:
    """Whether an argument is an xla tensor or names the device."""
    device = value.device if isinstance(value, torch.Tensor) else value
    if isinstance(device, str):
        return device.split(":")[0] == "xla"
    return isinstance(device, torch.device) and device.type == "xla"


class _Flag:
    """torch's flag: true as well where the function that looks at it has an xla query."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __bool__(self) -> bool:
        frame: Any = sys._getframe(1)
        # torch hands the flag on to a function inside of its own, and looks at it there.
        while frame is not None and frame.f_code.co_filename == torch_module.__file__:
            query = frame.f_locals.get("query")
            if isinstance(query, torch.Tensor):
                return bool(self._value) or query.device.type == "xla"
            frame = frame.f_back
        return bool(self._value)


@functools.cache
def _register_classes() -> None:
    """The operator's kernels where autograd isn't asked: in inference mode."""
    from xla_dtensor.compilation.recorded.host_ops import HostOperations
    from xla_dtensor.tensors.device_tensor import XLATensor
    from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

    for tensor_class in (XLATensor, XLAShardedTensor):
        flex_attention.py_impl(tensor_class)(_attend)

    @flex_attention.py_impl(HostOperations)
    def traced(mode: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:  # torch has taken it off; the modifiers may use tensors of the host
            return _attend(*args, **kwargs)


def _attend_in_lower_precision(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    dtype = torch.get_autocast_dtype("xla")
    with torch.autocast("xla", enabled=False):
        cast = [t.to(dtype) if t.is_floating_point() else t for t in (query, key, value)]
        return flex_attention(*cast, *args, **kwargs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result; the logarithm of each row's sum and its highest score, both in powers of two.

    Written in torch operations, which autograd records: what the modifiers have captured gets
    gradients like anything else. With a score modifier, or where the sums are asked for, the scores
    are there as a whole, in float32 (float64 of such).
    """
    groups = query.size(1) // key.size(1)
    batch = query.size(0)
    if key.size(0) not in (1, batch):
        raise RuntimeError(f"Bq and Bkv must broadcast. Got Bq={batch} and Bkv={key.size(0)}")
    if key.size(0) != batch:
        key, value = (t.expand(batch, *t.shape[1:]) for t in (key, value))
    sizes = *query.shape[:3], key.size(2)
    at = [torch.arange(size, device=query.device) for size in sizes]
    mask = _mask(block_mask, mask_mod_other_buffers, at)
    asked = kernel_options.get("OUTPUT_LOGSUMEXP", True) or kernel_options.get("OUTPUT_MAX", True)
    if score_mod is torch_private.no_score_mod and not asked:
        out = scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=groups > 1
        )
        nothing = query.new_empty(0)  # as torch takes what isn't there
        return _in_order_of(query, out), nothing, nothing
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(precision) @ key.to(precision).transpose(-2, -1) * scale
    with torch_private.TransformGetItemToIndex():
        modified = _over_positions(score_mod, (0,), score_mod_other_buffers)(
            scores, *at, *score_mod_other_buffers
        ).to(precision)
    if mask is not None:
        modified = torch.where(mask, modified, -math.inf)
    # A row of which nothing is left gives zeros, and no gradient that isn't a number.
    empty = (modified == -math.inf).all(-1, keepdim=True)
    finite = modified.masked_fill(empty, 0)
    log_sum = finite.logsumexp(-1).masked_fill(empty.squeeze(-1), -math.inf)
    weights = finite.softmax(-1).masked_fill(empty, 0)
    out = weights.to(query.dtype) @ value.to(query.dtype)
    highest = modified.detach().amax(-1)
    return _in_order_of(query, out), log_sum / math.log(2), highest / math.log(2)


def _mask(
    block_mask: tuple[Any, ...], others: tuple[Any, ...], at: list[torch.Tensor]
) -> torch.Tensor | None:
    """Which scores count, ``[batch, heads, queries, keys]``, with one place where all of a dim are
    alike; None for all."""
    mask_mod = block_mask[-1]
    everything = mask = torch.ones((1,) * 4, dtype=torch.bool, device=at[0].device)
    if mask_mod is not torch_module.noop_mask:
        with torch_private.TransformGetItemToIndex():
            mask = _over_positions(mask_mod, (), others)(*at, *others)
        for dim in range(4):
            if mask.stride(dim) == 0:  # vmap has expanded what doesn't depend on it
                mask = mask.narrow(dim, 0, 1)
    mask = _with_blocks(mask, block_mask, *at)
    return None if mask is everything else mask


def _over_positions(
    function: Callable[..., torch.Tensor], first: tuple[int, ...], others: tuple[Any, ...]
) -> Callable[..., torch.Tensor]:
    """``function`` of one position, mapped over batch, heads, queries and keys."""
    for own in (3, 2, 1, 0):
        dims = tuple(0 if which == own else None for which in range(4))
        function = torch.vmap(function, in_dims=(*first, *dims, *(None,) * len(others)))
    return function


def _with_blocks(mask: torch.Tensor, block_mask: tuple[Any, ...], *at: torch.Tensor) -> Any:
    """``mask`` in the blocks that the block mask has, and all of the blocks that it has in full:
    of those that `create_block_mask` makes that is the mask itself, but others may leave blocks
    out that their function (or none) would let in."""
    # Between these and the sizes torch's versions have more for the backward kernels.
    partial, partial_at, full, full_at = block_mask[2:6]
    rows, columns = block_mask[-3:-1]
    if rows >= _WHOLE and columns >= _WHOLE:
        return mask
    _, _, queries, keys = at
    row, column = queries // rows, keys // columns

    def has(number: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Per element whether its block is in the list of its row."""
        listed = torch.arange(where.size(-1), device=where.device) < number.unsqueeze(-1)
        blocks = torch.arange(-(-keys.size(0) // columns), device=where.device)
        dense = ((where.unsqueeze(-1) == blocks) & listed.unsqueeze(-1)).any(-2)
        for dim in (0, 1):
            size, wanted = dense.size(dim), at[dim].size(0)
            if size not in (1, wanted):  # torch's kernels go round
                dense = dense.index_select(dim, at[dim] % size)
        return dense.index_select(2, row).index_select(3, column)

    mask = mask & has(partial, partial_at)
    return mask if full is None else mask | has(full, full_at)


def _in_order_of(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` with its dims in memory in the order of the query's, the last one innermost: users
    rely on it where they ``view`` the heads as one dim."""
    order = sorted(range(3), key=lambda dim: (-query.stride(dim), dim))
    if order == [0, 1, 2]:
        return out
    back = [order.index(dim) for dim in range(3)]
    return out.permute(*order, 3).contiguous().permute(*back, 3)
