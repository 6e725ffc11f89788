"""A pytest plugin that runs a library's own tests with xla as torch's default device.

    git clone https://github.com/pyg-team/pytorch_geometric && cd pytorch_geometric
    PYTHONPATH=XLA_DTENSOR python -m pytest -p tests.libraries.default_device test/nn

What such tests make by `torch.tensor`, `torch.randn` and the like is then on the device. They are
compared by themselves: the results are what the library's authors expect.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")

import torch

import xla_dtensor  # noqa: F401
from xla_dtensor.runtime import xla_flags

xla_flags.add(*xla_flags.QUICK_COMPILES)
torch.set_default_device("xla")
