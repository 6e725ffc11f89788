"""The names that a program's lines use besides torch's: one set for CPU torch, one for xla."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.fuzz import layouts_text


def _same(x: torch.Tensor, placements: Any) -> torch.Tensor:
    return x.clone()


CPU: dict[str, Any] = {"torch": torch, "F": F, **layouts_text.SCOPE, "redistribute": _same}


def _redistribute(x: Any, placements: Any) -> Any:
    return x.redistribute(placements=placements)


XLA: dict[str, Any] = {**CPU, "redistribute": _redistribute}
