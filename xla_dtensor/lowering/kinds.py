"""`Kind`: facts about overloads that plans ask for (contains a product, only fills, is a gather).

Said beside the lowerings, also of overloads that have none of their own because torch composes
them.
"""

from __future__ import annotations

import enum

from xla_dtensor.lowering.registry import changes, qualified_name


class Kind(enum.Enum):
    """A kind of operation.

    - ``PRODUCT``: contains a matrix product.
    - ``BATCHED``: is one matrix product in batches.
    - ``ADDED``: is one, and adds it to something.
    - ``GATHER``: takes elements from where another tensor's values say.
    - ``TRANSFORM``: a Fourier transform.
    - ``CONVOLUTION``: positions of the input meet positions of a kernel.
    - ``LIKE``: takes shape, dtype and layout from a tensor, and none of its values.
    - ``CUT``: XLA can't cut it, so it is called with each device's shards, as its rule has them.
    - ``SLICED``: XLA can't see that shards need nothing of each other (`per_slice.py`), so it is
      called with each device's shards where the compiler can't call functions on them.
    - ``FILL``: writes one value wherever it writes, so it doesn't matter if elements share memory.
    """

    PRODUCT = enum.auto()
    BATCHED = enum.auto()
    ADDED = enum.auto()
    GATHER = enum.auto()
    TRANSFORM = enum.auto()
    CONVOLUTION = enum.auto()
    LIKE = enum.auto()
    CUT = enum.auto()
    SLICED = enum.auto()
    FILL = enum.auto()


_KINDS: dict[str, set[Kind]] = {}


def are(kind: Kind, *overloads: str) -> None:
    """Say that ``overloads`` are of a kind: ``"mm"`` (the default overload), ``"fill_.Scalar"``,
    ``"index.*"`` (all overloads); the ``aten`` namespace is implied."""
    for overload in overloads:
        _KINDS.setdefault(qualified_name(overload), set()).add(kind)
    changes.tell()


def is_(kind: Kind, name: str) -> bool:
    """Whether the overload with this qualified name is of a kind."""
    packet = name.partition(".")[0]
    return kind in _KINDS.get(name, ()) or kind in _KINDS.get(f"{packet}.*", ())
