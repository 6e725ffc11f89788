"""Route of batch norm: aten's schema doesn't say that it writes the running statistics."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.torch_private import preserve_version_counter
from xla_dtensor.dispatch.execute import dispatch
from xla_dtensor.dispatch.out_arguments import into
from xla_dtensor.plans.ops import handles


@handles("aten::native_batch_norm.default")
def _batch_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The functional overload, then the writes to the running statistics."""
    x, weight, bias, running_mean, running_var, training, momentum, eps = args
    if not training:
        functional = torch.ops.aten._native_batch_norm_legit_no_training.default
        return dispatch(functional, (x, weight, bias, running_mean, running_var, momentum, eps), {})
    if running_mean is None:
        functional = torch.ops.aten._native_batch_norm_legit.no_stats
        return dispatch(functional, (x, weight, bias, training, momentum, eps), {})
    functional = torch.ops.aten._native_batch_norm_legit_functional.default
    *results, new_mean, new_var = dispatch(
        functional, (x, weight, bias, running_mean, running_var, training, momentum, eps), {}
    )
    # One operation: both are written, or none. It counts as no write, as in torch: backward is
    # given the statistics, but doesn't look at them.
    statistics = [running_mean, running_var]
    counted = tuple(t for t in statistics if not t.is_inference())
    with preserve_version_counter(counted):
        dispatch(torch.ops.aten._foreach_copy_.default, (statistics, [new_mean, new_var]), {})
    return tuple(results)


@handles("aten::_native_batch_norm_legit.out")
def _batch_norm_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    outs = (kwargs["out"], kwargs["save_mean"], kwargs["save_invstd"])
    for out in outs:
        out._storage_.check_write()
    results = _batch_norm(torch.ops.aten.native_batch_norm.default, args, {})
    return tuple(map(into, outs, results))
