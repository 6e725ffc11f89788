"""Whether XLA's GPU compiler is there: ``pip install 'xla_dtensor[gpu-plan]'``, or JAX's two wheels
in a folder of PYTHONPATH (``make test-gpu-plans`` puts them there)."""

from __future__ import annotations

import importlib.util

import pytest

from xla_dtensor.runtime.gpus import installed

HAS_COMPILER = bool(installed())
HAS_CUDNN = HAS_COMPILER and importlib.util.find_spec("nvidia") is not None

needs_gpu_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="XLA's GPU compiler is not installed"
)
needs_cudnn = pytest.mark.skipif(not HAS_CUDNN, reason="cuDNN is not installed")
