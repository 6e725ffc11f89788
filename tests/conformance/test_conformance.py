"""A fast subset of the conformance run, and tests of the harness itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.conformance import entries
from tests.conformance.check import check_entry
from tests.conformance.compare import Mismatch, as_exact, compare
from tests.conformance.layouts import draw, short
from tests.conformance.report import render

pytestmark = pytest.mark.one_in(2)  # each variant compiles programs of its own

NAMES = (
    "abs",
    "add",
    "addbmm",
    "amax",
    "argsort",
    "as_strided",
    "atan2",
    "baddbmm",
    "bmm",
    "broadcast_to",
    "cat",
    "cdist",
    "chunk",
    "complex",
    "copysign",
    "cumprod",
    "cumsum",
    "diag_embed",
    "diagonal_scatter",
    "diff",
    "div",
    "einsum",
    "expand",
    "fft.rfft2",
    "flip",
    "floor_divide",
    "fmod",
    "gather",
    "histc",
    "index_add",
    "index_copy",
    "index_put",
    "index_reduce.amax",
    "index_select",
    "isin",
    "kron",
    "kthvalue",
    "lerp",
    "linalg.cholesky",
    "linalg.det",
    "linalg.inv",
    "linalg.norm",
    "linalg.qr",
    "linalg.solve",
    "logcumsumexp",
    "logsumexp",
    "masked_fill",
    "masked_scatter",
    "masked_select",
    "matmul",
    "max_pool2d_with_indices_backward",
    "median",
    "native_layer_norm",
    "nn.functional.adaptive_avg_pool2d",
    "nn.functional.batch_norm",
    "nn.functional.binary_cross_entropy_with_logits",
    "nn.functional.conv2d",
    "nn.functional.conv_transpose2d",
    "nn.functional.cross_entropy",
    "nn.functional.ctc_loss",
    "nn.functional.embedding",
    "nn.functional.embedding_bag",
    "nn.functional.gelu",
    "nn.functional.grid_sample",
    "nn.functional.group_norm",
    "nn.functional.interpolate.bilinear",
    "nn.functional.nll_loss",
    "nn.functional.pad.reflect",
    "nn.functional.scaled_dot_product_attention",
    "nonzero",
    "permute",
    "pow",
    "prod",
    "put",
    "remainder",
    "repeat_interleave",
    "reshape",
    "roll",
    "scatter",
    "scatter_add",
    "searchsorted",
    "select_scatter",
    "slice",
    "softmax",
    "sort",
    "split",
    "squeeze",
    "stack",
    "std",
    "sub",
    "sum",
    "take",
    "trace",
    "transpose",
    "tril",
    "unbind",
    "unfold",
    "unique",
    "view",
    "where",
)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("name", NAMES)
def test_entry(name: str, mesh_2x4: DeviceMesh) -> None:
    for entry in entries.select(name):
        result = check_entry(entry, torch.float32, mesh_2x4, limit=2)
        assert result.samples
        assert result.forms["forward"] == "pass", result.failures
        assert not result.failures


@pytest.mark.parametrize("name", ["bernoulli", "nn.functional.dropout", "rand_like"])
def test_random_entry(name: str, mesh_2x4: DeviceMesh) -> None:
    (entry, *_) = entries.select(name)
    assert not check_entry(entry, torch.float32, mesh_2x4, limit=1).failures


class _Broken:
    """An entry whose op is wrong on sharded tensors only."""

    def __init__(self, name: str, damage: Any) -> None:
        self._entry, self._damage = entries.select(name)[0], damage
        self.method_variant = self.inplace_variant = None
        self.supports_out = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self._entry(first, *args, **kwargs)
        return self._damage(result) if first.device.type == "xla" else result


def _raise(result: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no")


@pytest.mark.parametrize(
    "damage, kind",
    [
        (lambda result: result + 1, "wrong"),
        (lambda result: result * (1 + 3e-5) + 3e-5, "precision"),
        (lambda result: result.double(), "shape/dtype"),
        (lambda result: result[None], "shape/dtype"),
        (lambda result: result.cpu(), "shape/dtype"),
        (lambda result: result.nothing, "error"),
        (_raise, "unsupported"),
    ],
)
def test_classes_of_failure(damage: Any, kind: str, mesh_2x4: DeviceMesh) -> None:
    result = check_entry(_Broken("exp", damage), torch.float32, mesh_2x4, limit=1)
    assert result.forms["forward"] == kind
    assert result.failures[0]["class"] == kind


def test_wrong_gradient(mesh_2x4: DeviceMesh) -> None:
    twice = lambda result: result + result - result.detach()
    result = check_entry(_Broken("exp", twice), torch.float32, mesh_2x4, limit=1)
    assert (result.forms["forward"], result.forms["backward"]) == ("pass", "wrong")


def test_wrong_alias(mesh_2x4: DeviceMesh) -> None:
    result = check_entry(_Broken("t", torch.clone), torch.float32, mesh_2x4, limit=1)
    assert (result.forms["forward"], result.forms["alias"]) == ("pass", "wrong")


def test_every_kind_of_placement_is_drawn() -> None:
    import random

    drawn = {short(draw(random.Random(i), (5, 5), torch.float32, (2, 4))) for i in range(300)}
    assert {"[S0][S0]", "[S1/4][S1]", "[R][S1]", "[S0][S1]", "[P][S0]", "[R][R]"} <= drawn
    assert draw(random.Random(1), (), torch.bool, (2,)) == (Replicate(),)
    assert {type(p) for i in range(30) for p in draw(random.Random(i), (), torch.int64, (2,))} == {
        Replicate,
        Partial,
    }
    assert Shard(0) in draw(random.Random(0), (5,), torch.bool, (2,) * 9)


def test_compare_names_the_difference() -> None:
    with pytest.raises(Mismatch, match="result: 1 results, torch has 2"):
        compare(torch.zeros(1), (torch.zeros(1), torch.zeros(1)), None, "result")


def test_report_counts_and_explains() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failure = {"form": "out", "class": "wrong", "layouts": ["[5] [S0]"], "text": "7 | 8"}
        common = {"dtype": "float32", "mesh": "8", "limit": 1, "samples": 1}
        text = render(
            [
                {"name": "a", "forms": {"forward": "pass"}, "failures": [], **common},
                {"name": "b", "forms": {"out": "wrong"}, "failures": [failure], **common},
            ]
        )
    assert "| forward | 1 | 1 | 100.0 % |" in text
    assert "| out | 1 | 0 | 0.0 % | 1 |" in text
    assert "| b | out | float32 | [5] [S0] | 7 \\| 8 |" in text


def test_as_exact_as_torch_passes() -> None:
    exact = torch.tensor([1e4, 1e-3], dtype=torch.float64)

    def judge(error: float, kind: str, error_of_torch: float = 2e-2) -> bool:
        ours, torchs = (exact + error).float(), (exact + error_of_torch).float()
        return as_exact(ours, torchs, exact, None, kind)

    assert judge(5e-2, "precision") and not judge(7e-2, "precision")
    assert judge(5e-2, "wrong") and not judge(7e-2, "wrong")
    assert judge(0, "wrong", 1) and not judge(0, "shape/dtype")
    # torch's number is within its tolerance: ours has to be, too.
    assert not judge(1e-1, "wrong", 1e-6)
    count = torch.tensor([3])
    assert not as_exact(count + 1, count, count, None, "wrong")
    infinite = torch.tensor([float("inf"), 0.0], dtype=torch.float64)
    assert not as_exact(exact.float(), infinite.float(), infinite, None, "precision")
