"""The models of the sweep by name."""

from __future__ import annotations

import dataclasses

from sweep import resnet, vit
from sweep.model import Model
from sweep.transformer import Config, model

LLAMA = Config(kv_heads=4, rotary=True, gated=True)

MODELS: dict[str, Model] = {
    "gpt": model(Config()),
    "gpt-layernorm": model(Config(layer_norm=True, learned=True)),
    "llama": model(LLAMA),
    "fused": model(Config(fused=True)),
    "vit": vit.MODEL,
    "moe": model(dataclasses.replace(LLAMA, experts=True)),
    "resnet": resnet.MODEL,
}
"""gpt and fused have RMS norms and no positions, so that they are nothing but their products."""
