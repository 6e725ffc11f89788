"""Calls of the ops that are not elementwise, by the module that has their rules.

Dims divide by 8 where they may be sharded. Values do not matter: programs are compiled, not run.
"""

from __future__ import annotations

from functools import cache

from tools.rule_check.samples import Sample
from tools.rule_check.table_of_elements import (
    elementwise,
    factory,
    reduction,
    scan_sort,
)
from tools.rule_check.table_of_products import (
    attention,
    conv,
    linalg,
    loss,
    matmul,
    norm,
    recurrence,
)
from tools.rule_check.table_of_shapes import indexing, shape, view
from xla_dtensor.rules.paddle.names import NAMES


@cache
def samples() -> tuple[Sample, ...]:
    """Every call of this table."""
    families = (
        *(elementwise, factory, reduction, matmul, view, shape, norm, indexing, scan_sort),
        *(loss, linalg, conv, attention, recurrence),
    )
    return tuple(sample for family in families for sample in family())


CUDA = "its kernels are of other devices' libraries: there is no lowering to XLA"

HOST = "its result is a Python value: nothing is laid out"

VALUES = "the size of its result depends on values: dispatch computes it in two steps"

COMPOSED = "programs run the ops that it is composed of, which are checked"

_POOLS = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
REGIONS = (*_POOLS, *(f"_{name}_backward" for name in _POOLS))

NOT_CHECKED: dict[str, str] = {
    "xla_dtensor::jax_call": "the rule is the user's",
    "xla_dtensor::nms_static": "all is whole",
    **{f"torchvision::{name}": "torchvision needn't be there" for name in REGIONS},
    **{op: COMPOSED for op in NAMES.values() if op.startswith("paddle::")},
    **dict.fromkeys(
        (
            "aten::_scaled_dot_product_attention_math_for_mps",
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_cudnn_attention_backward",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_efficient_attention_backward",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_backward",
            "aten::_scaled_dot_product_fused_attention_overrideable",
            "aten::_scaled_dot_product_fused_attention_overrideable_backward",
            "aten::convolution_overrideable",
            "aten::cudnn_convolution",
            "aten::convolution_backward_overrideable",
            "aten::_scaled_mm",
        ),
        CUDA,
    ),
    **dict.fromkeys(
        (
            *("aten::_local_scalar_dense", "aten::equal", "aten::is_same_size"),
            *("aten::is_nonzero", "aten::item", "aten::allclose", "aten::_linalg_check_errors"),
        ),
        HOST,
    ),
    **dict.fromkeys(
        ("aten::masked_select", "aten::nonzero", "aten::_unique2", "aten::unique_dim"), VALUES
    ),
    **dict.fromkeys(
        ("aten::_cummax_helper", "aten::_cummin_helper"),
        "cummax and cummin have lowerings of their own, and need no helper",
    ),
    "aten::set_.source_Tensor": "it moves a storage, and computes nothing",
}

"""Rules without a call that can be compiled, each with its reason."""
