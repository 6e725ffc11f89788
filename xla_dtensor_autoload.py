"""What torch calls at the end of ``import torch``, where this package is installed.

Not in the package, which would be imported to find it: whoever only has it installed pays for this
file alone.
"""

import os


def autoload() -> None:
    """Import xla_dtensor if ``XLA_DTENSOR_AUTOLOAD`` is 1.

    Raises:
        ValueError: it is neither 1 nor 0 nor empty.
    """
    asked = os.environ.get("XLA_DTENSOR_AUTOLOAD", "").strip()
    if asked not in ("", "0", "1"):
        raise ValueError(f"XLA_DTENSOR_AUTOLOAD={asked!r}: it is 1, to load xla_dtensor, or 0")
    if asked == "1":
        import xla_dtensor  # noqa: F401
