"""torchtitan is imported once, and what it warns of while it is isn't about us; what is tested of
0.3.0 alone isn't looked at under others."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings

collect_ignore: list[str] = []

if importlib.util.find_spec("torchtitan") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ImportError):
            import torchtitan.train
        with contextlib.suppress(ImportError):
            import torchtitan.trainer  # noqa: F401
        from tests.torchtitan import releases
    if releases.NAME != "v0_3_0":
        of_0_3_0 = ("experts", "larger_configs", "processes", "refusals", "spmd_types", "trainer")
        collect_ignore = [f"test_{name}.py" for name in of_0_3_0]
