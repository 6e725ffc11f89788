"""Horovod's `Compression`: gradients are cast to float16 or bfloat16 before they are reduced."""

from __future__ import annotations

from typing import Any

import torch


class NoneCompressor:
    """Leaves tensors as they are."""

    dtype: torch.dtype | None = None

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that is reduced, and what `decompress` has to know.

        Args:
            tensor: a tensor of any dtype.
        """
        if cls.dtype is not None and tensor.dtype.is_floating_point:
            return tensor.to(cls.dtype), tensor.dtype
        return tensor, None

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor as it was before `compress`.

        Args:
            tensor: what has been reduced.
            ctx: the second result of `compress`.
        """
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(NoneCompressor):
    """Floating point tensors travel, and are summed, as float16."""

    dtype = torch.float16


class BF16Compressor(NoneCompressor):
    """Floating point tensors travel, and are summed, as bfloat16: TPUs' own."""

    dtype = torch.bfloat16


class Compression:
    """What to give as ``compression=``.

    Attributes:
        none: tensors travel as they are.
        fp16: floating point tensors travel as float16.
        bf16: floating point tensors travel as bfloat16 (Horovod's torch API has none).

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        small, dtype = hvd.Compression.bf16.compress(torch.ones(3))
        assert small.dtype == torch.bfloat16
        assert hvd.Compression.bf16.decompress(small, dtype).dtype == torch.float32
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
