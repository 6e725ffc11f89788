"""A pytest plugin for suites that choose their device themselves: it is xla.

Some ask a variable, and this only loads xla_dtensor: ``TORCH_DEVICE=xla`` (timm),
``TEST_DEVICE=xla`` (pytorch-metric-learning), ``KERAS_TORCH_DEVICE=xla`` with
``KERAS_BACKEND=torch``, ``XLA_DTENSOR_DEVICE=1`` (accelerate). kornia takes ``--device xla`` once
its conftest.py has a device of this name. torchmetrics looks for CUDA, and einops makes CPU tensors
of NumPy's arrays. Others have torch's default device: `default_device`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")

import torch

import xla_dtensor  # noqa: F401
from xla_dtensor.runtime import xla_flags

xla_flags.add(*xla_flags.QUICK_COMPILES)


def pytest_collection_modifyitems(config: Any) -> None:
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "TEST_OPTIMIZER_BACKEND"):  # kornia's conftest.py
            plugin.TEST_DEVICES["xla"] = torch.device("xla:0")
    metrics: Any = sys.modules.get("unittests._helpers.testers")
    if metrics is not None:
        metrics._select_rand_best_device = lambda: "xla"
    backends: Any = sys.modules.get("einops._backends")
    if "einops.tests" in sys.modules and backends is not None:
        made_on_cpu = backends.TorchBackend.from_numpy

        def from_numpy(self: Any, array: Any) -> Any:
            made = made_on_cpu(self, array)
            return made.detach().to("xla").requires_grad_(made.requires_grad)

        backends.TorchBackend.from_numpy = from_numpy
