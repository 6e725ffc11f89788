"""torch's ``op_db``: its entries, their samples, and what is special about some."""

from __future__ import annotations

import functools
import random
import re
import warnings
from typing import Any

import numpy as np
import torch

# Their numbers are random: dtype, shape, and the same numbers for a seed in every layout.
RANDOM = re.compile(
    r"(bernoulli|cauchy|exponential|geometric|log_normal|multinomial|normal|normal_in_place|"
    r"rand|rand_like|randint|randint_like|randn|randn_like|randperm|uniform|"
    r"nn\.functional\..*dropout.*|nn\.functional\.rrelu|nn\.functional\.fractional_max_pool.*|"
    r"nn\.functional\.gumbel_softmax|svd_lowrank|pca_lowrank|"
    r"nn\.functional\.multi_head_attention_forward|nn\.functional\.scaled_dot_product_attention)"
    r"(\..*)?"
)
# Only some samples of these draw numbers: the numbers of the others are compared.
SOMETIMES_RANDOM = re.compile(
    r"nn\.functional\.(multi_head_attention_forward|scaled_dot_product_attention|rrelu)(\..*)?"
    r"|(svd|pca)_lowrank"
)
# Factors of a random projection: unique up to signs (phases), which the layout may change.
UP_TO_SIGNS = re.compile(r"(svd|pca)_lowrank")
# Which of equal numbers' positions they return is up to torch: integer inputs are made distinct.
DISTINCT = re.compile(r"kthvalue|topk|mode|(nan)?median|(arg)?sort|msort")
# Their numbers are whatever was in memory.
UNDEFINED = re.compile(r"(new_)?empty(_like|_strided|_permuted)?(\..*)?")
# Arguments that torch wants on the CPU whatever the device: numbers that decide shapes.
ON_HOST = re.compile(r"tensor_split(\..*)?")
# Factors that are unique up to signs, phases or order: what torch's own gradient check takes of
# them (`output_process_fn_grad`) is compared.
UP_TO_PHASE = re.compile(r"linalg\.(eig|eigh|svd|qr)|svd|qr|geqrf|svd_lowrank|pca_lowrank")


@functools.cache
def op_db() -> list[Any]:
    with warnings.catch_warnings():
        # Importing torch's test database deprecates modules of torch itself.
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db as entries
    return entries


def full_name(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}".rstrip(".")


def select(names: str) -> list[Any]:
    """The entries with these names, with or without variant; all if empty."""
    if not names:
        return op_db()
    wanted = set(names.split(","))
    found = [e for e in op_db() if {e.name, full_name(e)} & wanted]
    missing = wanted - {e.name for e in found} - {full_name(e) for e in found}
    if missing:
        raise ValueError(f"no entry of op_db is named {', '.join(sorted(missing))}")
    return found


def differentiable(entry: Any, dtype: torch.dtype) -> bool:
    return entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")


def samples(entry: Any, dtype: torch.dtype, limit: int) -> list[Any]:
    """Up to ``limit`` samples of an entry, taken evenly from all."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    grad = differentiable(entry, dtype)
    every = list(entry.sample_inputs("cpu", dtype, requires_grad=grad))
    chosen = every[:: max(1, -(-len(every) // limit))]
    if DISTINCT.fullmatch(entry.name):
        for sample in chosen:
            sample.input = _distinct(sample.input)
    return chosen


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one without two equal numbers, cut to as many as every dtype has."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    if tensor.numel() > 127:
        # A sort of more than 16 numbers isn't stable in CPU torch, which only bool can't avoid.
        most = 16 if tensor.dtype is torch.bool else 127
        tensor = tensor[: most * len(tensor) // tensor.numel()].detach().clone()
    if tensor.dtype is torch.bool:
        return tensor
    numbers = torch.randperm(tensor.numel()).view(tensor.shape)
    return numbers.to(tensor.dtype).requires_grad_(tensor.requires_grad)


def tolerance(entry: Any, dtype: torch.dtype) -> tuple[float, float] | None:
    """rtol and atol that torch's own tests take for an entry, where it overrides them."""
    found = []
    for decorator in entry.decorators:
        if getattr(decorator, "cls_name", None) not in (None, "TestCommon"):
            continue
        if getattr(decorator, "device_type", None) not in (None, "cpu"):
            continue
        for inner in getattr(decorator, "decorators", [decorator]):
            override = getattr(inner, "overrides", {}).get(dtype)
            if override is not None and hasattr(override, "rtol"):
                found.append((override.rtol, override.atol))
    if not found:
        return None
    default = torch.testing._comparison.default_tolerances(dtype)
    rtols, atols = zip(*found, default, strict=True)
    return max(rtols), max(atols)
