"""Reads of tensors that torch's function modes (``TorchFunctionMode``) don't hear of."""

from __future__ import annotations

from typing import Any

import torch

unseen: Any = torch._C.DisableTorchFunction
"""A block in which no function mode hears of what is read of tensors. A read that one hears of
takes ten times as long, and a trace, which is under one, reads thousands for itself."""
