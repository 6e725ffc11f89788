"""The package's source, parsed once for the tests that read it."""

from __future__ import annotations

import ast

import pytest

from tools import import_graph as graph
from xla_dtensor.base import jax_private, torch_private

PRIVATE = (torch_private.__name__, jax_private.__name__)


@pytest.fixture(scope="package")
def trees() -> dict[str, ast.Module]:
    """Of all modules but the two that name what is private to torch and JAX."""
    return {
        name: ast.parse(path.read_text())
        for name, path in graph.modules().items()
        if not name.startswith(PRIVATE)
    }
