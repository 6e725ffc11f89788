"""torchtitan is imported once, and what it warns of while it is isn't about us."""

from __future__ import annotations

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import torchtitan.trainer  # noqa: F401
