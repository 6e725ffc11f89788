"""Whether the TPU's compiler is there: ``pip install libtpu``, or TPU_LIBRARY_PATH."""

from __future__ import annotations

import importlib.util
import os

import pytest

HAS_LIBTPU = (
    os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", ""))
    or importlib.util.find_spec("libtpu") is not None
)

needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed")
