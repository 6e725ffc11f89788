"""``nms``: non-maximum suppression of overlapping boxes, by score.

Their number depends on values, so torchvision's kernel for the CPU computes it, as torch's do for
``nonzero``, and compiled steps are told of `nms_static`. That one takes the best box that is left
and leaves out what it overlaps, as many times as there is room in the result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_dtensor.lowering.ops.sorting import sort
from xla_dtensor.lowering.registry import lowers
from xla_dtensor.movement.data_dependent import by_cpu_torch, say_instead
from xla_dtensor.plans.ops import handles
from xla_dtensor.rules.alternatives import Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.registry import register

say_instead(
    "torchvision::nms",
    "xla_dtensor.ecosystem.torchvision.nms_static(boxes, scores, iou_threshold, size=n) has n "
    "entries; with idxs= it is batched_nms",
)


@handles("torchvision::nms.default")
def nms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return by_cpu_torch(func, args, kwargs)


def _at_most(value: float, dtype: Any) -> Any:
    """The greatest number of ``dtype`` that isn't above ``value``: torchvision compares in double
    precision."""
    near = np.asarray(value, dtype)
    return near if float(near) <= value else np.nextafter(near, np.asarray(-np.inf, dtype))


@lowers("xla_dtensor::nms_static")
def nms_static(
    dets: jax.Array,
    scores: jax.Array,
    idxs: jax.Array | None,
    iou_threshold: float,
    *,
    size: int,
    fill_value: int = -1,
) -> jax.Array:
    result = jnp.full((size,), fill_value, np.int64)
    if result.size == 0 or dets.size == 0:
        return result
    _, order = sort(scores, 0, True)
    x1, y1, x2, y2 = dets[order].T
    area = (x2 - x1) * (y2 - y1)
    category = None if idxs is None else idxs[order]
    most = _at_most(iou_threshold, dets.dtype)

    def is_any_left(state: tuple[Any, ...]) -> jax.Array:
        count, left, _ = state
        return (count < size) & left.any()

    def keep_best(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, left, result = state
        best = lax.argmax(left, 0, np.int32)
        width = jnp.minimum(x2, x2[best]) - jnp.maximum(x1, x1[best])
        height = jnp.minimum(y2, y2[best]) - jnp.maximum(y1, y1[best])
        shared = jnp.maximum(width, 0) * jnp.maximum(height, 0)
        is_covered = shared / (area[best] + area - shared) > most
        if category is not None:
            is_covered &= category == category[best]
        left = left & ~is_covered & (jnp.arange(len(left)) != best)
        return count + 1, left, result.at[count].set(order[best].astype(np.int64))

    start = jnp.zeros((), np.int32), jnp.ones(len(scores), bool), result
    _, _, result = lax.while_loop(is_any_left, keep_best, start)
    return result


@register("nms_static", namespace="xla_dtensor")
def layout(call: Call) -> Merged:
    """whole: each box may exclude any other"""
    return call.replicate()
