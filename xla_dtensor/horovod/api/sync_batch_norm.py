"""`SyncBatchNorm`: batch normalization by the mean and variance of all ranks' batches."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.torch_private import BatchNorm
from xla_dtensor.horovod.api.collectives import allreduce
from xla_dtensor.horovod.collectives.reductions import Sum
from xla_dtensor.horovod.world.current_world import current


class SyncBatchNorm(BatchNorm):
    """``torch.nn.BatchNorm1d``, ``2d`` and ``3d`` whose mean and variance are those of all ranks'
    batches while training; on any device. Batches may have different sizes where ranks have tensors
    of their own.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as of ``torch.nn.BatchNorm2d``.

    Raises:
        ValueError: an input with fewer than two dims.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        norm = hvd.SyncBatchNorm(3).to("xla")
        x = torch.randn(4, 3, device="xla") + hvd.rank()
        mean = hvd.allreduce(norm(x).mean(0))  # of all ranks' rows
        assert mean.abs().max().item() < 1e-5
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As ``torch.nn.BatchNorm2d``'s."""
        self._check_input_dim(input)
        batch = self.training or not self.track_running_stats
        if not batch or current().size == 1:
            return super().forward(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        rows = torch.full_like(wide.detach().sum(dims)[:1], input.numel() // input.shape[1])
        total = allreduce(torch.cat([wide.sum(dims), rows]), op=Sum)
        count = total[-1].detach()
        mean = total[:-1] / count
        centred = wide - mean.reshape(shape)
        variance = allreduce(centred.square().sum(dims), op=Sum) / count
        if self.training and self.track_running_stats:
            self._keep(mean.detach(), (variance * (count / (count - 1))).detach())
        found = centred * (variance + self.eps).rsqrt().reshape(shape)
        if self.affine:
            found = found * self.weight.reshape(shape) + self.bias.reshape(shape)
        return found.to(input.dtype)

    def _keep(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        self.num_batches_tracked.add_(1)
        factor: Any = self.momentum
        if factor is None:
            factor = 1.0 / self.num_batches_tracked
        with torch.no_grad():
            for kept, new in ((self.running_mean, mean), (self.running_var, variance)):
                kept.mul_(1 - factor).add_(factor * new.to(kept.dtype))
