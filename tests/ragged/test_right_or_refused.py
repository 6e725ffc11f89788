"""Many operations on tensors of so many rows: each gives what CPU torch gives of each device's
rows, or is refused by name. None is silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import xla_dtensor as xd
from tests.ragged.test_exchange import DIM, IDS, RANKS, arriving, exchanged, inputs, near, placed

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda r, name=name: getattr(r, name)(0)
        for name in (
            *(
                "sum",
                "mean",
                "prod",
                "amax",
                "amin",
                "argmax",
                "argmin",
                "any",
                "all",
                "var",
                "std",
            ),
            *("median", "mode", "logsumexp", "count_nonzero", "cumsum", "cumprod", "cummax"),
            *("logcumsumexp", "sort", "argsort", "softmax", "log_softmax", "flip", "diff", "norm"),
            *("squeeze", "unsqueeze", "unbind", "select", "nansum", "nanmean"),
        )
        if name != "select"
    },
    **{
        f"{name} along dim 1": lambda r, name=name: getattr(r, name)(1)
        for name in (
            *("sum", "mean", "prod", "amax", "argmax", "any", "var", "median", "logsumexp"),
            *("cumsum", "cummax", "sort", "argsort", "softmax", "flip", "diff", "norm", "unbind"),
        )
    },
    **{
        f"{name} of all": lambda r, name=name: getattr(r, name)()
        for name in (
            "sum",
            "mean",
            "prod",
            "max",
            "min",
            "std",
            "norm",
            "any",
            "t",
            "flatten",
            "tril",
        )
    },
    "roll": lambda r: r.roll(1, 0),
    "roll along dim 1": lambda r: r.roll(1, 1),
    "pad rows": lambda r: F.pad(r, (0, 0, 0, 2), value=1.0),
    "pad before rows": lambda r: F.pad(r, (0, 0, 1, 0), value=1.0),
    "pad columns": lambda r: F.pad(r, (1, 1), value=1.0),
    "repeat": lambda r: r.repeat(2, 1),
    "repeat columns": lambda r: r.repeat(1, 2),
    "repeat_interleave": lambda r: r.repeat_interleave(2, 0),
    "stack": lambda r: torch.stack([r, r + 1]),
    "stack columns": lambda r: torch.stack([r, r + 1], -1),
    "cat": lambda r: torch.cat([r, r + 1]),
    "cat with others": lambda r: torch.cat([r, torch.ones(2, DIM, device=r.device), r]),
    "cat columns": lambda r: torch.cat([r, r + 1], 1),
    "products of rows": lambda r: r @ r.t(),
    "sum of products": lambda r: r.t() @ r,
    "addmm over rows": lambda r: torch.addmm(torch.ones(DIM, DIM, device=r.device), r.t(), r),
    "baddbmm": lambda r: torch.baddbmm(
        torch.ones(1, DIM, DIM, device=r.device), r.t().unsqueeze(0), r.unsqueeze(0)
    ),
    "einsum": lambda r: torch.einsum("rd,re->de", r, r + 1),
    "outer": lambda r: torch.outer(r[:, 0], torch.arange(3.0, device=r.device)),
    "cdist": lambda r: torch.cdist(r, r),
    "cdist to others": lambda r: torch.cdist(r, torch.ones(2, DIM, device=r.device)),
    "conv over rows": lambda r: F.conv1d(
        r.t().unsqueeze(0), torch.ones(1, DIM, 3, device=r.device), padding=1
    ),
    "pool over rows": lambda r: F.avg_pool1d(r.t().unsqueeze(0), 2),
    "batch_norm": lambda r: F.batch_norm(r, None, None, training=True),
    "layer_norm": lambda r: F.layer_norm(r, (DIM,)),
    "group_norm": lambda r: F.group_norm(r, 2),
    "rms_norm": lambda r: F.rms_norm(r, (DIM,)),
    "mse_loss": lambda r: F.mse_loss(r, r * 2 + 1),
    "mse_loss summed": lambda r: F.mse_loss(r, r * 2 + 1, reduction="sum"),
    "soft_margin_loss": lambda r: F.soft_margin_loss(r, r.sign() + 0.5, reduction="sum"),
    "poisson": lambda r: F.poisson_nll_loss(r, r.abs(), reduction="sum"),
    "cross_entropy": lambda r: F.cross_entropy(r, (r[:, 0] > 0).long()),
    "cross_entropy summed": lambda r: F.cross_entropy(r, (r[:, 0] > 0).long(), reduction="sum"),
    "cross_entropy of rows": lambda r: F.cross_entropy(r, (r[:, 0] > 0).long(), reduction="none"),
    "attention": lambda r: F.scaled_dot_product_attention(r[None], r[None], r[None]),
    "glu": lambda r: F.glu(r),
    "one_hot": lambda r: F.one_hot((r[:, 0] > 0).long(), 3),
    "gather": lambda r: r.gather(1, (r > 0).long()),
    "scatter": lambda r: r.clone().scatter(1, (r[:, :1] > 0).long(), 7.0),
    "scatter of rows": lambda r: torch.zeros(2, DIM, device=r.device).scatter(0, (r > 9).long(), r),
    "masked_fill": lambda r: r.masked_fill(r > 0, 3.0),
    "index": lambda r: r[:, torch.tensor([1, 0], device=r.device)],
    "index rows": lambda r: r[torch.tensor([0, -1], device=r.device)],
    "searchsorted": lambda r: torch.bucketize(r, torch.arange(3.0, device=r.device)),
    "view": lambda r: r.view(-1, DIM // 2),
    "view that takes rows together": lambda r: r.view(-1, DIM * 2),
    "unflatten": lambda r: r.unflatten(1, (2, 2)).transpose(0, 1),
    "expand": lambda r: r.unsqueeze(0).expand(3, -1, -1),
    "copy into others": lambda r: torch.zeros(1, DIM, device=r.device).copy_(r),
    "others into it": lambda r: r.clone().copy_(torch.ones(1, DIM, device=r.device)),
    "add to others": lambda r: torch.zeros(9, DIM, device=r.device).add_(r),
    "fill_": lambda r: r.clone().fill_(2.0),
    "zero_": lambda r: r.clone().zero_(),
    "fill a column": lambda r: (lambda c: (c[:, 0].fill_(9.0), c)[1])(r.clone()),
    "set columns": lambda r: (lambda c: (c.__setitem__((slice(None), 1), 5.0), c)[1])(r.clone()),
    "first rows": lambda r: r[:2],
    "all but the first": lambda r: r[1:],
    "every other": lambda r: r[::2],
    "last rows": lambda r: r[-2:],
    "clone": lambda r: r.clone(),
    "contiguous": lambda r: r.t().contiguous(),
    "numel": lambda r: r.sum() / r.numel(),
    "size": lambda r: r.sum(0) / r.size(0),
    "arange": lambda r: torch.arange(r.shape[0], device=r.device) * 2,
    "zeros and a product": lambda r: torch.zeros(r.shape, device=r.device) + r,
    "eye": lambda r: torch.eye(r.shape[0], device=r.device).sum(),
    "linspace": lambda r: torch.linspace(0, 1, r.shape[0], device=r.device),
    "triu": lambda r: r.triu(1),
    "trapezoid": lambda r: torch.trapezoid(r, dim=0),
    "cov": lambda r: torch.cov(r.t()),
    "quantile": lambda r: r.quantile(0.5, 0),
    "histc": lambda r: torch.histc(r, 4, -2, 2),
    "bincount": lambda r: torch.bincount((r[:, 0] > 0).long(), minlength=2),
    "kthvalue": lambda r: r.kthvalue(1, 0).values,
    "topk": lambda r: r.topk(2, 0).values,
    "topk along dim 1": lambda r: r.topk(2, 1).values,
    "embedding": lambda r: F.embedding(
        (r[:, 0] > 0).long(), torch.arange(4.0, device=r.device)[:, None]
    ),
    "embedding from it": lambda r: F.embedding(torch.tensor([0, 1], device=r.device), r),
    "fft": lambda r: torch.fft.fft(r, dim=0).abs(),
    "fft along dim 1": lambda r: torch.fft.fft(r, dim=1).abs(),
    "linalg.norm": lambda r: torch.linalg.vector_norm(r, dim=0),
    "det": lambda r: (r.t() @ r).det(),
    "svd": lambda r: torch.linalg.svdvals(r),
    "kron": lambda r: torch.kron(r, torch.ones(1, 2, device=r.device)),
    "cross": lambda r: torch.linalg.cross(r[:, :3], r[:, 1:4]),
    "lerp": lambda r: r.lerp(r * 2, 0.5),
    "where": lambda r: torch.where(r > 0, r, r * 2),
    "nan_to_num": lambda r: r.log().nan_to_num(1.0).sum(0),
    "int division": lambda r: ((r * 9).long() // ((r * 5).long().abs() + 1)).sum(0),
    "remainder": lambda r: ((r * 9).long() % 4).sum(0),
    "isclose": lambda r: torch.isclose(r, r + 1e-9).all(1),
    "renorm": lambda r: r.renorm(2, 0, 1.0),
    "renorm of columns": lambda r: r.renorm(2, 1, 1.0),
    "normalize": lambda r: F.normalize(r, dim=1),
    "normalize columns": lambda r: F.normalize(r, dim=0),
    "cosine_similarity": lambda r: F.cosine_similarity(r, r + 1, dim=1),
    "cosine_similarity of columns": lambda r: F.cosine_similarity(r, r + 1, dim=0),
    "foreach": lambda r: torch._foreach_mul([r, r + 1], 2.0)[1],
    "foreach norm": lambda r: torch._foreach_norm([r])[0],
    "chunk": lambda r: r.chunk(2, 1)[1],
    "movedim": lambda r: r.movedim(0, 1),
    "narrow columns": lambda r: r.narrow(1, 1, 2),
    "diagonal": lambda r: r.diagonal(),
    "trace": lambda r: r.trace(),
    "as_strided": lambda r: r.as_strided((2, 2), (DIM, 1)),
    "unfold": lambda r: r.unfold(0, 2, 1),
    "unfold columns": lambda r: r.unfold(1, 2, 1),
}


def values_of(found: Any) -> list[Any]:
    if isinstance(found, torch.Tensor):
        values = (
            found.local_values() if not hasattr(found, "_form") or found._form.varying else None
        )  # type: ignore[attr-defined]
        return [[v] for v in values] if values is not None else [[found.cpu()]] * RANKS
    each = [values_of(one) for one in found]
    return [[v for values in each for v in values[device]] for device in range(RANKS)]


def same(value: torch.Tensor, expected: torch.Tensor) -> None:
    assert value.dtype == expected.dtype
    if expected.dtype.is_floating_point and expected.numel():
        near(value, expected)
    else:
        torch.testing.assert_close(value, expected)


def flat(wanted: Any) -> list[torch.Tensor]:
    return [wanted] if isinstance(wanted, torch.Tensor) else [t for w in wanted for t in flat(w)]


@pytest.mark.slow
def test_each_is_right_or_refused() -> None:
    mesh = xd.init_device_mesh("xla", (2, RANKS), mesh_dim_names=("dp", "ep"))["ep"]
    x, ids = inputs()[0], IDS["drawn"]
    own = arriving(x, ids)
    rows, _ = exchanged(placed(x, mesh), placed(ids, mesh), mesh)
    # Behind the rows there is what would show.
    behind = (
        torch.arange(rows.buffer.shape[0], device="xla")[:, None]
        >= rows.new_ones(rows.shape)[:, 0].sum()
    )
    rows.buffer.copy_(torch.where(behind, float("nan"), rows.buffer))
    right, wrong = [], {}
    for name, function in OPERATIONS.items():
        try:
            found = values_of(function(rows))
        except (xd.DataDependentError, xd.UnsupportedOpError, xd.PerDeviceValueError):
            continue
        except Exception as error:
            if "operator aten::size does not exist" in str(error):
                continue  # code of torch's that takes no symbolic sizes
            wrong[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        right.append(name)
        for device, mine in enumerate(own):
            try:
                wanted = flat(function(mine))
            except RuntimeError:
                continue  # of so few rows
            for value, expected in zip(found[device], wanted, strict=True):
                try:
                    same(value, expected)
                except AssertionError as error:
                    wrong[name] = str(error)[:300]
    assert not wrong, "\n".join(f"{n}: {w}" for n, w in wrong.items())
    assert len(right) >= 60, right
