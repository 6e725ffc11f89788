"""A language model of two LSTM layers, which has no twin in JAX: for `tuned.py --timed` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
import torch.nn.functional as F
from steps.case import Batch
from torch import Tensor, nn

from sweep.model import Model, Say

VOCABULARY, WIDTH, LENGTH, ROWS = 1024, 256, 64, 64

ROLES = {
    "embedding.weight": "embedding",
    "output.weight": "column",
    "lstm.weight_ih_l0": "column",
    "lstm.weight_hh_l0": "column",
    "lstm.weight_ih_l1": "column",
    "lstm.weight_hh_l1": "column",
}


class LanguageModel(nn.Module):
    """The logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.lstm(self.embedding(tokens))[0])
        return logits


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel()


def make_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return [
        (text[:, :-1].contiguous(), text[:, 1:].contiguous())
        for text in (draw() for _ in range(count))
    ]


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def no_twin(say: Say) -> Callable[..., NoReturn]:
    def jax_loss(*_: object) -> NoReturn:
        raise NotImplementedError("the LSTM has no twin in JAX")

    return jax_loss


MODEL = Model(make_model, make_batches, loss, lambda name: ROLES.get(name, "vector"), no_twin)
