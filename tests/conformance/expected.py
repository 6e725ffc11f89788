"""The entries that may fail, each with its reason. Nothing else may."""

from __future__ import annotations

# Entry -> form ("*": all of them) -> the reason.
EXPECTED: dict[str, dict[str, str]] = {}


def reason(name: str, form: str) -> str | None:
    """Why this form of an entry is expected to fail, if it is."""
    forms = EXPECTED.get(name, {})
    return forms.get(form) or forms.get("*")
