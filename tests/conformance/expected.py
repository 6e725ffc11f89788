"""The entries that may fail, each with its reason. Nothing else may."""

from __future__ import annotations

_SPARSE = (
    "a sparse tensor: XLA has dense arrays only, and DTensor has no sparse layouts either; raises"
)
_HALF_COMPLEX = "complex32: XLA has no such type; raises"
_STATISTICS = (
    "torch's meta kernels, and CUDA, give the statistics of half-precision inputs in float32; the "
    "CPU kernel alone gives them in the inputs' dtype"
)

# Entry -> form ("*": all of them), with or without a dtype ("forward bfloat16") -> the reason.
EXPECTED: dict[str, dict[str, str]] = {
    "_batch_norm_with_update": {"forward bfloat16": _STATISTICS},
    "_native_batch_norm_legit": {"forward bfloat16": _STATISTICS},
    "chalf": {"*": _HALF_COMPLEX},
    "native_batch_norm": {"forward bfloat16": _STATISTICS},
    "native_layer_norm": {"forward bfloat16": _STATISTICS},
    "sparse.mm.reduce": {"*": _SPARSE},
    "sparse.sampled_addmm": {"*": _SPARSE},
    "to_sparse": {"*": _SPARSE},
}


def reason(name: str, form: str, dtype: str) -> str | None:
    """Why this form of an entry is expected to fail in ``dtype``, if it is."""
    forms = EXPECTED.get(name, {})
    return forms.get(f"{form} {dtype}") or forms.get(form) or forms.get("*")
