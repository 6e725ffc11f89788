"""The entries of `module_db` and `optim_db` that may fail, with reasons. Nothing else may."""

from __future__ import annotations

# Suite -> entry -> form ("*": all of them) -> the reason.
EXPECTED: dict[str, dict[str, dict[str, str]]] = {"modules": {}, "optimizers": {}}


def reason(suite: str, name: str, form: str) -> str | None:
    """Why this form of an entry is expected to fail, if it is."""
    forms = EXPECTED.get(suite, {}).get(name, {})
    return forms.get(form) or forms.get("*")
