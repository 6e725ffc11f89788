"""A module for torchtitan's ``--module``: its debug model with one layer, on whose loaders says
each process what it reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


class Loader(HuggingFaceTextDataLoader):
    """torchtitan's loader of a data-parallel rank, which notes whose it is."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        """torchtitan's."""

    def __init__(self, config: Config, *, dp_rank: int, **kwargs: Any) -> None:
        super().__init__(config, dp_rank=dp_rank, **kwargs)
        # One call for the line: the other process writes to the same terminal.
        os.write(1, f"process {os.environ['RANK']} reads for rank {dp_rank}\n".encode())


def llama3_one_layer() -> Trainer.Config:
    """``--config``."""
    config = llama3_debugmodel()
    assert config.model_spec is not None
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.dataloader = Loader.Config(dataset="c4_test")
    return config
