"""SGD's momentum in compiled steps: there from the start, so that the first step's program is that
of all others."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.ours import is_ours


def begin_momentum(
    params: Any, grads: Any = (), buffers: Any = (), *_: Any, **options: Any
) -> None:
    """Put zeros where one of torch's SGD functions has no momentum yet.

    torch takes the first gradient as it is, which is what ``momentum * 0 + gradient`` is, but for
    the sign of a zero. With dampening later gradients count less than the first: nothing is done.

    Args:
        params, grads, buffers: as ``_multi_tensor_sgd``'s and the others' first three arguments;
            zeros are put into ``buffers``.
        options: their keyword arguments.
    """
    # Asked first, and so in each trace: an audit compares what a step decides by its numbers.
    if options["momentum"] == 0 or options["dampening"] != 0:
        return
    missing = [i for i, buffer in enumerate(buffers) if buffer is None]
    if any(not is_ours(grads[i]) or grads[i]._form.unreduced for i in missing):
        return
    for i in missing:
        buffers[i] = torch.zeros_like(grads[i])
