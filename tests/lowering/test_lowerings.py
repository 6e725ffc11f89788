"""The pointwise, reduction, matmul, norm, loss and optimizer lowerings compute what CPU torch does.

OpInfo entries cover what torch's own samples dispatch; the rest are direct calls of overloads that
do not arrive that way (fused, functional and scalar variants).
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.lowering.harness import Report, check_call, check_overloads, run_lowering, to_torch
from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.lowering import find_lowering
from xla_dtensor.lowering.promotion import result_type

pytestmark = pytest.mark.one_in(2)  # each variant compiles programs of its own

aten = torch.ops.aten

# OpInfo entries, per dtype: at least one of every kind of lowering.
ENTRIES = {
    torch.float32: """
        add addcdiv addcmul all amax aminmax argmax clamp copysign cummax cumsum div erfinv exp
        fmod floor_divide heaviside lerp linalg.vector_norm logaddexp logcumsumexp logit
        logsumexp max mean median mode mul nan_to_num norm pow prod remainder rsub sgn sigmoid
        std_mean sum var where xlogy addmm addr baddbmm dist mm tril vdot nn.functional.elu
        nn.functional.gelu nn.functional.glu nn.functional.hardsigmoid nn.functional.hardswish
        nn.functional.hardtanh nn.functional.mish nn.functional.logsigmoid nn.functional.prelu
        nn.functional.silu nn.functional.softplus nn.functional.softshrink
        nn.functional.threshold softmax log_softmax nn.functional.batch_norm
        nn.functional.group_norm nn.functional.binary_cross_entropy
        nn.functional.binary_cross_entropy_with_logits nn.functional.cross_entropy
        nn.functional.huber_loss nn.functional.mse_loss nn.functional.multi_margin_loss
        nn.functional.multilabel_margin_loss nn.functional.nll_loss nn.functional.smooth_l1_loss
        nn.functional.soft_margin_loss
        cdist nn.functional.pdist digamma hash_tensor histc histogram histogramdd _segment_reduce
        polygamma special.airy_ai special.bessel_j0 special.bessel_j1 special.bessel_y0
        special.bessel_y1 special.modified_bessel_i0 special.modified_bessel_i1
        special.modified_bessel_k0 special.modified_bessel_k1 special.scaled_modified_bessel_k0
        special.scaled_modified_bessel_k1 special.spherical_bessel_j0
        special.chebyshev_polynomial_t special.chebyshev_polynomial_u
        special.hermite_polynomial_h special.hermite_polynomial_he special.laguerre_polynomial_l
        special.legendre_polynomial_p special.shifted_chebyshev_polynomial_v
        special.shifted_chebyshev_polynomial_w special.log_ndtr special.zeta
        fft.fftn fft.hfft2 fft.ihfft fft.irfft fft.rfftn stft
        linalg.ldl_factor_ex linalg.ldl_solve linalg.lu_solve linalg.solve_triangular ormqr
    """,
    torch.int64: """
        add argmin bitwise_left_shift bitwise_right_shift clamp cumsum div floor_divide fmod gcd
        mm mul nan_to_num pow prod remainder sign sum trunc
        digamma hash_tensor special.bessel_j0 special.hermite_polynomial_h
    """,
    torch.bfloat16: """
        add cumsum div lerp linalg.vector_norm mm mul nn.functional.cross_entropy
        nn.functional.gelu nn.functional.layer_norm softmax sum var
    """,
    torch.complex64: """
        abs add addmm angle cumprod div linalg.vector_norm mean mul pow sgn tanh var
        fft.fft2 fft.ifft fft.irfftn linalg.ldl_factor_ex linalg.ldl_solve linalg.matrix_power
    """,
    torch.bool: """
        add all any bitwise_xor logical_and max mul sum where
    """,
}
CASES = [(name, dtype) for dtype, names in ENTRIES.items() for name in names.split()]


MODULES = {
    *("activation", "arithmetic", "bessel", "distance", "fft", "gamma", "histogram", "ldl", "loss"),
    *("matmul", "optimizer", "pointwise", "polynomials", "reduction", "segment", "selection"),
    *("softmax_norm", "sorting"),
}


# Unique only up to signs.
FACTORS = {"aten::_linalg_svd.default", "aten::_linalg_eigh.default", "aten::linalg_qr.default"}


def is_ours(overload: str) -> bool:
    """Views, indexing and the like arrive too; they have tests of their own."""
    found = find_lowering(overload)
    if overload in FACTORS:
        return False
    return found is not None and found.function.__module__.rsplit(".", 1)[1] in MODULES


def assert_agrees(report: Report) -> None:
    assert not report.mismatches, "\n".join(map(str, report.mismatches))


@pytest.mark.one_in(17)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda v: str(v).replace("torch.", ""))
def test_opinfo_entry_agrees_with_torch(name: str, dtype: torch.dtype) -> None:
    report = check_overloads(name, dtype, limit=2, only=is_ours)
    assert_agrees(report)
    assert report.checked


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def uniform(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random(*shape).abs().to(dtype) + 0.5


@pytest.mark.parametrize("overload", ["default", "tensor_lr"])
@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_fused_adam(name: str, overload: str, found_inf: float | None) -> None:
    amsgrad = maximize = found_inf == 0.0
    params, grads, averages = ([random(3, 4) + i, random(5)] for i in range(3))
    squares, largest = [uniform(3, 4), uniform(5)], [uniform(3, 4), uniform(5)]
    steps = [torch.tensor(1.0), torch.tensor(7.0)]
    options: dict[str, Any] = {"lr": 0.01 if overload == "default" else torch.tensor(0.01)}
    if found_inf is not None:
        options |= {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(found_inf)}
    report = check_call(
        getattr(getattr(aten, name), overload),
        *(params, grads, averages, squares, largest if amsgrad else [], steps),
        **options,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=amsgrad,
        maximize=maximize,
    )
    assert_agrees(report)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "first"), [(0.0, False, False), (0.9, True, False), (0.9, False, True)]
)
def test_fused_sgd(momentum: float, nesterov: bool, first: bool) -> None:
    report = check_call(
        aten._fused_sgd.default,
        *([random(3, 4)], [uniform(3, 4)], [random(3, 4) - 1] if momentum else []),
        weight_decay=0.1,
        momentum=momentum,
        lr=0.1,
        dampening=0.0 if nesterov else 0.1,
        nesterov=nesterov,
        maximize=False,
        is_first_step=first,
    )
    assert_agrees(report)


def test_fused_adagrad() -> None:
    report = check_call(
        aten._fused_adagrad.default,
        *([random(3, 4)], [random(3, 4) + 1], [uniform(3, 4)], [torch.tensor(3.0)]),
        lr=0.1,
        lr_decay=0.1,
        weight_decay=0.1,
        eps=1e-8,
        maximize=True,
    )
    assert_agrees(report)


@pytest.mark.parametrize("value", [1.0, torch.inf, torch.nan])
def test_gradient_unscaling_finds_what_is_not_finite(value: float) -> None:
    grads = [torch.tensor([1.0, value]), random(3)]
    scale = (torch.zeros(1), torch.tensor([0.5]))
    unscale = aten._amp_foreach_non_finite_check_and_unscale.default
    assert_agrees(check_call(unscale, grads, *scale))


@pytest.mark.parametrize(("tracker", "found_inf"), [(0, 0.0), (1, 0.0), (0, 1.0)])
def test_gradient_scale_update(tracker: int, found_inf: float) -> None:
    state = (torch.tensor([4.0]), torch.tensor([tracker], dtype=torch.int32))
    report = check_call(
        aten._amp_update_scale.default, *state, torch.tensor([found_inf]), 2.0, 0.5, 2
    )
    assert_agrees(report)


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


_half = {"dtype": torch.bfloat16}
_stats = (uniform(3), random(3), random(3) + 1, uniform(3) + 1)
_int8 = torch.arange(-128, 128, dtype=torch.int8).reshape(16, 16)
DIRECT = {
    "add of a number to a 0-d tensor": (aten.add.Tensor, torch.tensor(1), 2.5),
    "batch norm, functional": (
        *(aten._native_batch_norm_legit_functional.default, random(4, 3, 5), *_stats),
        *(True, 0.1, 1e-5),
    ),
    "batch norm, functional, eval": (
        *(aten._native_batch_norm_legit_functional.default, random(4, 3, 5, **_half), *_stats),
        *(False, 0.1, 1e-5),
    ),
    "batch norm with update": (
        *(aten._batch_norm_with_update_functional.default, random(4, 3), *_stats, 0.1, 1e-5),
    ),
    "batch norm backward, eval": (
        *(aten.native_batch_norm_backward.default, random(4, 3, 5), uniform(4, 3, 5)),
        *(_stats[0], _stats[2], _stats[3], None, None, False, 1e-5, [True, True, False]),
    ),
    "layer norm backward, masked": (
        *(aten.native_layer_norm_backward.default, random(4, 6), uniform(4, 6), [6]),
        *(random(4, 1), uniform(4, 1), random(6), random(6), [True, False, True]),
    ),
    "fused rms norm": (aten._fused_rms_norm.default, random(4, 6, **_half), [6], None, None),
    "grouped mm, rows": (
        *(aten._grouped_mm.default, random(8, 16, **_half), random(2, 16, 8, **_half)),
        offsets(3, 8),
    ),
    "grouped mm, columns": (
        *(aten._grouped_mm.default, random(2, 8, 16, **_half), random(16, 24, **_half)),
        offsets(8, 24),
    ),
    "grouped mm, contracted": (
        *(aten._grouped_mm.default, random(8, 16, **_half), random(16, 24, **_half)),
        offsets(8, 16),
    ),
    "linear": (aten.linear.default, random(4, 3, 6), random(5, 6), random(5)),
    "trigamma": (aten.polygamma.default, 1, torch.linspace(-12.3, 4, 50, dtype=torch.float64)),
    "Hurwitz zeta": (
        *(aten.special_zeta.default, torch.tensor([[0.0], [1], [2], [2.5]])),
        torch.tensor([-2, -1.5, 0, 1, 3]),
    ),
    "int mm": (aten._int_mm.default, _int8.repeat(2, 1), _int8),
    "mm of int32": (aten.mm.default, _int8.int(), _int8.int()),
    "addmm with beta 0": (aten.addmm.default, torch.full((4,), torch.nan), *[random(4, 4)] * 2),
    "remainder of a number": (aten.remainder.Scalar_Tensor, -7, torch.tensor([2, -3, 4])),
    "negative integer powers": (aten.pow.Tensor_Tensor, torch.arange(-3, 4), torch.tensor(-2)),
    "half times a number": (aten.mul.Tensor, random(64, **_half), 0.1),
    "half compared with a number": (aten.lt.Scalar, random(64, **_half), 0.1),
    "max with NaN": (aten.max.dim, torch.tensor([[1.0, torch.nan, 2], [3, 1, 3]]), 1),
    "maximum with NaN": (aten.maximum.default, torch.tensor([torch.nan, 1]), torch.tensor(0.0)),
    "fmax with NaN": (aten.fmax.default, torch.tensor([torch.nan, 1]), torch.tensor(0.0)),
    "clamp of NaN": (aten.clamp.default, torch.tensor([torch.nan, 3]), -1, 1),
    "median with NaN": (aten.median.dim, torch.tensor([[1.0, torch.nan, 2], [3, 1, 2]]), 1),
    "sum of nothing": (aten.sum.dim_IntList, torch.zeros(0, 3), [0]),
    "mean of nothing": (aten.mean.default, torch.zeros(0)),
    "sum of a 0-d tensor": (aten.sum.dim_IntList, torch.tensor(True), [-1], True),
    "logsumexp of -inf": (aten.logsumexp.default, torch.full((2, 3), -torch.inf), [1]),
    "safe softmax": (aten._safe_softmax.default, torch.full((2, 3), -torch.inf), 1),
    "logical and of halves": (aten.logical_and.default, random(4, **_half), torch.zeros(4)),
    "complex to bool": (aten._to_copy.default, torch.tensor([0j, 1j])),
}


@pytest.mark.parametrize("case", DIRECT)
def test_direct_call_agrees_with_torch(case: str) -> None:
    function, *args = DIRECT[case]
    options = {"dtype": torch.bool} if function is aten._to_copy.default else {}
    if function is aten.addmm.default:
        options = {"beta": 0}
    assert_agrees(check_call(function, *args, **options))


def lowered(overload: torch._ops.OpOverload, *args: Any) -> Any:
    name = str(overload).replace("aten.", "aten::", 1)
    found = find_lowering(name)
    assert found is not None
    return run_lowering(overload, name, found, args, {})


def test_rms_norm_backward() -> None:
    """Not a CPU overload: compared with autograd through the composite."""
    x, weight, grad = random(4, 6).requires_grad_(), uniform(6).requires_grad_(), random(4, 6) + 1
    expected = torch.autograd.grad(
        torch.nn.functional.rms_norm(x, [6], weight, 1e-5), (x, weight), grad
    )
    _, rstd = aten._fused_rms_norm.default(x.detach(), [6], weight.detach(), 1e-5)
    actual = lowered(
        aten._fused_rms_norm_backward.default, grad, x, [6], rstd, weight, [True, True]
    )
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(to_torch(a, e.dtype), e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_linear_backward(dtype: torch.dtype) -> None:
    shapes = (4, 3, 5), (4, 3, 6), (5, 6), (5,)
    grad, *leaves = (torch.randn(*shape, dtype=dtype) for shape in shapes)
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    expected = torch.autograd.grad(
        torch.nn.functional.linear(x, weight, bias), (x, weight, bias), grad
    )
    actual = lowered(aten.linear_backward.default, x, grad, weight, [True, True, True])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(to_torch(a, e.dtype), e)


def test_matmul_backward_of_complex_numbers() -> None:
    x, y = (torch.complex(random(*s), uniform(*s)).requires_grad_() for s in ((2, 3, 4), (4, 5)))
    product = x @ y
    grad = torch.complex(random(2, 3, 5), uniform(2, 3, 5))
    expected = torch.autograd.grad(product, (x, y), grad)
    actual = lowered(aten.matmul_backward.default, grad, x, y, [True, True])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(to_torch(a, e.dtype), e)


def test_float32_products_follow_torchs_precision_setting() -> None:
    from xla_dtensor.lowering.linalg.matmul import _precision

    try:
        torch.set_float32_matmul_precision("medium")
        assert _precision() is jax.lax.Precision.DEFAULT
    finally:
        torch.set_float32_matmul_precision("highest")
    assert _precision() is jax.lax.Precision.HIGHEST


def test_result_type_is_torchs() -> None:
    """For every pair of dtypes, 0-d or not, and every kind of Python number, traced or not."""
    dtypes = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16)
    dtypes += (torch.float32, torch.float64, torch.complex64, torch.complex128)
    tensors = [torch.ones((1,) * ndim, dtype=d) for d in dtypes for ndim in (0, 1)]
    traced: list[np.dtype] = []
    with jax.enable_x64(True):
        arrays = [jnp.ones(t.shape, to_jax_dtype(t.dtype)) for t in tensors]
        numbers = [True, 2, 2.0, 2j]
        pairs = list(zip(tensors + numbers, arrays + numbers, strict=True))
        for (a, x), (b, y) in itertools.product(pairs[: len(tensors)], pairs):
            expected = torch.result_type(a, b)
            if expected is torch.complex32:  # XLA has none
                continue
            assert result_type(x, y) == result_type(y, x) == to_jax_dtype(expected), (a, b)
            if not isinstance(b, torch.Tensor):
                jax.eval_shape(lambda *v: traced.append(result_type(*v)), x, y)
                assert traced[-1] == to_jax_dtype(expected), (a, b)
