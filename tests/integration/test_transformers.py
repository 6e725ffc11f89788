"""Hooks into a transformers that hasn't the functions; `tests/transformers` has the others."""

from __future__ import annotations

import types

import pytest

from xla_dtensor.ecosystem import transformers


def test_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it must not fail, and where some of the functions are gone none does anything."""
    monkeypatch.setattr(transformers, "_hooked", set())

    class DistributedConfig:
        tp_size = None
        tp_plan = "auto"
        resolved = False

        def _resolve_parallelism(self) -> None:
            self.resolved = True

    for name, (path, handler) in transformers._functions().items():
        module = types.ModuleType(name)
        if name.endswith("configuration_utils"):
            module.DistributedConfig = DistributedConfig
        transformers._hook(path, handler, module)
    assert transformers._hooked == {"DistributedConfig._resolve_parallelism"}
    config = DistributedConfig()
    config._resolve_parallelism()
    assert config.resolved and config.tp_size is None
