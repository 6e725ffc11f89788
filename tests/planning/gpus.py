"""Whether XLA's GPU compiler is there: ``pip install 'xla_dtensor[gpu-plan]'``, or JAX's two wheels
in a folder of PYTHONPATH (``make test-gpu-plans`` puts them there)."""

from __future__ import annotations

import importlib.util

import pytest


def _is_there(plugin: str) -> bool:
    return (
        importlib.util.find_spec("jax_plugins") is not None
        and importlib.util.find_spec(f"jax_plugins.{plugin}") is not None
    )


HAS_COMPILER = _is_there("xla_cuda13") or _is_there("xla_cuda12")
HAS_CUDNN = HAS_COMPILER and importlib.util.find_spec("nvidia") is not None

needs_gpu_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="XLA's GPU compiler is not installed"
)
needs_cudnn = pytest.mark.skipif(not HAS_CUDNN, reason="cuDNN is not installed")
