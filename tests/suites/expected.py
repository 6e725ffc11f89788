"""The entries of `module_db` and `optim_db` that may fail, with reasons. Nothing else may."""

from __future__ import annotations

# Suite -> entry -> form ("*": all of them) -> the reason.
_VALUES = (
    "its line search decides by the loss what to compute next, which a program can't; eagerly it "
    "works, and compiled it raises"
)
_SPARSE = "takes sparse gradients alone, and XLA has dense arrays only; raises. Adam does the same"
EXPECTED: dict[str, dict[str, dict[str, str]]] = {
    "modules": {},
    "optimizers": {"LBFGS": {"compiled": _VALUES}, "SparseAdam": {"*": _SPARSE}},
}


def reason(suite: str, name: str, form: str) -> str | None:
    """Why this form of an entry is expected to fail, if it is."""
    forms = EXPECTED.get(suite, {}).get(name, {})
    return forms.get(form) or forms.get("*")
