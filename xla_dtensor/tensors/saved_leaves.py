"""Remembers what leaves saved for backward were, if they get other memory before it runs.

A leaf does so by ``w.data = ...`` or ``module.to``. torch saves views of some leaves, which stay
where they are (``linear`` its transposed weight). Who saves the leaf itself takes a `SavedLeaf`
here. It holds no memory: that is the saved tensor's, which hooks may pack away (`fully_shard`
does). When the leaf moves, the `SavedLeaf` gets what the leaf was.
"""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.ours import is_ours

_ATTRIBUTE = "_xla_kept"


class SavedLeaf:
    """What a leaf's storage was when the leaf was saved, if it has another one now.

    Attributes:
        memory: its storage, the steps to it and its form; None as long as it is that.
    """

    __slots__ = ("memory",)

    def __init__(self) -> None:
        self.memory: Any = None

    def of(self, tensor: Any) -> Any:
        """``tensor``, the leaf as it is now, as it was.

        Raises:
            RuntimeError: it has moved, and the backward pass is to be differentiated again.
        """
        if self.memory is None:
            return tensor
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward pass that is to be differentiated again (create_graph=True) needs a "
                "weight that has moved to other memory since (.data =, module.to): move it after "
                "that"
            )
        storage, steps, form = self.memory
        return type(tensor)(storage, form, steps)


def keep(tensor: Any) -> SavedLeaf | None:
    """For who saves ``tensor`` for a backward pass; None of what is no leaf, or not ours."""
    if not is_ours(tensor) or not tensor.is_leaf:
        return None
    if getattr(tensor, _ATTRIBUTE, None) is None:  # or of others who have saved it where it is now
        setattr(tensor, _ATTRIBUTE, SavedLeaf())
    return getattr(tensor, _ATTRIBUTE)


def moves(tensor: Any) -> None:
    """``tensor`` is about to move to other memory."""
    kept = getattr(tensor, _ATTRIBUTE, None)
    if kept is not None:
        delattr(tensor, _ATTRIBUTE)
        kept.memory = tensor._storage_, tensor._steps, tensor._form
