"""A tokenizer and a data set for torchtitan's trainer, as small as they get."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WORDS = ("the", "mesh", "has", "devices", "along", "its", "dims", "in", "shards", "or", "whole")


def write(folder: Path) -> tuple[Path, Path]:
    """Write both.

    Returns:
        the folders of the tokenizer and of the data set.
    """
    tokenizer, data = folder / "tokenizer", folder / "data"
    tokenizer.mkdir()
    data.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *alphabet]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tokenizer / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    drawn = random.Random(5)
    with (data / "data.json").open("w") as file:
        for _ in range(400):
            text = " ".join(drawn.choices(WORDS, k=drawn.randint(5, 60)))
            file.write(json.dumps({"text": text}) + "\n")
    return tokenizer, data
