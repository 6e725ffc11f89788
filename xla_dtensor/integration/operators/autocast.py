"""``torch.autocast("xla")``, with the lists of operations that it has for CUDA.

Which operation computes in which precision is said in torch's header ``ATen/autocast_mode.h`` (the
macros ``AT_FORALL_...``); a test compares the lists here with the installed torch's. The kernels
are for the dispatch key ``AutocastPrivateUse1``, which only is asked while autocast is on.

Unlike for CUDA, weights that have been cast aren't kept until the end of the block: XLA finds equal
casts in a compiled step, and a gradient comes back in its weight's own precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base.torch_private import DispatchKey, DispatchKeySet, pytree, without_keys
from xla_dtensor.base.torch_private.attributes import schema_of

LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
"""
FLOAT32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

_KEY = DispatchKey.AutocastPrivateUse1
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register the kernels; bfloat16 is the default."""
    # Every other operation goes on to the next key, as it does for CUDA.
    fallback = torch.library.Library("_", "IMPL", _KEY.name)
    fallback.fallback(torch.library.fallthrough_kernel)
    aten = torch.library.Library("aten", "IMPL")
    kernels: list[tuple[Callable[..., Any], str]] = [
        (_in_lower_precision, LOWER_PRECISION),
        (_in_float32, FLOAT32),
        (_with_float32_result, FLOAT32_RESULT),
        (_in_widest, WIDEST),
        (_norm, " ".join(NORMS)),
        (_refused, "binary_cross_entropy"),
    ]
    for kernel, names in kernels:
        for name in names.split():
            func = _overload(name)
            if func is not None:
                aten.impl(name, _without_autocast(functools.partial(kernel, func)), _KEY.name)
    # A library takes its kernels with it when it is garbage.
    _libraries.extend((fallback, aten))
    torch.set_autocast_dtype("xla", torch.bfloat16)


def add_library(namespace: str, *names: str) -> None:
    """Let operations of another library compute in float32 and give results in the precision of
    their first tensor, as torchvision's kernels for CUDA do.

    Args:
        namespace: the library's, in ``torch.ops``.
        names: of operations that have one overload.
    """
    library = torch.library.Library(namespace, "IMPL")
    for name in names:
        func = getattr(getattr(torch.ops, namespace), name).default
        kernel = _without_autocast(functools.partial(_through_float32, func))
        library.impl(name, kernel, _KEY.name)
    _libraries.append(library)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    keys = DispatchKeySet(_KEY)

    def below(*args: Any, **kwargs: Any) -> Any:
        # As torch's own kernels: what an operation is composed of isn't cast once more.
        with without_keys(keys):
            return kernel(*args, **kwargs)

    return below


def _is_eligible(value: Any) -> bool:
    """Whether autocast may change a value's precision: an xla tensor of floats, but no doubles."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "xla"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def cast(dtype: torch.dtype, values: Any) -> Any:
    """What autocast may change of (nested) values, in another precision."""
    return pytree.tree_map(lambda v: v.to(dtype) if _is_eligible(v) else v, values)


def _in_lower_precision(func: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast(torch.get_autocast_dtype("xla"), (args, kwargs))
    return func(*args, **kwargs)


def _in_float32(func: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast(torch.float32, (args, kwargs))
    return func(*args, **kwargs)


def _through_float32(func: Any, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    results = _in_float32(func, first, *args, **kwargs)
    return pytree.tree_map(lambda v: v.to(first.dtype) if _is_eligible(v) else v, results)


def _with_float32_result(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation computes in float32 by itself, if it is asked for such a result."""
    position = [a.name for a in schema_of(func).arguments].index("dtype")
    given = args[position] if position < len(args) else kwargs.get("dtype")
    if given is not None or not _is_eligible(args[0]):
        return func(*args, **kwargs)
    if position < len(args):
        return func(*args[:position], torch.float32, *args[position + 1 :], **kwargs)
    return func(*args, **{**kwargs, "dtype": torch.float32})


def _in_widest(func: Any, *args: Any, **kwargs: Any) -> Any:
    """In lower precision if all arguments have it already."""
    lower = torch.get_autocast_dtype("xla")
    leaves = pytree.tree_leaves((args, kwargs))
    dtypes = {leaf.dtype for leaf in leaves if _is_eligible(leaf)}
    args, kwargs = cast(lower if dtypes <= {lower} else torch.float32, (args, kwargs))
    return func(*args, **kwargs)


def _norm(func: Any, *args: Any, **kwargs: Any) -> Any:
    name = func.name().removeprefix("aten::")
    dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
    rest = [kwargs.get(a.name, a.default_value) for a in schema_of(func).arguments[len(args) :]]
    return _overload(NORMS[name])(*args, *rest, dtype=dtype)


def _refused(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy and BCELoss are unsafe under autocast: a sigmoid in low precision "
        "before them loses what they need. Use binary_cross_entropy_with_logits or "
        "BCEWithLogitsLoss, or leave autocast for them (torch.autocast('xla', enabled=False))"
    )
