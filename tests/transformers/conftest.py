"""What transformers warns of while it is imported isn't about us."""

from __future__ import annotations

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
