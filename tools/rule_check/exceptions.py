"""Rules that claim no communication where XLA's program has some, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Allowed:
    """Why a rule may be wrong about communication.

    Attributes:
        cut_only: only where the rule would cut a replicated input, not where all have its layout.
    """

    reason: str
    cut_only: bool = False


_WHOLE = Allowed(
    "XLA's partitioner ends the process on some layouts of it, so dispatch computes it on whole "
    "tensors (_layout.py); the layout is torch's"
)
_DRAWS = Allowed(
    "it draws until every element has accepted a number, which all devices have to agree on: an "
    "all-reduce of one number per round. The draws are of positions in the whole tensor, so a "
    "device can't do its own"
)
_SCATTER = Allowed(
    "it scatters by coordinates of every dim, the form that XLA partitions right "
    "(lowering/_scatter.py), but XLA then exchanges what it scatters"
)
_UPDATES = Allowed(
    "XLA gathers the updates of a scatter whose operand is whole, instead of cutting the operand",
    cut_only=True,
)

ALLOWED: dict[str, Allowed] = {
    **dict.fromkeys((f"aten::_fft_{kind}" for kind in ("c2c", "c2r", "r2c")), _WHOLE),
    **dict.fromkeys(("aten::poisson", "aten::_standard_gamma"), _DRAWS),
    **dict.fromkeys(
        (
            *("aten::scatter", "aten::scatter_add", "aten::scatter_reduce", "aten::index_reduce"),
            *(f"aten::max_unpool{n}d" for n in (2, 3)),
        ),
        _SCATTER,
    ),
    **dict.fromkeys(
        (
            *("aten::index_add", "aten::index_copy", "aten::index_put"),
            *("aten::_unsafe_index_put", "aten::_index_put_impl"),
        ),
        _UPDATES,
    ),
    "aten::fill_diagonal": Allowed("torch's decomposition writes through a strided view"),
}
"""By the name of an op."""
