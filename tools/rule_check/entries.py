"""How the table of samples is written."""

from __future__ import annotations

from typing import Any

import torch

from tools.rule_check.samples import Like, Sample

F32, I64, I32, BOOL, C64 = torch.float32, torch.int64, torch.int32, torch.bool, torch.complex64


def t(*shape: int) -> Like:
    return Like(shape)


def half(*shape: int) -> Like:
    return Like(shape, torch.bfloat16)


def ints(*shape: int) -> Like:
    return Like(shape, I64)


def s(name: str, *args: Any, **kwargs: Any) -> Sample:
    """A call of `name`: an op with a default overload, ``op.overload``, or with its namespace."""
    namespace, _, rest = name.rpartition("::")
    op, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), op)
    return Sample(getattr(packet, overload or "default"), args, kwargs)


COMPLEX = Like((16, 8), C64)

SCALAR = t()
X, Y, ROW, CUBE = t(16, 8), t(16, 8), t(8), t(8, 16, 8)
MASK, INDEX, PICK = Like((16, 8), BOOL), ints(16, 8), ints(8)
