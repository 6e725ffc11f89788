"""What torchtitan has and an xla mesh hasn't is refused by name."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

from torchtitan.components import quantization
from torchtitan.distributed import minimal_async_ep
from torchtitan.distributed.minimal_async_ep import kernels
from torchtitan.models import llama3

import xla_dtensor as xd


@pytest.mark.parametrize(
    "name",
    [name for name in quantization.__all__ if name.startswith(("F", "M", "N")) and "Conv" in name],
)
def test_converters(name: str) -> None:
    """By the converter's name, and before a model is built."""
    converter = getattr(quantization, name).Config()
    with pytest.raises(xd.UnsupportedOpError, match=f"{name}: .* bfloat16"):
        llama3.model_registry("debugmodel", converters=[converter])


def test_kernels_of_triton() -> None:
    """They are there to be imported, where there is no Triton."""
    assert minimal_async_ep.__file__
    with pytest.raises(xd.UnsupportedOpError, match="copy_rows_to_peers_kernel is a Triton kernel"):
        kernels.copy_rows_to_peers_kernel[(1,)](torch.zeros(1))
