"""Text generation by running the whole window for every byte: slow per byte, but one program."""

from collections.abc import Callable

import torch
from torch import Tensor


def generate(
    predict: Callable[[Tensor], Tensor],
    prompt: str,
    length: int,
    window: int,
    temperature: float,
    seed: int = 0,
) -> str:
    """`prompt` and `length` further bytes.

    Args:
        predict: token ids [1, window] to logits [1, window, vocab], on the CPU both.
        window: every call has this length, padded on the right, which a causal model ignores, so
            that a compiled `predict` is compiled once.
        temperature: 0 takes the likeliest byte every time.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt.encode())
    for _ in range(length):
        recent = text[-window:]
        padded = torch.zeros(1, window, dtype=torch.int64)
        padded[0, : len(recent)] = torch.tensor(recent)
        logits_V = predict(padded)[0, len(recent) - 1].float()
        if temperature == 0:
            text.append(int(logits_V.argmax()))
        else:
            probabilities_V = torch.softmax(logits_V / temperature, dim=-1)
            text.append(int(torch.multinomial(probabilities_V, 1, generator=generator)))
    return bytes(text).decode(errors="replace")
